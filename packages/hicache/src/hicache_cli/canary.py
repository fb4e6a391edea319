"""A canary: pages in a namespace of their own, set, found, read back, removed, each step in time."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hicache_cli.checks import Check, failed, within
from hicache_cli.output import nbytes_text
from hicache_cli.pagebytes import PageBytes
from hicache_cli.player import Slots, replay_identity
from hicache_core.factory import Loaded, open_storage
from hicache_core.identity import Namespace, Placement
from hicache_core.status import Status
from hicache_core.storage import HiCacheStorage, HiCacheStorageConfig

_PAGES = 4
_PAGE_NBYTES = 64 << 10
#: What a step may take beyond the deadline that the backend was given (C11).
_GRACE_S = 1.0

_REMEDIES = {
    Status.DENIED: "Give this user the right to write there, or choose another place.",
    Status.NO_SPACE: "Make room, or raise the backend's capacity.",
    Status.UNAVAILABLE: "See that its server runs and answers.",
    Status.TIMEOUT: "See that its server answers, or raise --timeout.",
}


@dataclass(frozen=True, slots=True)
class _Canary:
    """The pages of one round trip."""

    slots: Slots
    contents: PageBytes
    hashes: list[str]
    keys: list[str]
    absent: str


def canary_checks(loaded: Loaded, timeout_s: float) -> Iterator[Check]:
    """Open the store, make a round trip, close it; stops at the first step that fails."""
    backend = loaded.spec.name
    nbytes = min(_PAGE_NBYTES, loaded.spec.capabilities.max_page_nbytes or _PAGE_NBYTES)
    canary = _made(nbytes)
    identity = replay_identity(f"doctor-{uuid.uuid4().hex}")
    config = HiCacheStorageConfig(
        namespace=Namespace.of(identity), identity=identity, placement=Placement(), timeout_s=timeout_s
    )
    limit = timeout_s + _GRACE_S
    try:
        storage = loaded.create(config)
        within(limit, lambda: open_storage(storage, [canary.slots.pool]))
    except Exception as error:  # noqa: BLE001 - whatever a backend raises is a finding
        yield failed(backend, "opening", error)
        return
    yield Check(backend, "opening", True, f"open within {limit:g} s")
    failure = _first_failure(backend, _steps(storage, canary), limit)
    removal = _first_failure(backend, [("removing", lambda: _remove(storage, canary))], limit)
    if failure:
        yield failure
    else:
        yield Check(
            backend, "round trip", True, f"{_PAGES} pages of {nbytes_text(nbytes)}, every byte as set"
        )
    if removal and not (failure and removal.ok is False):
        yield removal  # after another failure it would only repeat it
    try:
        within(limit, storage.close)
    except Exception as error:  # noqa: BLE001 - as above
        yield failed(backend, "closing", error)


def _made(nbytes: int) -> _Canary:
    slots = Slots(nbytes, 2 * _PAGES)
    contents = PageBytes(nbytes)
    hashes = [PageBytes.hash_of(f"canary {n}") for n in range(_PAGES)]
    for page_hash, slot in zip(hashes, slots.views, strict=False):
        contents.fill(slot, page_hash)
    component = slots.pool.component
    (absent,) = component.keys([PageBytes.hash_of("absent")])
    return _Canary(slots, contents, hashes, component.keys(hashes), absent)


@dataclass(frozen=True, slots=True)
class _Finding:
    ok: bool | None
    found: str
    remedy: str = ""


_Step = Callable[[], "_Finding | None"]


def _steps(storage: HiCacheStorage, canary: _Canary) -> list[tuple[str, _Step]]:
    return [
        ("set", lambda: _statuses(storage.batch_set(canary.keys, canary.slots.all[:_PAGES]))),
        ("contains", lambda: _contains(storage, canary)),
        ("get", lambda: _get(storage, canary)),
    ]


def _first_failure(backend: str, steps: Sequence[tuple[str, _Step]], limit_s: float) -> Check | None:
    """Take steps until one has something to say; None when all went well."""
    for name, step in steps:
        try:
            finding = within(limit_s, step)
        except Exception as error:  # noqa: BLE001 - whatever a backend raises is a finding
            return failed(backend, name, error)
        if finding is not None:
            return Check(backend, name, finding.ok, finding.found, finding.remedy)
    return None


def _statuses(statuses: Sequence[Status]) -> _Finding | None:
    bad = [status for status in statuses if status is not Status.OK]
    if not bad and len(statuses) == _PAGES:
        return None
    names = ", ".join(getattr(status, "name", repr(status)) for status in statuses)
    remedy = _REMEDIES.get(bad[0], "") if bad else ""
    return _Finding(False, f"answered {names or 'nothing'}", remedy or "Report it to the backend's authors.")


def _contains(storage: HiCacheStorage, canary: _Canary) -> _Finding | None:
    complaint = _statuses(storage.batch_contains(canary.keys))
    if complaint:
        return complaint
    (absent,) = storage.batch_contains([canary.absent])
    if absent is Status.OK:
        return _Finding(False, "says OK for a page that nobody set", "Report it to the backend's authors.")
    return None


def _get(storage: HiCacheStorage, canary: _Canary) -> _Finding | None:
    complaint = _statuses(storage.batch_get(canary.keys, canary.slots.all[_PAGES:]))
    if complaint:
        return complaint
    slots = canary.slots.views[_PAGES:]
    pairs = zip(slots, canary.hashes, strict=True)
    wrong = [n for n, (slot, page_hash) in enumerate(pairs) if not canary.contents.matches(slot, page_hash)]
    if wrong:
        found = f"pages {wrong} of {_PAGES} came back with other bytes than were set"
        return _Finding(False, found, "Do not use this store: its answers are wrong. Report it.")
    return None


def _remove(storage: HiCacheStorage, canary: _Canary) -> _Finding | None:
    can = storage.capabilities
    if can.remove:
        complaint = _statuses(storage.batch_remove(canary.keys))
        if complaint:
            return complaint
    elif can.clear:
        storage.clear()
    else:
        namespace = storage.config.namespace
        return _Finding(None, f"cannot remove or clear: {_PAGES} pages stay in namespace {namespace}")
    if Status.OK in storage.batch_contains(canary.keys):
        return _Finding(False, "removed pages are still there", "Report it to the backend's authors.")
    return None
