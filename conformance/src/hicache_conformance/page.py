"""The report as one HTML page that needs nothing else, with a badge that can be cut out of it."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from hicache_conformance.cases import OUTCOMES
from hicache_conformance.report import Report, Result, headline

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #1a7f37; --bad: #c62828; --mute: #777; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { overflow-x: auto; padding: .6rem; border: 1px solid var(--line); }
.pass, .reached { color: var(--good); } .fail, .not-reached, .not-run { color: var(--bad); }
.unsupported { color: var(--mute); }
summary { cursor: pointer; }
"""


def to_html(report: Report) -> str:
    """Write the page."""
    name = escape(str(report.description.get("name") or report.subject))
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>hicache conformance: {name}</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>hicache conformance: {name}</h1>",
        f"<p>{badge_svg(report)}</p>",
    ]
    if report.unusable:
        parts.append(f'<p class="fail">Nothing could be run: {escape(report.unusable)}</p>')
    parts += [_facts(report), _levels(report), _failures(report), _capabilities(report), _cases(report)]
    parts.append("</body></html>")
    return "\n".join(parts) + "\n"


def badge_svg(report: Report) -> str:
    """Draw the badge: what it is, and how many of the levels that apply were reached."""
    words, good = report.badge()
    left, right = 54, 12 + 7 * len(words)
    colour = "#1a7f37" if good else "#c62828"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="hicache: {words}"><rect width="{left}" height="20" fill="#444"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="{colour}"/>'
        f'<g fill="#fff" font-family="Verdana, sans-serif" font-size="11">'
        f'<text x="6" y="14">hicache</text><text x="{left + 6}" y="14">{words}</text></g></svg>'
    )


def _facts(report: Report) -> str:
    native = report.description.get("native") or {}
    rows = {
        "Backend": f"{report.description.get('distribution', '')} ({report.description.get('summary', '')})",
        "Native": ", ".join(f"{name} {version or 'missing'}" for name, version in native.items()) or "none",
        "Versions": ", ".join(f"{name} {version}" for name, version in report.versions.items()),
        "Capabilities": f"sha256 {report.capabilities_sha256}",
        "Run": f"{report.started}, {report.seconds:.1f} s, seed {report.seed}",
        "Options given": ", ".join(report.options) or "none",
    }
    return f"<table>{_pairs(rows)}</table>"


def _levels(report: Report) -> str:
    rows = []
    for level in report.present():
        verdict, counts = report.verdict(level), report.counts(level)
        numbers = "".join(f'<td class="n">{counts[outcome] or ""}</td>' for outcome in OUTCOMES)
        rows.append(f'<tr><td>{level}</td><td class="{_css(verdict)}">{verdict}</td>{numbers}</tr>')
    head = "".join(f"<th>{outcome}</th>" for outcome in OUTCOMES)
    return f"<h2>Levels</h2><table><tr><th>Level</th><th></th>{head}</tr>{''.join(rows)}</table>"


def _failures(report: Report) -> str:
    failed = [result for result in report.results if result.outcome == "fail"]
    if not failed:
        return ""
    entries = [
        f'<details><summary><span class="fail">{escape(r.case.id)}</span> {", ".join(r.case.clauses)}: '
        f"{escape(headline(r.detail))}</summary><pre>{escape(r.detail)}</pre></details>"
        for r in failed
    ]
    return f"<h2>Failures</h2>{''.join(entries)}"


def _capabilities(report: Report) -> str:
    rows = _pairs(report.capabilities)
    return f"<h2>Capabilities once open</h2><table>{rows}</table>" if rows else ""


def _cases(report: Report) -> str:
    rows = "".join(_row(result) for result in report.results)
    return (
        f"<h2>Cases</h2><details><summary>All {len(report.results)}</summary><table>"
        f"<tr><th>Level</th><th>Case</th><th>Clauses</th><th></th><th>s</th></tr>{rows}</table></details>"
    )


def _row(result: Result) -> str:
    note = f"<br>{escape(headline(result.detail))}" if result.detail and result.outcome != "pass" else ""
    return (
        f"<tr><td>{result.case.level}</td><td><code>{escape(result.case.id)}</code>{note}</td>"
        f"<td>{escape(', '.join(result.case.clauses))}</td>"
        f'<td class="{_css(result.outcome)}">{result.outcome}</td>'
        f'<td class="n">{result.seconds:.2f}</td></tr>'
    )


def _pairs(rows: Mapping[str, object]) -> str:
    return "".join(f"<tr><th>{escape(n)}</th><td>{escape(str(v))}</td></tr>" for n, v in rows.items())


def _css(word: str) -> str:
    return word.replace(" ", "-")
