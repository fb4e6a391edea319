"""Line charts as SVG text: two kinds of axis, a legend, nothing to download.

Numbers go in, text comes out; colours are CSS classes ``s0`` to ``s7`` that the
page defines, so that a chart follows the reader's light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 760, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 30, 20, 50
_TICKS = 5
COLOURS = 8


@dataclass(frozen=True, slots=True)
class Line:
    """One series: its name in the legend, its points from left to right."""

    label: str
    points: Sequence[tuple[float, float]]
    marked: bool = False
    """Draw a dot at each point, with its value on hovering."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction of a chart."""

    label: str
    text: Callable[[float], str] = "{:.3g}".format
    log: bool = False
    low: float | None = None
    """Where the axis begins; None for the least value. A logarithmic one never begins at 0."""
    high: float | None = None
    ticks: Sequence[float] = ()
    """Values to label; chosen by the chart where there are none."""


def chart(lines: Sequence[Line], x: Axis, y: Axis) -> str:
    """Draw lines over two axes; an empty chart says so."""
    points = [point for line in lines for point in line.points]
    if not points:
        return "<p>No samples.</p>"
    across = _Scale(x, [px for px, _ in points], _LEFT, _WIDTH - _RIGHT)
    up = _Scale(y, [py for _, py in points], _HEIGHT - _BOTTOM, _TOP)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">', *_grid(x, y, across, up)]
    for number, line in enumerate(lines):
        parts += _drawn(line, f"s{number % COLOURS}", x, y, across, up)
    parts.append("</svg>")
    legend = "".join(
        f'<li class="s{number % COLOURS}"><span></span>{escape(line.label)}</li>'
        for number, line in enumerate(lines)
    )
    return "\n".join([*parts, f'<ul class="legend">{legend}</ul>'])


class _Scale:
    """Maps an axis's values to pixels."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        self._log = axis.log
        self._ticks = list(axis.ticks)
        low = min(values) if axis.low is None else axis.low
        high = max(values) if axis.high is None else axis.high
        if axis.log:
            least = min((value for value in values if value > 0), default=1.0)
            low, high = math.log10(max(low, least)), math.log10(max(high, least))
        if high <= low:
            low, high = low - 0.5, high + 0.5
        self._low, self._high, self._start, self._end = low, high, start, end

    def __call__(self, value: float) -> float:
        if self._log:
            value = math.log10(value) if value > 0 else self._low
        share = (value - self._low) / (self._high - self._low)
        return self._start + min(max(share, 0.0), 1.0) * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Give round values within the axis, or the ones that were asked for."""
        if self._ticks:
            return self._ticks
        if self._log:
            return self._log_ticks()
        step = _round_step((self._high - self._low) / _TICKS)
        first = math.ceil(self._low / step - 1e-9)
        last = math.floor(self._high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]

    def _log_ticks(self) -> list[float]:
        """Give powers of ten; on a short axis 2 and 5 times them too; on a very short one its ends."""
        exponents = range(math.floor(self._low), math.floor(self._high) + 1)
        for factors in ((1,), (1, 2, 5)):
            values = [factor * 10.0**exponent for exponent in exponents for factor in factors]
            inside = [v for v in values if self._low - 1e-9 <= math.log10(v) <= self._high + 1e-9]
            if len(inside) > 2:
                return inside
        return [10.0**self._low, 10.0**self._high]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next((power * factor for factor in (1, 2, 5) if power * factor >= rough), power * 10)


def _grid(x: Axis, y: Axis, across: _Scale, up: _Scale) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for tick in up.ticks():
        place = up(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{place:.1f}" y2="{place:.1f}"/>')
        parts.append(_text(_LEFT - 8, place + 4, "end", y.text(tick)))
    for tick in across.ticks():
        place = across(tick)
        parts.append(f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(_text(place, bottom + 18, "middle", x.text(tick)))
    parts.append(_text((_LEFT + right) / 2, _HEIGHT - 10, "middle", x.label))
    turned = f"translate(16 {(_TOP + bottom) / 2:.1f}) rotate(-90)"
    parts.append(f'<text transform="{turned}" text-anchor="middle">{escape(y.label)}</text>')
    return parts


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _drawn(line: Line, colour: str, x: Axis, y: Axis, across: _Scale, up: _Scale) -> list[str]:
    if not line.points:
        return []
    path = " ".join(f"{across(px):.1f},{up(py):.1f}" for px, py in line.points)
    parts = [f'<polyline class="{colour}" points="{path}"/>']
    if line.marked:
        parts += [
            f'<circle class="{colour}" cx="{across(px):.1f}" cy="{up(py):.1f}" r="3.5">'
            f"<title>{escape(f'{line.label}: {x.text(px)}, {y.text(py)}')}</title></circle>"
            for px, py in line.points
        ]
    return parts
