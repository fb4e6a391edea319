"""The metadata server's application: a FastAPI app over one page table.

Requests are answered one after another on the event loop: each is a few hundred microseconds of sqlite on
an open database, less than handing it to a thread, and the table needs no lock. Only checkpoints, which
flush the disk, run beside it.
"""

from __future__ import annotations

import hmac
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse

from hicache_core.errors import HiCacheError
from hicache_core.status import Status
from hicache_hf3fs._pagetable import PageTable
from hicache_hf3fs._schema import trouble
from hicache_hf3fs.metadata import NO_PAGE, PageFileConflict, PageFileUnknown, PageRef
from hicache_hf3fs.wire import (
    MAX_BODY_NBYTES,
    PREFIX,
    number,
    numbers,
    pack_error,
    pack_flags,
    pack_refs,
    unpack_keys,
    unpack_label,
    unpack_rank,
    unpack_written,
)

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_STATUS = {PageFileUnknown: 404, PageFileConflict: 409}


def make_app(table: PageTable, *, database: str, token: str = "") -> Callable[..., Awaitable[None]]:
    """Make the ASGI application; with a token, everything but /health asks for it."""
    verbs = Verbs(table, database, token)
    app = FastAPI(title="hicache-hf3fs-metadata", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse(verbs.health())

    @app.get("/metrics")
    async def metrics(request: Request) -> PlainTextResponse:
        if not verbs.admits(request.headers.get("authorization", "").encode()):
            return PlainTextResponse("a bearer token is needed\n", status_code=401)
        return PlainTextResponse(verbs.metrics(), media_type="text/plain; version=0.0.4")

    async def application(scope: _Scope, receive: _Receive, send: _Send) -> None:
        # The verbs come past FastAPI's routing, which takes longer than most of them.
        if scope["type"] == "http" and scope["path"].startswith(PREFIX):
            await verbs(scope, receive, send)
        else:
            await app(scope, receive, send)

    return application


class Verbs:
    """The verbs as an ASGI application, and what was counted of them."""

    def __init__(self, table: PageTable, database: str, token: str) -> None:
        self._table = table
        self._database = database
        self._token = f"Bearer {token}".encode() if token else b""
        self._calls: Counter[tuple[str, int]] = Counter()
        self._seconds: dict[str, float] = {}
        self._verbs: dict[str, Callable[[str, Mapping[str, Any]], Any]] = {
            "initialize": self._initialize,
            "reserve": self._reserve,
            "confirm": self._confirm,
            "get": self._get,
            "exists": lambda name, asked: pack_flags(table.exists(name, unpack_keys(asked["keys"]))),
            "delete": lambda name, asked: pack_flags(table.delete(name, unpack_keys(asked["keys"]))),
            "report_bad": self._report_bad,
            "touch": lambda name, asked: table.touch(name, unpack_keys(asked["keys"])),
            "clear": lambda name, asked: table.clear(name),
            "usage": lambda name, asked: table.usage(name),
        }

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        namespace, _, verb = scope["path"][len(PREFIX) :].partition("/")
        authorization = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        admitted = self.admits(authorization)
        body = await _body(receive) if admitted else None  # strangers take no memory
        started = time.perf_counter()
        if scope["method"] != "POST" or verb not in self._verbs:
            verb, status, answer = "unknown", 404, {"what": f"no such verb: {scope['method']} {verb}"}
        elif not admitted:
            status, answer = 401, {"what": "a bearer token is needed"}
        elif body is None:
            status, answer = 413, {"what": f"a request is at most {MAX_BODY_NBYTES} bytes"}
        else:
            status, answer = self._answer(namespace, verb, body)
        payload = json.dumps(answer, separators=(",", ":")).encode()
        self._calls[verb, status] += 1
        self._seconds[verb] = self._seconds.get(verb, 0.0) + time.perf_counter() - started
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(payload))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": payload})

    def admits(self, authorization: bytes) -> bool:
        """Compare in constant time."""
        return not self._token or hmac.compare_digest(authorization, self._token)

    def health(self) -> dict[str, Any]:
        """Tell that the server answers, for how long it keeps pages, and which database it serves."""
        return {"status": "ok", **self._table.terms._asdict()}

    def metrics(self) -> str:
        """Give the counters in the text format of Prometheus."""
        lines = [f"hicache_hf3fs_metadata_{name} {value}" for name, value in self._table.counts().items()]
        for (verb, status), count in sorted(self._calls.items()):
            lines.append(f'hicache_hf3fs_metadata_requests_total{{verb="{verb}",status="{status}"}} {count}')
        for verb, seconds in sorted(self._seconds.items()):
            lines.append(f'hicache_hf3fs_metadata_request_seconds_total{{verb="{verb}"}} {seconds:.6f}')
        return "\n".join(lines) + "\n"

    def _answer(self, namespace: str, verb: str, body: bytes) -> tuple[int, Any]:
        try:
            asked = json.loads(body)
            for hold in numbers(asked.get("ended", [])):
                self._table.end_read(hold)
            if asked.get("database", "") not in ("", self._table.terms.database):
                raise PageFileUnknown(asked["rank"])  # to this one: the client means another database's pages
            return 200, self._verbs[verb](namespace, asked)
        except HiCacheError as error:
            return _STATUS.get(type(error), 503), pack_error(error)
        except sqlite3.IntegrityError as error:
            return 500, {"what": f"the metadata {self._database!r} is inconsistent", "value": str(error)}
        except (sqlite3.Error, IndexError) as error:
            return 503, pack_error(trouble(self._database, error))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            return 400, {"what": f"a request for '{verb}' is malformed", "value": repr(error)}

    def _initialize(self, _: str, asked: Mapping[str, Any]) -> Any:
        rank, label = unpack_rank(asked["rank"]), unpack_label(asked["label"])
        owner = asked.get("owner", "")
        return self._table.initialize(rank, label, bytes.fromhex(owner).hex())

    def _reserve(self, namespace: str, asked: Mapping[str, Any]) -> Any:
        digests, lease = unpack_keys(asked["keys"]), number(asked["lease"])
        found = self._table.reserve(asked["rank"], namespace, digests, lease, time.monotonic())
        return {"existed": pack_flags([r.existed for r in found]), "pages": [r.page for r in found]}

    def _confirm(self, namespace: str, asked: Mapping[str, Any]) -> Any:
        written, lease = unpack_written(asked), number(asked["lease"])
        release = numbers(asked["release"], NO_PAGE)
        return pack_flags(self._table.confirm(asked["rank"], namespace, written, release, lease))

    def _get(self, namespace: str, asked: Mapping[str, Any]) -> Any:
        keys, hold = unpack_keys(asked["keys"]), number(asked["hold"])
        rows = self._table.find(namespace, keys, hold, time.monotonic())
        return pack_refs(rows, asked["rank"], self._table.name_of, Status.CORRUPT)

    def _report_bad(self, namespace: str, asked: Mapping[str, Any]) -> None:
        digests = unpack_keys(asked["keys"])
        bad = [
            (digest, PageRef(*ref), Status(verdict))
            for digest, (ref, verdict) in zip(digests, asked["bad"], strict=True)
        ]
        self._table.report_bad(namespace, bad)


async def _body(receive: _Receive) -> bytes | None:
    """Read a request's body to its end; None where it is too long."""
    parts: list[bytes] = []
    nbytes, more = 0, True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        nbytes += len(parts[-1])
        more = message.get("more_body", False)
        if nbytes > MAX_BODY_NBYTES:
            return None
    return parts[0] if len(parts) == 1 else b"".join(parts)
