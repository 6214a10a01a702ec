"""The report: every part is there, all inside one file, and what is in the data is escaped."""

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from m2flow.apps.atomic import replace_file
from m2flow.apps.config import TrainingConfig
from m2flow.apps.errors import RunDirectoryError
from m2flow.apps.report import load_run, render_page, write_report
from m2flow.apps.report.charts import line_chart, stacked_bars
from m2flow.apps.report.timeline import idle_table
from m2flow.apps.run_directory import RunDirectory
from m2flow.apps.testing import example_run
from m2flow.apps.yaml_tree import dump_yaml

PARTS = ["reward-curve", "evaluation", "stage-times", "prediction", "timeline", "idle-causes", "plan", "samples"]


class _Page(HTMLParser):
    """Collects section ids, the tags in each, and every address that would be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: dict[str, list[str]] = {}
        self.addresses: list[str] = []
        self._section = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "section":
            self._section = str(values["id"])
            self.sections[self._section] = []
        elif self._section:
            self.sections[self._section].append(tag)
        self.addresses += [str(values[name]) for name in ("src", "href") if name in values]


def test_every_part_is_there_and_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    run = example_run(tmp_path / "run")
    write_report(run)
    text = run.report.read_text()
    page = _Page(text)
    assert set(PARTS) <= set(page.sections)
    for part in ("reward-curve", "evaluation", "prediction"):
        assert {"svg", "polyline", "circle"} <= set(page.sections[part])
    assert page.sections["stage-times"].count("rect") == 24
    assert page.sections["timeline"].count("svg") == 8
    assert page.addresses == []
    assert "http" not in re.sub(r"<pre>.*?</pre>", "", text, flags=re.DOTALL)


def test_the_summary_has_the_numbers(tmp_path: Path) -> None:
    text = render_page(load_run(example_run(tmp_path / "run", num_steps=10)))
    assert "<td>mean reward, last 5 steps</td><td>0.760</td>" in text
    assert "<td>held-out greedy accuracy, before</td><td>0.130</td>" in text
    assert "<td>held-out greedy accuracy, after</td><td>0.740</td>" in text


def test_the_first_and_the_last_film_are_inside_the_page(tmp_path: Path) -> None:
    run = example_run(tmp_path / "run")
    assert 'id="films"' not in render_page(load_run(run))
    for step, film in ((0, b"first"), (6, b"middle"), (12, b"last")):
        run.write_film(step, film)
    page = _Page(render_page(load_run(run)))
    assert page.addresses == [f"data:image/webp;base64,{word}" for word in ("Zmlyc3Q=", "bGFzdA==")]


def test_what_the_data_says_is_escaped(tmp_path: Path) -> None:
    run = example_run(tmp_path / "run")
    run.write_samples(12, [{"prompt": "<script>alert(1)</script>", "completion": "&", "answer": "", "reward": 0.0}])
    text = render_page(load_run(run))
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "&lt;because the stages overlap&gt;" in text


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    run = RunDirectory.create("example", root="unused", directory=str(tmp_path / "run"))
    replace_file(run.config, dump_yaml(TrainingConfig()))
    page = _Page(render_page(load_run(run)))
    assert set(PARTS) <= set(page.sections)


def test_a_broken_timeline_is_named_and_the_old_page_stays(tmp_path: Path) -> None:
    run = example_run(tmp_path / "run")
    write_report(run)
    old = run.report.read_text()
    run.timeline.write_text("{")
    with pytest.raises(RunDirectoryError, match=r"timeline\.json: not JSON"):
        write_report(run)
    assert run.report.read_text() == old


def test_a_line_chart_puts_its_points_where_its_ticks_say() -> None:
    svg = line_chart({"reward": [(0, 0.0), (5, 0.5), (10, 1.0)]}, x_label="step", y_label="reward")
    root = ElementTree.fromstring(svg)
    ticks = {text.text: text.attrib for text in root.iter("text")}
    circles = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter("circle")]
    assert circles[0][0] == pytest.approx(float(ticks["0"]["x"]), abs=0.1) or circles[0][0] == pytest.approx(58.0)
    assert circles[2][0] == pytest.approx(float(ticks["10"]["x"]), abs=0.1)
    assert circles[1][1] == pytest.approx((circles[0][1] + circles[2][1]) / 2, abs=0.1)
    assert circles[2][1] == pytest.approx(float(ticks["1"]["y"]) - 4, abs=0.1)


def test_stacked_bars_stand_on_each_other() -> None:
    svg = stacked_bars({"a": {1: 2.0, 2: 1.0}, "b": {1: 2.0, 2: 3.0}}, x_label="step", y_label="seconds")
    root = ElementTree.fromstring(svg[: svg.index("</svg>") + 6])
    first, _, third, _ = [(float(r.attrib["y"]), float(r.attrib["height"])) for r in root.iter("rect")]
    assert third[0] + third[1] == pytest.approx(first[0], abs=0.11)
    assert third[1] == pytest.approx(first[1], abs=0.11)


def test_idle_time_is_put_to_its_causes() -> None:
    table = idle_table({"0": {"busy": 2.0, "waiting for input": 2.0}, "1": {"busy": 4.0, "waiting for input": 0.0}})
    assert "<tr><th>device</th><th>busy</th><th>waiting for input</th></tr>" in table
    assert "<tr><td>0</td><td>2.00 s (50%)</td><td>2.00 s (50%)</td></tr>" in table
    assert "<tr><td>1</td><td>4.00 s (100%)</td><td>0.00 s (0%)</td></tr>" in table
