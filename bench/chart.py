"""Draws lines over logarithmic axes as SVG."""

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


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A chart of its own: lines of positive points by their names."""

    title: str
    x_title: str
    y_title: str
    lines: Mapping[str, Sequence[Point]]


def draw(panels: Sequence[Panel], columns: int = 2) -> str:
    """Return an SVG of charts side by side. A dashed line in each rises as its x does: whatever is steeper grows faster."""
    rows = -(-len(panels) // columns)
    size = f'width="{columns * _WIDTH}" height="{rows * _HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        parts += [f'<g transform="translate({column * _WIDTH},{row * _HEIGHT})">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


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
