"""Inputs as files, the command, pictures, and what a facade import loads."""

import json
import os
import pathlib
import re
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
        ("name: a\nname: b", "key 'name' is there twice"),
        ("name: [a]", "want text"),
        ("source_items: .nan", "whole number"),
        ("source_items: 1e30", "whole number"),
    ],
)
def test_mistakes_are_named_where_they_are(tmp_path: pathlib.Path, text: str, message: str) -> None:
    (tmp_path / "w.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        read_message(tmp_path / "w.yaml", flow_pb2.WorkflowGraph)


def test_a_missing_file_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InputError, match=r"^\S*no\.yaml is not a file, .*: check the path$"):
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


def test_the_command_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("m2flow-sched ")


def test_what_does_not_fit_exits_with_one(case: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(case), "--set", "profile.switches.0.resident_bytes=90GB"]) == 1
    assert "are missing" in capsys.readouterr().out


def test_who_stops_reading_ends_the_command_in_silence(case: pathlib.Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "m2flow.sched.cli", "plan", str(case), "--json"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_what_cannot_be_read_exits_with_two(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path)]) == 2
    assert main(["plan"]) == 2
    assert "give one or the other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("profile.samples.0.seconds=.nan", "seconds is nan, want 0 to"),
        ("profile.samples.0.seconds=-1", "seconds is -1, want 0 to"),
        ("profile.samples.0.seconds=0", "of stage 'rollout.generate' has seconds 0, want"),
        ("profile.samples.0.seconds=1e300", "seconds is 1e.300, want"),
        ("profile.samples.0.items=0", "has items 0, want"),
        ("profile.samples.0.devices=0", "has devices 0, want 1 to"),
        ("profile.samples.0.beside=rollout.generate", "ran beside itself"),
        ("profile.samples.0.layout={data: 2, tensor: 2, pipeline: 1}", "layout 2 x 2 x 1 on 1 devices"),
        ("profile.switches.0.onload_s=-5", "onload_s is -5"),
        ("profile.transfer_latency_s=-1", "transfer_latency_s is -1"),
        ("cluster.nodes.0.devices.0.memory_bytes=-1", "memory_bytes is -1"),
        ("cluster.nodes.0.devices.0.count=0", "no devices"),
        ("cluster.nodes.0.count=1000000", "4,000,000 devices, want at most"),
        ("workflow.source_items=0", "source_items is 0"),
        ("workflow.source_items=1e12", "source_items is 1000000000000, want"),
        ("workflow.stages.1.expansion=-3", "expansion is -3"),
        ("workflow.stages.1.kind=publish", "publishes to group ''"),
        ("workflow.streams.1.rounds=1e9", "rounds, want 1 to"),
        ("workflow.groups.0.name=actor", "lists group 'actor' twice"),
        ("workflow.groups=[{name: rollout, min_devices: 4, max_devices: 2}]", "at most 2 devices and at least 4"),
        ("workflow.name=[", "no YAML value"),
        ("workflow.name=2020-13-45", "no YAML value"),
        ("workflow.stages.1.after=rollout.generate", "form a cycle"),
        ("workflow.stages.1.expansion=1e-200", "items in an iteration, want 1e-06 to"),
        (f"workflow.source_items=1{'0' * 400}", "want a number"),
        ("cluster.nodes.\u00b2.count=1", "is no index"),
        ("profile.switches.0.resident_bytes=1e20", "resident_bytes is 1e.20, want 0 to 1e.15"),
        ("profile.transfer_latency_s=1e15", "transfer_latency_s is 1e.15, want 0 to 1e.09"),
        ("profile.loop_items=[{stage: rollout.generate, passes: [4294967295]}]", "4,294,967,295 times"),
        ("profile.loop_items=[{stage: rollout.generate, passes: [1], relative: [0]}]", "take 0 in all"),
        ("max_chunks=100000000", "max_chunks is 100000000, want at most 1,024"),
        ("max_staleness=100000", "max_staleness is 100000, want at most 64"),
    ],
)
def test_numbers_that_nothing_real_has_exit_with_two(
    case: pathlib.Path, capsys: pytest.CaptureFixture[str], setting: str, message: str
) -> None:
    assert main(["plan", str(case), "--set", setting]) == 2
    answer = capsys.readouterr()
    assert re.search(message, answer.err)
    assert not answer.out


