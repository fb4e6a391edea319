"""The guarded way to a backend: every call bounded, every answer checked, nothing raised for its sake.

A Guard holds the one session, replaces it on rebind, opens it again when the
store comes back, and turns whatever a backend does into statuses. HiCache in
front of it names pages and counts; Session behind it knows how to place a call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from hicache_core.bounce import run_apart
from hicache_core.breaker import Breaker
from hicache_core.errors import (
    BackendIncompatible,
    BackendTimeout,
    BackendUnavailable,
    HiCacheError,
    StorageClosed,
)
from hicache_core.factory import Loaded, open_storage
from hicache_core.memory import HostPool, Pages
from hicache_core.notices import Notices, described
from hicache_core.observers import active
from hicache_core.session import Session
from hicache_core.status import Status, is_answer
from hicache_core.storage import HiCacheStorage, HiCacheStorageConfig

T = TypeVar("T")

#: The margin of C11: a call returns within timeout_s and this.
GRACE_S = 1.0

_NO_ANSWER = frozenset({Status.UNAVAILABLE, Status.TIMEOUT})


class Guard:
    """One backend behind breaker, watch and bounce; thread-safe."""

    def __init__(self, loaded: Loaded, config: HiCacheStorageConfig) -> None:
        self.name = loaded.spec.name
        self.config = config
        self.pools: dict[int, HostPool] = {}
        self.breaker = Breaker()
        self.notices = Notices()
        self.observers = active()
        self.late = 0
        self.session: Session | None = None
        self._loaded = loaded
        self._admin = threading.Lock()
        self._late_lock = threading.Lock()
        self._left_behind: list[threading.Thread] = []
        self._ended = False

    # Opening, replacing, closing.

    def open(self, *, strict: bool) -> None:
        """Open the first session; without ``strict`` a store that cannot be reached is tried again later.

        Raises: BackendLoadError, InvalidPages; BackendUnavailable with strict.
        """
        try:
            self.session = self._new_session()
        except BackendUnavailable as error:
            if strict:
                raise
            self._retry_later("open", error)

    def rebind(self, config: HiCacheStorageConfig) -> None:
        """Replace the session by one of another namespace; never raises for the store's sake."""
        with self._admin:
            self.config = config
            old, self.session = self.session, None
            if self._ended:
                return
            try:
                self._adopt(self._new_session() if old is None else self._successor(old))
            except Exception as error:
                self._retry_later("rebind", error)

    def add_pool(self, pool: HostPool) -> None:
        """Tell the backend of one more pool."""
        with self._admin:
            if id(pool) not in self.pools:
                self.pools[id(pool)] = pool
                session = self.session
                if session is not None and pool.segments and session.serves(pool):
                    self._pool_verb("adding a pool", session.storage.add_pool, pool)

    def drop_pool(self, pool: HostPool) -> None:
        """Tell the backend to forget a pool."""
        with self._admin:
            session = self.session
            if self.pools.pop(id(pool), None) is not None and session is not None and pool.segments:
                self._pool_verb("dropping a pool", session.storage.drop_pool, pool)

    def close(self) -> None:
        """Close the session within timeout_s and GRACE_S; idempotent."""
        self._ended = True
        session, self.session = self.session, None
        if session is not None:
            self._end(session, self.config.timeout_s)

    def end_in_child(self) -> None:
        """Answer misses in a fork's child; takes no lock."""
        self._admin = threading.Lock()
        self.session = None
        self._ended = True

    # Calls.

    def transfer(self, verb: str, keys: list[str], pages: Pages) -> list[Status]:
        """Get or set pages, in as many calls as the backend's max_batch wants, all of one session."""
        session = self._enter()
        if session is None:
            return [self._absence] * len(keys)
        try:
            get = verb == "get"
            ask = session.get if get else session.set
            bounced = session.bounces(pages)
            size = session.chunk(len(keys), pages if bounced else None)
            statuses = self._in_chunks(
                verb, size, len(keys), lambda a, b: ask(keys[a:b], pages[a:b], bounced=bounced)
            )
            (session.note_get if get else session.note_set)(keys, statuses)
            return statuses
        finally:
            session.gate.leave()

    def contains(self, keys: list[str]) -> list[Status]:
        """Ask for each key; keys on which a get has failed count as absent."""
        session = self._enter()
        if session is None:
            return [self._absence] * len(keys)
        try:
            ask = session.storage.batch_contains
            statuses = self._in_chunks(
                "contains",
                session.chunk(len(keys)),
                len(keys),
                lambda a, b: session.call(lambda: ask(keys[a:b])),
            )
            for position, dead in enumerate(session.dead_flags(keys)):
                if dead:
                    statuses[position] = Status.MISS
            return statuses
        finally:
            session.gate.leave()

    def exists(self, keys: list[str]) -> int:
        """Count the leading keys that are there."""
        session = self._enter()
        if session is None:
            return 0
        try:
            flags = session.dead_flags(keys)
            keys = keys[: flags.index(True)] if flags else keys
            run = 0
            for start, stop in self._parts(len(keys), session.chunk(len(keys))):
                run += self._exists_once(session, keys[start:stop])
                if run < stop:
                    break
            return run
        finally:
            session.gate.leave()

    def _exists_once(self, session: Session, keys: list[str]) -> int:
        answer = self._try("exists", lambda: session.call(lambda: session.storage.batch_exists(keys)))
        if type(answer) is int and 0 <= answer <= len(keys):
            return answer
        if type(answer) is not Status:
            self._odd_answer("exists", answer)
        return 0

    def touch(self, keys: list[str]) -> None:
        """Count as a use."""
        session = self._enter()
        if session is None:
            return
        try:
            for start, stop in self._parts(len(keys), session.chunk(len(keys))):
                verb = partial(session.storage.touch, keys[start:stop])
                if type(self._try("touch", partial(session.call, verb))) is Status:
                    break
        finally:
            session.gate.leave()

    def remove(self, keys: list[str]) -> list[Status]:
        """Remove pages; raises as operate."""

        def work(session: Session) -> list[tuple[Any, int]]:
            size = session.chunk(len(keys))
            parts = [keys[start : start + size] for start in range(0, len(keys), size)]
            return [(session.storage.batch_remove(part), len(part)) for part in parts]

        answers = self.operate("remove", work, lambda parts: all(is_answer(*part) for part in parts))
        return [status for part, _ in answers for status in part]

    def operate(self, verb: str, work: Callable[[Session], T], valid: Callable[[T], bool]) -> T:
        """Run an operator's verb, guarded like the others; its trouble is raised.

        Raises: HiCacheError and nothing else.
        """
        session = self._enter()
        if session is None:
            if self._ended:
                raise StorageClosed(self.name)
            remedy = f"Run: hicache doctor {self.name}"
            raise BackendUnavailable(f"'{self.name}' cannot be reached for {verb}", remedy=remedy)
        try:
            answer = session.call(lambda: work(session))
        except BackendUnavailable:
            self.breaker.fail()
            raise
        except (HiCacheError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise self._not_ours(f"failed in {verb}", error) from error
        finally:
            session.gate.leave()
        self.breaker.succeed()
        if not valid(answer):
            raise self._not_ours(f"gave an answer to {verb} that breaks the contract", answer)
        return answer

    def _not_ours(self, what: str, met: object) -> HiCacheError:
        remedy = "Report it to the plugin's authors."
        return HiCacheError(f"'{self.name}' {what}", value=described(met), remedy=remedy)

    # How a call is guarded.

    def _enter(self) -> Session | None:
        """Give the session with its gate passed, or None where there can be no answer."""
        session = self.session
        if session is None:
            session = self._reopened()
        elif session.overdue():
            self._note_late()
            self._open_breaker(self.breaker.trip())
        if session is None or not self.breaker.allow() or not session.gate.enter():
            return None
        return session

    def _in_chunks(self, verb: str, size: int, count: int, ask: Callable[[int, int], Any]) -> list[Status]:
        """Ask for at most ``size`` pages a call; no call follows one without any answer, or the deadline.

        What is not asked for is SKIPPED. So slow calls add up to the deadline and one call at most.
        """
        statuses: list[Status] = []
        for start, stop in self._parts(count, size):
            part = self._settled(verb, self._try(verb, partial(ask, start, stop)), stop - start)
            statuses += part
            if _no_answer(part):
                break
        return statuses + [Status.SKIPPED] * (count - len(statuses))

    def _parts(self, count: int, size: int) -> Iterator[tuple[int, int]]:
        """Cut a batch into calls of at most ``size``; none begins after the deadline of the whole."""
        until = time.monotonic() + self.config.timeout_s
        for start in range(0, count, size):
            if start and time.monotonic() >= until:
                return
            yield start, min(start + size, count)

    def _try(self, verb: str, work: Callable[[], Any]) -> Any:
        """Run a backend's verb; a Status in place of its answer when there is none."""
        try:
            answer = work()
        except BackendTimeout as error:
            self._note_late()
            return self._trouble(verb, Status.TIMEOUT, error)
        except (BackendUnavailable, StorageClosed) as error:
            return self._trouble(verb, Status.UNAVAILABLE, error)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.breaker.succeed()
            return self._trouble(verb, Status.ERROR, error)
        if type(answer) is list and _no_answer(answer):
            self._trouble(verb, answer[0], None)
        else:
            self.breaker.succeed()
        return answer

    def _settled(self, verb: str, answer: Any, count: int) -> list[Status]:
        """Hold an answer to C1: exactly one Status a key, else nothing in it can be believed."""
        if is_answer(answer, count):
            return answer  # type: ignore[no-any-return]
        if type(answer) is Status:
            return [answer] * count
        self._odd_answer(verb, answer)
        return [Status.ERROR] * count

    def _trouble(self, verb: str, status: Status, error: BaseException | None) -> Status:
        if status in _NO_ANSWER:
            self._open_breaker(self.breaker.fail())
        cause = described(error) if error is not None else "reported for the whole batch"
        self.notices.warn(f"hicache '{self.name}' {verb}", status.name, f"{status.name}: {cause}")
        return status

    def _open_breaker(self, opened_now: bool) -> None:
        if opened_now:
            self.notices.warn(
                f"hicache '{self.name}'", "breaker", "no answer: misses at once until it answers again"
            )

    def _odd_answer(self, verb: str, answer: Any) -> None:
        detail = f"an answer that breaks the contract was dropped: {described(answer)}"
        self.notices.warn(f"hicache '{self.name}' {verb}", "answer", detail)

    def _note_late(self) -> None:
        with self._late_lock:
            self.late += 1

    @property
    def _absence(self) -> Status:
        return Status.MISS if self._ended else Status.UNAVAILABLE

    # Sessions.

    def _reopened(self) -> Session | None:
        """Open again when the breaker lets one caller try; the others are answered at once."""
        if self._ended or not self._admin.acquire(blocking=False):
            return None
        try:
            if self.session is None and not self._ended and self.breaker.allow():
                try:
                    self._adopt(self._new_session())
                except Exception as error:
                    self._retry_later("open", error)
            return self.session
        finally:
            self._admin.release()

    def _adopt(self, session: Session) -> None:
        self.session = session
        self.breaker.succeed()
        if self._ended:  # closed while it was being opened
            self.close()

    def _retry_later(self, what: str, error: Exception) -> None:
        if not self.breaker.trip():
            self.breaker.fail()
        self.notices.warn(f"hicache '{self.name}' {what}", "open", f"{error}; it will be tried again")

    def _new_session(self) -> Session:
        storage = self._loaded.create(self.config)
        most = self._loaded.spec.capabilities.max_segments
        pools = [p for p in self.pools.values() if p.segments and (most is None or len(p.segments) <= most)]
        self._apart("opening", lambda: open_storage(storage, pools), late=lambda _: storage.close())
        return self._started(storage)

    def _successor(self, old: Session) -> Session:
        """Let the storage itself change its namespace if no call of the old one can still be running."""
        if not old.close(self.config.timeout_s) or old.abandoned:
            self._end(old, 0.0)
            return self._new_session()
        pools = [p for p in self.pools.values() if p.segments and old.serves(p)]
        try:
            storage = self._apart(
                "rebinding",
                lambda: _last(old, old.rebound, self.config, pools),
                late=lambda fresh: fresh.close(),
            )
        finally:
            self._tell_closed(old)
        if storage.config.namespace != self.config.namespace or not storage.is_open:
            storage.close()
            raise BackendIncompatible(
                self.name,
                f"rebind of '{self.name}' did not give an open storage of the new namespace",
                remedy="Report it to the plugin's authors.",
            )
        return self._started(storage)

    def _pool_verb(self, what: str, verb: Callable[[HostPool], None], pool: HostPool) -> None:
        """Register or forget memory apart, since that may hang; trouble shows in the calls that follow."""
        try:
            self._apart(what, lambda: verb(pool), late=lambda _: None)
        except HiCacheError as error:
            self.notices.warn(f"hicache '{self.name}'", what, str(error))

    def _started(self, storage: HiCacheStorage) -> Session:
        if self.observers is not None:
            self.observers.tell("hicache_opened", storage=storage)
        return Session(
            storage, self.config.namespace, timeout_s=self.config.timeout_s, on_late=self._note_late
        )

    def _end(self, session: Session, timeout_s: float) -> None:
        started = time.monotonic()
        session.close(timeout_s)
        left = timeout_s - (time.monotonic() - started)
        try:
            run_apart(
                lambda: _last(session, session.storage.close),
                max(left, 0.0) + GRACE_S,
                what=f"closing '{self.name}'",
            )
        except BaseException as error:
            self.notices.warn(f"hicache '{self.name}' close", "close", described(error))
        self._tell_closed(session)

    def _tell_closed(self, session: Session) -> None:
        if self.observers is not None:
            self.observers.tell("hicache_closed", storage=session.storage)

    def _apart(self, what: str, work: Callable[[], T], *, late: Callable[[T], None]) -> T:
        try:
            return run_apart(
                work,
                self.config.timeout_s + GRACE_S,
                what=f"{what} '{self.name}'",
                late=late,
                left_behind=self._left_behind,
            )
        except (HiCacheError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise BackendUnavailable(
                f"{what} '{self.name}' failed",
                value=described(error),
                remedy=f"Run: hicache doctor {self.name}",
            ) from error


def _last(session: Session, act: Callable[..., T], *arguments: Any) -> T:
    """Make a session's last call, which unregisters its private memory, and only then let that go."""
    try:
        return act(*arguments)
    finally:
        session.end()


def _no_answer(statuses: Sequence[Any]) -> bool:
    """True where the whole batch says that the backend gave no answer."""
    if not statuses or type(statuses[0]) is not Status or statuses[0] not in _NO_ANSWER:
        return False
    return all(type(status) is Status and status in _NO_ANSWER for status in statuses)
