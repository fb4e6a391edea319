"""The eic backend's description: pages in EIC (Elastic Instant Cache).

The `eic` module comes with EIC's own image and is not public; all of this was proven against a simulator of
the surface that open code uses (simulator/), never against a real service. For C11 it declares ``bounce``:
the module is given private memory on threads of ours, and the calling thread copies. It lists and counts
nothing, so ``clear`` and ``usage`` work with a catalogue that is kept in the store itself (catalog.py).
What a service keeps over its own restart is not known here, so ``persistent`` is not declared.
"""

from __future__ import annotations

from hicache_core.capabilities import Capabilities
from hicache_core.spec import API_VERSION, BackendSpec, Requirement

SPEC = BackendSpec(
    name="eic",
    api=API_VERSION,
    target="hicache_eic.storage:EICStorage",
    options="hicache_eic.options:EicOptions",
    harness="hicache_eic.harness:EicHarness",
    summary="pages in EIC (Elastic Instant Cache); proven on a simulator",
    capabilities=Capabilities(
        shared=True,
        eviction="ttl",  # where ttl_s is set; the service may evict by rules of its own
        remove=True,
        clear=True,
        checksum=True,
        deadline="bounce",
        transport="rdma, gdr or tcp",
    ),
    requires=(
        Requirement(module="xxhash", pip="pip install 'xxhash>=3.4'", versions=">=3.4"),
        Requirement(module="yaml", pip="pip install 'pyyaml>=6'", versions=">=6"),
    ),
)
