"""The aibrix backend's description: pages through AIBrix's KV cache library.

Proven with aibrix-kvcache 0.8.0, its ROCKSDB and SHFS connectors. The spec
declares the most that an instance may promise, ``open`` narrows it:

- ``shared``: SHFS. RocksDB admits one process; its instances share one handle.
- ``eviction``: RocksDB drops values by age where ``ttl_s`` is set.
- ``deadline``: a call of the library cannot be taken back and, on a local disk,
  returns, ``hold``. On a network file system it may not, ``none``, so that
  HiCache bounces from the start.
"""

from __future__ import annotations

from hicache_core.capabilities import Capabilities
from hicache_core.spec import API_VERSION, BackendSpec, Requirement

SPEC = BackendSpec(
    name="aibrix",
    api=API_VERSION,
    target="hicache_aibrix.storage:AibrixKVCacheStorage",
    options="hicache_aibrix.options:AibrixOptions",
    harness="hicache_aibrix.harness:AibrixHarness",
    summary="AIBrix KVCache: RocksDB, or files on a shared file system",
    capabilities=Capabilities(
        shared=True,
        persistent=True,
        durable=True,  # RocksDB's log, SHFS's rename: a killed process loses nothing confirmed
        eviction="ttl",
        remove=True,
        clear=True,
        checksum=True,
        deadline="hold",
        transport="RocksDB, file",
    ),
    requires=(
        Requirement(
            module="aibrix_kvcache", pip="pip install 'hicache-aibrix[aibrix]'", versions=">=0.8,<0.9"
        ),
        Requirement(module="xxhash", pip="pip install 'xxhash>=3.4'", versions=">=3.4"),
    ),
)
