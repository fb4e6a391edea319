"""S3 beside NIXL: sizes, listings and removals, which NIXL's OBJ plugin cannot do.

NIXL 1.5.1 puts and gets objects and tells whether one exists; it tells no size,
lists nothing and removes nothing, and its calls wait 25 s and more for a server
that is down. So these requests are made here, over plain HTTP/1.1 with
signature version 4, each bounded by the caller's deadline.

Source: AWS documentation, "Authenticating Requests (AWS Signature Version 4)",
and the S3 API's HeadObject, ListObjectsV2, DeleteObject.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import http.client
import ssl
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from hicache_core import Status
from hicache_core.errors import BackendTimeout, BackendUnavailable

#: Connections kept for later requests.
MAX_IDLE = 16

_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
_STATUS = {
    200: Status.OK,
    204: Status.OK,
    206: Status.OK,
    404: Status.MISS,
    401: Status.DENIED,
    403: Status.DENIED,
    507: Status.NO_SPACE,
    408: Status.TIMEOUT,
    504: Status.TIMEOUT,
}


@dataclass(frozen=True, slots=True)
class Found:
    """What a server says of one object."""

    key: str
    nbytes: int
    etag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Where a bucket is and who asks."""

    endpoint: str
    bucket: str
    region: str
    access_key: str
    secret_key: str
    session_token: str = ""
    ca_bundle: str | None = None

    def __repr__(self) -> str:
        return f"Account({self.endpoint}/{self.bucket})"


class Bucket:
    """One bucket; thread-safe, a connection a running request."""

    def __init__(self, account: Account) -> None:
        self._account = account
        parts = urlsplit(account.endpoint)
        self._secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port
        self._authority = parts.netloc
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._closed = False

    def head(self, key: str, deadline: float) -> tuple[Status, Found | None]:
        """Look for one object.

        Raises: BackendTimeout, BackendUnavailable.
        """
        code, headers, _ = self._request("HEAD", key, {}, deadline)
        status = _status(code)
        if status is not Status.OK:
            return status, None
        return status, Found(key, int(headers.get("Content-Length", -1)), headers.get("ETag", ""))

    def delete(self, key: str, deadline: float) -> Status:
        """Remove one object; OK also where there was none, as S3 has it.

        Raises: BackendTimeout, BackendUnavailable.
        """
        return _status(self._request("DELETE", key, {}, deadline)[0])

    def listing(self, prefix: str, deadline: float, *, limit: int | None = None) -> Iterator[Found]:
        """List the objects whose keys begin with a prefix, a request a thousand.

        Raises: BackendTimeout, BackendUnavailable (a refusal too: its text says why).
        """
        token = ""
        while True:
            query = {"list-type": "2", "prefix": prefix}
            query |= {"continuation-token": token} if token else {}
            query |= {"max-keys": str(limit)} if limit else {}
            code, _, body = self._request("GET", "", query, deadline)
            if code != 200:
                raise self._refusal("listing", code, body)
            tree = ElementTree.fromstring(body)
            for item in tree.iterfind("{*}Contents"):
                yield Found(
                    item.findtext("{*}Key") or "",
                    int(item.findtext("{*}Size") or -1),
                    item.findtext("{*}ETag") or "",
                )
            token = tree.findtext("{*}NextContinuationToken") or ""
            if limit or not token:
                return

    def close(self) -> None:
        """Close the idle connections; running requests close theirs."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _request(
        self, verb: str, key: str, query: Mapping[str, str], deadline: float
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Send one request; a kept connection that turns out dead is replaced once."""
        path = "/" + quote(f"{self._account.bucket}/{key}" if key else self._account.bucket, safe="/-_.~")
        text = "&".join(f"{quote(k, safe='-_.~')}={quote(v, safe='-_.~')}" for k, v in sorted(query.items()))
        target = f"{path}?{text}" if text else path
        while True:
            connection, kept = self._connection(deadline)
            try:
                connection.request(verb, target, headers=self._signed(verb, path, text))
                response = connection.getresponse()
                body = response.read()
            except TimeoutError as error:
                connection.close()
                raise BackendTimeout(
                    f"'{self._account.endpoint}' gave no answer to {verb} in time",
                    remedy="Look at the S3 server, or raise timeout_s.",
                ) from error
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if kept and not isinstance(error, ConnectionRefusedError) and time.monotonic() < deadline:
                    continue
                raise BackendUnavailable(
                    f"'{self._account.endpoint}' cannot be reached",
                    value=f"{type(error).__name__}: {error}",
                    remedy="Start the S3 server there, or correct endpoint.",
                ) from error
            self._keep(connection, response)
            return response.status, response.headers, body

    def _connection(self, deadline: float) -> tuple[http.client.HTTPConnection, bool]:
        left = max(0.001, deadline - time.monotonic())
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            connection.timeout = left
            if connection.sock is not None:
                connection.sock.settimeout(left)
                return connection, True
        if self._secure:
            context = ssl.create_default_context(cafile=self._account.ca_bundle)
            return http.client.HTTPSConnection(self._host, self._port, timeout=left, context=context), False
        return http.client.HTTPConnection(self._host, self._port, timeout=left), False

    def _keep(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        with self._lock:
            if not self._closed and not response.will_close and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def _signed(self, verb: str, path: str, query: str) -> dict[str, str]:
        account = self._account
        now = datetime.datetime.now(datetime.timezone.utc)
        stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
        headers = {"host": self._authority, "x-amz-content-sha256": _EMPTY_SHA256, "x-amz-date": stamp}
        if account.session_token:
            headers["x-amz-security-token"] = account.session_token
        names = ";".join(sorted(headers))
        lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        canonical = f"{verb}\n{path}\n{query}\n{lines}\n{names}\n{_EMPTY_SHA256}"
        scope = f"{day}/{account.region}/s3/aws4_request"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        wanted = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"
        key = f"AWS4{account.secret_key}".encode()
        for part in (day, account.region, "s3", "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, wanted.encode(), "sha256").hex()
        headers["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={account.access_key}/{scope}, "
            f"SignedHeaders={names}, Signature={signature}"
        )
        return headers

    def _refusal(self, what: str, code: int, body: bytes) -> BackendUnavailable:
        return BackendUnavailable(
            f"{what} bucket '{self._account.bucket}' at '{self._account.endpoint}'",
            value=f"HTTP {code} {_error_code(body)}".rstrip(),
            remedy="Check bucket, access_key, secret_key and region; the bucket must exist.",
        )


def _status(code: int) -> Status:
    return _STATUS.get(code, Status.UNAVAILABLE if code >= 500 else Status.ERROR)


def _error_code(body: bytes) -> str:
    try:
        return ElementTree.fromstring(body).findtext("{*}Code") or ""
    except ElementTree.ParseError:
        return ""