def test_options_and_files_that_cannot_be_used_exit_with_two(
    case: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(case), "--quantum", "-3"]) == 2
    assert main(["plan", str(case), "--svg", str(case / "nowhere" / "plan.svg")]) == 2
    assert main(["plan", "--workflow", "a" * 5000, str(case)]) == 2
    errors = capsys.readouterr().err
    for words in ("--quantum -3, want 0 to 4294967295", "cannot be written", "File name too long"):
        assert words in errors


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("workflow.yaml", b"\xff\xfe\x00"),
        ("workflow.yaml", b"source_items: !!int abc"),
        ("workflow.yaml", b"name: 2020-13-45"),
        ("workflow.yaml", b'name: "\\ud800"'),
        ("workflow.yaml", b"a: " + b"[" * 3000),
        ("workflow.yaml", b"source_items: 1" + b"0" * 5000),
        ("profile.yaml", b"[]"),
        ("profile.yaml", b"0"),
        ("list.json", b"[]"),
        ("deep.json", b"[" * 100_000),
    ],
)
def test_a_file_that_is_no_message_exits_with_two(
    case: pathlib.Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes
) -> None:
    (case / name).write_bytes(content)
    part = "profile" if name.startswith("profile") else "workflow"
    assert main(["plan", str(case), f"--{part}", str(case / name)]) == 2
    assert str(case / name) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: setattr(p, "staleness", 4_000_000_000), "staleness is 4000000000, want at most 64"),
        (lambda p: setattr(p.stages[0], "granularity", 0), "no granularity for stage 'rollout.generate'"),
        (lambda p: p.groups[0].device_ids.append(99), "devices \\[99\\], want ids of its kind"),
        (lambda p: p.groups[0].device_ids.append(p.groups[0].device_ids[0]), "want each device once"),
        (lambda p: setattr(p.groups[0], "num_ranks", 99), "99 ranks"),
    ],
)
def test_a_plan_that_cannot_be_exits_with_two(
    case: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[flow_pb2.ExecutionPlan], None],
    message: str,
) -> None:
    chosen = plan(read_case(case)).plans[0].plan
    change(chosen)
    (case / "chosen.json").write_text(to_json(chosen))
    assert main(["simulate", str(case), "--plan", str(case / "chosen.json")]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_devices_of_one_kind_that_differ_are_noted(case: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixed = "cluster.nodes=[{devices: [{hardware: h100-sxm, count: 2}]}, {devices: [{hardware: l40s, count: 2}]}]"
    assert main(["plan", str(case), "--set", mixed]) == 0
    assert "devices of kind 'cuda' differ" in capsys.readouterr().out


def test_items_that_divide_into_no_chunks_are_noted(case: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    prime = ["--set", "workflow.source_items=127"]
    assert main(["plan", str(case), *prime]) == 0
    assert "127 items divide into no equal chunks" in capsys.readouterr().out
    assert main(["plan", str(case), "--mode", "spatial", *prime]) == 1
    assert "127 items an iteration divide into no equal chunks" in capsys.readouterr().out


def test_a_misspelt_stage_of_the_profile_is_noted(case: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(case), "--set", "profile.samples.0.stage=rollot.generate"]) == 0
    text = capsys.readouterr().out
    assert "samples of stage 'rollot.generate', which the workflow does not have" in text
    assert "did you mean 'rollout.generate'?" in text
    assert "rollout.generate: no samples" in text


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
