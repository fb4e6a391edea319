"""What the pages mean: SGLang's server arguments as an Identity.

SGLang's page hash covers the tokens, and from 0.5.20 on the request's salt and
LoRA id. Everything else that changes a page's bytes is read here: model, weights,
quantisation, overrides, KV dtype and scales, page size, adapters' content.

The server's arguments are asked of modules that are loaded already: in a
scheduler process they always are; without a server (tools, tests) the storage
config's model name stands alone.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from typing import Any

from hicache_core import Identity
from hicache_core.errors import InvalidOptions
from hicache_core.fingerprint import weights_digest
from hicache_sglang.fingerprint import adapter_paths, adapters_digest, file_digest
from hicache_sglang.settings import Settings

_log = logging.getLogger("hicache")

#: Server arguments that change what KV bytes mean, besides those that Identity has fields for.
OVERRIDES = ("json_model_override_args", "context_length", "dtype", "torchao_config", "modelopt_quant")
#: Every server argument read here; a test looks each one up in the real wheels.
SERVER_ARGUMENTS = (
    *OVERRIDES,
    "model_path",
    "revision",
    "load_format",
    "quantization",
    "quantization_param_path",
    "kv_cache_dtype",
    "enable_lora",
    "lora_paths",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
)

#: Part of SGLang's page hashes from 0.5.20 on; see ``storage_namespace_seed`` in ``mem_cache/utils.py``.
SEED = "sglang-cache-namespace-v1"


def server_arguments() -> Any:
    """Find the ServerArgs of this process; None where no server runs."""
    for module_name, getter in (
        ("sglang.srt.runtime_context", "get_server_args"),  # 0.5.15 and later
        ("sglang.srt.server_args", "get_global_server_args"),  # 0.5.5 to 0.5.15
    ):
        ask = getattr(sys.modules.get(module_name), getter, None)
        if ask is None:
            continue
        try:
            arguments = ask()
        except (ValueError, RuntimeError, AttributeError, LookupError):
            continue
        if arguments is not None:
            return arguments
    return None


def hashes_are_seeded() -> bool:
    """Tell whether this release's page hashes cover the LoRA id and the cache salt (0.5.20 and later)."""
    module = sys.modules.get("sglang.srt.mem_cache.utils")
    if module is None:
        from importlib.util import find_spec

        spec = find_spec("sglang.srt.mem_cache.utils")
        if spec is None or not spec.origin:
            return False
        with open(spec.origin, encoding="utf-8") as source:
            return "def storage_namespace_seed" in source.read()
    return hasattr(module, "storage_namespace_seed")


def refuse_unseeded(settings: Settings, arguments: Any, *, seeded: bool) -> None:
    """Refuse LoRA and salts on a release that would share pages between them.

    Raises:
        InvalidOptions: with what to do instead.
    """
    if seeded:
        return
    problems = []
    if settings.cache_salts:
        problems.append(
            ("cache_salts", "this SGLang leaves cache_salt out of its page hashes; upgrade to 0.5.20", "")
        )
    if getattr(arguments, "enable_lora", None) or getattr(arguments, "lora_paths", None):
        complaint = (
            "this SGLang leaves the LoRA adapter out of its page hashes, so adapters would share pages; "
            "upgrade to 0.5.20 or serve without LoRA"
        )
        problems.append(("enable_lora", complaint, ""))
    if problems:
        raise InvalidOptions("sglang", problems)


@dataclass(frozen=True, slots=True)
class Server:
    """What of the server decides the identity; read anew after each weight update."""

    arguments: Any
    settings: Settings
    model_name: str | None
    """From the storage config: what remains where there are no server arguments."""
    seeded: bool

    def argument(self, name: str) -> Any:
        """Give one server argument; None where this release has none of the name."""
        return getattr(self.arguments, name, None)

    def identity(
        self,
        *,
        kv_dtype: str,
        page_tokens: int,
        model_path: str | None = None,
        adapters: dict[str, str] | None = None,
    ) -> Identity:
        """Build the identity; reads weights and adapters from disk.

        Args:
            model_path: instead of the server's, after an update from disk.
            adapters: path by name, instead of the server's, once some were loaded while running.

        Raises:
            LookupError: a LoRA adapter whose content cannot be read.
        """
        settings = self.settings
        path = model_path or self.argument("model_path") or self.model_name or "unknown"
        revision = self.argument("revision") if model_path is None else None
        weights = settings.weights if model_path is None else None
        if weights is None:
            weights = weights_digest(path, revision, str(self.argument("load_format") or "auto"))
            if weights is None:
                _log.warning(
                    "hicache: the weights of %r cannot be read; model and revision alone tell pages apart. "
                    'Set "weights" in the extra config to a text that changes with them.',
                    path,
                )
        lora = adapters_digest(adapter_paths(self.argument("lora_paths")) if adapters is None else adapters)
        return Identity(
            engine="sglang",
            hash_scheme="sha256-chained",
            hash_seed=SEED if self.seeded else None,
            model=settings.model or path,
            revision=revision or None,
            weights=weights,
            quantization=self.argument("quantization") or None,
            config_overrides=self._overrides(),
            kv_dtype=f"{self.argument('kv_cache_dtype') or 'auto'}:{kv_dtype}",
            kv_scales=self._kv_scales(),
            page_tokens=page_tokens,
            lora=lora,
            tenant=settings.tenant,
        )

    def draft_model(self) -> str | None:
        """Name the draft model of speculative decoding with its weights; None where there is none."""
        path = self.argument("speculative_draft_model_path")
        if not path:
            return None
        revision = self.argument("speculative_draft_model_revision")
        return f"{path}@{revision or ''}#{weights_digest(path, revision) or ''}"

    def _overrides(self) -> dict[str, Any] | None:
        found = {name: self.argument(name) for name in OVERRIDES}
        text = found["json_model_override_args"]
        if isinstance(text, str):
            try:
                found["json_model_override_args"] = json.loads(text) or None
            except ValueError:
                pass
        if found["dtype"] == "auto":
            found["dtype"] = None
        return {name: _plain(value) for name, value in found.items() if value not in (None, "", {})} or None

    def _kv_scales(self) -> str | None:
        path = self.argument("quantization_param_path")
        return (file_digest(str(path)) or str(path)) if path else None


def _plain(value: Any) -> Any:
    """Keep JSON values; anything else by its text."""
    return value if isinstance(value, (str, int, float, bool, list, dict)) else str(value)
