"""The suite: in process with every change; on a real metadata server process, either client, with `-m slow`."""

import pytest

from hicache_conformance.conformance import Conformance


class TestLocalMetadata(Conformance):
    backend = "hf3fs"
    options = {"metadata": "local"}


@pytest.mark.slow
class TestPosixWithServer(Conformance):
    backend = "hf3fs"


@pytest.mark.slow
class TestUsrbioDoubleWithServer(Conformance):
    backend = "hf3fs"
    options = {"client": "usrbio"}
