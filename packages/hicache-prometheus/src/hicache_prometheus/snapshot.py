"""What the cells mean, and a snapshot of them that adds up over processes: no Prometheus in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hicache_core.status import Status
from hicache_prometheus.cells import CELLS, Labels

#: The first label of a row says what kind it is.
VERB, CACHE = "verb", "cache"

# A verb's row: (VERB, backend, namespace, component, verb).
CALLS, NBYTES, NANOSECONDS = 0, 1, 2
#: The cell of a status is this and its value.
STATUSES = 2
FIRST_BUCKET = STATUSES + len(Status) + 1
#: Upper bounds in seconds: from a lookup in an index to a store that times out.
BOUNDS_S = (
    2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2,
    2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip

# A cache's row: (CACHE, backend, namespace, then the identity's IDENTITY_FIELDS).
LATE, ABANDONED, DEAD_KEYS = 0, 1, 2
#: Caches whose breaker is in this state.
BREAKERS = {"closed": 3, "half-open": 4, "open": 5}
IDENTITY_FIELDS = (
    "engine", "model", "revision", "weights", "quantization", "kv_dtype", "page_tokens", "lora", "tenant",
)  # fmt: skip

Cells = tuple[int, ...]
#: Cells that are a sum over the life of a process; the others of a cache's row tell what is now.
_LASTING = frozenset({LATE})


@dataclass(slots=True)
class Snapshot:
    """Counts of one or several processes."""

    verbs: dict[Labels, Cells] = field(default_factory=dict)
    """(backend, namespace, component, verb) -> cells."""
    caches: dict[Labels, Cells] = field(default_factory=dict)
    """(backend, namespace) -> cells."""
    identities: dict[str, Labels] = field(default_factory=dict)
    """Namespace -> the texts of IDENTITY_FIELDS."""

    def add(self, rows: Iterable[tuple[Labels, Cells]], *, alive: bool = True) -> None:
        """Add a process's rows; of a dead one only what it counted."""
        for (kind, *labels), cells in rows:
            if kind == VERB:
                _add(self.verbs, tuple(labels), cells)
            elif kind == CACHE:
                if not alive:
                    cells = tuple(cell if at in _LASTING else 0 for at, cell in enumerate(cells))
                _add(self.caches, tuple(labels[:2]), cells)
                self.identities.setdefault(labels[1], tuple(labels[2:]))

    def rows(self) -> list[tuple[Labels, Cells]]:
        """Give it back as rows, for storing."""
        unknown = ("",) * len(IDENTITY_FIELDS)
        verbs = [((VERB, *labels), cells) for labels, cells in self.verbs.items()]
        caches = [
            ((CACHE, *labels, *self.identities.get(labels[1], unknown)), cells)
            for labels, cells in self.caches.items()
        ]
        return verbs + caches


def _add(into: dict[Labels, Cells], labels: Labels, cells: Cells) -> None:
    before = into.get(labels, (0,) * CELLS)
    into[labels] = tuple(a + b for a, b in zip(before, cells, strict=True))
