"""The hf3fs backend's description: pages in preallocated page files, their places in a metadata service.

Proven through ``client="posix"`` on ext4 and tmpfs, and through ``client="usrbio"`` on a double of the
usrbio library; a real 3FS was never at hand. The spec declares the most that an instance may promise,
``open`` narrows it:

- ``deadline``: usrbio moves bytes between the file and private memory, and the calling thread copies before
  its deadline, which is ``bounce``. A system call on a local disk returns, ``hold``. On a mounted network
  file system it may not, ``none``, so that HiCache bounces.
- ``zero_copy``: the posix client reads into the slots themselves; usrbio copies.
- ``shared``: with the metadata server. The local metadata belongs to one process.
- ``checksum``: unless it is switched off.
"""

from __future__ import annotations

from hicache_core.capabilities import Capabilities
from hicache_core.spec import API_VERSION, BackendSpec, Requirement

SPEC = BackendSpec(
    name="hf3fs",
    api=API_VERSION,
    target="hicache_hf3fs.storage:HiCacheHF3FS",
    options="hicache_hf3fs.options:Hf3fsOptions",
    harness="hicache_hf3fs.harness:Hf3fsHarness",
    summary="page files on 3FS (usrbio) or any mounted parallel file system, with a metadata server",
    capabilities=Capabilities(
        shared=True,
        persistent=True,
        durable=True,  # a killed process or metadata server loses nothing confirmed; a power loss needs fsync
        eviction="approx",  # second chance by a clock over the pages of a file
        remove=True,
        clear=True,
        checksum=True,
        zero_copy=True,
        deadline="bounce",
        max_segments=1024,  # IOV_MAX of Linux: one page has to fit one preadv
        transport="mount or usrbio",
    ),
    requires=(
        Requirement(module="httpx", pip="pip install 'httpx>=0.27'", versions=">=0.27"),
        Requirement(module="xxhash", pip="pip install 'xxhash>=3.4'", versions=">=3.4"),
    ),
)
