"""The hf3fs metadata server against SGLang's mini server: 128 keys, exists and get, over HTTP on loopback.

    python benchmarks/hf3fs_metadata.py [--sglang FOLDER] [--calls 400] [--json]

FOLDER holds an unpacked ``sglang`` wheel (0.5.23 was measured); an installed sglang is found by itself. Its
server and its client run unchanged, each from its own file; the two names that they import from the rest of
sglang are stood in for, so that torch is not needed (requests and orjson are). Calls take turns; medians
and the fastest of each. The same keys are asked for again and again; "first" rows ask for keys that were
neither set nor asked for since our server was started, which read their rows when it started, and are shown
beside the goal.

What limits ours: HTTP and JSON in Python on both sides. Keys beyond the rows that the server keeps in memory
would cost a look-up in sqlite, about 0.2 ms. Without sglang only our own figures are shown.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hicache_conformance.leash import end_with
from hicache_hf3fs.harness import Hf3fsHarness
from hicache_hf3fs.metadata import PageFileLabel, Written, new_ticket
from hicache_hf3fs.metadata_http import MetadataClient

KEYS = 128
PAGES = 100_000
#: Batches that are asked for once a verb.
FIRST = 100
_SERVER = "sglang/srt/mem_cache/storage/hf3fs/mini_3fs_metadata_server.py"


def load_mini(folder: str) -> Any:
    """Import SGLang's server module by its file, with stand-ins for the two names it takes from elsewhere."""
    for name, attribute in (
        ("sglang.srt.mem_cache.hicache_storage", "PoolName"),
        ("sglang.srt.mem_cache.storage.hf3fs.storage_hf3fs", "Hf3fsMetadataInterface"),
    ):
        module = types.ModuleType(name)
        stand_in = type(attribute, (), {"KV": "kv"})
        setattr(module, attribute, stand_in)
        sys.modules[name] = module
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.storage"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules.setdefault("sglang.srt.mem_cache.storage.hf3fs", types.ModuleType("hf3fs"))
    spec = importlib.util.spec_from_file_location("mini_server", Path(folder) / _SERVER)
    if spec is None or spec.loader is None:
        raise ImportError(folder)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sglang_folder(given: str | None) -> str | None:
    if given:
        return given
    spec = importlib.util.find_spec("sglang")
    return str(Path(spec.origin).parent.parent) if spec and spec.origin else None


Verbs = dict[str, Callable[[list[str]], Any]]


def some_keys() -> list[str]:
    return [f"{os.urandom(32).hex()}.kv_0123456789abcdef" for _ in range(KEYS)]


def ours(batches: list[list[str]]) -> tuple[Hf3fsHarness, Verbs]:
    harness = Hf3fsHarness({})
    harness.start()
    client = MetadataClient(harness.options()["metadata_url"], "0" * 32)

    def soon() -> float:
        return time.monotonic() + 10.0

    def get(keys: list[str]) -> Any:
        hold = new_ticket()
        found = client.get_page_indices("kv", keys, hold=hold, deadline=soon())
        client.end_read(hold)
        return found

    def store(keys: list[str]) -> None:
        lease, wanted = new_ticket(), [(key, "") for key in keys]
        taken = client.reserve_and_allocate_page_indices("kv", wanted, lease=lease, deadline=soon())
        checksum = int.from_bytes(os.urandom(7), "big")
        written = [Written(k, r.page, 65536, checksum) for k, r in zip(keys, taken, strict=True)]
        client.confirm_write("kv", written, [], lease=lease, deadline=soon())

    client.initialize("kv", PageFileLabel("0" * 32, 65536, PAGES), deadline=soon())
    for keys in batches:
        store(keys)
    harness.restart()  # what was just set is in the server's memory too
    assert all(client.exists(batches[0], deadline=soon()))
    assert None not in get(batches[0])
    return harness, {"exists": lambda keys: client.exists(keys, deadline=soon()), "get": get}


def theirs(folder: str, batches: list[list[str]]) -> tuple[subprocess.Popen[bytes], Verbs]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve = [sys.executable, __file__, "--sglang", folder, "--serve-mini", str(port)]
    serve += ["--parent", str(os.getpid())]
    process = subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    client = load_mini(folder).Hf3fsGlobalMetadataClient(f"http://127.0.0.1:{port}")
    deadline = time.monotonic() + 60
    while True:
        try:
            client.initialize(0, PAGES)
            break
        except RuntimeError:
            if time.monotonic() > deadline or process.poll() is not None:
                process.kill()
                raise
    for keys in batches:
        taken = client.reserve_and_allocate_page_indices(0, [(key, "") for key in keys])
        client.confirm_write(0, [(key, page) for key, (_, page) in zip(keys, taken, strict=True)], [])
    assert all(client.exists(0, batches[0]))
    assert None not in client.get_page_indices(0, batches[0])
    return process, {
        "exists": lambda keys: client.exists(0, keys),
        "get": lambda keys: client.get_page_indices(0, keys),
    }


def timed(work: Callable[[list[str]], Any], keys: list[str]) -> float:
    started = time.perf_counter()
    work(keys)
    return (time.perf_counter() - started) * 1e3


def measured(parties: dict[str, Verbs], batches: list[list[str]], calls: int) -> dict[str, list[float]]:
    """Give the milliseconds of each call, the parties taking turns."""
    again, *fresh = batches
    times: dict[str, list[float]] = {}
    for first in (False, True):
        for verb, once in (("exists", fresh[:FIRST]), ("get", fresh[FIRST:])):
            for keys in once if first else [again] * calls:
                for who, verbs in parties.items():
                    name = f"{who} {verb}{' first' if first else ''}"
                    times.setdefault(name, []).append(timed(verbs[verb], keys))
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sglang")
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve-mini", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    folder = sglang_folder(given.sglang)
    if given.serve_mini:
        end_with(given.parent)
        load_mini(folder or "").run_metadata_server("127.0.0.1", given.serve_mini)
        return 0
    batches = [some_keys() for _ in range(1 + 2 * FIRST)]
    harness, contestants = ours(batches)
    parties = {"ours": contestants}
    process = None
    try:
        if folder:
            process, parties["sglang"] = theirs(folder, batches)
        times = measured(parties, batches, given.calls)
    finally:
        harness.stop()
        if process is not None:
            process.kill()
            process.wait()
    rows = {name: (statistics.median(ms), min(ms)) for name, ms in times.items()}
    if given.json:
        sys.stdout.write(json.dumps(rows) + "\n")
    for name, (median, least) in rows.items():
        sys.stdout.write(f"{name:20} median {median:6.3f} ms   least {least:6.3f} ms\n")
    if not folder:
        sys.stdout.write("not compared: give --sglang FOLDER\n")
        return 0
    slower = [verb for verb in ("exists", "get") if rows[f"ours {verb}"][0] >= rows[f"sglang {verb}"][0]]
    sys.stdout.write(f"faster than SGLang's mini server: {'no, ' + ', '.join(slower) if slower else 'yes'}\n")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
