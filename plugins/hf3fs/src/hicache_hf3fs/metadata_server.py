"""``hicache-hf3fs-metadata``: the metadata server, one process, one sqlite database, all page places.

Killed and started again it has every page that was confirmed. It gives no page of its earlier life to a
writer before the reads of that life have ended (``--hold``), and its open reservations run anew
(``--lease``).
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from math import inf

from hicache_core.errors import BackendDependencyMissing, HiCacheError, InvalidOptions
from hicache_hf3fs._recent import MOST_ROWS
from hicache_hf3fs.metadata import Terms
from hicache_hf3fs.options import DEFAULT_HOLD_S, DEFAULT_LEASE_S, DEFAULT_PORT

TOKEN_VARIABLE = "HICACHE_HF3FS_METADATA_TOKEN"

#: Clients keep connections; one that the server ends first costs its user a repeated request.
_KEEP_ALIVE_S = 3600
_BACKLOG = 1024


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until SIGINT or SIGTERM."""
    given = _parser().parse_args(arguments)
    try:
        _serve(given)
    except InvalidOptions as error:  # of this command, which `hicache show hf3fs` does not know
        said = "; ".join(complaint for _, complaint, _ in error.problems)
        sys.exit(f"hicache-hf3fs-metadata: {said}. See: hicache-hf3fs-metadata --help")
    except HiCacheError as error:
        sys.exit(f"hicache-hf3fs-metadata: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hicache-hf3fs-metadata", description=__doc__)
    add = parser.add_argument
    add("--database", required=True, metavar="FILE", help="the sqlite file, on a local disk")
    add("--host", default="127.0.0.1", help="the address to listen on; others than loopback need a token")
    add("--port", type=int, default=DEFAULT_PORT, help="the port to listen on; 0 takes a free one")
    add("--token-file", metavar="FILE", help=f"a file with the bearer token; else {TOKEN_VARIABLE}")
    add(
        "--lease",
        type=float,
        default=DEFAULT_LEASE_S,
        metavar="SECONDS",
        help="until an unconfirmed page is free",
    )
    add(
        "--hold",
        type=float,
        default=DEFAULT_HOLD_S,
        metavar="SECONDS",
        help="for which a read keeps its pages; a database keeps the longest that it was ever served with",
    )
    add(
        "--rows-in-memory",
        type=int,
        default=MOST_ROWS,
        metavar="ROWS",
        help="of pages, 300 bytes each; the others are looked up in the database, 2 us a key",
    )
    add("--ready-file", metavar="FILE", help="where to write host:port once connections are accepted")
    return parser


def _serve(given: argparse.Namespace) -> None:
    token = _token(given.token_file)
    if not token and not _is_loopback(given.host):
        complaint = (
            f"--host {given.host} without a token would let anybody in; give --token-file or {TOKEN_VARIABLE}"
        )
        raise InvalidOptions("hf3fs", [("host", complaint, "")])
    _check(given)
    try:
        import uvicorn

        from hicache_hf3fs.metadata_app import make_app
    except ModuleNotFoundError as error:
        remedy = "Run: pip install 'hicache-hf3fs[server]'"
        raise BackendDependencyMissing("hf3fs", error.name or "uvicorn", remedy=remedy) from error
    from hicache_hf3fs._checkpoint import Checkpointer
    from hicache_hf3fs.metadata_local import lock_exclusively, open_table

    database = os.path.realpath(given.database)  # one lock, whatever links lead there
    lock = lock_exclusively(f"{database}.lock")
    terms = Terms(given.lease, given.hold)
    table = open_table(database, terms, after_crash=True, rows=given.rows_in_memory)
    table.read_ahead()
    checkpointer = Checkpointer(database)
    listener = _listen(given.host, given.port)
    config = uvicorn.Config(
        make_app(table, database=database, token=token),
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        log_level="warning",
        lifespan="off",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=2,
    )
    if given.ready_file:
        _write_whole(given.ready_file, "{}:{}\n".format(*listener.getsockname()[:2]))
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        checkpointer.close()
        table.close()
        os.close(lock)


def _check(given: argparse.Namespace) -> None:
    problems = [
        (name, f"--{name} {value} is no time; give seconds above 0", "")
        for name, value in (("lease", given.lease), ("hold", given.hold))
        if not 0 < value < inf
    ]
    if given.rows_in_memory < 0:
        problems.append(("rows-in-memory", f"{given.rows_in_memory}; give 0 or more", ""))
    if not 0 <= given.port < 1 << 16:
        problems.append(("port", f"--port {given.port} is none; give 0 to 65535", ""))
    if problems:
        raise InvalidOptions("hf3fs", problems)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Named, for asyncio turns off Nagle's delay (40 ms a request) only where it sees that this is TCP.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        complaint = f"{host}:{port} cannot be listened on ({error.strerror}); name another --port or --host"
        raise InvalidOptions("hf3fs", [("port", complaint, "")]) from error
    return listener


def _token(path: str | None) -> str:
    if path is None:
        return os.environ.get(TOKEN_VARIABLE, "").strip()
    try:
        with open(path, encoding="ascii") as file:
            token = file.read().strip()
    except (OSError, UnicodeError) as error:
        raise InvalidOptions("hf3fs", [("token_file", f"{path!r} cannot be read: {error}", "")]) from error
    if not token:
        raise InvalidOptions("hf3fs", [("token_file", f"{path!r} holds no token", "")])
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _write_whole(path: str, text: str) -> None:
    with open(f"{path}.new", "w", encoding="ascii") as file:
        file.write(text)
    os.replace(f"{path}.new", path)


if __name__ == "__main__":
    main()
