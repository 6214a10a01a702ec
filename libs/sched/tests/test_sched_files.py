"""Inputs as files, the command, pictures, and what a facade import loads."""

import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched import InputError, plan, simulate
from m2flow.sched.cli import main
from m2flow.sched.files import fill, override, read_case, read_message, to_json
from m2flow.sched.picture import perfetto, svg

Make = Callable[..., sched_pb2.PlanRequest]

WORKFLOW = """
name: grpo
source_items: 64
stages:
  - {name: prompts, kind: source}
  - {name: rollout.generate, kind: work, group: rollout, expansion: 8}
  - {name: actor.train, kind: work, group: actor, expansion: 0.125}
streams: [[prompts, rollout.generate], [rollout.generate, actor.train]]
groups:
  - {name: rollout, device_kind: cuda, can_offload: true}
  - {name: actor, device_kind: cuda, can_offload: true}
"""
PROFILE = """
samples:
  - {stage: rollout.generate, devices: 1, items: 64, seconds: 40}
  - {stage: actor.train, devices: 1, items: 512, seconds: 30}
switches: [{group: actor, resident_bytes: 20GB}]
"""
CLUSTER = "nodes: [{name: n, count: 2, devices: [{hardware: h100-sxm, count: 4}]}]"


@pytest.fixture
def case(tmp_path: pathlib.Path) -> pathlib.Path:
    for name, text in (("workflow", WORKFLOW), ("profile", PROFILE), ("cluster", CLUSTER)):
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def test_short_forms_become_messages(case: pathlib.Path) -> None:
    request = read_case(case)
    assert request.workflow.stages[1].kind == flow_pb2.STAGE_KIND_WORK
    assert (request.workflow.streams[1].producer, request.workflow.streams[1].consumer) == (
        "rollout.generate",
        "actor.train",
    )
    assert request.profile.switches[0].resident_bytes == 20e9
    device = request.cluster.nodes[0].devices[0]
    assert (device.kind, device.count, device.memory_bytes, device.flops_per_s) == ("cuda", 4, 80e9, 989e12)


def test_json_goes_out_and_comes_back(case: pathlib.Path) -> None:
    request = read_case(case)
    (case / "graph.json").write_text(to_json(request.workflow))
    assert read_message(case / "graph.json", flow_pb2.WorkflowGraph) == request.workflow


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sauce_items: 3", "unknown key 'sauce_items'.*did you mean 'source_items'"),
        ("stages: [{name: a, kind: wrok}]", "'wrok', want one of"),
        ("source_items: many", "want a number"),
        ("source_items: -1", "whole number of 0 or more"),
        ("source_items: 1.5", "whole number"),
        ("groups: [{name: g, can_offload: 3}]", "true or false"),
        ("- 1", "want a WorkflowGraph with keys"),
        ("a: [", "cannot be read"),
    ],
)
def test_mistakes_are_named_where_they_are(tmp_path: pathlib.Path, text: str, message: str) -> None:
    (tmp_path / "w.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        read_message(tmp_path / "w.yaml", flow_pb2.WorkflowGraph)


def test_a_missing_file_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InputError, match=r"no\.yaml is not a file"):
        read_message(tmp_path / "no.yaml", sched_pb2.Profile)


def test_overrides_reach_into_lists(case: pathlib.Path) -> None:
    request = read_case(case)
    override(request, "cluster.nodes.0.devices.0.memory_bytes=141GB")
    override(request, "workflow.source_items=128")
    assert request.cluster.nodes[0].devices[0].memory_bytes == 141e9
    assert request.workflow.source_items == 128
    for wrong, message in (
        ("mode", "has no '='"),
        ("cluster.nodes.7.count=1", "no index"),
        ("x.y=1", "no message 'x'"),
    ):
        with pytest.raises(InputError, match=message):
            override(request, wrong)


def test_a_name_alone_is_not_a_message() -> None:
    with pytest.raises(InputError, match="want a Profile"):
        fill(sched_pb2.Profile(), "fast", "profile")


def test_plan_prints_the_best_and_exits_well(case: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(case), "--mode", "temporal"]) == 0
    assert capsys.readouterr().out.startswith("1. 8.75 s  temporal  (rollout.generate ; actor.train)")


def test_json_for_machines_is_the_message(case: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(case), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["plan"]["mode"] == "temporal"


def test_explain_draws_what_it_explains(case: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, trace = case / "plan.svg", case / "plan.json"
    assert main(["explain", str(case), "--svg", str(picture), "--perfetto", str(trace)]) == 0
    assert capsys.readouterr().out.startswith("Temporal: (rollout.generate ; actor.train)")
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert {e["name"] for e in json.loads(trace.read_text())["traceEvents"]} >= {"rollout.generate", "actor.train"}


def test_a_plan_can_be_simulated_again(case: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = plan(read_case(case)).plans[0].plan
    (case / "chosen.json").write_text(to_json(chosen))
    assert main(["simulate", str(case), "--plan", str(case / "chosen.json")]) == 0
    assert main(["simulate", str(case)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second == "8.75 s an iteration, 2 spans"


def test_compare_takes_two_cases(case: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(case), str(case)]) == 0
    assert "1 times as fast" in capsys.readouterr().out


def test_what_does_not_fit_exits_with_one(case: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(case), "--set", "profile.switches.0.resident_bytes=90GB"]) == 1
    assert "are missing" in capsys.readouterr().out


def test_what_cannot_be_read_exits_with_two(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path)]) == 2
    assert main(["plan"]) == 2
    assert "give one or the other" in capsys.readouterr().err


def test_a_picture_has_a_row_for_each_set_of_devices(make_request: Make) -> None:
    request = make_request(3, mode="spatial")
    best = plan(request).plans[0].plan
    timeline = simulate(sched_pb2.SimulateRequest(request=request, plan=best)).timeline
    drawing = ElementTree.fromstring(svg(timeline, title="a < b"))
    texts = [t.text or "" for t in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"rollout on 0", "reward on 1", "actor on 2", "a < b"} <= set(texts)
    complete = [e for e in json.loads(perfetto(timeline))["traceEvents"] if e["ph"] == "X"]
    assert len(complete) == len(timeline.spans)
    assert max(e["ts"] + e["dur"] for e in complete) == pytest.approx(max(s.end_ns for s in timeline.spans) / 1e3)


@pytest.mark.medium
def test_the_facade_loads_nothing_heavy() -> None:
    code = "import sys, m2flow.sched; print([m for m in ('torch', 'ray', 'grpc', 'scipy') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50)
    assert found.stdout.strip() == "[]"
