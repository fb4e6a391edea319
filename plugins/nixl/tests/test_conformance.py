"""The whole suite over real files, by both of the kernel's queues, and over objects on a real SeaweedFS."""

from __future__ import annotations

from typing import ClassVar

import pytest

from hicache_conformance import Conformance


class TestAio(Conformance):
    backend = "nixl"


class TestUring(Conformance):
    backend = "nixl"
    options: ClassVar = {"io": "uring"}


@pytest.mark.slow
class TestDirect(Conformance):
    backend = "nixl"
    options: ClassVar = {"direct_io": True}


@pytest.mark.slow
class TestObjects(Conformance):
    backend = "nixl"
    options: ClassVar = {"plugin": "OBJ"}
