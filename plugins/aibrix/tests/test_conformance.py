"""The whole suite, over RocksDB and over a shared folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hicache_conformance.conformance import Conformance


class TestRocksDB(Conformance):
    backend = "aibrix"
    options: ClassVar[Mapping[str, Any]] = {"backend": "rocksdb"}


class TestSHFS(Conformance):
    backend = "aibrix"
    options: ClassVar[Mapping[str, Any]] = {"backend": "shfs"}
