"""Pages as S3 objects: what a set, a get and a look make of NIXL's OBJ plugin and of S3 itself.

An object is a page and its trailer under ``prefix + namespace/key``, put and got
as one request from and into private memory, an own NIXL transfer an object: a
transfer of many tells of one failure for all, and at once, while the others
still write into their memory. NIXL does not say why a transfer failed, nor how
large an object is; S3 is asked (s3.py).

The transfers themselves, and what becomes of them at the deadline, are in
objectmoves.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pydantic import SecretStr

from hicache_core import HostPool, Namespace, Pages, Status, Usage
from hicache_core.errors import BackendTimeout, BackendUnavailable, StorageClosed
from hicache_nixl._native import Agent, Scratch
from hicache_nixl.agents import Agents
from hicache_nixl.objectmoves import ObjectMover
from hicache_nixl.options import NixlOptions
from hicache_nixl.s3 import Account, Bucket, Found
from hicache_nixl.trailer import TRAILER_NBYTES, Verdict, checksum, examine, pack, plain_nbytes

T = TypeVar("T")
R = TypeVar("R")

#: Requests to S3 itself at a time.
WORKERS = 8
MAX_BAD = 65_536
#: Gets of an object that S3 says is there before it is called damaged: others may set and remove it.
ATTEMPTS = 3

#: What the end of private memory holds before a get: no trailer ends so, however much of one is missing.
_NO_TRAILER = b"\xff" * TRAILER_NBYTES

_OK, _MISS = Status.OK, Status.MISS
#: What a get cannot tell by itself: whether there is an object, and of which size.
_UNCLEAR = (Status.ERROR, Status.CORRUPT)


class ObjectStore:
    """The pages of one namespace in a bucket; thread-safe."""

    def __init__(self, options: NixlOptions, namespace: Namespace, agents: Agents) -> None:
        self._namespace = namespace
        self._prefix = options.prefix
        self._agents = agents
        self._bucket = Bucket(account_of(options))
        self._mover = ObjectMover(agents, self._bucket, self._own_prefix)
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="hicache-nixl-s3")
        self._checksums = options.checksum
        self._staging_nbytes = options.staging
        self._most = options.in_flight
        self._page_nbytes: dict[str, int] = {}
        #: object key -> etag of a value on which a get has failed (C6).
        self._bad: dict[str, str] = {}

    def prepare(self, deadline: float) -> None:
        """See that the bucket answers.

        Raises: BackendTimeout, BackendUnavailable.
        """
        list(self._bucket.listing(self._own_prefix, deadline, limit=1))

    def know(self, pools: Sequence[HostPool]) -> None:
        """Learn the sizes that keys of these pools' components have; their memory is not touched by NIXL."""
        self._page_nbytes = {pool.component.key: pool.component.page_nbytes for pool in pools}

    def contains(self, keys: Sequence[str], deadline: float) -> list[Status]:
        """Ask for each object's size."""
        return [status for status, _ in self._each(lambda key: self._look(key, deadline), keys)]

    def get(self, keys: Sequence[str], locs: Pages, deadline: float) -> list[Status]:
        """Get objects into private memory, judge them, copy the good ones into their slots."""
        statuses = [Status.SKIPPED] * len(keys)
        asked: Sequence[int] = range(len(keys))
        for attempt in range(ATTEMPTS):
            self._in_stages(asked, locs, statuses, deadline, lambda *a: self._get_stage(keys, locs, *a))
            unclear = [position for position in asked if statuses[position] in _UNCLEAR]
            looks = self._each(lambda position: self._look(keys[position], deadline, locs.nbytes), unclear)
            asked = []
            for position, (status, found) in zip(unclear, looks, strict=True):
                if status is _OK and attempt < ATTEMPTS - 1:
                    asked.append(position)  # it was set, or set anew, in between
                    continue
                if status is not _OK:
                    statuses[position] = status
                if found is not None and statuses[position] in (Status.CORRUPT, Status.SIZE_MISMATCH):
                    self._condemn(self._name(keys[position]), found.etag)
            if not asked:
                break
        return statuses

    def set(self, keys: Sequence[str], locs: Pages, deadline: float) -> list[Status]:
        """Put the objects that are not there yet."""
        first_of: dict[str, int] = {}
        for position, key in enumerate(keys):
            first_of.setdefault(key, position)
        unique = list(first_of.values())
        statuses = [Status.SKIPPED] * len(keys)
        looks = self._each(lambda position: self._look(keys[position], deadline, locs.nbytes), unique)
        absent = []
        for position, (status, _) in zip(unique, looks, strict=True):
            statuses[position] = status
            if status in (_MISS, Status.CORRUPT, Status.SIZE_MISMATCH):
                absent.append(position)
        self._in_stages(absent, locs, statuses, deadline, lambda *a: self._set_stage(keys, locs, *a))
        unclear = [position for position in absent if statuses[position] is Status.SKIPPED]
        found = self._each(lambda position: self._why_not_put(keys[position], deadline), unclear)
        for position, status in zip(unclear, found, strict=True):
            statuses[position] = status
        for position, key in enumerate(keys):
            statuses[position] = statuses[first_of[key]]
        return statuses

    def remove(self, keys: Sequence[str], deadline: float) -> list[Status]:
        """Remove objects; S3 does not tell whether there was one, so it is asked before."""

        def remove(key: str) -> Status:
            name = self._name(key)
            status, found = self._bucket.head(name, deadline)
            return self._bucket.delete(name, deadline) if found is not None else status

        unique = dict.fromkeys(keys)
        outcome = dict(zip(unique, self._each(_guarded(remove), list(unique)), strict=True))
        return [outcome.pop(key, _MISS) for key in keys]

    def touch(self, keys: Sequence[str]) -> None:
        """Nothing: a bucket evicts by its own rules."""

    def clear(self, deadline: float) -> int:
        """Remove every object under the namespace's prefix."""
        names = [found.key for found in self._bucket.listing(self._own_prefix, deadline)]
        statuses = self._each(_guarded(lambda name: self._bucket.delete(name, deadline)), names)
        left = len(names) - statuses.count(_OK)
        if left:
            worst = next(status for status in statuses if status is not _OK)
            kind = BackendTimeout if worst is Status.TIMEOUT else BackendUnavailable
            raise kind(
                f"clearing the namespace {self._namespace} of 'nixl'",
                value=f"{left} of {len(names)} objects remain: {worst.name}",
                remedy="Clear again, raise timeout_s, or allow DeleteObject to this access key.",
            )
        self._bad.clear()
        return len(names)

    def usage(self, deadline: float) -> Usage:
        """List all that lies under the prefix, once."""
        own, pages, nbytes, everything = self._own_prefix, 0, 0, 0
        for found in self._bucket.listing(self._prefix, deadline):
            everything += found.nbytes
            if found.key.startswith(own):
                pages += 1
                nbytes += found.nbytes - TRAILER_NBYTES
        return Usage(pages, nbytes, everything, None)

    def close(self) -> None:
        """Give everything back; what was abandoned ends with its transfers."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._bucket.close()
        self._agents.close()

    def abandon_in_child(self) -> None:
        """Leave everything of the parent's alone in the child of a fork."""
        self._agents.leak()

    # Names and looks.

    @property
    def _own_prefix(self) -> str:
        return f"{self._prefix}{self._namespace.qualify('')}"

    def _name(self, key: str) -> str:
        return f"{self._prefix}{self._namespace.qualify(key)}"

    def _look(self, key: str, deadline: float, wanted: int | None = None) -> tuple[Status, Found | None]:
        """Judge an object by its size, and by what an earlier get made of it."""
        name = self._name(key)
        try:
            status, found = self._bucket.head(name, deadline)
        except BackendTimeout:
            return Status.TIMEOUT, None
        except BackendUnavailable:
            return Status.UNAVAILABLE, None
        if found is None:
            return status, None
        wanted = wanted if wanted is not None else self._page_nbytes.get(key.rpartition(".")[2])
        if wanted is not None and found.nbytes != plain_nbytes(wanted):
            return Status.SIZE_MISMATCH, found
        if found.nbytes <= TRAILER_NBYTES:
            return Status.CORRUPT, found
        bad = self._bad.get(name)
        return (_OK if bad is None or bad != found.etag else Status.CORRUPT), found

    def _each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Do work for each item, several at a time."""
        if len(items) < 2:
            return [work(item) for item in items]
        try:
            return list(self._workers.map(work, items))
        except RuntimeError as error:  # shut down by a close() that has given up waiting
            raise StorageClosed("nixl") from error

    # Moving.

    def _in_stages(
        self,
        positions: Sequence[int],
        locs: Pages,
        statuses: list[Status],
        deadline: float,
        move: Callable[[Agent, Scratch, Sequence[int], list[Status], float], bool],
    ) -> None:
        """Move as many pages at a time as private memory holds; the rest has the last trouble as status."""
        nbytes = plain_nbytes(locs.nbytes)
        size = max(1, min(self._most, self._staging_nbytes // nbytes))
        for start in range(0, len(positions), size):
            try:
                agent = self._agents.take(deadline)
            except BackendTimeout:
                trouble = Status.TIMEOUT
            except (BackendUnavailable, StorageClosed):
                trouble = Status.UNAVAILABLE
            else:
                part = positions[start : start + size]
                try:
                    ended = move(agent, agent.scratch(nbytes * size), part, statuses, deadline)
                except BaseException:  # Ctrl-C, say
                    self._agents.abandon(agent, ())
                    raise
                if ended:
                    self._agents.give(agent)
                    continue
                start += size
                trouble = Status.TIMEOUT
            for position in positions[start:]:
                statuses[position] = trouble
            return

    def _get_stage(
        self,
        keys: Sequence[str],
        locs: Pages,
        agent: Agent,
        memory: Scratch,
        part: Sequence[int],
        statuses: list[Status],
        deadline: float,
    ) -> bool:
        """Get one stage; False when the deadline came first and the agent was left behind."""
        stride = plain_nbytes(locs.nbytes)
        for slot in range(len(part)):
            end = (slot + 1) * stride
            memory.view[end - TRAILER_NBYTES : end] = _NO_TRAILER  # a stale one would be believed
        names = [self._name(keys[p]) for p in part]
        failed, late = self._mover.move(agent, "READ", names, memory, stride, deadline)
        for slot, position in enumerate(part):
            if slot in late:
                statuses[position] = late[slot]
            elif slot in failed:
                statuses[position] = Status.ERROR
            else:
                value = memory.view[slot * stride : (slot + 1) * stride]
                statuses[position] = self._judged(keys[position], value, locs, position)
        return not late

    def _judged(self, key: str, value: memoryview, locs: Pages, position: int) -> Status:
        """Believe a value only when trailer and checksum agree; CORRUPT until S3 has told its size."""
        page = value[: locs.nbytes]
        verdict, wanted = examine(bytes(value[locs.nbytes :]), self._namespace.qualify(key), locs.nbytes)
        if verdict is not Verdict.GOOD or (
            wanted is not None and self._checksums and checksum([page]) != wanted
        ):
            return Status.CORRUPT
        at = 0
        for view in locs.views(position):
            view[:] = page[at : at + view.nbytes]
            at += view.nbytes
        return _OK

    def _set_stage(
        self,
        keys: Sequence[str],
        locs: Pages,
        agent: Agent,
        memory: Scratch,
        part: Sequence[int],
        statuses: list[Status],
        deadline: float,
    ) -> bool:
        """Put one stage; False when the deadline came first and the agent was left behind."""
        stride = plain_nbytes(locs.nbytes)
        for slot, position in enumerate(part):
            at = start = slot * stride
            for view in locs.views(position):
                memory.view[at : at + view.nbytes] = view
                at += view.nbytes
            value = checksum([memory.view[start:at]]) if self._checksums else None
            trailer = pack(self._namespace.qualify(keys[position]), locs.nbytes, value)
            memory.view[at : at + TRAILER_NBYTES] = trailer
        names = [self._name(keys[p]) for p in part]
        failed, late = self._mover.move(agent, "WRITE", names, memory, stride, deadline)
        for slot, position in enumerate(part):
            if slot in late:
                statuses[position] = late[slot]
            elif slot in failed:
                statuses[position] = Status.SKIPPED
            else:
                statuses[position] = _OK
                self._bad.pop(names[slot], None)
        return not late

    # What NIXL does not tell.

    def _condemn(self, name: str, etag: str) -> None:
        """Have contains deny, and a set replace, a value on which a get has failed."""
        if len(self._bad) >= MAX_BAD:
            self._bad.clear()
        self._bad[name] = etag

    def _why_not_put(self, key: str, deadline: float) -> Status:
        status, _ = self._look(key, deadline)
        return status if status in (Status.TIMEOUT, Status.UNAVAILABLE, Status.DENIED) else Status.ERROR


def account_of(options: NixlOptions) -> Account:
    """Give the account that options name."""

    def plain(secret: SecretStr | None) -> str:
        return secret.get_secret_value() if secret is not None else ""

    return Account(
        endpoint=options.endpoint or f"https://s3.{options.region}.amazonaws.com",
        bucket=options.bucket or "",
        region=options.region,
        access_key=plain(options.access_key),
        secret_key=plain(options.secret_key),
        session_token=plain(options.session_token),
        ca_bundle=options.ca_bundle,
    )


def _guarded(work: Callable[[str], Status]) -> Callable[[str], Status]:
    """Turn trouble with the server into a status."""

    def guarded(item: str) -> Status:
        try:
            return work(item)
        except BackendTimeout:
            return Status.TIMEOUT
        except BackendUnavailable:
            return Status.UNAVAILABLE

    return guarded
