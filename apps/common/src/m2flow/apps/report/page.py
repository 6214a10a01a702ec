"""The page: sections of the run's data, with style and script inside it and nothing loaded from elsewhere."""

from base64 import b64encode
from html import escape
from importlib import resources

from m2flow.apps.atomic import replace_file
from m2flow.apps.metrics import spoken
from m2flow.apps.report.charts import line_chart, stacked_bars, table
from m2flow.apps.report.data import RunData, load_run
from m2flow.apps.report.timeline import idle_table, timeline_charts
from m2flow.apps.run_directory import RunDirectory

__all__ = ["render_page", "write_report"]


def write_report(run: RunDirectory) -> None:
    """Makes report.html from the run's files. A failed write leaves the old page."""
    replace_file(run.report, render_page(load_run(run)))


def render_page(data: RunData) -> str:
    """Returns the page as HTML. A part of the run that has no data yet says so in its section."""
    sections = [
        ("summary", "Summary", _summary(data)),
        ("reward-curve", "Reward", _reward(data)),
        ("evaluation", "Held out", _evaluation(data)),
        *([("films", "The policy at work", _films(data))] if data.films else []),
        ("stage-times", "Seconds per stage", _stage_times(data)),
        ("prediction", "Predicted and measured seconds", _prediction(data)),
        ("timeline", "Timeline", timeline_charts(data.spans)),
        ("idle-causes", "Where the time of each device went", idle_table(data.device_s)),
        ("plan", "Plan", _plan(data)),
        ("samples", "Sample rollouts", _samples(data)),
        ("config", "Configuration", f"<pre>{escape(data.config)}</pre>"),
    ]
    body = "".join(
        f'<section id="{key}"><h2>{title}</h2>{content or _NOTHING}</section>' for key, title, content in sections
    )
    style, script = _asset("report.css"), _asset("report.js")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(data.name)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style></head>'
        f"<body><h1>{escape(data.name)}</h1>{body}<script>{script}</script></body></html>\n"
    )


_NOTHING = "<p>Nothing recorded.</p>"


def _asset(name: str) -> str:
    return resources.files("m2flow.apps.report").joinpath(name).read_text(encoding="utf-8")


def _summary(data: RunData) -> str:
    rewards, seconds = data.series("critic/score/mean"), data.series("timing_s/step")
    rows = []
    if rewards:
        last = [value for _, value in rewards[-5:]]
        rows.append(("steps", f"{rewards[-1][0]:g}"))
        rows.append(("mean reward, first step", f"{rewards[0][1]:.3f}"))
        rows.append((f"mean reward, last {len(last)} steps", f"{sum(last) / len(last):.3f}"))
    for name, values in data.all_series("eval/").items():
        rows.append((f"held-out {spoken(name)}, before", f"{values[0][1]:.3f}"))
        rows.append((f"held-out {spoken(name)}, after", f"{values[-1][1]:.3f}"))
    if seconds:
        rows.append(("seconds per step, mean", f"{sum(value for _, value in seconds) / len(seconds):.2f}"))
    for name, values in data.all_series("throughput/").items():
        rows.append((f"{spoken(name)}, mean", f"{sum(value for _, value in values) / len(values):.0f}"))
    return table(("", ""), rows)


def _reward(data: RunData) -> str:
    points = data.series("critic/score/mean")
    return line_chart({"mean reward": points}, x_label="step", y_label="reward") if points else ""


def _evaluation(data: RunData) -> str:
    series = {spoken(name): points for name, points in data.all_series("eval/").items()}
    shares = all(0 <= value <= 1 for points in series.values() for _, value in points)
    return line_chart(series, x_label="step", y_label="held out", y_max=1.0 if shares else None) if series else ""


def _films(data: RunData) -> str:
    """The first and the last film, inside the page."""
    steps = sorted(data.films)
    return "".join(_film(step, data.films[step]) for step in dict.fromkeys((steps[0], steps[-1])))


def _film(step: int, film: bytes) -> str:
    address = f"data:image/webp;base64,{b64encode(film).decode('ascii')}"
    return f'<figure><img src="{address}" alt="the policy at step {step}"><figcaption>Step {step}</figcaption></figure>'


def _stage_times(data: RunData) -> str:
    names = [name for name in data.names("timing_s/") if name not in ("timing_s/step", "timing_s/evaluation")]
    series = {name.removeprefix("timing_s/"): dict(data.series(name)) for name in names}
    series = {name: values for name, values in series.items() if values}
    return stacked_bars(series, x_label="step", y_label="busy seconds") if series else ""


def _prediction(data: RunData) -> str:
    names = {"measured": "plan/measured_s", "predicted": "plan/predicted_s"}
    series = {label: points for label, name in names.items() if (points := data.series(name))}
    if not series:
        return ""
    chart = line_chart(series, x_label="step", y_label="seconds")
    return chart if "predicted" in series else chart + "<p>This plan came without a prediction.</p>"


def _plan(data: RunData) -> str:
    if not data.plan:
        return ""
    rows = []
    groups = data.plan.get("groups", [])
    assert isinstance(groups, list)
    for group in groups:
        devices = ", ".join(str(device) for device in group.get("device_ids", group.get("deviceIds", [])))
        rows.append((str(group.get("group", "")), devices))
    explanation = f"<pre>{escape(data.explanation)}</pre>" if data.explanation else ""
    mode = escape(str(data.plan.get("mode", "")))
    return f"<p>Mode: <b>{mode}</b></p>{table(('worker group', 'devices'), rows)}{explanation}"


def _samples(data: RunData) -> str:
    if not data.samples:
        return ""
    steps = sorted(data.samples)
    parts = []
    for step in dict.fromkeys((steps[0], steps[len(steps) // 2], steps[-1])):
        shown = data.samples[step][:8]
        columns = list(dict.fromkeys(name for sample in shown for name in sample))
        rows = [tuple(str(sample.get(column, "")) for column in columns) for sample in shown]
        header = [column.replace("_", " ") for column in columns]
        parts.append(f"<h3>Step {step}</h3>{table(header, rows)}")
    return "".join(parts)
