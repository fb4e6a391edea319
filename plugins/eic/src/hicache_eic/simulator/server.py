"""The simulated service: ``python -m hicache_eic.simulator.server``; values in memory, faults on request.

It holds values by (instance, namespace, key), and knows the quirks that open code was seen to meet; each
can be switched with the ``quirks`` message:

- ``all_miss_failed``: an mget without any hit has the overall status FAILED;
- ``exist_success``: an mexist has the overall status SUCCESS, whatever the keys';
- ``short_codes``: a call that fails as a whole tells no codes a key;
- ``delay_s``: every call takes that long;
- ``fail``: {verb: number of calls that fail as a whole}, ``fail_keys``: {verb: {key suffix: code}} once each.

A namespace that was never used is not an error: its calls succeed, and it holds nothing.
"""

from __future__ import annotations

import argparse
import os
import socket
import threading
import time
from typing import Any

from hicache_eic.simulator.wire import receive, send

SUCCESS, KEY_NOT_EXIST, PARTIAL_FAILED, FAILED = range(4)

DEFAULT_QUIRKS: dict[str, Any] = {
    "all_miss_failed": True,
    "exist_success": True,
    "short_codes": False,
    "delay_s": 0.0,
    "fail": {},
    "fail_keys": {},
}


class Service:
    """The values and the faults; thread-safe."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str, str], tuple[bytes, float | None]] = {}
        self._quirks: dict[str, Any] = dict(DEFAULT_QUIRKS)
        self._calls: dict[str, int] = {}
        self._lock = threading.Lock()

    def answer(self, head: dict[str, Any], body: bytearray) -> tuple[dict[str, Any], list[bytes]]:
        """Carry out one message."""
        verb = head["verb"]
        if verb == "quirks":
            self._quirks = DEFAULT_QUIRKS | head["quirks"]
            return {}, []
        if verb == "calls":
            return {"calls": dict(self._calls)}, []
        if verb == "names":
            with self._lock:
                return {"names": [list(name) for name in self._values]}, []
        time.sleep(self._quirks["delay_s"])
        with self._lock:
            self._calls[verb] = self._calls.get(verb, 0) + 1
            if self._quirks["fail"].get(verb, 0) > 0:
                self._quirks["fail"][verb] -= 1
                codes = [] if self._quirks["short_codes"] else [FAILED] * len(head["keys"])
                return {"status": FAILED, "codes": codes}, []
            codes, values = self._each(verb, head, body)
        return {
            "status": self._overall(verb, codes),
            "codes": codes,
            "sizes": [len(v) for v in values],
        }, values

    def _each(self, verb: str, head: dict[str, Any], body: bytearray) -> tuple[list[int], list[bytes]]:
        codes: list[int] = []
        values: list[bytes] = []
        at = 0
        for position, key in enumerate(head["keys"]):
            name = (head["instance"], head["ns"], key)
            code = self._fault(verb, key)
            entry = self._live(name)
            if verb == "mset":
                nbytes = head["sizes"][position]
                if code is None:
                    ttl_s = head["ttl_s"]
                    end = None if ttl_s < 0 else time.monotonic() + ttl_s
                    self._values[name] = (bytes(body[at : at + nbytes]), end)
                at += nbytes
                codes.append(SUCCESS if code is None else code)
                continue
            found = SUCCESS if entry is not None else KEY_NOT_EXIST
            codes.append(found if code is None else code)
            if verb == "mget":
                values.append(entry[0] if entry is not None and code is None else b"")
            elif verb == "mdel" and code is None:
                self._values.pop(name, None)
        return codes, values

    def _live(self, name: tuple[str, str, str]) -> tuple[bytes, float | None] | None:
        entry = self._values.get(name)
        if entry is not None and entry[1] is not None and entry[1] < time.monotonic():
            del self._values[name]
            return None
        return entry

    def _fault(self, verb: str, key: str) -> int | None:
        faults = self._quirks["fail_keys"].get(verb, {})
        suffix = next((suffix for suffix in faults if key.endswith(suffix)), None)
        return None if suffix is None else int(faults.pop(suffix))

    def _overall(self, verb: str, codes: list[int]) -> int:
        good = codes.count(SUCCESS)
        if verb == "mexist" and self._quirks["exist_success"]:
            return SUCCESS
        if good == len(codes):
            return SUCCESS
        if good:
            return PARTIAL_FAILED
        return FAILED if self._quirks["all_miss_failed"] else PARTIAL_FAILED


def serve(connection: socket.socket, service: Service) -> None:
    """Answer one client until it goes."""
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            try:
                send(connection, *service.answer(*receive(connection)))
            except OSError:
                return


def main() -> None:
    """Listen until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ready-file", required=True)
    given = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", given.port), backlog=256)
    with open(f"{given.ready_file}.new", "w", encoding="ascii") as file:
        file.write("{}:{}\n".format(*listener.getsockname()))
    os.replace(f"{given.ready_file}.new", given.ready_file)
    service = Service()
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection, service), daemon=True).start()


if __name__ == "__main__":
    main()
