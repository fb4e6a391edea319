"""What `hicache doctor nixl` adds: each NIXL plugin in the installed wheel, and whether it can work here.

A plugin is loaded in a process of its own, so that a missing library, a crash
or a hang is a line in a table. What the options ask for must work; the others
are remarks.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hicache_core.errors import HiCacheError
from hicache_nixl._native import load
from hicache_nixl.choice import choose
from hicache_nixl.options import FILE_PLUGINS, OBJECT_PLUGINS, NixlOptions

Row = tuple[str, "bool | None", str, str]

#: Seconds that loading one plugin may take; those of CUDA take several.
_LOAD_TIMEOUT_S = 60.0
_LOAD_CODE = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
_MISSING = re.compile(r"OSError: (\S+?): cannot open shared object file")

#: Missing library, by the beginning of its name -> what brings it.
_REMEDIES = {
    "libcufile": "Run: pip install nvidia-cufile-cu12, and put its folder on LD_LIBRARY_PATH.",
    "libcuda.so": "Install the NVIDIA driver; without a GPU this plugin cannot work.",
    "libcudart": "Run: pip install nvidia-cuda-runtime-cu12, and put its folder on LD_LIBRARY_PATH.",
    "libcuobjclient": "Install NVIDIA's cuObject client, or use nixl_cu12, whose OBJ does without it.",
    "libhf3fs": "Install 3FS's hf3fs_api_shared; no NIXL wheel brings the plugin.",
    "libfabric": "Run: apt-get install libfabric1",
    "libibverbs": "Run: apt-get install libibverbs1",
    "librdmacm": "Run: apt-get install librdmacm1",
    "libdoca": "Install NVIDIA DOCA.",
}
_IO_URING = Path("/proc/sys/kernel/io_uring_disabled")
_AIO_USED, _AIO_MOST = Path("/proc/sys/fs/aio-nr"), Path("/proc/sys/fs/aio-max-nr")


def checks(options: Any) -> Iterator[Row]:
    """Give (check, ok, found, remedy) for each plugin, and for the kernel's queues."""
    chosen = options if isinstance(options, NixlOptions) else None
    try:
        module = load(chosen.library if chosen else "auto")
    except HiCacheError as error:
        yield "NIXL", False, str(error).removesuffix(error.remedy).strip(), error.remedy
        return
    wanted = choose(chosen, ()).plugin if chosen else ""
    found = plugins_of(module.__name__)
    for name, path in found.items():
        missing = trouble(path)
        ok = None if name != wanted else not missing
        kind = "" if name in (*FILE_PLUGINS, *OBJECT_PLUGINS) else " (not used by hicache)"
        text = f"cannot work here: {missing}" if missing else "loads"
        yield f"plugin {name}", ok, f"{text}{kind}", remedy_for(missing) if missing else ""
    for name in (*FILE_PLUGINS, *OBJECT_PLUGINS):
        if name not in found:
            ok = None if name != wanted else False
            yield (
                f"plugin {name}",
                ok,
                f"is not in {module.__name__}",
                "Build NIXL with it, or set plugin=POSIX.",
            )
    yield from queues(chosen)


def plugins_of(module: str) -> dict[str, Path]:
    """Find the plugins of an installed wheel: name -> library."""
    spec = importlib.util.find_spec(module)
    folder = Path(spec.origin).parent.parent if spec is not None and spec.origin else Path()
    libraries = sorted((folder / f".{module}.mesonpy.libs" / "plugins").glob("libplugin_*.so"))
    return {path.stem.removeprefix("libplugin_"): path for path in libraries}


def trouble(library: Path) -> str:
    """Load a plugin in a process of its own; empty when that went well, else what is missing."""
    command = [sys.executable, "-c", _LOAD_CODE, str(library)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"loading it took more than {_LOAD_TIMEOUT_S:g} s"
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return f"loading it ended the process with signal {-done.returncode}"
    match = _MISSING.search(done.stderr)
    lines = done.stderr.strip().splitlines()
    if match:
        return f"{', '.join(dict.fromkeys([match[1], *_not_found(library)]))} missing"
    return lines[-1] if lines else "it cannot be loaded"


def _not_found(library: Path) -> list[str]:
    """Name every library that the loader does not find; none where there is no ldd."""
    try:
        done = subprocess.run(
            ["ldd", str(library)], capture_output=True, text=True, timeout=_LOAD_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.split()[0] for line in done.stdout.splitlines() if line.rstrip().endswith("not found")]


def remedy_for(missing: str) -> str:
    """Say what brings a missing library."""
    for beginning, remedy in _REMEDIES.items():
        if missing.startswith(beginning):
            return remedy
    return "Install the library that is named, or set plugin=POSIX."


def queues(options: NixlOptions | None) -> Iterator[Row]:
    """Look at what the kernel gives the POSIX plugin to work with."""
    uses_uring = options is not None and options.io == "uring"
    disabled = _IO_URING.read_text().strip() if _IO_URING.exists() else "0"
    ok = disabled == "0" if uses_uring else None
    remedy = "" if disabled == "0" else "Run: sysctl kernel.io_uring_disabled=0, or set io=aio."
    yield "io_uring", ok, "on" if disabled == "0" else f"kernel.io_uring_disabled is {disabled}", remedy
    if _AIO_USED.exists():
        used, most = int(_AIO_USED.read_text()), int(_AIO_MOST.read_text())
        ok = used + 4096 <= most if options is not None and not uses_uring else None
        remedy = "" if used + 4096 <= most else "Run: sysctl fs.aio-max-nr=1048576"
        yield "Linux AIO", ok, f"{used} of {most} requests are taken", remedy
