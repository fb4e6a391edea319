"""The metadata over HTTP: a client with deadlines and retries.

Every request names its lease or its read, so that repeating one that got lost changes nothing twice. Only
requests that got no answer are repeated, and only within the deadline.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import httpx

from hicache_core.errors import BackendTimeout, BackendUnavailable
from hicache_core.status import Status
from hicache_hf3fs._transport import DeadlineTransport
from hicache_hf3fs.metadata import (
    Hf3fsMetadataInterface,
    MetadataUsage,
    PageFileLabel,
    PageRef,
    Reservation,
    Terms,
    Written,
)
from hicache_hf3fs.wire import (
    PREFIX,
    VERBS,
    number,
    numbers,
    pack_keys,
    pack_label,
    pack_written,
    unpack_error,
    unpack_flags,
    unpack_refs,
    unpack_reservations,
    unpack_terms,
)

T = TypeVar("T")

#: Before a request is repeated; twice as long before each further one.
_FIRST_PAUSE_S = 0.05
#: What close may take to tell the server that reads are over.
_FAREWELL_S = 0.25
_MAX_CONNECTIONS = 256


class MetadataClient(Hf3fsMetadataInterface):
    """One namespace on a server; thread-safe.

    Args:
        url: ``http://host:port``.
        retries: repeats of a request that got no answer.
    """

    def __init__(self, url: str, namespace: str, *, token: str = "", retries: int = 2) -> None:
        self._url = url
        self._retries = retries
        self._ended: deque[int] = deque()
        self._database = ""
        base = httpx.URL(f"{url}{PREFIX}{namespace}/")
        self._urls = {verb: base.join(verb) for verb in VERBS}
        self._headers = httpx.Headers({"host": base.netloc.decode(), "content-type": "application/json"})
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        # The transport itself: httpx.Client puts 0.2 ms of redirects, cookies and proxies on each request.
        self._http: DeadlineTransport | None = DeadlineTransport(
            tls=base.scheme == "https", max_connections=_MAX_CONNECTIONS
        )

    def check(self, *, deadline: float) -> None:
        """See that there is a server of this kind and that it lets us in.

        Raises: BackendUnavailable, BackendTimeout.
        """
        self.usage(deadline=deadline)

    def initialize(self, rank: str, label: PageFileLabel, owner: str = "", *, deadline: float) -> Terms:
        asked = {"rank": rank, "label": pack_label(label), "owner": owner}
        terms = self._ask("initialize", deadline, unpack_terms, **asked)
        self._database = terms.database
        return terms

    def reserve_and_allocate_page_indices(
        self, rank: str, keys: Sequence[tuple[str, str]], *, lease: int, deadline: float
    ) -> list[Reservation]:
        names, read = pack_keys([key for key, _ in keys]), partial(unpack_reservations, count=len(keys))
        believed = self._database
        return self._ask("reserve", deadline, read, rank=rank, keys=names, lease=lease, database=believed)

    def confirm_write(
        self,
        rank: str,
        written: Sequence[Written],
        pages_to_release: Sequence[int],
        *,
        lease: int,
        deadline: float,
    ) -> list[bool]:
        columns, read = pack_written(written), partial(unpack_flags, count=len(written))
        asked = columns | {"release": list(pages_to_release), "lease": lease, "database": self._database}
        return self._ask("confirm", deadline, read, rank=rank, **asked)

    def get_page_indices(
        self, rank: str, keys: Sequence[str], *, hold: int, deadline: float
    ) -> list[PageRef | None]:
        read = partial(unpack_refs, rank=rank, count=len(keys))
        asked = {"keys": pack_keys(keys), "hold": hold, "database": self._database}
        return self._ask("get", deadline, read, rank=rank, **asked)

    def end_read(self, hold: int) -> None:
        self._ended.append(hold)

    def exists(self, keys: Sequence[str], *, deadline: float) -> list[bool]:
        read = partial(unpack_flags, count=len(keys))
        return self._ask("exists", deadline, read, keys=pack_keys(keys))

    def delete_keys(self, keys: Sequence[str], *, deadline: float) -> list[bool]:
        read = partial(unpack_flags, count=len(keys))
        return self._ask("delete", deadline, read, keys=pack_keys(keys))

    def report_bad(self, bad: Sequence[tuple[str, PageRef, Status]], *, deadline: float) -> None:
        keys = pack_keys([key for key, _, _ in bad])
        found = [[ref, int(verdict)] for _, ref, verdict in bad]
        self._ask("report_bad", deadline, _nothing, keys=keys, bad=found)

    def touch(self, keys: Sequence[str], *, deadline: float) -> None:
        self._ask("touch", deadline, _nothing, keys=pack_keys(keys))

    def clear(self, *, deadline: float) -> int:
        return self._ask("clear", deadline, number)

    def usage(self, *, deadline: float) -> MetadataUsage:
        return self._ask("usage", deadline, lambda answer: MetadataUsage(*numbers(answer)))

    def close(self) -> None:
        if self._http is None:
            return
        if self._ended:
            try:
                self._ask("touch", time.monotonic() + _FAREWELL_S, _nothing, keys="")
            except BackendUnavailable:
                pass  # the reads end by themselves
        http, self._http = self._http, None
        if http is not None:
            http.close()

    def abandon_in_child(self) -> None:
        self._http = None

    # Requests.

    def _ask(self, verb: str, deadline: float, read: Callable[[Any], T], **asked: Any) -> T:
        """Send a request and read its answer; repeat it while it gets none and there is time."""
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        if ended:
            asked["ended"] = ended
        body = json.dumps(asked, separators=(",", ":")).encode()
        pause = _FIRST_PAUSE_S
        for attempt in range(self._retries + 1):
            if time.monotonic() >= deadline:
                raise self._late()
            try:
                answer = self._once(verb, body, deadline, asked.get("rank", ""))
                break
            except httpx.TimeoutException as error:
                raise self._late() from error
            except httpx.RequestError as error:
                if attempt == self._retries or time.monotonic() + pause >= deadline:
                    raise BackendUnavailable(
                        f"the metadata server {self._url} cannot be reached",
                        value=str(error) or type(error).__name__,
                        remedy="Start hicache-hf3fs-metadata there, or correct metadata_url.",
                    ) from error
                time.sleep(pause)
                pause *= 2
        try:
            return read(answer)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise BackendUnavailable(
                f"the metadata server {self._url} answered '{verb}' with something else",
                value=repr(error),
                remedy="Correct metadata_url, or install the same version of hicache-hf3fs on both sides.",
            ) from error

    def _once(self, verb: str, body: bytes, deadline: float, rank: str) -> Any:
        http = self._http
        if http is None:
            raise BackendUnavailable(f"the client of {self._url} is closed")
        request = httpx.Request("POST", self._urls[verb], headers=self._headers, content=body)
        status, content = http.ask(request, deadline)
        try:
            answer = json.loads(content)
        except ValueError:  # a proxy, or another server
            raise self._refusal(status, None, verb, rank) from None
        if status == 200:
            return answer
        raise self._refusal(status, answer, verb, rank)

    def _refusal(self, status: int, found: Any, verb: str, rank: str) -> Exception:
        answer = found if isinstance(found, dict) else {}
        known = unpack_error(status, answer, rank)
        if known is not None:
            return known
        if status == 401:
            remedy = "Set metadata_token to the server's token."
        elif not answer:
            remedy = "Correct metadata_url: that is not a hicache-hf3fs-metadata server."
        else:
            remedy = answer.get("remedy") or "Install the same version of hicache-hf3fs on both sides."
        text = answer.get("what", "") + (f": {answer['value']}" if answer.get("value") else "")
        return BackendUnavailable(
            f"the metadata server {self._url} refused '{verb}'",
            value=f"HTTP {status} {text}".strip(),
            remedy=remedy,
        )

    def _late(self) -> BackendTimeout:
        return BackendTimeout(
            f"the metadata server {self._url} gave no answer in time",
            remedy="Look at the server and its disk, or raise timeout_s.",
        )


def _nothing(_: Any) -> None:
    """Read an answer that says no more than that it was done."""
