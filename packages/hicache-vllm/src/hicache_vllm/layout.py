"""What a row of vLLM's host tier holds, and where its rows lie.

A row holds one chunk of all ranks, so its shard is ``whole``: nobody but the scheduler's
process reads or writes it. What its bytes mean depends on much that vLLM decides by
itself: ranks and their order, layers and cache groups, blocks a chunk, the layout
of a block, the attention backend and so platform, device and release. All that is
the row's byte order; servers that differ in any of it share no pages.

Source: vLLM 0.24 to 0.33, ``v1/kv_offload/{base,config,file_mapper}.py``,
``cpu/shared_offload_region.py`` (create_kv_memoryview).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hicache_core import Component, HostPool, Segment
from hicache_core.buffers import address_of
from hicache_core.errors import InvalidPages

#: Bytes at the end of an offload key that number its cache group; a block's hash is before them.
GROUP_NBYTES = 4

_LAYOUT_VARIABLES = ("VLLM_KV_CACHE_LAYOUT", "VLLM_ATTENTION_BACKEND")


@dataclass(frozen=True, slots=True)
class Group:
    """One cache group: layers that share blocks."""

    number: int
    """As it is in keys."""
    tokens_per_block: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """What decides the bytes of a row, read from a spec of any release."""

    release: str
    """vLLM's, ``0.32``: layouts inside a block are its own business and change between releases."""
    platform: str
    kv_dtype: str
    kv_layout: str | None
    attention: str | None
    blocks_per_chunk: int
    ranks: tuple[int, int, int, int] | None
    """Tensor, pipeline, prefill- and decode-context parallel sizes; None where rows do not depend on them."""
    copies: str
    """``single`` where ranks share one copy, ``canonical`` for a topology-free format, else ``ranks``."""
    groups: tuple[Group, ...]

    @property
    def page_tokens(self) -> int:
        """Tokens of a chunk of the first group; the others' are in the byte order."""
        return self.groups[0].tokens_per_block * self.blocks_per_chunk

    @property
    def byte_order(self) -> str:
        """All of it as text, layers as a digest."""
        groups = [[g.number, g.tokens_per_block, len(g.layers), _digest(g.layers)] for g in self.groups]
        facts = {
            "vllm": self.release,
            "platform": self.platform,
            "layout": self.kv_layout,
            "attention": self.attention,
            "blocks": self.blocks_per_chunk,
            "ranks": self.ranks,
            "copies": self.copies,
            "groups": groups,
        }
        return json.dumps(facts, sort_keys=True, separators=(",", ":"))

    def components(self, page_nbytes: int, draft_model: str | None) -> dict[int, Component]:
        """Describe each group's pages, by the group's number; one group alone is ``kv``."""
        alone = len(self.groups) == 1
        return {
            group.number: Component(
                "kv" if alone else f"group{group.number}",
                shard="whole",
                byte_order=self.byte_order,
                format=self.kv_dtype,
                page_nbytes=page_nbytes,
                draft_model=draft_model,
            )
            for group in self.groups
        }


def read_layout(spec: Any, vllm_config: Any, *, release: str, platform: str) -> Layout:
    """Read the layout from an offloading spec: its config (0.28 on), or vLLM's own (0.24)."""
    config = getattr(spec, "config", None)
    parallel = vllm_config.parallel_config
    canonical = bool(getattr(config, "canonical_layout", False))
    single = bool(getattr(config, "replicated_layout", False))
    topology_free = config is not None and bool(config.parallel.is_parallelism_agnostic)
    portable = single or (canonical and topology_free)
    ranks = (
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.prefill_context_parallel_size,
        parallel.decode_context_parallel_size,
    )
    return Layout(
        release=".".join(release.split(".")[:2]),
        platform=platform,
        kv_dtype=_kv_dtype(vllm_config),
        kv_layout=_text(getattr(config, "kv_cache_layout", None) or _variable("VLLM_KV_CACHE_LAYOUT")),
        attention=_attention(vllm_config),
        blocks_per_chunk=int(spec.blocks_per_chunk if config is not None else spec.block_size_factor),
        ranks=None if portable else ranks,
        copies="canonical" if canonical else "single" if single else "ranks",
        groups=_groups(spec, config),
    )


def pools_over(view: memoryview, components: Iterable[Component]) -> list[HostPool]:
    """Cover the rows of vLLM's host tier, one pool a component, all over the same memory.

    The view is not held: vLLM releases it, and its memory, once its tiers are shut down.

    Raises:
        InvalidPages: it is not a two-dimensional view of whole rows.
    """
    if view.ndim != 2 or not view.contiguous or view.shape is None or view.strides is None:
        raise InvalidPages(
            "vLLM's host tier is not a table of rows", value=f"{view.ndim} dimensions, shape {view.shape}"
        )
    rows, stride = view.shape[0], view.strides[0]
    segment = Segment(address_of(view), stride, stride)
    return [HostPool(component, (segment,), rows) for component in components]


def split_key(key: bytes) -> tuple[str, int]:
    """Split an offload key into the page hash, as text, and its group's number."""
    return key[:-GROUP_NBYTES].hex(), int.from_bytes(key[-GROUP_NBYTES:], "big")


def _groups(spec: Any, config: Any) -> tuple[Group, ...]:
    if config is not None:
        return tuple(
            Group(getattr(group, "group_id", number), group.tokens_per_block, tuple(group.layer_names))
            for number, group in enumerate(config.groups)
        )
    return tuple(
        Group(number, tokens, tuple(group.layer_names))
        for number, (tokens, group) in enumerate(
            zip(spec.gpu_block_size, spec.kv_cache_config.kv_cache_groups, strict=True)
        )
    )


def _kv_dtype(vllm_config: Any) -> str:
    """Name the type of stored values: the cache's own, or the model's where that is ``auto``."""
    chosen = vllm_config.cache_config.cache_dtype
    named = vllm_config.model_config.dtype if chosen == "auto" else chosen
    return str(named).removeprefix("torch.")


def _attention(vllm_config: Any) -> str | None:
    """Name the attention backend where it was chosen; where vLLM chooses, platform and release decide."""
    config = getattr(vllm_config, "attention_config", None)
    chosen = {
        name: _text(value)
        for name in ("backend", "backend_per_kind")
        if (value := getattr(config, name, None))
    }
    return json.dumps(chosen, sort_keys=True) if chosen else _text(_variable("VLLM_ATTENTION_BACKEND"))


def _variable(name: str) -> str | None:
    return os.environ.get(name) if name in _LAYOUT_VARIABLES else None


def _text(value: Any) -> str | None:
    return None if value is None else str(getattr(value, "name", value))


def _digest(layers: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(layers).encode()).hexdigest()[:16]
