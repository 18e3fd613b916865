"""Draws lines over logarithmic axes, and bars, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

_COLOURS = (
    "#3366cc",
    "#dc3912",
    "#109618",
    "#ff9900",
    "#990099",
    "#0099c6",
    "#dd4477",
    "#66aa00",
    "#8b5a2b",
    "#555555",
)
_WIDTH, _HEIGHT = 560, 330
_LEFT, _TOP, _RIGHT, _BOTTOM = 60, 30, 190, 40
_BARS_WIDTH, _BAR, _NAMES, _TEXTS = 560, 22, 200, 120


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A chart of its own: lines of positive points by their names."""

    title: str
    x_title: str
    y_title: str
    lines: Mapping[str, Sequence[Point]]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A horizontal bar: its name, its length, the text at its end, and whether it is one of ours."""

    name: str
    value: float
    text: str
    ours: bool = False


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A chart of horizontal bars from zero."""

    title: str
    subtitle: str
    bars: Sequence[Bar]


def draw(panels: Sequence[Panel], columns: int = 2) -> str:
    """Return an SVG of charts side by side. A dashed line in each rises as its x does: whatever is steeper grows faster."""
    rows = -(-len(panels) // columns)
    parts = []
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        parts += [f'<g transform="translate({column * _WIDTH},{row * _HEIGHT})">', *_panel(panel), "</g>"]
    return _svg(columns * _WIDTH, rows * _HEIGHT, parts)


def draw_bars(charts: Sequence[Bars], columns: int = 2) -> str:
    """Return an SVG of charts of bars side by side; the charts of a row are as high as the highest of them."""
    parts, top = [], 0
    for first in range(0, len(charts), columns):
        row = charts[first : first + columns]
        for number, chart in enumerate(row):
            parts += [f'<g transform="translate({number * _BARS_WIDTH},{top})">', *_bars(chart), "</g>"]
        top += 60 + _BAR * max(len(chart.bars) for chart in row)
    return _svg(min(columns, len(charts)) * _BARS_WIDTH, top, parts)


def _svg(width: int, height: int, parts: Iterable[str]) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])


def _bars(chart: Bars) -> Iterable[str]:
    longest = max(bar.value for bar in chart.bars)
    yield f'<text x="16" y="24" font-size="14" font-weight="bold">{escape(chart.title)}</text>'
    yield f'<text x="16" y="41" fill="#555">{escape(chart.subtitle)}</text>'
    for number, bar in enumerate(chart.bars):
        y = 52 + _BAR * number
        length = (_BARS_WIDTH - _NAMES - _TEXTS) * bar.value / longest
        colour, weight = (_COLOURS[0], "bold") if bar.ours else ("#a0a8b4", "normal")
        yield f'<text x="{_NAMES - 8}" y="{y + 12}" text-anchor="end" font-weight="{weight}">{escape(bar.name)}</text>'
        yield f'<rect x="{_NAMES}" y="{y}" width="{length:.1f}" height="{_BAR - 6}" fill="{colour}"/>'
        yield f'<text x="{_NAMES + length + 6:.1f}" y="{y + 12}" font-weight="{weight}">{escape(bar.text)}</text>'


def _panel(panel: Panel) -> Iterable[str]:
    points = [point for line in panel.lines.values() for point in line]
    (left, right), (low, high) = _decades(x for x, _ in points), _decades(y for _, y in points)
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(point: Point) -> str:
        x = _LEFT + width * (math.log10(point[0]) - left) / (right - left)
        y = _TOP + height * (high - math.log10(point[1])) / (high - low)
        return f"{x:.1f},{y:.1f}"

    yield f'<text x="{_LEFT}" y="16" font-weight="bold">{escape(panel.title)}</text>'
    for power in range(left, right + 1):
        x, _, y = place((10.0**power, 10.0**low)).partition(",")
        yield f'<path d="M{x},{_TOP}V{y}" stroke="#ddd"/>'
        yield f'<text x="{x}" y="{float(y) + 14}" text-anchor="middle">{_text(power)}</text>'
    for power in range(low, high + 1):
        x, _, y = place((10.0**left, 10.0**power)).partition(",")
        yield f'<path d="M{x},{y}H{_LEFT + width}" stroke="#ddd"/>'
        yield f'<text x="{float(x) - 6}" y="{float(y) + 4}" text-anchor="end">{_text(power)}</text>'
    yield f'<text x="{_LEFT + width / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(panel.x_title)}</text>'
    yield (
        f'<text transform="translate(14,{_TOP + height / 2}) rotate(-90)" text-anchor="middle">{escape(panel.y_title)}</text>'
    )
    rise = min(right - left, high - low)
    yield (
        f'<path d="M{place((10.0**left, 10.0**low))}L{place((10.0 ** (left + rise), 10.0 ** (low + rise)))}" '
        'stroke="#999" stroke-dasharray="4 4"/>'
    )
    for number, (name, line) in enumerate(panel.lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        yield f'<polyline points="{" ".join(map(place, line))}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        for point in line:
            x, _, y = place(point).partition(",")
            yield f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>'
        y_name = _TOP + 6 + 16 * number
        yield f'<text x="{_WIDTH - _RIGHT + 10}" y="{y_name}" fill="{colour}">{escape(name)}</text>'


def _decades(values: Iterable[float]) -> tuple[int, int]:
    """Return the powers of ten around some positive values, at least one apart."""
    logs = [math.log10(value) for value in values]
    low, high = math.floor(min(logs) + 1e-9), math.ceil(max(logs) - 1e-9)
    return low, max(high, low + 1)


def _text(power: int) -> str:
    names = {-3: "1 m", -6: "1 µ", 0: "1", 3: "1 k", 6: "1 M", 9: "1 G"}
    base = power - power % 3
    return names.get(base, f"1e{base}").replace("1", str(10 ** (power - base)), 1) if base in names else f"1e{power}"
