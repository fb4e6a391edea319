"""A file system of which the test decides when a read ends: FUSE, spoken without a library.

A process of its own serves files of one folder under the names ``good-NAME``, ``held-NAME`` and
``broken-NAME``: read at once; read for the first time when the test says so; EIO. Reads bypass the
page cache, so that each of the kernel's queues sees them as it sees a device's.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _RELEASE, _FLUSH, _INIT = 1, 2, 3, 14, 15, 18, 25, 26
_INTERRUPT, _DESTROY, _BATCH_FORGET = 36, 38, 42
_ASYNC_READ, _ASYNC_DIO = 1 << 0, 1 << 15
_DIRECT_IO = 1
#: Nobody is there any more when nothing is asked for so long.
PATIENCE_S = 60.0
_DETACH = 2


def missing() -> str | None:
    """Say what is missing for it here; None where nothing is."""
    if os.geteuid():
        return "mounting a file system needs root"
    return None if os.path.exists("/dev/fuse") else "there is no /dev/fuse"


class SlowDisk:
    """The mounted file system, from the test's side."""

    def __init__(self, mount: Path, child: subprocess.Popen[str]) -> None:
        self.mount = mount
        self._child = child

    def path(self, how: str, name: str) -> str:
        return str(self.mount / f"{how}-{name}")

    def held(self) -> int:
        """How many reads are held now."""
        return self._ask("count")

    def let_go(self) -> int:
        """End the held reads; how many there were."""
        return self._ask("go")

    def _ask(self, what: str) -> int:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(f"{what}\n")
        self._child.stdin.flush()
        return int(self._child.stdout.readline())


@contextlib.contextmanager
def slow_disk(mount: Path, backing: Path) -> Iterator[SlowDisk]:
    """Mount it for the time of a block."""
    mount.mkdir()
    command = [sys.executable, __file__, str(mount), str(backing)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "mounted\n"
        yield SlowDisk(mount, child)
    finally:
        child.kill()  # the kernel ends what is held
        child.wait()
        ctypes.CDLL(None).umount2(str(mount).encode(), _DETACH)


class _Server:
    def __init__(self, mount: str, backing: str) -> None:
        self._backing = backing
        self._names = [""]  # by node number less one
        self._held: list[tuple[int, bytes]] = []
        self._held_once: set[int] = set()
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"slow-disk", mount.encode(), b"fuse", 0, options):
            raise OSError(ctypes.get_errno(), "mount")

    def serve(self) -> None:
        sys.stdout.write("mounted\n")
        sys.stdout.flush()
        while True:
            ready, _, _ = select.select([self._device, sys.stdin], [], [], PATIENCE_S)
            if not ready:  # a test that was killed ends when its reads do
                return
            if sys.stdin in ready:
                what = sys.stdin.readline()
                if not what:
                    return
                count = len(self._held)
                if what == "go\n":
                    for unique, data in self._held:
                        self._say(unique, data)
                    self._held.clear()
                sys.stdout.write(f"{count}\n")
                sys.stdout.flush()
            if self._device in ready:
                self._one(os.read(self._device, 1 << 21))

    def _say(self, unique: int, data: bytes = b"", error: int = 0) -> None:
        with contextlib.suppress(FileNotFoundError):  # interrupted
            os.write(self._device, _OUT.pack(_OUT.size + len(data), -error, unique) + data)

    def _one(self, message: bytes) -> None:
        _, opcode, unique, node, *_ = _IN.unpack_from(message)
        body = message[_IN.size :]
        if opcode in (_FORGET, _BATCH_FORGET, _INTERRUPT):
            return
        try:
            if opcode == _INIT:
                major, minor, ahead, _ = struct.unpack_from("<IIII", body)
                flags = _ASYNC_READ | _ASYNC_DIO
                limits = struct.pack("<HHII", 64, 64, 1 << 20, 1)
                self._say(unique, struct.pack("<IIII", major, minor, ahead, flags) + limits + bytes(36))
            elif opcode == _LOOKUP:
                name = body.rstrip(b"\0").decode()
                if name not in self._names:
                    self._names.append(name)
                node = self._names.index(name) + 1
                self._say(unique, struct.pack("<QQQQII", node, 0, 60, 60, 0, 0) + self._attributes(node))
            elif opcode == _GETATTR:
                self._say(unique, struct.pack("<QII", 60, 0, 0) + self._attributes(node))
            elif opcode == _OPEN:
                self._say(unique, struct.pack("<QII", 0, _DIRECT_IO, 0))
            elif opcode == _READ:
                self._read(unique, node, *struct.unpack_from("<QI", body, 8))
            elif opcode in (_RELEASE, _FLUSH, _DESTROY):
                self._say(unique)
            else:
                self._say(unique, error=errno.ENOSYS)
        except OSError as error:
            self._say(unique, error=error.errno or errno.EIO)

    def _read(self, unique: int, node: int, offset: int, nbytes: int) -> None:
        how, _, _ = self._names[node - 1].partition("-")
        if how == "broken":
            raise OSError(errno.EIO, "broken")
        with open(self._path(node), "rb") as file:
            data = os.pread(file.fileno(), nbytes, offset)
        if how == "held" and node not in self._held_once:
            self._held_once.add(node)
            self._held.append((unique, data))
        else:
            self._say(unique, data)

    def _path(self, node: int) -> str:
        return f"{self._backing}/{self._names[node - 1].partition('-')[2]}"

    def _attributes(self, node: int) -> bytes:
        mode, nbytes = stat.S_IFDIR | 0o755, 0
        if node > 1:
            mode, nbytes = stat.S_IFREG | 0o644, os.stat(self._path(node)).st_size
        return struct.pack("<6Q10I", node, nbytes, nbytes // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


if __name__ == "__main__":
    _Server(*sys.argv[1:]).serve()
