"""The Mooncake backend's spec.

A Mooncake store is one master, which knows where every object lies, and any
number of clients, which give it segments of their memory and move bytes between
each other. Proven with mooncake-transfer-engine-non-cuda 0.3.13.post1 over TCP.

``deadline`` is ``hold``: a native call cannot be cancelled, and pages move between
the engine's own memory and the store without a copy. What bounds a call is the
library's own timeouts, which open() derives from timeout_s.
"""

from __future__ import annotations

from hicache_core import BackendSpec, Capabilities, Requirement

SPEC = BackendSpec(
    name="mooncake",
    api=1,
    target="hicache_mooncake.storage:MooncakeStore",
    options="hicache_mooncake.options:MooncakeOptions",
    harness="hicache_mooncake.harness:MooncakeHarness",
    summary="pages in the memory of many machines, found through a Mooncake master",
    capabilities=Capabilities(
        shared=True,
        # The page whose lease ran out first goes first. A lease is renewed by a get and by touch, but also by
        # contains, which "lru" and "approx" forbid.
        eviction="ttl",
        remove=True,
        clear=True,
        checksum=True,  # open() narrows this without the option
        zero_copy=True,
        needs_registered=True,  # TCP moves unregistered memory too; RDMA refuses it
        deadline="hold",
        transport="tcp, rdma",
    ),
    requires=(
        Requirement(
            module="mooncake.store",
            pip="pip install 'hicache-mooncake[cpu]'  (or [cuda12], [cuda13])",
            apt="libibverbs1 libcurl4 libnuma1",
            versions=">=0.3.11.post1",
        ),
    ),
)
