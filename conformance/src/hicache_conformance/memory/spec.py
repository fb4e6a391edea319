"""What the memory backend is, readable without importing it.

C11 by ``cancel``: page bytes move between slots and private bytes in the calling
thread only, after the answer has arrived or before the request leaves. A call
that runs out of time drops its connection, so nothing is left that could touch
a slot later.
"""

from __future__ import annotations

from hicache_core import BackendSpec, Capabilities

SPEC = BackendSpec(
    name="memory",
    api=1,
    target="hicache_conformance.memory.storage:MemoryStorage",
    options="hicache_conformance.memory.options:MemoryOptions",
    harness="hicache_conformance.memory.harness:MemoryHarness",
    summary="pages in memory, for tests and to learn from",
    capabilities=Capabilities(
        shared=True,  # with a server; open() narrows this and the next two without one
        persistent=True,
        durable=True,  # with a server that keeps a journal
        eviction="lru",
        remove=True,
        clear=True,
        checksum=True,
        deadline="cancel",
        transport="local, or a Unix socket",
    ),
)
