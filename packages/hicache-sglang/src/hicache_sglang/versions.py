"""What each SGLang release changed for a storage backend, as data.

Nothing at run time branches on a version: the adapter reads what an object has.
This is for people, for ``hicache sglang --version``, and for the tests, which
hold every line of it against the real wheels.
"""

from __future__ import annotations

from dataclasses import dataclass

from hicache_core.adapters import parsed_version, release_known

_CONFIG_055 = ("tp_rank", "tp_size", "is_mla_model", "is_page_first_layout", "model_name", "extra_config")
_CONFIG_059 = ("tp_rank", "tp_size", "pp_rank", "pp_size", *_CONFIG_055[2:])
_CONFIG_0512 = (
    *_CONFIG_059[:4],
    "attn_cp_rank",
    "attn_cp_size",
    "is_mla_model",
    "enable_storage_metrics",
    "is_page_first_layout",
    "model_name",
    "tp_lcm_size",
    "should_split_heads",
    "extra_config",
)
_CONFIG_0521 = (*_CONFIG_0512[:-1], "dp_rank", "extra_config")
_CONFIG_0523 = (*_CONFIG_0521, "dcp_size", "dcp_rank", "logical_page_size")

_VERBS = (
    "register_mem_pool_host",
    "batch_get_v1",
    "batch_set_v1",
    "get",
    "batch_get",
    "set",
    "batch_set",
    "exists",
    "batch_exists",
    "clear",
    "get_stats",
)
_VERBS_V2 = ("register_mem_host_pool_v2", "batch_exists_v2", "batch_get_v2", "batch_set_v2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One release as its wheel has it."""

    version: str
    config_fields: tuple[str, ...]
    """HiCacheStorageConfig's fields in order; some were inserted in the middle."""
    verbs: frozenset[str]
    """Methods of SGLang's HiCacheStorage."""
    zero_copy: bool
    """"interface_v1" chooses the zero-copy calls for ``dynamic``."""
    attaches: bool
    """Storage can be attached and detached while the server runs."""
    plugins: bool
    """The entry-point group ``sglang.srt.plugins`` is read, so ``hicache.<name>`` works."""
    seeded: bool
    """Page hashes cover the LoRA id and the cache salt."""


RELEASES: tuple[Release, ...] = tuple(
    Release(
        version=version,
        config_fields=fields,
        verbs=frozenset(verbs),
        zero_copy=version != "0.5.5",
        attaches=version != "0.5.5",
        plugins=version not in ("0.5.5", "0.5.9"),
        seeded=version in ("0.5.20", "0.5.21", "0.5.22", "0.5.23"),
    )
    for version, fields, verbs in (
        ("0.5.5", _CONFIG_055, _VERBS),
        ("0.5.9", _CONFIG_059, _VERBS),
        ("0.5.12", _CONFIG_0512, (*_VERBS, *_VERBS_V2)),
        ("0.5.15", _CONFIG_0512, (*_VERBS, *_VERBS_V2)),
        ("0.5.20", _CONFIG_0512, (*_VERBS, *_VERBS_V2)),
        ("0.5.21", _CONFIG_0521, (*_VERBS, *_VERBS_V2)),
        ("0.5.22", _CONFIG_0521, (*_VERBS, *_VERBS_V2)),
        ("0.5.23", _CONFIG_0523, (*_VERBS, *_VERBS_V2, "on_host_pools_registered")),
    )
)

#: (first release that has it, what changed, what the adapter makes of it). Releases between those
#: of RELEASES were read where a change falls between two of them.
CHANGES: tuple[tuple[str, str, str], ...] = (
    (
        "0.5.3",
        "the factory, dynamic, register_mem_pool_host, the v1 calls",
        "releases before 0.5.5 are not supported",
    ),
    ("0.5.4", "batch_exists(keys, extra_info)", "every call takes what it does not know"),
    (
        "0.5.6",
        "interface_v1 chooses the zero-copy calls for dynamic",
        "0.5.5 copies each page through flat tensors",
    ),
    (
        "0.5.9",
        "runtime attach and detach; pp_rank, pp_size in the middle of the config",
        "the config is read by name",
    ),
    (
        "0.5.9",
        "NSA's indexer is part of the KV pool's size and not of its pages",
        "refused: pages would come back without it",
    ),
    (
        "0.5.10",
        "v2 calls, PoolTransfer, sidecar pools, tp_lcm_size",
        "sidecars and head groups are components",
    ),
    (
        "0.5.11",
        "sglang.srt.plugins; generic draft pages under 'd:<hash>'",
        "hicache.<name>; draft pages are a component",
    ),
    ("0.5.13", "generic draft pages under '<hash>.draft', to 0.5.18", "the same component"),
    ("0.5.19", "restorable_prefix_pages", "filled: every length that all gating pools allow"),
    ("0.5.20", "page hashes seeded by LoRA id and cache salt", "before it, LoRA and salts are refused"),
    ("0.5.20", "weights are replaced by WeightUpdater, not ModelRunner", "both are watched"),
    ("0.5.21", "dp_rank; UnifiedRadixCache only", "dp_rank is placement: equal shards share pages"),
    ("0.5.22", "hit policy block_groups", "reported, never a reason to shorten a prefix"),
    ("0.5.23", "dcp_*, logical_page_size, on_host_pools_registered", "pages are counted in logical tokens"),
)


def release_of(version: str) -> Release:
    """Give the newest known release that is not newer than this version.

    Raises:
        ValueError: it is older than the oldest supported one, or no version at all.
    """
    return release_known("SGLang", RELEASES, version)


def has_plugins(version: str) -> bool:
    """Tell whether ``hicache.<name>`` can be given as a backend name: from 0.5.11 on."""
    return parsed_version(version) >= (0, 5, 11)


def has_zero_copy(version: str) -> bool:
    """Tell whether "interface_v1" is heeded: from 0.5.6 on."""
    return parsed_version(version) >= (0, 5, 6)
