"""Builders for the file backend's tests: stores on a scratch root, second processes, small disks."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CHILD = Path(__file__).with_name("child.py")


def _load_child() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hicache_file_tests_child", CHILD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_child = _load_child()


@pytest.fixture
def child() -> ModuleType:
    """The helper module: Store, page, keys_of."""
    return _child


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "root")


@pytest.fixture
def make(root: str) -> Iterator[Callable[..., Any]]:
    """Open stores on the root; all are closed after the test."""
    opened: list[Any] = []

    def make_store(**options: Any) -> Any:
        where = options.pop("root", root)
        opened.append(_child.Store(where, **options))
        return opened[-1]

    yield make_store
    for store in opened:
        store.close()


class Process:
    """A child process that answers in lines."""

    def __init__(self, *arguments: str, **environment: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **environment,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            assert self.process.stderr is not None
            raise AssertionError(f"the child ended: {self.process.stderr.read()}")
        return line.rstrip("\n")

    def ask(self, text: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return self.line()

    def rest(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.read().splitlines()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Start children; all are gone after the test."""
    started: list[Process] = []

    def start_child(verb: str, root: str, **given: Any) -> Process:
        started.append(Process(verb, root, *(f"{k}={v}" for k, v in given.items())))
        assert started[-1].line() == "open"
        return started[-1]

    yield start_child
    for process in started:
        process.end()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], str]]:
    """Mount a tmpfs of so many bytes; not run where mounting is not permitted."""
    mounted: list[Path] = []

    def mount(nbytes: int) -> str:
        point = tmp_path / f"disk-{len(mounted)}"
        point.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(point)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"not run: mounting a tmpfs is not permitted here ({done.stderr.strip()})")
        mounted.append(point)
        return str(point)

    yield mount
    for point in mounted:
        subprocess.run(["umount", "-l", str(point)], check=True)


@pytest.fixture
def as_nobody() -> Callable[[Callable[[], None]], None]:
    """Run a function in a forked child as user 65534, where it may fail with permissions like anybody."""

    def run(work: Callable[[], None]) -> None:
        if os.geteuid() != 0:
            work()
            return
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                work()
                code = 0
            except BaseException as error:  # noqa: BLE001 - told to the parent
                os.write(write_end, f"{type(error).__name__}: {error}".encode()[:4000])
            finally:
                os._exit(code)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            complaint = pipe.read().decode()
        _, status = os.waitpid(pid, 0)
        assert status == 0, complaint

    return run


def fds() -> dict[int, str]:
    """List this process's descriptors and what they lead to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    return found


@pytest.fixture
def no_leaks(root: str) -> Iterator[None]:
    """Fail where a test leaves a descriptor into its root open."""
    yield
    assert [path for path in fds().values() if path.startswith(root)] == []


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Wait for a condition, with a deadline."""

    def wait(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            os.sched_yield()

    return wait
