"""A replay's report: the numbers derived from a tally, as JSON and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from hicache_cli.output import nbytes_text
from hicache_cli.tally import VERBS, Tally
from hicache_cli.trace import BLOCK_TOKENS

_GIB = 1 << 30
#: Statuses that say nothing bad of the store: full is what a capacity means.
_EXPECTED = frozenset({"OK", "MISS", "NO_SPACE", "SKIPPED"})


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """One replay: where it ran, and what was counted."""

    backend: str
    version: str
    source: str
    """The log's path, or the load's name."""
    page_nbytes: int
    workers: int
    capacity_nbytes: int | None
    tally: Tally
    unreadable: Sequence[tuple[int, str]]
    notes: Sequence[str]

    @property
    def fetch_seconds(self) -> float:
        """Seconds spent in asking and getting, all workers together."""
        return self.tally.verbs["contains"].total_s + self.tally.verbs["get"].total_s

    @property
    def break_even_tokens_s(self) -> float | None:
        """Tokens a second of prefill above which recomputing beats fetching; None without a hit."""
        fetched = self.tally.hit_tokens
        if self.tally.tiers:  # what was in memory was not fetched
            fetched = min(fetched, self.tally.tiers["store"] * BLOCK_TOKENS)
        if not fetched or not self.fetch_seconds:
            return None
        return fetched / self.fetch_seconds

    @property
    def trouble(self) -> list[str]:
        """What makes this run a failure: wrong bytes, or statuses of a store that does not work."""
        lines = []
        if self.tally.wrong:
            lines.append(f"{self.tally.wrong} pages came back with other bytes than were set")
            lines += self.tally.named
        for verb in VERBS:
            bad = {s: n for s, n in self.tally.verbs[verb].statuses.items() if s not in _EXPECTED}
            if bad:
                lines.append(f"{verb}: " + ", ".join(f"{n} pages {s}" for s, n in sorted(bad.items())))
        return lines

    def as_json(self) -> dict[str, Any]:
        """Give everything but the per-request series."""
        tally = self.tally
        return {
            "backend": self.backend,
            "version": self.version,
            "source": self.source,
            "page_nbytes": self.page_nbytes,
            "block_tokens": BLOCK_TOKENS,
            "workers": self.workers,
            "capacity_nbytes": self.capacity_nbytes,
            "requests": tally.requests,
            "unreadable_lines": [{"line": line, "reason": reason} for line, reason in self.unreadable],
            "blocks": tally.blocks,
            "hit_blocks": tally.hit_blocks,
            "hit_rate_blocks": share(tally.hit_blocks, tally.blocks),
            "hit_blocks_by_tier": dict(tally.tiers),
            "tokens": tally.tokens,
            "hit_tokens": tally.hit_tokens,
            "hit_rate_tokens": share(tally.hit_tokens, tally.tokens),
            "verified_pages": tally.verified,
            "wrong_pages": tally.wrong,
            "elapsed_s": tally.elapsed_s,
            "store_nbytes": tally.store_nbytes,
            "break_even_tokens_per_s": self.break_even_tokens_s,
            "verbs": {verb: self._verb(verb) for verb in VERBS},
            "trouble": self.trouble,
            "notes": list(self.notes),
        }

    def _verb(self, name: str) -> dict[str, Any]:
        verb = self.tally.verbs[name]
        return {
            "batches": len(verb.seconds),
            "seconds": verb.total_s,
            "nbytes": verb.nbytes,
            "gib_per_s": gib_per_s(verb.nbytes, verb.total_s),
            "p50_ms": verb.quantile_s(0.50) * 1e3,
            "p99_ms": verb.quantile_s(0.99) * 1e3,
            "statuses": dict(sorted(verb.statuses.items())),
        }

    def headline(self) -> list[str]:
        """Give the result in words."""
        tally = self.tally
        lines = [
            f"{tally.hit_blocks:,} hits of {tally.blocks:,} blocks "
            f"({share(tally.hit_blocks, tally.blocks):.1%}); "
            f"{tally.hit_tokens:,} of {tally.tokens:,} tokens ({share(tally.hit_tokens, tally.tokens):.1%}).",
            f"{tally.requests:,} requests in {tally.elapsed_s:.1f} s with {self.workers} worker"
            f"{'s' if self.workers > 1 else ''}, a page of {nbytes_text(self.page_nbytes)} "
            f"for each block of {BLOCK_TOKENS} tokens.",
        ]
        if tally.tiers:
            shares = (f"{count:,} from the {tier}" for tier, count in sorted(tally.tiers.items()))
            lines.insert(1, f"Of these hits, {' and '.join(shares)}.")
        if not tally.wrong:
            lines.append(
                f"{tally.verified:,} pages came back, every byte as it was set "
                f"({nbytes_text(tally.verified * self.page_nbytes)})."
            )
        if tally.store_nbytes is not None:
            lines.append(f"The store took {nbytes_text(tally.store_nbytes)} at the end.")
        if self.break_even_tokens_s is not None:
            lines.append(
                f"Break-even: recomputing beats fetching only above {self.break_even_tokens_s:,.0f} tokens/s "
                f"of prefill, at this page size (hit tokens / seconds in exists and get)."
            )
        return lines

    def table(self) -> Table:
        """Lay out the verbs."""
        table = Table()
        table.add_column("a batch of")
        for column in ("batches", "bytes", "GiB/s", "p50 ms", "p99 ms"):
            table.add_column(column, justify="right")
        table.add_column("pages by status")
        for name in VERBS:
            row = self._verb(name)
            statuses = ", ".join(f"{status} {count:,}" for status, count in row["statuses"].items())
            moves = name != "contains"
            table.add_row(
                name,
                f"{row['batches']:,}",
                nbytes_text(row["nbytes"]) if moves else "-",
                f"{row['gib_per_s']:.2f}" if moves and row["gib_per_s"] is not None else "-",
                f"{row['p50_ms']:.3f}",
                f"{row['p99_ms']:.3f}",
                statuses or "-",
            )
        return table


def share(part: int, whole: int) -> float:
    """Divide, 0 where there is nothing to divide by."""
    return part / whole if whole else 0.0


def gib_per_s(nbytes: int, seconds: float) -> float | None:
    """Give a throughput; None where nothing was timed."""
    return nbytes / seconds / _GIB if seconds else None
