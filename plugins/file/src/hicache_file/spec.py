"""The file backend's description: pages on a local or shared file system.

A log-structured store: segments that only their creator appends to, a journal
beside each one, no server. Proven on ext4 and tmpfs under Linux 6.18. For C11
it declares ``hold``: a system call on a local disk cannot be cancelled, and
returns. On a network file system ``open`` narrows that to ``none``, so that
HiCache bounces.
"""

from __future__ import annotations

from hicache_core.capabilities import Capabilities
from hicache_core.spec import API_VERSION, BackendSpec, Requirement

SPEC = BackendSpec(
    name="file",
    api=API_VERSION,
    target="hicache_file.storage:HiCacheFile",
    options="hicache_file.options:FileOptions",
    harness="hicache_file.harness:FileHarness",
    summary="pages on a local or shared file system, log-structured, no server",
    capabilities=Capabilities(
        shared=True,  # every process that opens the same root
        persistent=True,
        durable=True,  # a killed process loses nothing; a power loss needs fsync=True
        eviction="approx",  # second chance by age; none where the root has no capacity
        remove=True,
        clear=True,
        listing=True,
        verify=True,  # where pages have checksums
        checksum=True,
        zero_copy=True,
        deadline="hold",
        max_segments=1024,  # IOV_MAX of Linux: one page has to fit one preadv
        transport="local",
    ),
    requires=(
        Requirement(module="numpy", pip="pip install 'numpy>=1.24'", versions=">=1.24"),
        Requirement(module="xxhash", pip="pip install 'xxhash>=3.4'", versions=">=3.4"),
    ),
)
