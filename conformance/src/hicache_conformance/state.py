"""What a backend must not change in its process (C16): ``python -m hicache_conformance.state SETUP``.

It looks at the process before anything of the backend is loaded, uses a storage,
looks again after each step, and writes the differences as one JSON line to a
private copy of standard output. Standard output itself is watched for prints.
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import locale
import logging
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Run three cycles of open, use, close, and tell what they changed."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    printed = tempfile.TemporaryFile()  # noqa: SIM115 - open until the process ends
    os.dup2(printed.fileno(), 1)
    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
    logging.lastResort = None  # a warning that a library logs is not a print

    setup: dict[str, Any] = json.loads(sys.argv[1])
    _restore(setup["environment"])
    findings: list[str] = []
    before = snapshot()
    exits: list[int] = []
    for cycle in range(3):
        for step, act in _cycle(setup):
            act()
            findings += [f"{step} (cycle {cycle + 1}): {text}" for text in differences(before, snapshot())]
        exits.append(_exit_handlers())
    if exits[2] > exits[1]:
        findings.append("each cycle leaves an atexit handler behind")
    for name, text in (("stdout", sys.stdout.getvalue()), ("stderr", sys.stderr.getvalue())):
        if text:
            findings.append(f"printed to {name}: {text[:200]!r}")
    if os.fstat(printed.fileno()).st_size:
        findings.append(f"wrote {os.fstat(printed.fileno()).st_size} bytes to descriptor 1")
    answers.write(json.dumps({"result": list(dict.fromkeys(findings))}) + "\n")
    answers.flush()


def _restore(environment: dict[str, str]) -> None:
    """Go back to the variables that were set before the starting process opened a storage itself."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


def _cycle(setup: dict[str, Any]) -> list[tuple[str, Callable[[], Any]]]:
    from hicache_conformance.builders import Arena
    from hicache_conformance.subject import find_subject
    from hicache_core import Component, HiCacheStorageConfig, Identity, Namespace, Placement

    identity = Identity(**setup["identity"])
    config = HiCacheStorageConfig(
        namespace=Namespace.of(identity),
        identity=identity,
        placement=Placement(),
        timeout_s=setup["timeout_s"],
    )
    arena = Arena(Component(**setup["component"]), 4)
    keys = arena.component.keys(["a", "b", "c", "d"])
    storage = find_subject(setup["subject"]).create(config, setup["options"])

    def use() -> None:
        storage.batch_set(keys, arena.pages())
        storage.batch_get(keys, arena.pages())
        storage.batch_contains(keys)
        storage.usage()

    return [("open", lambda: storage.open([arena.pool])), ("use", use), ("close", storage.close)]


def snapshot() -> dict[str, Any]:
    """Look at everything that belongs to the process and not to a library."""
    mask = os.umask(0o022)
    os.umask(mask)
    limits = ("RLIMIT_NOFILE", "RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_MEMLOCK", "RLIMIT_STACK")
    return {
        "signal handlers": {number.name: repr(signal.getsignal(number)) for number in signal.Signals},
        "interval timers": signal.getitimer(signal.ITIMER_REAL),
        "root logger": (logging.root.level, [repr(handler) for handler in logging.root.handlers]),
        "logging as a whole": (
            logging.root.manager.disable,
            logging.raiseExceptions,
            logging.getLoggerClass(),
        ),
        "environment": dict(os.environ),
        "locale": locale.setlocale(locale.LC_ALL),
        "working directory": os.getcwd(),
        "umask": mask,
        "standard streams": (id(sys.stdout), id(sys.stderr), id(sys.stdin)),
        "exception hooks": (repr(sys.excepthook), repr(threading.excepthook), repr(sys.unraisablehook)),
        "sys.path": list(sys.path),
        "socket timeout": socket.getdefaulttimeout(),
        "resource limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "cpu affinity": sorted(os.sched_getaffinity(0)),
        "interpreter settings": (sys.getswitchinterval(), sys.getrecursionlimit(), gc.isenabled()),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Name what differs, one line each."""
    found = []
    for name, was in before.items():
        now = after[name]
        if was == now:
            continue
        if isinstance(was, dict):
            changed = sorted(key for key in {*was, *now} if was.get(key) != now.get(key))
            found.append(f"{name} changed: {', '.join(changed)}")
        else:
            found.append(f"{name} changed: {was!r} to {now!r}")
    return found


def _exit_handlers() -> int:
    count: int = getattr(atexit, "_ncallbacks", lambda: 0)()
    return count


if __name__ == "__main__":
    main()
