"""vLLM's own values, in the form of the release at hand.

Source: vLLM 0.24 to 0.33, ``v1/kv_offload/base.py`` (LookupResult, from 0.28 on; plain truths
before), ``v1/kv_offload/tiering/base.py`` (JobResult, which grew fields).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.v1.kv_offload import base as offload
from vllm.v1.kv_offload.tiering.base import JobResult

from hicache_vllm.jobs import Outcome


def verdicts() -> dict[bool | None, Any]:
    """Give what lookup answers for stored, not stored, and not known yet."""
    kinds = getattr(offload, "LookupResult", None)
    if kinds is None:
        return {True: True, False: False, None: None}
    return {True: kinds.HIT, False: kinds.MISS, None: kinds.RETRY}


def fields_of_result() -> frozenset[str]:
    """Name the fields of this release's JobResult."""
    return frozenset(field.name for field in dataclasses.fields(JobResult))


def result_of(outcome: Outcome, row_nbytes: int, fields: frozenset[str]) -> Any:
    """Make a JobResult; of a load that failed in part it names the keys that were loaded."""
    good = sum(outcome.good)
    whole = good == len(outcome.keys)
    loaded = tuple(key for key, ok in zip(outcome.keys, outcome.good, strict=True) if ok)
    known = {
        "job_id": outcome.job_id,
        "success": whole,
        "successful_keys": loaded if outcome.loads and loaded and not whole else None,
        "transfer_time": outcome.seconds,
        "transfer_bytes": good * row_nbytes,
    }
    return JobResult(**{name: value for name, value in known.items() if name in fields})
