"""Charts: SVG plots and heat maps of a report's page."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 60, 30, 14, 52
ROW_HEIGHT = 22  # Of a heat map, down to a quarter where there are many rows.
HEAT_MAX = 400  # Height of a heat map.
MARKS_SHOWN = 60  # More vertical lines hide the data.

Points = Sequence[tuple[float, float]]


class Mark(NamedTuple):
    """A vertical line at a value of the horizontal axis, with its meaning."""

    at: float
    title: str
    color: str = "#dc2626"


def plot(
    title: str,
    lines: Mapping[str, Points],
    unit: str,
    *,
    is_log: bool = False,
    marks: Sequence[Mark] = (),
    end: float = 0.0,
) -> str:
    """Return an SVG plot of several lines, with vertical lines at the marks that are within its range.

    `end`: the least value at the end of the horizontal axis.
    """
    points = [point for line in lines.values() for point in line]
    if not points:
        return f"<h2>{html.escape(title)}</h2><p>no data"
    low = min(x for x, _ in points)
    high = max(x for x, _ in points)
    top = max(y for _, y in points) or 1.0
    low, high = min(low, *(mark.at for mark in marks)) if is_log and marks else low, max(high, end)
    ticks = _powers(low, high) if is_log else round_steps(high)
    if is_log:
        low, high = min(low, ticks[0]), max(high, ticks[-1], low * 1.01)
    else:
        low, high = 0.0, high or 1.0

    def across(x: float) -> float:
        part = math.log(x / low) / math.log(high / low) if is_log else (x - low) / (high - low)
        return LEFT + part * (WIDTH - LEFT - RIGHT)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    parts = [_head(title, HEIGHT)]
    for y in round_steps(top):
        parts.append(f"<line class=grid x1={LEFT} x2={WIDTH - RIGHT} y1={up(y):.1f} y2={up(y):.1f} />")
        parts.append(f"<text x={LEFT - 6} y={up(y) + 5:.1f} text-anchor=end>{short_number(y)}</text>")
    for x in ticks:
        parts.append(f"<line class=grid x1={across(x):.1f} x2={across(x):.1f} y1={TOP} y2={HEIGHT - BOTTOM} />")
        parts.append(f"<text x={across(x):.1f} y={HEIGHT - BOTTOM + 26} text-anchor=middle>{short_number(x)}</text>")
    parts.append(f"<text x={WIDTH - RIGHT} y={HEIGHT - 5} text-anchor=end>{unit}</text>")
    parts.append(f"<line class=axis x1={LEFT} x2={WIDTH - RIGHT} y1={HEIGHT - BOTTOM} y2={HEIGHT - BOTTOM} />")
    shown = [mark for mark in marks if low <= mark.at <= high][:MARKS_SHOWN]
    parts += [_mark(mark, across(mark.at), HEIGHT - BOTTOM) for mark in shown]
    for at, line in enumerate(lines.values()):
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line)
        color = COLORS[at % len(COLORS)]
        parts.append(f"<polyline fill=none stroke={color} stroke-width=1.6 points='{path}' />")
    return "".join(parts) + "</svg>" + _legend(lines)


def _legend(names: Iterable[str]) -> str:
    """Return the names of the lines with their colors."""
    parts = (
        f"<span><i style='background:{COLORS[at % len(COLORS)]}'></i>{html.escape(name)}</span>"
        for at, name in enumerate(names)
    )
    return f"<div class=key>{''.join(parts)}</div>"


def _head(title: str, height: float) -> str:
    """Return the title of a figure and the start of its SVG element."""
    text = html.escape(title)
    return f"<h2>{text}</h2><svg viewBox='0 0 {WIDTH} {height:.0f}' role=img aria-label='{text}'>"


def _mark(mark: Mark, x: float, bottom: float) -> str:
    return (
        f"<line class=mark stroke={mark.color} x1={x:.1f} x2={x:.1f} y1={TOP} y2={bottom:.1f}>"
        f"<title>{html.escape(mark.title)}</title></line>"
    )


def heat_map(
    title: str, rows: Mapping[str, Sequence[float]], seconds: float, unit: str, marks: Sequence[Mark] = ()
) -> str:
    """Return an SVG heat map: a row for each name, a cell for each of its values, `seconds` in all from left to right."""
    top = max((value for values in rows.values() for value in values), default=0.0)
    if top <= 0 or seconds <= 0:
        return f"<h2>{html.escape(title)}</h2><p>no data"
    high = min(ROW_HEIGHT, max(ROW_HEIGHT / 4, HEAT_MAX / len(rows)))
    bottom = TOP + high * len(rows)
    width = WIDTH - LEFT - RIGHT
    parts = [_head(title, bottom + BOTTOM)]
    every = math.ceil(len(rows) * 20 / (high * len(rows)))  # Names that do not overlap.
    for at, (name, values) in enumerate(rows.items()):
        y, step = TOP + at * high, width / max(1, len(values))
        if at % every == 0:
            parts.append(f"<text x={LEFT - 6} y={y + high / 2 + 5:.1f} text-anchor=end>{html.escape(name)}</text>")
        for place, value in enumerate(values):
            if value > 0:
                parts.append(
                    f"<rect x={LEFT + place * step:.1f} y={y:.1f} width={step + 0.3:.1f} height={high - 1:.1f} "
                    f"fill={COLORS[0]} fill-opacity={max(0.06, value / top):.2f} />"
                )
    parts += [
        f"<text x={LEFT + x / seconds * width:.1f} y={bottom + 24:.1f} text-anchor=middle>{short_number(x)}</text>"
        for x in round_steps(seconds)
    ]
    shown = [mark for mark in marks if 0 <= mark.at <= seconds][:MARKS_SHOWN]
    parts += [_mark(mark, LEFT + mark.at / seconds * width, bottom) for mark in shown]
    parts.append(f"<text x={WIDTH - RIGHT} y={bottom + BOTTOM - 6:.1f} text-anchor=end>s</text></svg>")
    shades = "".join(f"<i style='background:{COLORS[0]};opacity:{part}'></i>" for part in (0.1, 0.4, 0.7, 1))
    parts.append(f"<div class=key>{shades} up to {short_number(round(top, 1))} {html.escape(unit)}</div>")
    return "".join(parts)


def _powers(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]


def round_steps(high: float) -> list[float]:
    """Return about five round numbers from 0 on."""
    raw = high / 5
    size = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw)
    return [step * at for at in range(int(high / step + 1e-9) + 1)]


def short_number(value: float) -> str:
    """Return a number with a suffix for thousands and millions."""
    if value >= 1e6:
        return f"{value / 1e6:.4g}M"
    if value >= 1e4:
        return f"{value / 1e3:.4g}k"
    return f"{value:g}"
