"""The `eic` module behind four verbs that answer one Status a key.

The codes of the single keys decide, never the overall status: an mget without any hit may be FAILED as a
whole, an mexist SUCCESS although nothing is there. A call that tells no code for each key has failed for
all of them. Keys that failed are asked again, keys that are absent are not.

Facts: the surface that SGLang, LMCache and AIBrix use.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from hicache_core.errors import BackendDependencyMissing, BackendTimeout, BackendUnavailable, InvalidOptions
from hicache_core.status import OK, Status
from hicache_eic.options import EicOptions

#: Before a failed key is asked again; twice as long before each further time.
_FIRST_PAUSE_S = 0.005
#: Keys of a call that carries no values.
_MAX_NAMES = 1024

_INSTALL = (
    "it is not public and comes with EIC's image: run inside that image, or ask Volcano Engine for the wheel"
)

#: (address, nbytes) of a value.
Buffer = tuple[int, int]


class Native:
    """One connected client; thread-safe as far as the client is."""

    def __init__(self, module: Any, client: Any, options: EicOptions) -> None:
        self._eic = module
        self._client = client
        self._options = options
        self._codes = {module.StatusCode.SUCCESS: OK, module.StatusCode.KEY_NOT_EXIST: Status.MISS}

    def get(
        self, names: Sequence[str], buffers: Sequence[Buffer], registered: bool, deadline: float
    ) -> list[Status]:
        """Fetch values into buffers."""
        option = self._eic.GetOption()
        option.ns = self._options.eic_namespace

        def call(chosen: Sequence[int]) -> Any:
            values = self._buffers([buffers[i] for i in chosen], registered and self._options.register_get)
            return self._client.mget(self._vector(names, chosen), option, values)[2]

        return self._each(len(names), self._options.max_keys, call, deadline)

    def set(
        self, names: Sequence[str], buffers: Sequence[Buffer], registered: bool, deadline: float
    ) -> list[Status]:
        """Store values; what is there is replaced."""
        option = self._eic.SetOption()
        option.ns = self._options.eic_namespace
        option.ttl_second = -1 if self._options.ttl_s is None else self._options.ttl_s

        def call(chosen: Sequence[int]) -> Any:
            values = self._buffers([buffers[i] for i in chosen], registered and self._options.register_set)
            return self._client.mset(self._vector(names, chosen), values, option)[1]

        statuses = self._each(len(names), self._options.max_keys, call, deadline)
        return [Status.ERROR if status is Status.MISS else status for status in statuses]

    def exist(self, names: Sequence[str], deadline: float) -> list[Status]:
        """Look for keys."""
        option = self._eic.ExistOption()
        option.ns = self._options.eic_namespace
        return self._each(
            len(names),
            _MAX_NAMES,
            lambda chosen: self._client.mexist(self._vector(names, chosen), option)[1],
            deadline,
        )

    def delete(self, names: Sequence[str], deadline: float) -> list[Status]:
        """Delete keys."""
        option = self._eic.DelOption()
        option.ns = self._options.eic_namespace
        return self._each(
            len(names),
            _MAX_NAMES,
            lambda chosen: self._client.mdel(self._vector(names, chosen), option)[1],
            deadline,
        )

    def register(self, address: int, nbytes: int) -> bool:
        """Register host memory as what it is; False where EIC does not take it, and copies then."""
        about = self._eic.MemoryInfo()
        about.type = self._eic.MemoryType.MEMORY_DEFAULT
        return bool(self._client.register_memory(self._buffers([(address, nbytes)], True), about))

    def _each(
        self, count: int, at_once: int, call: Callable[[Sequence[int]], Any], deadline: float
    ) -> list[Status]:
        """Call with the positions that are not settled, until all are, or tries are used up.

        Raises: BackendTimeout, where a call would begin after the deadline. The caller has left by then and
        was told TIMEOUT: what begins later would undo what others do from then on.
        """
        statuses: list[Status] = [Status.ERROR] * count
        left, pause = list(range(count)), _FIRST_PAUSE_S
        for attempt in range(self._options.retries + 1):
            if attempt:
                if time.monotonic() + pause >= deadline:
                    break
                time.sleep(pause)
                pause *= 2
            for start in range(0, len(left), at_once):
                if time.monotonic() >= deadline:
                    raise late()
                chosen = left[start : start + at_once]
                for position, status in zip(chosen, self._settled(call, chosen), strict=True):
                    statuses[position] = status
            left = [position for position in left if statuses[position] is Status.ERROR]
            if not left:
                return statuses
        # Nothing but failures: that is the service, and no trouble of single pages.
        return [Status.UNAVAILABLE] * count if len(left) == count else statuses

    def _settled(self, call: Callable[[Sequence[int]], Any], chosen: Sequence[int]) -> list[Status]:
        try:
            statuses = [self._status(code) for code in call(chosen).status_codes]
        except Exception:  # noqa: BLE001 - whatever the library raises or answers is its failure, not ours
            statuses = []
        return statuses if len(statuses) == len(chosen) else [Status.ERROR] * len(chosen)

    def _status(self, code: Any) -> Status:
        # False equals SUCCESS, and is no code.
        return Status.ERROR if isinstance(code, bool) else self._codes.get(code, Status.ERROR)

    def _vector(self, names: Sequence[str], chosen: Sequence[int]) -> Any:
        vector = self._eic.StringVector()
        for position in chosen:
            vector.append(names[position])
        return vector

    def _buffers(self, buffers: Sequence[Buffer], registered: bool) -> Any:
        values = self._eic.IOBuffers()
        for address, nbytes in buffers:
            values.append(address, nbytes, registered)
        return values


def load(options: EicOptions) -> Any:
    """Import EIC's module.

    Raises: BackendDependencyMissing, BackendUnavailable.
    """
    try:
        return importlib.import_module(options.module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{options.module}.".startswith(f"{error.name}."):
            raise
        raise BackendDependencyMissing("eic", options.module, remedy=f"eic: {_INSTALL}.") from error
    except ImportError as error:
        raise BackendUnavailable(
            f"the module '{options.module}' cannot be loaded",
            value=str(error),
            remedy="Run inside EIC's image, where its libraries are.",
        ) from error


def connect(module: Any, options: EicOptions, interfaces: str) -> Native:
    """Make a client and connect it.

    Raises: BackendUnavailable; InvalidOptions, where EIC does not know a number.
    """
    about = module.InitOption()
    problems = []
    for name, kind in (("log_level", module.LogLevel), ("transport_type", module.TransportType)):
        try:
            setattr(about, name, kind(getattr(options, name)))
        except ValueError:
            problems.append(
                (name, f"{name}={getattr(options, name)} is not one of EIC's {kind.__name__}s", "")
            )
    if problems:
        raise InvalidOptions("eic", problems)
    about.log_dir, about.flag_file = options.log_dir, options.flag_file
    if interfaces:
        about.multi_net_local_interface_names = interfaces
    try:
        if options.log_dir:
            os.makedirs(options.log_dir, exist_ok=True)
        client = module.Client()
        code = client.init(options.instance_id, options.endpoint, about)
    except Exception as error:  # noqa: BLE001 - whatever the library raises
        code = error
    if isinstance(code, bool) or code != 0:
        raise BackendUnavailable(
            f"EIC at {options.url} does not take instance '{options.instance_id}'",
            value=f"init gave {code}",
            remedy="Check url, instance_id and that the service runs.",
        )
    return Native(module, client, options)


def late() -> BackendTimeout:
    """Make the error of a call that is not over at its deadline."""
    return BackendTimeout("EIC gave no answer in time", remedy="Look at the service, or raise timeout_s.")
