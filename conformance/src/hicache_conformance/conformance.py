"""Conformance: all levels in one class, which a plugin's own test module derives from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hicache_conformance.levels.batch import BatchLevel
from hicache_conformance.levels.core import CoreLevel
from hicache_conformance.levels.durable import DurableLevel
from hicache_conformance.levels.evict import EvictLevel
from hicache_conformance.levels.fault import FaultLevel
from hicache_conformance.levels.identity import IdentityLevel
from hicache_conformance.levels.lifecycle import LifecycleLevel
from hicache_conformance.levels.memory import MemoryLevel
from hicache_conformance.levels.shared import SharedLevel
from hicache_conformance.levels.threads import ThreadsLevel
from hicache_conformance.subject import Subject


class Conformance(
    CoreLevel,
    BatchLevel,
    MemoryLevel,
    LifecycleLevel,
    IdentityLevel,
    SharedLevel,
    DurableLevel,
    EvictLevel,
    ThreadsLevel,
    FaultLevel,
):
    """Every case of the suite; name the backend, and give options where its harness needs them.

    ``subject`` instead of ``backend`` takes anything that storages can be built
    for, a foreign class behind an adapter for example.
    """

    backend: ClassVar[str | None] = None
    subject: ClassVar[Subject | None] = None
    options: ClassVar[Mapping[str, Any]] = {}
