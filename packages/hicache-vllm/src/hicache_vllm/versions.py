"""What each vLLM release changed for a secondary tier, as data.

Nothing at run time branches on a version: the adapter reads what an object has.
This is for people, for ``hicache vllm --version``, and for the tests, which hold
every line of it against the real wheels.
"""

from __future__ import annotations

from dataclasses import dataclass

from hicache_core.adapters import release_known

#: What a secondary tier must have, the same in all of them.
ABSTRACT = frozenset(
    {"drain_jobs", "get_finished_jobs", "lookup", "on_new_request", "submit_load", "submit_store"}
)

_TIER_024 = ("offloading_spec", "primary_kv_view", "tier_type")
_TIER_031 = (*_TIER_024, "backpressure_detector")
_RESULT_024 = ("job_id", "success")
_RESULT_028 = (*_RESULT_024, "successful_keys", "transfer_time")
_RESULT_031 = (*_RESULT_028, "transfer_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One release as its wheel has it."""

    version: str
    tier_arguments: tuple[str, ...]
    """Of SecondaryTierManager's constructor."""
    result_fields: tuple[str, ...]
    """JobResult's."""
    rows: str
    """The job's field that names rows of the host tier."""
    named_verdicts: bool
    """lookup answers a LookupResult; before, True, False or None."""
    marks_misses: bool
    """AsyncLookupManager.mark_miss is there; before, the adapter has one."""
    hands_config: bool
    """The spec holds the VllmConfig; later an excerpt, and the connector factory's hook is needed."""
    chunks: bool
    """The extra config knows blocks_per_chunk; before, block_size alone."""
    seed_constant: bool
    """Page hashes have a constant seed without PYTHONHASHSEED."""
    adapter_paths: bool
    """Page hashes hold an adapter's path beside its name."""
    schedule_context: bool
    """on_schedule_end is given a context."""
    stats: bool
    """A tier has get_stats and build_metric_definitions."""


RELEASES: tuple[Release, ...] = (
    Release(
        version="0.24.0",
        tier_arguments=_TIER_024,
        result_fields=_RESULT_024,
        rows="block_ids",
        named_verdicts=False,
        marks_misses=False,
        hands_config=True,
        chunks=False,
        seed_constant=False,
        adapter_paths=False,
        schedule_context=False,
        stats=False,
    ),
    Release(
        version="0.28.0",
        tier_arguments=_TIER_024,
        result_fields=_RESULT_028,
        rows="block_ids",
        named_verdicts=True,
        marks_misses=True,
        hands_config=False,
        chunks=True,
        seed_constant=False,
        adapter_paths=False,
        schedule_context=True,
        stats=True,
    ),
    *(
        Release(
            version=version,
            tier_arguments=_TIER_031,
            result_fields=_RESULT_031,
            rows="chunk_ids",
            named_verdicts=True,
            marks_misses=True,
            hands_config=False,
            chunks=True,
            seed_constant=True,
            adapter_paths=True,
            schedule_context=True,
            stats=True,
        )
        for version in ("0.31.0", "0.32.0", "0.33.0")
    ),
)

#: (first of the releases above that has it, what changed, what the adapter makes of it).
CHANGES: tuple[tuple[str, str, str], ...] = (
    ("0.28.0", "lookup answers a LookupResult", "answered in kind"),
    (
        "0.28.0",
        "mark_miss; a failed load says which keys were loaded",
        "in 0.24 the whole load is done again",
    ),
    (
        "0.28.0",
        "the spec holds an excerpt of the configuration",
        "the connector factory is hooked for the whole",
    ),
    ("0.28.0", "blocks_per_chunk", "part of the identity, as block_size is in 0.24"),
    ("0.28.0", "stats of a tier", "pages by verb and outcome, late calls, the breaker"),
    ("0.31.0", "jobs name chunk_ids, not block_ids", "both are read"),
    ("0.31.0", "backpressure_detector is always passed", "handed on; what else is passed is left alone"),
    ("0.31.0", "page hashes have a constant seed", "before, PYTHONHASHSEED must be set; the adapter says so"),
    ("0.31.0", "page hashes hold an adapter's path", "replaced by its content; before, content is added"),
    ("0.33.0", "tiers may be polled off the scheduler's thread", "not asked for"),
)


def release_of(version: str) -> Release:
    """Give the newest known release that is not newer than this version.

    Raises:
        ValueError: it is older than the oldest supported one, or no version at all.
    """
    return release_known("vLLM", RELEASES, version)
