"""What the pages mean: vLLM's configuration as an Identity.

vLLM's page hash covers the tokens, salts, images and embeddings by content, and,
through ``lora``, adapters by content. Everything else that changes a page's bytes is
read here: model, weights, quantisation, overrides, KV dtype and scales, chunk size.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

from hicache_core import Identity, Placement
from hicache_core.errors import InvalidOptions
from hicache_core.fingerprint import weights_digest
from hicache_vllm.layout import Layout
from hicache_vllm.settings import Settings

_log = logging.getLogger("hicache")

#: Fields of vLLM's ModelConfig that change what KV bytes mean, besides those that Identity has fields for.
OVERRIDES = ("dtype", "disable_sliding_window", "override_attention_dtype", "hf_config_path")
#: Every field of vLLM's configuration read here or in layout.py; a test looks each one up in the real wheels.
FIELDS = {
    "vllm": ("model_config", "cache_config", "parallel_config", "load_config", "attention_config"),
    "model": ("model", "revision", "quantization", "hf_overrides", "max_model_len", "dtype"),
    "cache": ("cache_dtype", "prefix_caching_hash_algo"),
    "load": ("load_format",),
    "speculative": ("model", "revision"),
}
#: vLLM's seed where none is set, by release: a constant from 0.31 on, random before.
SEED_CONSTANT = "DEFAULT_NONE_HASH_SEED"
#: Hash functions for which vLLM never uses a constant seed.
SECRET_SEED_PREFIX = "xxhash"


def identity_of(
    vllm_config: Any, layout: Layout, settings: Settings, *, seed_constant: str | None
) -> Identity:
    """Build the identity; reads samples of the weights from disk.

    Args:
        seed_constant: the seed of page hashes where PYTHONHASHSEED is not set; None where it is random.

    Raises:
        InvalidOptions: KV scales that each process computes for itself.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    revision = getattr(model, "revision", None)
    weights = settings.weights or weights_digest(model.model, revision, _load_format(vllm_config))
    if weights is None:
        _log.warning(
            "hicache: the weights of %r cannot be read; model and revision alone tell pages apart. "
            'Set "weights" in the tier\'s entry to a text that changes with them.',
            model.model,
        )
    algorithm = str(getattr(cache, "prefix_caching_hash_algo", "sha256"))
    return Identity(
        engine="vllm",
        hash_scheme=algorithm,
        hash_seed=_seed(algorithm, seed_constant),
        model=settings.model or str(model.model),
        revision=revision or None,
        weights=weights,
        quantization=_named(getattr(model, "quantization", None)),
        config_overrides=_overrides(model),
        kv_dtype=f"{cache.cache_dtype}:{layout.kv_dtype}",
        kv_scales=_kv_scales(cache, layout.kv_dtype),
        page_tokens=layout.page_tokens,
        lora=None,  # by content in each page's hash
        tenant=settings.tenant,
    )


def placement_of(vllm_config: Any, device: str) -> Placement:
    """Say who asks, from where: a scheduler, on behalf of all its ranks."""
    parallel = vllm_config.parallel_config
    return Placement(
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        dp_rank=int(getattr(parallel, "data_parallel_index", 0) or 0),
        dp_size=parallel.data_parallel_size,
        cp_size=parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size,
        host_layout="rows",
        device=device,
        io_backend="offload",
    )


def draft_model_of(vllm_config: Any) -> str | None:
    """Name the draft model, whose layers are in the rows too, with its weights; None where there is none."""
    speculative = getattr(vllm_config, "speculative_config", None)
    path = getattr(speculative, "model", None)
    if not path:
        return None
    revision = getattr(speculative, "revision", None)
    return f"{path}@{revision or ''}#{weights_digest(str(path), revision) or ''}"


def _seed(algorithm: str, constant: str | None) -> str | None:
    """Give the seed of page hashes; None, and one log line, where other processes cannot have it."""
    given = os.environ.get("PYTHONHASHSEED")
    if given is not None:
        return given
    if constant is None or algorithm.startswith(SECRET_SEED_PREFIX):
        _log.warning(
            "hicache: page hashes are seeded at random, so no other process finds these pages; "
            "set PYTHONHASHSEED to one value everywhere%s",
            ", or use --prefix-caching-hash-algo sha256" if constant is not None else "",
        )
        return None
    return constant


def _overrides(model: Any) -> dict[str, Any] | None:
    found = {name: getattr(model, name, None) for name in OVERRIDES}
    found["hf_overrides"] = _written(getattr(model, "hf_overrides", None), model)
    if _scales_rope(model):
        # Some scalings choose their factors by the longest request that is served.
        found["max_model_len"] = getattr(model, "max_model_len", None)
    return {name: _plain(value) for name, value in found.items() if value} or None


def _written(overrides: Any, model: Any) -> Any:
    """Give overrides as values; a function's effect as a digest of the config that it made."""
    if not callable(overrides):
        return overrides
    config = getattr(model, "hf_config", None)
    to_json = getattr(config, "to_json_string", None)
    made = to_json() if to_json is not None else repr(config)
    return f"made:{hashlib.sha256(made.encode()).hexdigest()}"


def _scales_rope(model: Any) -> bool:
    config = getattr(model, "hf_text_config", None) or getattr(model, "hf_config", None)
    tables = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    return any(kind != "default" for table in tables for kind in _rope_kinds(table))


def _rope_kinds(table: Any) -> list[str]:
    """List the kinds of scaling in a table, which may hold one table a kind of layer."""
    if not isinstance(table, Mapping):
        return []
    own = table.get("rope_type", table.get("type"))
    inner = [kind for value in table.values() for kind in _rope_kinds(value)]
    return inner + ([str(own)] if own else [])


def _plain(value: Any) -> Any:
    """Turn dtypes, enumerations and the like into text."""
    return json.loads(json.dumps(value, default=str))


def _kv_scales(cache: Any, kv_dtype: str) -> str | None:
    if not kv_dtype.startswith("fp8"):
        return None
    if getattr(cache, "calculate_kv_scales", False):
        complaint = (
            "each process computes its own KV scales from its first request, so pages of one are wrong in "
            "another; serve without --calculate-kv-scales, with scales from the checkpoint"
        )
        raise InvalidOptions("vllm", [("calculate_kv_scales", complaint, "")])
    return "checkpoint"


def _load_format(vllm_config: Any) -> str:
    named = getattr(getattr(vllm_config, "load_config", None), "load_format", "auto")
    return str(getattr(named, "value", named))


def _named(value: Any) -> str | None:
    return str(getattr(value, "value", value)) if value else None
