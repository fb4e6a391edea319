"""The tree of errors: fields, messages, and a place for every class."""

from __future__ import annotations

import pickle

import pytest

from hicache_core import errors
from hicache_core.errors import (
    BackendBlocked,
    BackendConflict,
    BackendDependencyMissing,
    BackendImportFailed,
    BackendIncompatible,
    BackendLoadError,
    BackendNotFound,
    BackendTimeout,
    BackendUnavailable,
    HiCacheError,
    InvalidArgument,
    InvalidIdentity,
    InvalidKey,
    InvalidOptions,
    InvalidPages,
    StorageClosed,
    StorageNotOpened,
    UnsupportedOperation,
)

#: One of each, with the message that it must give.
EXAMPLES: list[tuple[HiCacheError, str]] = [
    (HiCacheError("reading failed"), "reading failed"),
    (HiCacheError("reading failed", value="x"), "reading failed: x"),
    (HiCacheError("reading failed", remedy="Try y."), "reading failed. Try y."),
    (HiCacheError("which one", value="this?", remedy="Try y."), "which one: this? Try y."),
    (InvalidArgument("a is wrong", value="1", remedy="Write 2."), "a is wrong: 1. Write 2."),
    (InvalidPages("pages are wrong"), "pages are wrong"),
    (InvalidKey("key is wrong"), "key is wrong"),
    (InvalidIdentity("identity is wrong"), "identity is wrong"),
    (StorageNotOpened("acme"), "'acme' is not open. Call open() before the first verb."),
    (
        StorageClosed("acme"),
        "'acme' is closed. Create and open a new instance; a closed one stays closed.",
    ),
    (
        UnsupportedOperation("acme", "clear a namespace", capability="clear"),
        "'acme' cannot clear a namespace: it does not declare 'clear'. "
        "Choose a backend that does: `hicache backends` prints the table.",
    ),
    (
        BackendUnavailable("opening 'acme'", value="no answer", remedy="Start it."),
        "opening 'acme': no answer. Start it.",
    ),
    (BackendTimeout("opening 'acme'"), "opening 'acme'"),
    (BackendLoadError("acme", "loading failed"), "loading failed"),
    (
        BackendNotFound("acne", installed=["acme", "bolt"], close=["acme"]),
        "no backend named 'acne'; installed: acme, bolt. Did you mean 'acme'?",
    ),
    (
        BackendNotFound("acne", installed=["acme", "acre"], close=["acme", "acre"]),
        "no backend named 'acne'; installed: acme, acre. Did you mean 'acme' or 'acre'?",
    ),
    (
        BackendNotFound("zzz"),
        "no backend named 'zzz'; installed: none. "
        "Install a plugin that provides it, or name one that is installed.",
    ),
    (BackendNotFound("acme", install="pip install acme"), "'acme' is not installed. Run: pip install acme"),
    (
        BackendDependencyMissing("acme", "acme_native", remedy="Run: pip install x"),
        "'acme' needs 'acme_native', which is not installed. Run: pip install x",
    ),
    (
        BackendImportFailed("acme", "m:C", OSError("no GPU")),
        "importing 'm:C' for backend 'acme' failed: OSError: no GPU. "
        "Report it to the authors, or leave it out with HICACHE_BACKENDS_DENY=acme.",
    ),
    (
        BackendImportFailed("acme", "m:C", OSError("no GPU"), distribution="d 1.0"),
        "importing 'm:C' of d 1.0 for backend 'acme' failed: OSError: no GPU. "
        "Report it to the authors of d 1.0, or leave it out with HICACHE_BACKENDS_DENY=acme.",
    ),
    (
        BackendIncompatible("acme", "too old", remedy="Run: pip install -U acme"),
        "too old. Run: pip install -U acme",
    ),
    (
        BackendConflict("acme", [("one", "1.0", "/a"), ("two", "2.0", "/b")]),
        "'acme' is provided by 2 distributions: one 1.0 (/a); two 2.0 (/b). "
        "Uninstall all but one, or name the one you mean: 'acme@one' or 'acme@two'.",
    ),
    (
        BackendBlocked("acme", variable="HICACHE_BACKENDS_DENY", setting="acme,bolt"),
        "'acme' is blocked by HICACHE_BACKENDS_DENY: acme,bolt. Change HICACHE_BACKENDS_DENY to let it load.",
    ),
    (
        InvalidOptions("acme", [("port", "port is required", "")]),
        "1 option of 'acme' is not valid: port is required. See: hicache show acme",
    ),
    (
        InvalidOptions(
            "acme", [("a", "a is unknown", "V"), ("b", "b is unknown", "V"), ("c", "c is unknown", "f")]
        ),
        "3 options of 'acme' are not valid: a is unknown; b is unknown; c is unknown. "
        "Set by: V, f. See: hicache show acme",
    ),
]


@pytest.mark.parametrize(("error", "message"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_the_message_is_made_of_the_fields(error: HiCacheError, message: str) -> None:
    assert str(error) == message


@pytest.mark.parametrize("error", [error for error, _ in EXAMPLES], ids=lambda error: type(error).__name__)
def test_an_error_survives_pickle(error: HiCacheError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.__dict__) == (type(error), str(error), error.__dict__)


def test_every_class_has_an_example() -> None:
    classes = {value for value in vars(errors).values() if isinstance(value, type)}
    named = {value for value in classes if issubclass(value, HiCacheError)}
    assert named == {type(error) for error, _ in EXAMPLES}


def test_kinds_can_be_caught_together() -> None:
    assert issubclass(BackendTimeout, BackendUnavailable)
    assert all(issubclass(kind, InvalidArgument) for kind in (InvalidPages, InvalidKey, InvalidIdentity))
    assert issubclass(InvalidArgument, ValueError)
    load = (
        *(BackendNotFound, BackendDependencyMissing, BackendImportFailed, BackendIncompatible),
        *(BackendConflict, BackendBlocked, InvalidOptions),
    )
    assert all(issubclass(kind, BackendLoadError) for kind in load)
    assert not issubclass(BackendUnavailable, BackendLoadError)
