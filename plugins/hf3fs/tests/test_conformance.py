"""The suite: in process with every change; on a metadata server process, either client, with `-m slow`."""

from typing import ClassVar

import pytest

from hicache_conformance.conformance import Conformance


class TestLocalMetadata(Conformance):
    backend = "hf3fs"
    options: ClassVar = {"metadata": "local"}


@pytest.mark.slow
class TestPosixWithServer(Conformance):
    backend = "hf3fs"


@pytest.mark.slow
class TestUsrbioDoubleWithServer(Conformance):
    backend = "hf3fs"
    options: ClassVar = {"client": "usrbio"}
