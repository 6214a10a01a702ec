"""The timeline part of the report: spans on tracks, one chart an iteration, and where each device's time went."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from m2flow.apps.report.charts import color_class, legend, span_chart, table
from m2flow.apps.report.data import TraceSpan

__all__ = ["idle_table", "timeline_charts"]

_MAX_CHARTS = 8


def timeline_charts(spans: Sequence[TraceSpan]) -> str:
    """Returns a chart for each of some iterations, the newest shown; the page's script shows another on demand."""
    by_iteration: dict[int, list[TraceSpan]] = defaultdict(list)
    for span in spans:
        by_iteration[span.iteration].append(span)
    if not by_iteration:
        return ""
    chosen = _spread(sorted(by_iteration))
    stages = list(dict.fromkeys(span.name for span in spans if span.kind == "busy"))
    options = "".join(f'<option value="{n}"{" selected" if n == chosen[-1] else ""}>{n}</option>' for n in chosen)
    charts = "".join(_chart(n, by_iteration[n], stages, shown=n == chosen[-1]) for n in chosen)
    choice = f'<label>Iteration <select id="iteration">{options}</select></label>'
    waiting = '<span class="key"><i class="wait"></i>waiting or moving memory</span>'
    return f"{choice}{charts}{legend(stages).replace('</p>', waiting + '</p>')}"


def idle_table(device_s: Mapping[str, Mapping[str, float]]) -> str:
    """Returns a table: for each device its seconds by cause, and their share of its time."""
    if not device_s:
        return ""
    causes = list(next(iter(device_s.values())))
    rows = [
        [device, *(f"{value:.2f} s ({value / max(sum(seconds.values()), 1e-9):.0%})" for value in seconds.values())]
        for device, seconds in device_s.items()
    ]
    return table(["device", *causes], rows)


def _spread(iterations: Sequence[int]) -> list[int]:
    if len(iterations) <= _MAX_CHARTS:
        return list(iterations)
    early, late = _MAX_CHARTS // 2, _MAX_CHARTS - _MAX_CHARTS // 2
    return [*iterations[:early], *iterations[-late:]]


def _chart(iteration: int, spans: Sequence[TraceSpan], stages: Sequence[str], *, shown: bool) -> str:
    start, end = min(span.start_s for span in spans), max(span.end_s for span in spans)
    tracks: dict[str, list[tuple[float, float, str, str]]] = {track: [] for track in sorted({s.track for s in spans})}
    for span in spans:
        busy = span.kind == "busy"
        css = color_class(stages.index(span.name)) if busy else "wait"
        tip = f"{span.name.replace('_', ' ')}, {span.end_s - span.start_s:.3f} s"
        tracks[span.track].append((span.start_s, span.end_s, css, tip))
    chart = span_chart(tracks, start=start, end=end)
    return f'<div class="iteration" data-iteration="{iteration}"{"" if shown else " hidden"}>{chart}</div>'
