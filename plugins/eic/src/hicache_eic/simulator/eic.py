"""A module with the surface of `eic` that open code uses, over the simulated service.

Names, argument order and results are those of the users' code; the numbers of the enumerations are not
public, and these are made up. Strictness is the binding's: text where text is wanted, raw addresses, a flag
that is true only for registered memory of its real kind.

Source: the eic connectors of SGLang, LMCache and AIBrix.
"""

from __future__ import annotations

import ctypes
import enum
import os
import socket
import threading
from typing import Any

from hicache_eic.simulator.wire import receive, send

#: What tells this from the real module.
SIMULATOR = True


class StatusCode(enum.IntEnum):
    SUCCESS = 0
    KEY_NOT_EXIST = 1
    PARTIAL_FAILED = 2
    FAILED = 3
    INVALID_ARGUMENT = 4


class TransportType(enum.IntEnum):
    TRANSPORT_TCP = 0
    TRANSPORT_RDMA = 2
    TRANSPORT_GDR = 3


class LogLevel(enum.IntEnum):
    DEBUG = 0
    INFO = 1
    WARN = 2
    ERROR = 3


class MemoryType(enum.IntEnum):
    MEMORY_DEFAULT = 0
    MEMORY_CUDA = 1


class InitOption:
    """What init takes; texts must be texts."""

    log_dir: str
    log_level: LogLevel
    transport_type: TransportType
    flag_file: str
    multi_net_local_interface_names: str

    def __init__(self) -> None:
        self.log_dir = self.flag_file = self.multi_net_local_interface_names = ""
        self.log_level = LogLevel.INFO
        self.transport_type = TransportType.TRANSPORT_RDMA

    def __setattr__(self, name: str, value: Any) -> None:
        wanted = {"log_level": LogLevel, "transport_type": TransportType}.get(name, str)
        if not isinstance(value, wanted):
            raise TypeError(
                f"incompatible argument: {name} must be {wanted.__name__}, not {type(value).__name__}"
            )
        object.__setattr__(self, name, value)


class _Option:
    def __init__(self) -> None:
        self.ns = ""


class SetOption(_Option):
    """Options of mset."""

    def __init__(self) -> None:
        super().__init__()
        self.ttl_second = -1


class GetOption(_Option):
    """Options of mget."""


class ExistOption(_Option):
    """Options of mexist."""


class DelOption(_Option):
    """Options of mdel."""


class MemoryInfo:
    """What kind of memory is registered."""

    def __init__(self) -> None:
        self.type = MemoryType.MEMORY_DEFAULT
        self.cuda_id = 0


