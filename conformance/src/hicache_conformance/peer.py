"""A second process on the same store: ``python -m hicache_conformance.peer SETUP``.

It opens one storage and obeys JSON lines on standard input, one answer a line.
Answers go to a private copy of standard output: what a backend prints goes to
standard error, and cannot be taken for an answer. Peer, below, is the other end.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO, cast

from hicache_conformance.builders import Arena, page_bytes
from hicache_conformance.calls import PATIENCE_S
from hicache_conformance.subject import find_subject
from hicache_core import (
    Component,
    HiCacheStorage,
    HiCacheStorageConfig,
    Identity,
    Namespace,
    Placement,
    Status,
)
from hicache_core.factory import open_storage


class Peer:
    """The suite's end of a second process; every answer has a deadline.

    Raises AssertionError when the process dies or does not answer.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._unread = b""
        self._errors = b""

    def ask(self, verb: str, *, timeout_s: float = PATIENCE_S, **arguments: Any) -> Any:
        """Have one verb carried out and give its result."""
        self.tell(verb, **arguments)
        return self.answer(timeout_s)

    def tell(self, verb: str, **arguments: Any) -> None:
        """Start a verb without waiting for its answer."""
        if self.process.stdin is None:
            raise AssertionError("the second process has no standard input")
        try:
            self.process.stdin.write(json.dumps({"verb": verb} | arguments).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise self._dead() from error

    def answer(self, timeout_s: float = PATIENCE_S) -> Any:
        """Give the next answer."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            if not self._pump(deadline - time.monotonic()):
                raise self._dead()
        line, _, self._unread = self._unread.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise AssertionError(f"in the second process: {answer['error']}")
        return answer["result"]

    def rest(self) -> list[Any]:
        """Give the answers that a killed process had written before it died."""
        while self._pump(PATIENCE_S):
            pass
        whole, _, _ = self._unread.rpartition(b"\n")
        self._unread = b""
        return [json.loads(line)["result"] for line in whole.split(b"\n") if line]

    def kill(self) -> None:
        """Kill -9."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """Have the storage closed and the process end; kill it if it does not."""
        if self.process.stdin is not None and self.process.poll() is None:
            self.process.stdin.close()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def _pump(self, timeout_s: float) -> bool:
        """Read what is there; False at the end of answers or of time."""
        with selectors.DefaultSelector() as selector:
            open_pipes = [pipe for pipe in (self.process.stdout, self.process.stderr) if pipe]
            for pipe in open_pipes:
                selector.register(pipe, selectors.EVENT_READ)
            ready = selector.select(max(timeout_s, 0))
        for key, _ in ready:
            data = os.read(key.fd, 1 << 16)
            if key.fileobj is self.process.stdout:
                self._unread += data
                if not data:
                    return False
            elif not data and len(ready) == 1:
                self.process.stderr = None
            else:
                self._errors = (self._errors + data)[-4000:]
        return bool(ready)

    def _dead(self) -> AssertionError:
        state = "gives no answer" if self.process.poll() is None else f"ended with {self.process.returncode}"
        tail = self._errors.decode(errors="replace")
        return AssertionError(f"the second process {state}; its standard error ends: {tail}")


class _Obedient:
    """Carries out verbs on one open storage."""

    def __init__(self, storage: HiCacheStorage, component: Component, seed: int) -> None:
        self._storage = storage
        self._component = component
        self._seed = seed

    def set(self, keys: Sequence[str], version: int = 0) -> list[str]:
        arena = self._arena(len(keys))
        for index, key in enumerate(keys):
            arena.fill(index, page_bytes(key, arena.nbytes, version, self._seed))
        return self._names(self._storage.batch_set(keys, arena.pages()), arena)

    def get(self, keys: Sequence[str], versions: int = 4) -> list[list[Any]]:
        """Give a status and the version of its bytes for each key; -1 for bytes that are nobody's."""
        arena = self._arena(len(keys))
        names = self._names(self._storage.batch_get(keys, arena.pages()), arena)
        return [
            [name, self._version(key, arena.read(index), versions) if name == "OK" else None]
            for index, (key, name) in enumerate(zip(keys, names, strict=True))
        ]

    def contains(self, keys: Sequence[str]) -> list[str]:
        return self._names(self._storage.batch_contains(keys))

    def remove(self, keys: Sequence[str]) -> list[str]:
        return self._names(self._storage.batch_remove(keys))

    def clear(self) -> int:
        return self._storage.clear()

    def _arena(self, count: int) -> Arena:
        arena = Arena(self._component, max(count, 1))
        self._storage.add_pool(arena.pool)
        return arena

    def _names(self, statuses: Sequence[Status], arena: Arena | None = None) -> list[str]:
        if arena is not None:
            self._storage.drop_pool(arena.pool)
        return [status.name for status in statuses]

    def _version(self, key: str, value: bytes, versions: int) -> int:
        for version in range(versions):
            if value == page_bytes(key, len(value), version, self._seed):
                return version
        return -1


def serve(setup: dict[str, Any], answers: TextIO) -> None:
    """Open a storage as the setup says and obey until standard input ends."""
    identity = Identity(**setup["identity"])
    config = HiCacheStorageConfig(
        namespace=Namespace.of(identity),
        identity=identity,
        placement=Placement(),
        timeout_s=setup["timeout_s"],
    )
    storage = find_subject(setup["subject"]).create(config, setup["options"])
    open_storage(storage, ())
    worker = _Obedient(storage, Component(**setup["component"]), setup["seed"])

    def say(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    say(result="open")
    for line in sys.stdin:
        request = json.loads(line)
        verb = request.pop("verb")
        try:
            if verb == "set_forever":
                _set_forever(worker, answers, **request)
            say(result=getattr(worker, verb)(**request))
        except Exception as error:  # noqa: BLE001 - the asking side fails the case with it
            say(error=f"{type(error).__name__}: {error}")
    storage.close()


def _set_forever(worker: _Obedient, answers: TextIO, prefix: str, batch: int, suffix: str) -> None:
    """Set batch after batch until killed, telling the keys that were OK after each."""
    count = 0
    while True:
        keys = [f"{prefix}{count + i}.{suffix}" for i in range(batch)]
        names = worker.set(keys)
        kept = [key for key, name in zip(keys, names, strict=True) if name == "OK"]
        answers.write(json.dumps({"result": kept}) + "\n")
        answers.flush()
        count += batch


def main() -> None:
    """Keep standard output for answers alone, then serve."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(cast("dict[str, Any]", json.loads(sys.argv[1])), answers)


if __name__ == "__main__":
    main()
