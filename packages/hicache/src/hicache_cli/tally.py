"""What one or several players counted: a mergeable record, no formatting."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

#: Verbs whose batches are timed.
VERBS = ("contains", "get", "set")

#: Wrong pages that are named; the rest is counted.
MAX_NAMED = 20


@dataclass(slots=True)
class VerbTally:
    """One verb: seconds of each batch, pages by status name."""

    seconds: array[float] = field(default_factory=lambda: array("d"))
    statuses: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0
    """Bytes of the pages that were OK."""

    @property
    def total_s(self) -> float:
        """Seconds in all batches together."""
        return sum(self.seconds)

    def quantile_s(self, share: float) -> float:
        """Give the duration that this share of the batches does not exceed; 0 without batches."""
        if not self.seconds:
            return 0.0
        ordered = sorted(self.seconds)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


@dataclass(slots=True)
class Tally:
    """One player's count, or several merged."""

    requests: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    tiers: Counter[str] = field(default_factory=Counter)
    """Hit blocks by the tier that had them; empty where the store is the only one."""
    verified: int = 0
    """Pages that came back and held exactly what was set."""
    wrong: int = 0
    """Pages that came back as OK and did not."""
    named: list[str] = field(default_factory=list)
    """The first wrong pages, in words."""
    verbs: dict[str, VerbTally] = field(default_factory=lambda: {verb: VerbTally() for verb in VERBS})
    places: array[int] = field(default_factory=lambda: array("q"))
    """For each request, its place in the log ..."""
    request_blocks: array[int] = field(default_factory=lambda: array("q"))
    """... its blocks ..."""
    request_hits: array[int] = field(default_factory=lambda: array("q"))
    """... and how many of them were hits."""
    started_s: float = 0.0
    """time.monotonic() at the first request; the same clock in every process of a machine."""
    ended_s: float = 0.0
    store_nbytes: int | None = None
    """Bytes that the store took at the end; None where it cannot tell."""

    @property
    def elapsed_s(self) -> float:
        """Wall-clock seconds from the first request to the end of the last."""
        return self.ended_s - self.started_s

    def merge(self, other: Tally) -> None:
        """Add another player's count to this one."""
        first = not self.requests
        self.started_s = other.started_s if first else min(self.started_s, other.started_s)
        self.ended_s = max(self.ended_s, other.ended_s)
        known = [nbytes for nbytes in (self.store_nbytes, other.store_nbytes) if nbytes is not None]
        self.store_nbytes = max(known, default=None)
        for name in ("requests", "blocks", "hit_blocks", "tokens", "hit_tokens", "verified", "wrong"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.tiers.update(other.tiers)
        self.named = (self.named + other.named)[:MAX_NAMED]
        for verb, theirs in other.verbs.items():
            mine = self.verbs[verb]
            mine.seconds.extend(theirs.seconds)
            mine.statuses.update(theirs.statuses)
            mine.nbytes += theirs.nbytes
        self.places.extend(other.places)
        self.request_blocks.extend(other.request_blocks)
        self.request_hits.extend(other.request_hits)
