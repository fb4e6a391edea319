"""What the NIXL backend is, readable without importing NIXL.

Pages lie as files in folders (NIXL's POSIX, GDS, GDS_MT and HF3FS plugins) or as
objects in an S3 bucket (OBJ). Proven with nixl-cu12 1.5.1, POSIX over Linux AIO
and io_uring on ext4, OBJ over SeaweedFS 4.48.

C11. Objects: ``bounce``. A get lands in private memory and a set leaves from it,
since an object is one contiguous request anyway and the AWS SDK retries for
25 s and more; at the deadline the agent and its memory are left to themselves.
Files: ``hold``, narrowed in open. The kernel cannot be asked to forget a read
into a slot, so a verb returns when its transfer has ended; an agent that ran
over the deadline is thrown away. On a network file system ``none``, so that
HiCache bounces from the start.
"""

from __future__ import annotations

from hicache_core import BackendSpec, Capabilities, Requirement

SPEC = BackendSpec(
    name="nixl",
    api=1,
    target="hicache_nixl.storage:HiCacheNixl",
    options="hicache_nixl.options:NixlOptions",
    harness="hicache_nixl.harness:NixlHarness",
    summary="files and S3 objects through NIXL (POSIX, GDS, HF3FS, OBJ)",
    capabilities=Capabilities(
        shared=True,
        persistent=True,
        durable=True,
        eviction="approx",  # files, once they have a capacity; objects none
        remove=True,
        clear=True,
        checksum=True,
        zero_copy=True,  # files; objects are staged
        device_memory=True,  # GDS and GDS_MT; narrowed elsewhere
        needs_registered=True,
        deadline="bounce",
        transport="file, S3",
    ),
    requires=(Requirement(module="nixl_cu12", pip="pip install 'hicache-nixl[cu12]'", versions=">=1.5.0"),),
)
