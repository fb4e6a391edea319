"""SGLang's HiCacheHF3FS over the usrbio double, as a class for `hicache check --sglang-class`.

The class, its usrbio client and its metadata client and server run unchanged, each from its own file of an
unpacked sglang wheel. What stands in: ``hf3fs_fuse.io`` is this distribution's double, the C++ helper that
copies shared memory is two loops, and the names that the files import from the rest of SGLang are empty.
Run::

    python sglang_hf3fs.py --check FOLDER [-- ARGUMENTS OF hicache check]

FOLDER holds the unpacked wheel. ``-o extra_config={"zero_copy": true}`` takes the layout in which K and V
are apart.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing.shared_memory  # noqa: F401 - their client relies on somebody's import
import os
import shutil
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import torch

from hicache_conformance.leash import end_with
from hicache_hf3fs import usrbio_double

FOLDER_VARIABLE = "HICACHE_TEST_SGLANG"
URL_VARIABLE = "HICACHE_TEST_MINI_SERVER"
FILE_NBYTES = 256 << 20
NBYTES = 4096

_PACKAGE = "sglang.srt.mem_cache.storage.hf3fs"


class _Shm:
    """The C++ helper, in Python."""

    @staticmethod
    def read_shm(shm: torch.Tensor, into: list[torch.Tensor]) -> None:
        at = 0
        for tensor in into:
            flat = tensor.reshape(-1).view(torch.uint8)
            flat[:] = shm[at : at + flat.numel()]
            at += flat.numel()

    @staticmethod
    def write_shm(source: list[torch.Tensor], shm: torch.Tensor) -> None:
        at = 0
        for tensor in source:
            flat = tensor.reshape(-1).view(torch.uint8)
            shm[at : at + flat.numel()] = flat
            at += flat.numel()


def _module(name: str, **names: Any) -> None:
    module = types.ModuleType(name)
    module.__path__ = []  # type: ignore[attr-defined]
    vars(module).update(names)
    sys.modules[name] = module


def load(folder: str) -> tuple[Any, Any]:
    """Import the storage and the metadata module by their files."""
    _module("hf3fs_fuse")
    sys.modules["hf3fs_fuse.io"] = usrbio_double
    interface = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    _module("sglang.srt.mem_cache.pool_host", HostKVCache=object)
    _module("sglang.srt.observability")
    _module("sglang.srt.observability.metrics_collector", StorageMetrics=object)
    _module("sglang.srt.utils")
    _module("sglang.srt.utils.cpp_extension_loader", load_extension_with_recovery=lambda **_: _Shm)
    assert interface.PoolName.KV
    place = Path(folder) / _PACKAGE.replace(".", "/")
    for name in ("sglang.srt.mem_cache.storage", _PACKAGE):
        _module(name)
    for name in ("hf3fs_client", "hf3fs_usrbio_client", "storage_hf3fs", "mini_3fs_metadata_server"):
        spec = importlib.util.spec_from_file_location(f"{_PACKAGE}.{name}", place / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return sys.modules[f"{_PACKAGE}.storage_hf3fs"], sys.modules[f"{_PACKAGE}.mini_3fs_metadata_server"]


class HF3FSOverDouble:
    """Constructs their class as their factory does, once the pool, and with it the page's size, is known."""

    def __init__(self, config: Any, extra: Any = None) -> None:
        self._config = config
        self._given = config.extra_config or {}
        self._theirs = self._make(NBYTES)

    def register_mem_pool_host(self, pool: Any) -> None:
        self._theirs.close()
        self._theirs = self._make(pool.size_per_token)
        if self._given.get("zero_copy"):
            pool.get_data_page = lambda index, flat=True: _whole(pool, index)
        else:
            pool.layout = "layer_first"
        self._theirs.register_mem_pool_host(pool)

    def register_mem_host_pool_v2(self, pool: Any, name: Any) -> None:
        self._theirs.register_mem_host_pool_v2(pool, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    def _make(self, nbytes: int) -> Any:
        storage, metadata = load_once()
        root = self._given["root"]
        os.makedirs(f"{root}/3fs-virt/iovs", exist_ok=True)
        # Their keys do not say the model: one namespace's pages are another's. `isolate` gives each a rank,
        # so that a run shows what else there is.
        rank = int(self._config.model_name[:6], 16) if self._given.get("isolate") else 0
        theirs = storage.HiCacheHF3FS(
            rank=rank,
            file_path=f"{root}/pages-{nbytes}.{rank}.bin",
            file_size=FILE_NBYTES,
            numjobs=2,
            bytes_per_page=nbytes // 2 if self._given.get("zero_copy") else nbytes,
            entries=8,
            client_timeout=1,
            dtype=torch.uint8,
            metadata_client=metadata.Hf3fsGlobalMetadataClient(os.environ[URL_VARIABLE]),
            is_page_first_layout=True,
        )
        theirs.mha_zero_copy = False  # set when a pool is registered, which SGLang does before any call
        return theirs


def _whole(pool: Any, index: Any) -> torch.Tensor:
    """Give a page's memory itself, K and V as its two rows."""
    import ctypes

    (address,), (nbytes,) = pool._pool.pages([int(index)]).addresses()
    flat = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
    return flat.reshape(2, nbytes // 2)


_loaded: list[tuple[Any, Any]] = []


def load_once() -> tuple[Any, Any]:
    if not _loaded:
        _loaded.append(load(os.environ[FOLDER_VARIABLE]))
    return _loaded[0]


def main() -> int:
    verb, folder, *rest = sys.argv[1:]
    if verb == "--serve":
        end_with(int(rest[1]))
        load(folder)[1].run_metadata_server("127.0.0.1", int(rest[0]))
        return 0
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = str(Path(__file__).parent)
    # Their package's own __init__ imports all that SGLang needs; this one only says where the package is.
    stub = tempfile.mkdtemp(prefix="hicache-sglang-stub-")
    os.mkdir(f"{stub}/sglang")
    Path(f"{stub}/sglang/__init__.py").write_text(f"__path__ = [{str(Path(folder, 'sglang').resolve())!r}]\n")
    environment = os.environ | {
        FOLDER_VARIABLE: folder,
        URL_VARIABLE: f"http://127.0.0.1:{port}",
        "PYTHONPATH": os.pathsep.join([here, stub, os.environ.get("PYTHONPATH", "")]),
    }
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    serve = [sys.executable, __file__, "--serve", folder, str(port), str(os.getpid())]
    server = subprocess.Popen(serve, env=environment, **quiet)
    try:
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < deadline
        with tempfile.TemporaryDirectory(prefix="hicache-sglang-hf3fs-") as root:
            extra = {"root": root} | json.loads(os.environ.get("HICACHE_TEST_EXTRA", "{}"))
            command = [sys.executable, "-m", "hicache_conformance"]
            command += ["--sglang-class", "sglang_hf3fs:HF3FSOverDouble", "-o", "calls=v1"]
            command += ["-o", f"extra_config={json.dumps(extra)}", *rest[1:]]
            return subprocess.run(command, env=environment, check=False).returncode
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(stub)


if __name__ == "__main__":
    sys.exit(main())
