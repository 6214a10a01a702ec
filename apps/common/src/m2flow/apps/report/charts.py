"""Charts as inline SVG text (lines over steps, stacked bars a step, spans on tracks), and tables. No script draws."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

__all__ = ["Points", "color_class", "legend", "line_chart", "span_chart", "stacked_bars", "table"]

Points = Sequence[tuple[float, float]]
Bar = tuple[float, float, str, str]  # start, end, colour class, tooltip

_WIDTH, _HEIGHT = 760, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 12, 34
_NUM_COLORS = 8


def color_class(index: int) -> str:
    """Returns the CSS class of the colour for series number `index`."""
    return f"c{index % _NUM_COLORS}"


def legend(names: Sequence[str]) -> str:
    """Returns the names beside their colours."""
    keys = (f'<span class="key"><i class="{color_class(i)}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return f'<p class="legend">{"".join(keys)}</p>'


def line_chart(series: Mapping[str, Points], *, x_label: str, y_label: str, y_max: float | None = None) -> str:
    """Returns a chart of one line a series, each point with its numbers as a tooltip, and a legend if there are two."""
    points = [point for line in series.values() for point in line]
    x_ticks = _ticks(min(x for x, _ in points), max(x for x, _ in points), whole=True)
    top = max(y for _, y in points) if y_max is None else y_max
    y_ticks = _ticks(min(0.0, *(y for _, y in points)), top)
    x, y = _scales(x_ticks, y_ticks)
    parts = [_axes(x_ticks, y_ticks, x, y, x_label, y_label)]
    for index, (name, line) in enumerate(series.items()):
        css = color_class(index)
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line)
        parts.append(f'<polyline class="line {css}" points="{path}"/>')
        for a, b in line:
            tip = escape(f"{name}, {x_label} {a:g}: {b:.4g}")
            parts.append(f'<circle class="{css}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3"><title>{tip}</title></circle>')
    return _svg(_HEIGHT, parts) + (legend(list(series)) if len(series) > 1 else "")


def stacked_bars(series: Mapping[str, Mapping[float, float]], *, x_label: str, y_label: str) -> str:
    """Returns one bar a position, its parts the series' values there, bottom first."""
    positions = sorted({at for values in series.values() for at in values})
    totals = {at: sum(values.get(at, 0.0) for values in series.values()) for at in positions}
    x_ticks = _ticks(positions[0] - 0.5, positions[-1] + 0.5, whole=True)
    y_ticks = _ticks(0.0, max(totals.values()))
    x, y = _scales([min(x_ticks[0], positions[0] - 0.5), *x_ticks, max(x_ticks[-1], positions[-1] + 0.5)], y_ticks)
    parts = [_axes(x_ticks, y_ticks, x, y, x_label, y_label)]
    half = max(1.0, min(18.0, (x(positions[0] + 1) - x(positions[0])) * 0.4))
    base = dict.fromkeys(positions, 0.0)
    for index, (name, values) in enumerate(series.items()):
        for at, value in values.items():
            low, high = base[at], base[at] + value
            base[at] = high
            tip = escape(f"{name}, {x_label} {at:g}: {value:.3g}")
            parts.append(
                f'<rect class="{color_class(index)}" x="{x(at) - half:.1f}" y="{y(high):.1f}" width="{2 * half:.1f}"'
                f' height="{max(y(low) - y(high), 0):.1f}"><title>{tip}</title></rect>'
            )
    return _svg(_HEIGHT, parts) + legend(list(series))


def span_chart(tracks: Mapping[str, Sequence[Bar]], *, start: float, end: float) -> str:
    """Returns one row a track with its bars between `start` and `end` seconds, which the axis counts from 0."""
    row, label_width = 26, 230
    height = row * len(tracks) + _TOP + _BOTTOM
    ticks = _ticks(0.0, max(end - start, 1e-6))
    scale = (_WIDTH - label_width - _RIGHT) / max(ticks[-1], end - start)
    parts = []
    for tick in ticks:
        at = label_width + tick * scale
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{height - _BOTTOM}"/>')
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{height - _BOTTOM + 14}" text-anchor="middle">{tick:g} s</text>'
        )
    for index, (name, bars) in enumerate(tracks.items()):
        top = _TOP + index * row
        parts.append(f'<text class="tick" x="{label_width - 8}" y="{top + 17}" text-anchor="end">{escape(name)}</text>')
        for begin, finish, css, tip in bars:
            left, width = label_width + (begin - start) * scale, max((finish - begin) * scale, 0.6)
            parts.append(
                f'<rect class="{css}" x="{left:.1f}" y="{top + 3}" width="{width:.1f}" height="{row - 6}">'
                f"<title>{escape(tip)}</title></rect>"
            )
    return _svg(height, parts)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns the rows as a table, under the header unless all of it is empty; nothing where there are no rows."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header) if any(header) else ""
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>" if rows else ""


def _svg(height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(parts)}</svg>'


def _scales(x_ticks: Sequence[float], y_ticks: Sequence[float]) -> tuple[Callable[[float], float], ...]:
    x_span, y_span = (x_ticks[-1] - x_ticks[0]) or 1.0, (y_ticks[-1] - y_ticks[0]) or 1.0
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    return (
        lambda value: _LEFT + (value - x_ticks[0]) / x_span * width,
        lambda value: _TOP + height - (value - y_ticks[0]) / y_span * height,
    )


def _axes(
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x: Callable[[float], float],
    y: Callable[[float], float],
    x_label: str,
    y_label: str,
) -> str:
    parts = []
    for tick in y_ticks:
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        parts.append(f'<text class="tick" x="{x(tick):.1f}" y="{_HEIGHT - 18}" text-anchor="middle">{tick:g}</text>')
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(f'<text class="axis" x="{_WIDTH / 2}" y="{_HEIGHT - 3}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text class="axis" x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 {middle})">'
        f"{escape(y_label)}</text>"
    )
    return "".join(parts)


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    span = (high - low) or 1.0
    raw = span / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    if whole:
        step = max(1.0, round(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 10) for index in range(first, max(last, first + 1) + 1)]
