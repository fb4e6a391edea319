"""The lmcache backend's description: pages through LMCache's L2 adapters.

Proven with lmcache 0.5.6, its ``fs`` adapter on ext4 and tmpfs and its ``resp``
adapter on a real Redis 7. The spec declares the most that an instance may
promise, ``open`` narrows it:

- ``deadline``: LMCache moves bytes between the store and private memory on
  threads of its own; the calling thread waits, copies, and leaves what is late
  behind, ``bounce``. On a network mount the questions about files may hang too,
  ``none``, so that HiCache bounces.
- ``persistent``, ``durable``: files. What Redis keeps is its configuration's.
- ``checksum``: not over Redis with ``l1_bytes`` (memory.py).
"""

from __future__ import annotations

from hicache_core.capabilities import Capabilities
from hicache_core.spec import API_VERSION, BackendSpec, Requirement

SPEC = BackendSpec(
    name="lmcache",
    api=API_VERSION,
    target="hicache_lmcache.storage:LMCacheStorage",
    options="hicache_lmcache.options:LMCacheOptions",
    harness="hicache_lmcache.harness:LMCacheHarness",
    summary="LMCache's L2 adapters: files, Redis, Valkey",
    capabilities=Capabilities(
        shared=True,
        persistent=True,
        durable=True,
        remove=True,
        clear=True,
        checksum=True,
        deadline="bounce",
        transport="file, RESP over TCP",
    ),
    requires=(
        Requirement(module="lmcache", pip="pip install 'hicache-lmcache[lmcache]'", versions=">=0.5.6,<0.6"),
        Requirement(module="xxhash", pip="pip install 'xxhash>=3.4'", versions=">=3.4"),
    ),
)
