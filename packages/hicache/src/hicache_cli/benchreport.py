"""A benchmark's report: rates and ratios with their spread, as JSON, text and HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.table import Table

from hicache_cli import html
from hicache_cli.contestants import Plan
from hicache_cli.measure import VERBS, Series
from hicache_cli.output import nbytes_text
from hicache_cli.svg import Axis, Line, chart

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle and the ends of some rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value."""
        return cls(median(values), min(values), max(values))

    def as_json(self) -> dict[str, float]:
        """Give the three numbers by name."""
        return {"median": self.median, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True)
class Cell:
    """All contestants at one page size."""

    plan: Plan
    series: Mapping[str, Series]
    reference: str
    """Whom the ratios are to."""

    def rate(self, name: str, verb: str) -> Spread:
        """Give GiB a second over the rounds."""
        return Spread.of([rate / _GIB for rate in self.series[name].rates(verb, self.plan.batch_nbytes)])

    def ratio(self, name: str, verb: str) -> Spread:
        """Give a contestant's rate by the reference's, round by round: what disturbs both cancels out."""
        mine = self.series[name].rates(verb, self.plan.batch_nbytes)
        other = self.series[self.reference].rates(verb, self.plan.batch_nbytes)
        return Spread.of([a / b for a, b in zip(mine, other, strict=True)])

    def quantile_ms(self, name: str, verb: str, share: float) -> float:
        """Give a call's duration that this share of the calls does not exceed."""
        ordered = self.series[name].seconds(verb)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] * 1e3

    def as_json(self) -> dict[str, Any]:
        """Give every contestant's numbers."""
        return {
            "page_nbytes": self.plan.page_nbytes,
            "batches_per_thread": self.plan.batches,
            "reference": self.reference,
            "contestants": [
                {"name": name, "wrong_pages": series.wrong, "trouble": dict(series.troubles)}
                | {verb: self._verb(name, verb) for verb in VERBS}
                for name, series in self.series.items()
            ],
        }

    def _verb(self, name: str, verb: str) -> dict[str, Any]:
        return {
            "gib_per_s": self.rate(name, verb).as_json(),
            "ratio": self.ratio(name, verb).as_json(),
            "p50_ms": self.quantile_ms(name, verb, 0.50),
            "p99_ms": self.quantile_ms(name, verb, 0.99),
        }


@dataclass(frozen=True, slots=True)
class BenchReport:
    """One run of the benchmark."""

    cells: Sequence[Cell]
    notes: Sequence[str]

    @property
    def trouble(self) -> list[str]:
        """What makes the run a failure: its numbers are not of a store that works."""
        lines = []
        for cell in self.cells:
            at = f"at {nbytes_text(cell.plan.page_nbytes)}"
            for name, series in cell.series.items():
                if series.wrong:
                    lines.append(f"{name} {at}: {series.wrong} pages have other bytes than were set")
                lines += [f"{name} {at}: {what}, {n} pages" for what, n in sorted(series.troubles.items())]
        return lines

    def as_json(self) -> dict[str, Any]:
        """Give everything but the single calls."""
        plan = self.cells[0].plan
        return {
            "batch": plan.batch,
            "threads": plan.threads,
            "processes": plan.processes,
            "rounds": plan.rounds,
            "cells": [cell.as_json() for cell in self.cells],
            "trouble": self.trouble,
            "notes": list(self.notes),
        }

    def headline(self) -> str:
        """Say what was measured."""
        plan = self.cells[0].plan
        return (
            f"Batches of {plan.batch} pages, {plan.threads} thread(s) in {plan.processes} process(es), "
            f"medians of {plan.rounds} rounds in rotating order, in brackets the lowest and the highest. "
            f"Ratios are to '{self.cells[0].reference}' in the same round."
        )

    def rows(self) -> list[list[str]]:
        """Give the table's cells."""
        rows = []
        for cell in self.cells:
            for name in cell.series:
                row = [nbytes_text(cell.plan.page_nbytes), name]
                for verb in VERBS:
                    ratio = cell.ratio(name, verb)
                    row += [
                        f"{cell.rate(name, verb).median:.2f}",
                        f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})",
                        f"{cell.quantile_ms(name, verb, 0.5):.2f} / {cell.quantile_ms(name, verb, 0.99):.2f}",
                    ]
                rows.append(row)
        return rows

    def header(self) -> list[str]:
        """Name the table's columns."""
        columns = ["page", "who"]
        for verb in VERBS:
            columns += [f"{verb} GiB/s", f"{verb} ratio", f"{verb} p50 / p99 ms"]
        return columns

    def table(self) -> Table:
        """Lay the rows out for a terminal."""
        table = Table()
        for number, column in enumerate(self.header()):
            table.add_column(column, justify="left" if number < 2 else "right")
        names = len(self.cells[0].series)
        for number, row in enumerate(self.rows(), 1):
            table.add_row(*row, end_section=number % names == 0)
        return table

    def page(self) -> str:
        """Draw throughput by page size and the latency of a call at each size."""
        sections = [
            html.paragraphs([self.headline()]),
            html.paragraphs(self.trouble, "trouble"),
            html.table(self.header(), self.rows()),
        ]
        sizes = [float(cell.plan.page_nbytes) for cell in self.cells]
        across = Axis("page", text=nbytes_text, log=True, ticks=sizes)
        for verb in VERBS:
            lines = [
                Line(
                    name,
                    [(float(cell.plan.page_nbytes), cell.rate(name, verb).median) for cell in self.cells],
                    marked=True,
                )
                for name in self.cells[0].series
            ]
            sections += [f"<h2>Throughput of {verb}</h2>", chart(lines, across, Axis("GiB/s", low=0.0))]
        for cell in self.cells:
            lines = [
                Line(f"{name} {verb}", html.distribution(cell.series[name].seconds(verb)))
                for name in cell.series
                for verb in VERBS
            ]
            sections.append(f"<h2>Latency of a batch, pages of {nbytes_text(cell.plan.page_nbytes)}</h2>")
            share = Axis("share of batches", text="{:.0%}".format, low=0.0, high=1.0)
            sections.append(chart(lines, Axis("ms, logarithmic", log=True), share))
        return html.page("hicache bench", [*sections, html.paragraphs(self.notes)])
