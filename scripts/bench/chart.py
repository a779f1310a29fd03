"""Lines on two logarithmic axes, and bars, as SVG; and how a cost grows, as an exponent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from statistics import median

Point = tuple[float, float]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 400, 80, 170, 40, 56
COLORS = ("#1b6ca8", "#c8553d", "#3f7d20", "#7d3c98", "#8a6d00", "#555555")


def exponent(points: Sequence[Point]) -> float | None:
    """The slope of the line through all points above 0, on logarithmic axes: 1 where the cost is linear. None where
    fewer than three are."""
    above = [point for point in points if min(point) > 0]
    if len(above) < 3:
        return None
    xs, ys = [math.log(x) for x, _ in above], [math.log(y) for _, y in above]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    across = sum((x - x_mean) ** 2 for x in xs)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / across


def svg(title: str, x_label: str, y_label: str, series: Mapping[str, Sequence[Point]]) -> str:
    """One line for each series. Points that are not above 0 have no place on such axes, and are left out."""
    lines = {name: sorted(p for p in points if min(p) > 0) for name, points in series.items()}
    lines = {name: points for name, points in lines.items() if points}
    everything = [point for points in lines.values() for point in points]
    (x_low, x_high), (y_low, y_high) = (_decades([point[axis] for point in everything]) for axis in (0, 1))

    def place(point: Point) -> tuple[float, float]:
        across = (math.log10(point[0]) - x_low) / (x_high - x_low)
        up = (math.log10(point[1]) - y_low) / (y_high - y_low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 14}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text x="{LEFT}" y="{TOP - 4}" font-size="11" fill="#555">{escape(y_label)}</text>',
    ]
    for decade in range(x_low, x_high + 1):
        x, _ = place((10.0**decade, 10.0**y_low))
        parts.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{10.0**decade:g}</text>')
    for decade in range(y_low, y_high + 1):
        _, y = place((10.0**x_low, 10.0**decade))
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**decade:g}</text>')
    for number, (name, points) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        places = [place(point) for point in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places]
        key = TOP + 14 + 18 * number
        parts.append(f'<text x="{WIDTH - RIGHT + 12}" y="{key}" fill="{color}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


BAR, LABELS = 22, 250
"""Height of a bar with its gap, and width of the names."""


def bars(title: str, x_label: str, rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    """A bar for the median of each row, with a line from its least to its most; from 0, or from the least below it."""
    low = min(0.0, *(min(samples) for _, samples in rows))
    high = max(0.0, *(max(samples) for _, samples in rows))
    height = TOP + BAR * len(rows) + 30

    def x(value: float) -> float:
        return LABELS + (value - low) / ((high - low) or 1.0) * (WIDTH - LABELS - 90)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="12" y="22" font-size="14">{escape(title)}</text>',
        f'<text x="{LABELS}" y="{height - 10}" font-size="11" fill="#555">{escape(x_label)}</text>',
    ]
    for number, (name, samples) in enumerate(rows):
        y, middle = TOP + BAR * number, median(samples)
        color = COLORS[0] if name.startswith("train") else COLORS[5]
        start, end = sorted((x(0.0), x(middle)))
        box = f'x="{start:.1f}" y="{y + 2}" width="{max(end - start, 0.5):.1f}" height="{BAR - 7}"'
        parts += [
            f'<text x="{LABELS - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>',
            f'<rect {box} fill="{color}"/>',
            f'<path d="M{x(min(samples)):.1f} {y + 9}H{x(max(samples)):.1f}" stroke="#222"/>',
            f'<text x="{x(max(samples)) + 6:.1f}" y="{y + 13}">{middle:.3g}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten around all values; at least one apart."""
    low = math.floor(math.log10(min(values)))
    return low, max(math.ceil(math.log10(max(values))), low + 1)
