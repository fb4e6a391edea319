"""A client of its own process that knows nothing of this backend: ``python -m hicache_mooncake._raw``.

The harness reads, writes and damages values through it, and it can give the store
a segment, so that pages outlive the storages under test. It takes JSON lines on
standard input and answers one line each; a first line says that it is set up.
"""

from __future__ import annotations

import base64
import json
import mmap
import sys
from collections.abc import Callable
from typing import Any

from hicache_core.buffers import address_of, flat_view

#: Largest value that can be read or written.
_BUFFER_NBYTES = 64 << 20


class RawClient:
    """One native client and one registered buffer."""

    def __init__(self, master: str, segment_nbytes: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._native = MooncakeDistributedStore()
        code = self._native.setup("127.0.0.1", "P2PHANDSHAKE", segment_nbytes, 16 << 20, "tcp", "", master)
        if code != 0:
            raise SystemExit(f"setup gave {code}")
        self._memory = mmap.mmap(-1, _BUFFER_NBYTES)
        self._address = address_of(flat_view(self._memory))
        self._native.register_buffer(self._address, _BUFFER_NBYTES)

    def get(self, key: str) -> str | None:
        """Give an object's bytes."""
        size = self._native.get_size(key)
        if size < 0:
            return None
        if self._native.get_into(key, self._address, size) != size:
            return None
        return base64.b64encode(self._memory[:size]).decode()

    def put(self, key: str, value: str) -> int:
        """Put an object in the place of whatever there was."""
        self._native.remove(key, True)
        content = base64.b64decode(value)
        self._memory[: len(content)] = content
        return int(self._native.put_from(key, self._address, len(content)))

    def remove(self, key: str) -> int:
        """Remove an object."""
        return int(self._native.remove(key, True))

    def exist(self, key: str) -> int:
        """Tell whether there is one."""
        return int(self._native.is_exist(key))

    def begin(self, key: str, nbytes: int) -> int:
        """Begin to put an object and never finish."""
        return int(self._native.batch_put_session_start([key], [nbytes])[0])

    def finish(self, key: str, value: str) -> int:
        """Finish what was begun."""
        content = base64.b64decode(value)
        self._memory[: len(content)] = content
        self._native.batch_put_from_multi_buffer_ranges([key], [[self._address]], [[len(content)]], [[0]])
        return int(self._native.batch_put_session_end([key])[0])

    def look_up(self, key: str) -> int:
        """Ask where an object lies, as a get does before it reads; a lease is granted."""
        return int(self._native.batch_get_session_start([key])[0])

    def read_looked_up(self, key: str, nbytes: int) -> tuple[int, str]:
        """Read an object from where it lay when it was looked up: the code, and the bytes."""
        buffers, sizes, offsets = [[self._address]], [[nbytes]], [[0]]
        code = int(self._native.batch_get_into_multi_buffer_ranges([key], buffers, sizes, offsets)[0])
        self._native.batch_get_session_end([key])
        return code, base64.b64encode(self._memory[:nbytes]).decode()

    def close(self) -> None:
        """Unmount."""
        self._native.close()


def main() -> None:
    """Serve standard input until it ends."""
    client = RawClient(sys.argv[1], int(sys.argv[2]))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        request = json.loads(line)
        verb: Callable[..., Any] = getattr(client, request.pop("verb"))
        sys.stdout.write(json.dumps(verb(**request)) + "\n")
        sys.stdout.flush()
    client.close()


if __name__ == "__main__":
    main()
