"""A result as one self-contained HTML page: no script, no font, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from hicache_cli.svg import Axis, Line, chart
from hicache_cli.tally import VERBS

if TYPE_CHECKING:
    from hicache_cli.report import ReplayReport
    from hicache_cli.tally import Tally

#: Points of a plotted line; more would only make the page heavy.
_POINTS = 400
#: Stretches into which a log is cut for the hit rate over time; more would be noise.
_STRETCHES = 120

_STYLE = """
:root { color-scheme: light dark; --fg: #1c2128; --bg: #ffffff; --grid: #d8dde3; }
@media (prefers-color-scheme: dark) { :root { --fg: #dfe4ea; --bg: #15191e; --grid: #333b44; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg);
       max-width: 820px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; font-size: 12px; fill: var(--fg); }
svg .grid { stroke: var(--grid); stroke-width: 1; }
svg polyline { fill: none; stroke: var(--c); stroke-width: 2; }
svg circle { fill: var(--c); }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; }
.legend span { display: inline-block; width: 1rem; height: .25rem; margin: .25rem .4rem;
               background: var(--c); }
.s0 { --c: #2f6fde; } .s1 { --c: #d9622b; } .s2 { --c: #2c9a5b; } .s3 { --c: #a347ba; }
.s4 { --c: #b8860b; } .s5 { --c: #138a9e; } .s6 { --c: #c0396b; } .s7 { --c: #6b7480; }
.trouble { color: #c62828; font-weight: 600; }
"""


def page(title: str, sections: Iterable[str]) -> str:
    """Wrap sections, which are HTML already, into a page."""
    body = "\n".join(sections)
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out text cells."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def paragraphs(lines: Iterable[str], css: str = "") -> str:
    """Put each line into a paragraph of its own."""
    mark = f' class="{css}"' if css else ""
    return "\n".join(f"<p{mark}>{escape(line)}</p>" for line in lines)


def replay_page(report: ReplayReport) -> str:
    """Draw a replay: hit rate over time, latency distributions, the report's numbers."""
    tally = report.tally
    numbers = report.as_json()["verbs"]
    rows = [
        [
            verb,
            f"{numbers[verb]['batches']:,}",
            f"{numbers[verb]['gib_per_s']:.2f}" if verb != "contains" and numbers[verb]["gib_per_s"] else "-",
            f"{numbers[verb]['p50_ms']:.3f}",
            f"{numbers[verb]['p99_ms']:.3f}",
            ", ".join(f"{status} {count:,}" for status, count in numbers[verb]["statuses"].items()),
        ]
        for verb in VERBS
    ]
    return page(
        f"hicache replay on {report.backend}",
        [
            paragraphs([f"{report.backend} {report.version}, {report.source}", *report.headline()]),
            paragraphs(report.trouble, "trouble"),
            table(("batch of", "batches", "GiB/s", "p50 ms", "p99 ms", "pages by status"), rows),
            "<h2>Hit rate over time</h2>",
            chart(
                hit_rate_lines(tally),
                Axis("request", text="{:,.0f}".format),
                Axis("hits of blocks", text="{:.0%}".format, low=0.0, high=1.0),
            ),
            "<h2>Latency of a batch</h2>",
            chart(
                [Line(verb, distribution(tally.verbs[verb].seconds)) for verb in VERBS],
                Axis("ms, logarithmic", log=True),
                Axis("share of batches", text="{:.0%}".format, low=0.0, high=1.0),
            ),
            paragraphs(report.notes),
        ],
    )


def hit_rate_lines(tally: Tally) -> list[Line]:
    """Give the hit rate of each stretch of requests, and from the first request on, in the log's order."""
    order = sorted(range(len(tally.places)), key=tally.places.__getitem__)
    step = max(1, -(-len(order) // _STRETCHES))
    stretch, since_start = [], []
    all_hits = all_blocks = 0
    for first in range(0, len(order), step):
        part = order[first : first + step]
        hits = sum(tally.request_hits[i] for i in part)
        blocks = sum(tally.request_blocks[i] for i in part)
        all_hits, all_blocks = all_hits + hits, all_blocks + blocks
        at = first + len(part)
        if blocks:
            stretch.append((float(at), hits / blocks))
        if all_blocks:
            since_start.append((float(at), all_hits / all_blocks))
    return [Line(f"each {step} requests", stretch), Line("since the first request", since_start)]


def distribution(seconds: Sequence[float]) -> list[tuple[float, float]]:
    """Give points (ms, share of the samples that took no longer)."""
    ordered = sorted(seconds)
    count = len(ordered)
    marks = sorted({min(count - 1, i * count // _POINTS) for i in range(_POINTS + 1)}) if count else []
    return [(ordered[i] * 1e3, (i + 1) / count) for i in marks]
