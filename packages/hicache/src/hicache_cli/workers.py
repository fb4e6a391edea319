"""One player, or several processes of one each, sharing a store.

Several workers draw requests from one counter, in the log's order, each the next
one as soon as it is free: so the store meets the log nearly in order however
unevenly the workers run, as behind a router. Who plays what, and which worker finds a
page that another one sets at the same time, differs a little from run to run.
Workers are spawned, not forked: a backend's threads do not survive a fork. Each
opens its own instance, and all begin when the last one is ready.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from hicache_cli.extensions import PlayThrough
from hicache_cli.pagebytes import PageBytes
from hicache_cli.player import Player, Slots, replay_identity
from hicache_cli.tally import Tally
from hicache_cli.trace import Request
from hicache_core.cache import HiCache
from hicache_core.errors import HiCacheError
from hicache_core.identity import Placement

#: A worker reports its progress every so many requests.
_REPORT_EVERY = 16
#: Seconds that a worker may take to end once it has sent its result.
_EXIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Job:
    """What every worker is told; picklable."""

    backend: str
    options: Mapping[str, Any]
    tenant: str
    page_nbytes: int
    timeout_s: float
    engine: PlayThrough | None = None
    """What plays the requests instead of the player; see extensions.py."""


class WorkerFailed(HiCacheError):
    """A worker process could not do its part."""


def open_cache(job: Job, pools: Sequence[Any] = ()) -> HiCache:
    """Open a job's store, or raise what keeps it from opening."""
    return HiCache.open(
        job.backend,
        identity=replay_identity(job.tenant),
        placement=Placement(),
        pools=pools,
        timeout_s=job.timeout_s,
        options=job.options,
        strict=True,
    )


def play(job: Job, requests: Sequence[Request], workers: int, progress: Callable[[int], None]) -> Tally:
    """Play all requests and return what was counted.

    Raises:
        HiCacheError: from opening the store; WorkerFailed when a process ends early.
    """
    if workers == 1:
        return _play_here(job, list(enumerate(requests)), progress)
    return _play_apart(job, requests, workers, progress)


def _drawn(requests: Sequence[Request], counter: Any) -> Iterator[tuple[int, Request]]:
    """Give what this worker draws: (place, request), until the shared counter is at the end."""
    while True:
        with counter.get_lock():
            place = counter.value
            counter.value = place + 1
        if place >= len(requests):
            return
        yield place, requests[place]


def _play_here(
    job: Job,
    requests: Iterable[tuple[int, Request]],
    progress: Callable[[int], None],
    ready: Callable[[], None] = lambda: None,
) -> Tally:
    contents = PageBytes(job.page_nbytes)
    if job.engine is not None:
        ready()
        return job.engine(job, list(requests), progress)
    slots = Slots(job.page_nbytes)
    with open_cache(job, [slots.pool]) as cache:
        ready()
        tally = Player(cache, slots, contents).play(requests, progress)
        try:
            tally.store_nbytes = cache.usage().store_bytes
        except HiCacheError:
            pass  # a store that cannot tell; what it did is in the statuses
        return tally


def _play_apart(
    job: Job, requests: Sequence[Request], workers: int, progress: Callable[[int], None]
) -> Tally:
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    processes = []
    ours: list[Connection] = []
    try:
        for _ in range(workers):
            near, far = context.Pipe()
            process = context.Process(target=_worker, args=(far, job, requests, counter), daemon=True)
            process.start()
            far.close()
            processes.append(process)
            ours.append(near)
        for number, connection in enumerate(ours):
            _expect(number, connection, "ready")
        for connection in ours:
            connection.send("go")
        total = _collect(ours, progress)
        for process in processes:
            process.join(_EXIT_S)
        return total
    finally:
        for connection in ours:
            connection.close()
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def _collect(connections: Sequence[Connection], progress: Callable[[int], None]) -> Tally:
    total = Tally()
    running = {connection: number for number, connection in enumerate(connections)}
    while running:
        for connection in wait(list(running)):
            number = running[connection]  # type: ignore[index]
            kind, value = _receive(number, connection)  # type: ignore[arg-type]
            if kind == "progress":
                progress(value)
            else:
                total.merge(value)
                del running[connection]  # type: ignore[arg-type]
    return total


def _expect(number: int, connection: Connection, wanted: str) -> None:
    kind, _ = _receive(number, connection)
    if kind != wanted:
        raise WorkerFailed(f"worker {number} said '{kind}' where '{wanted}' was due")


def _receive(number: int, connection: Connection) -> tuple[str, Any]:
    try:
        kind, value = connection.recv()
    except EOFError as error:
        raise WorkerFailed(
            f"worker {number} ended without a result",
            remedy="Its lines above may say why; where memory is short, use fewer --workers.",
        ) from error
    if kind == "error":
        raise WorkerFailed(f"worker {number} failed", value=value)
    return kind, value


def _worker(connection: Connection, job: Job, requests: Sequence[Request], counter: Any) -> None:
    """Run in a process of its own: say ready, wait for go, play, send the tally."""
    unreported = 0

    def ready() -> None:
        connection.send(("ready", None))
        connection.recv()

    def progress(count: int) -> None:
        nonlocal unreported
        unreported += count
        if unreported >= _REPORT_EVERY:
            connection.send(("progress", unreported))
            unreported = 0

    try:
        tally = _play_here(job, _drawn(requests, counter), progress, ready)
        connection.send(("progress", unreported))
        connection.send(("result", tally))
    except HiCacheError as error:
        connection.send(("error", str(error)))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass  # the parent is gone or going; it reports
    finally:
        connection.close()
