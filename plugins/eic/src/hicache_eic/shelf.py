"""A worker's shelf: its part of the catalogue, and memory for the catalogue's records."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_core.errors import BackendUnavailable
from hicache_core.status import OK, Status
from hicache_eic.catalog import CHUNK_NBYTES, Record, Writer
from hicache_eic.native import Native
from hicache_eic.workers import Memory, stride_of


class Shelf:
    """What a worker keeps for the catalogue: its writer, and memory for records."""

    def __init__(self, writer: Writer, control: Memory) -> None:
        self.writer = writer
        self.control = control

    def place(self, records: Sequence[Record]) -> list[tuple[int, int]]:
        """Lay out records to be stored."""
        places = []
        for (view, (address, _)), record in zip(
            self.control.values(len(records), CHUNK_NBYTES), records, strict=True
        ):
            view[: len(record.value)] = record.value
            places.append((address, len(record.value)))
        return places

    def fetch(self, eic: Native, names: Sequence[str], nbytes: int, deadline: float) -> list[bytes | None]:
        """Fetch records of one size; None for what is absent or cannot be had."""
        found: list[bytes | None] = []
        at_once = len(self.control.view) // stride_of(nbytes)
        for start in range(0, len(names), at_once):
            part = names[start : start + at_once]
            values = self.control.values(len(part), nbytes)
            buffers = [buffer for _, buffer in values]
            statuses = eic.get(part, buffers, self.control.registered, deadline)
            raise_trouble(statuses)
            found += [
                bytes(view) if status is OK else None
                for (view, _), status in zip(values, statuses, strict=True)
            ]
        return found


def raise_trouble(statuses: Sequence[Status]) -> None:
    """Raise BackendUnavailable where the service gave no answer."""
    bad = [status for status in statuses if status not in (OK, Status.MISS)]
    if bad:
        raise BackendUnavailable(
            "EIC does not answer",
            value=f"{len(bad)} of {len(statuses)} keys failed",
            remedy="Look at the service.",
        )