class StringVector:
    """A vector of texts."""

    def __init__(self) -> None:
        self.items: list[str] = []

    def append(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError("append(): incompatible function arguments")
        self.items.append(text)

    def __len__(self) -> int:
        return len(self.items)


class IOBuffers:
    """A vector of (address, size, registered)."""

    def __init__(self) -> None:
        self.items: list[tuple[int, int, bool]] = []

    def append(self, address: int, nbytes: int, registered: bool) -> None:
        self.items.append((int(address), int(nbytes), bool(registered)))

    def __len__(self) -> int:
        return len(self.items)


class Outcome:
    """What a call tells of each key."""

    def __init__(self, codes: list[StatusCode]) -> None:
        self.status_codes = codes


class Client:
    """A client; any thread may call it, and a call blocks until the service has answered."""

    def __init__(self) -> None:
        #: (address, nbytes, kind) of what was registered, for tests.
        self.registered: list[tuple[int, int, MemoryType]] = []
        self._endpoint: tuple[str, int] | None = None
        self._instance = ""
        self._idle: list[socket.socket] = []
        self._managed: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def init(self, instance_id: str, endpoint: str, option: InitOption) -> int:
        """Connect; 0 is success."""
        if not isinstance(option, InitOption) or not instance_id:
            return 1
        host, _, port = endpoint.rpartition(":")
        try:
            self._endpoint = (host, int(port))
            self._idle.append(self._connect())
        except (ValueError, OSError):
            return 2
        self._instance = instance_id
        return 0

    def register_memory(self, buffers: IOBuffers, info: MemoryInfo) -> bool:
        """Register memory; this machine's memory is no CUDA memory."""
        if info.type != MemoryType.MEMORY_DEFAULT:
            return False
        self.registered += [(address, nbytes, info.type) for address, nbytes, _ in buffers.items]
        return True

    def allocate_managed_buffer(self, nbytes: int) -> int:
        """Give the address of fresh registered memory; 0 is failure."""
        if nbytes < 1:
            return 0
        buffer = ctypes.create_string_buffer(nbytes)
        address = ctypes.addressof(buffer)
        self._managed[address] = buffer
        self.registered.append((address, nbytes, MemoryType.MEMORY_DEFAULT))
        return address

    def free_managed_buffer(self, address: int, nbytes: int) -> int:
        """Give it back."""
        self._managed.pop(address, None)
        return 0

    def mset(self, keys: StringVector, values: IOBuffers, option: SetOption) -> tuple[StatusCode, Outcome]:
        """Store values."""
        if not self._usable(keys, values):
            return self._invalid(keys)
        bodies = [(ctypes.c_char * nbytes).from_address(address) for address, nbytes, _ in values.items]
        more = {"ttl_s": option.ttl_second, "sizes": [nbytes for _, nbytes, _ in values.items]}
        status, outcome, _, _ = self._call("mset", keys, option, bodies, more)
        return status, outcome

    def mget(
        self, keys: StringVector, option: GetOption, values: IOBuffers
    ) -> tuple[StatusCode, IOBuffers, Outcome]:
        """Fetch values into buffers; one that is longer than its buffer is cut."""
        if not self._usable(keys, values):
            status, outcome = self._invalid(keys)
            return status, values, outcome
        status, outcome, sizes, body = self._call("mget", keys, option, [], {})
        at = 0
        for (address, nbytes, _), size in zip(values.items, sizes, strict=False):
            ctypes.memmove(address, bytes(body[at : at + min(size, nbytes)]), min(size, nbytes))
            at += size
        return status, values, outcome

    def mexist(self, keys: StringVector, option: ExistOption) -> tuple[StatusCode, Outcome]:
        """Look for keys."""
        status, outcome, _, _ = self._call("mexist", keys, option, [], {})
        return status, outcome

    def mdel(self, keys: StringVector, option: DelOption | None = None) -> tuple[StatusCode, Outcome]:
        """Delete keys."""
        status, outcome, _, _ = self._call("mdel", keys, option or DelOption(), [], {})
        return status, outcome

    def __del__(self) -> None:
        if os.getpid() == self._pid:
            for connection in self._idle:
                connection.close()

    def _usable(self, keys: StringVector, values: IOBuffers) -> bool:
        flagged = [(a, a + n) for a, n, registered in values.items if registered]
        return len(keys) == len(values) and all(
            any(start <= a and b <= start + nbytes for start, nbytes, _ in self.registered)
            for a, b in flagged
        )

    def _invalid(self, keys: StringVector) -> tuple[StatusCode, Outcome]:
        return StatusCode.INVALID_ARGUMENT, Outcome([StatusCode.INVALID_ARGUMENT] * len(keys))

    def _call(
        self, verb: str, keys: StringVector, option: _Option, bodies: list[Any], more: dict[str, Any]
    ) -> tuple[StatusCode, Outcome, list[int], bytearray]:
        head = {"verb": verb, "instance": self._instance, "ns": option.ns, "keys": keys.items} | more
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        try:
            connection = connection or self._connect()
            send(connection, head, bodies)
            answer, body = receive(connection)
        except OSError:
            if connection is not None:
                connection.close()
            return StatusCode.FAILED, Outcome([StatusCode.FAILED] * len(keys)), [], bytearray()
        with self._lock:
            self._idle.append(connection)
        codes = [StatusCode(code) for code in answer["codes"]]
        return StatusCode(answer["status"]), Outcome(codes), answer.get("sizes", []), body

    def _connect(self) -> socket.socket:
        if self._endpoint is None:
            raise ConnectionError("init() was not called")
        connection = socket.create_connection(self._endpoint)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
