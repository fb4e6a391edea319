"""The whole suite, over files and over a real Redis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hicache_conformance.conformance import Conformance


class TestFiles(Conformance):
    backend = "lmcache"
    options: ClassVar[Mapping[str, Any]] = {"l2": "fs"}


class TestRedis(Conformance):
    backend = "lmcache"
    options: ClassVar[Mapping[str, Any]] = {"l2": "resp"}


class TestFilesWithL1(Conformance):
    backend = "lmcache"
    options: ClassVar[Mapping[str, Any]] = {"l2": "fs", "l1_bytes": "32mib"}


class TestRedisWithL1(Conformance):
    backend = "lmcache"
    options: ClassVar[Mapping[str, Any]] = {"l2": "resp", "l1_bytes": "32mib"}
