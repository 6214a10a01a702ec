"""The loop for real: processes, channels, plans; a scripted model in place of one that has to learn first."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from scripted import ScriptedRollout

from m2flow.agentic.app import APP
from m2flow.apps.config import load_config
from m2flow.apps.planning import fixed_plan
from m2flow.apps.training import cluster_of, traced
from m2flow.flow import IterationResult, Runtime
from m2flow.proto.flow.v1 import flow_pb2
from m2flow.worker import Item, launch_run

pytestmark = [pytest.mark.medium, pytest.mark.timeout(60)]


def run(model: Path, run_dir: Path, plan: str, numbers: list[tuple[int, int, int]]) -> IterationResult:
    """One iteration of the recipe about these problems."""
    overrides = [
        f"prompts_per_step={len(numbers)}",
        "samples_per_prompt=2",
        f"minibatch_size={2 * len(numbers)}",
        "tools.targets={calc: 'm2flow.agentic.calculator:calculate', obey: 'tools_that_misbehave:obey'}",
        "tools.timeout_s=2",
        f"plan={plan}",
    ]
    config = load_config(APP.config_class, APP.recipes["calculator"], overrides)
    job = APP.build(config, model, None)
    rollout = ScriptedRollout.group(job.groups["rollout"].config, name="rollout", devices_per_rank=None)
    job = replace(job, groups={**job.groups, "rollout": rollout})
    graph, cluster = traced(job, config, name="agentic"), cluster_of(config)
    fields = [{"prompt": f"({a}+{b})*{c}", "answer": str((a + b) * c)} for a, b, c in numbers]
    with (
        launch_run(cluster, launcher="process", run_dir=run_dir) as session,
        Runtime(graph, fixed_plan(plan, graph, cluster), session) as runtime,
    ):
        runtime.start(1)
        return runtime.run(1, [Item((place,), 1, entry) for place, entry in enumerate(fields)])


def busy(result: IterationResult, stage: str) -> list[tuple[int, int]]:
    """(start, end) of each span in which a stage worked, in nanoseconds."""
    spans = [span for span in result.timeline.spans if span.stage == stage]
    return [(span.start_ns, span.end_ns) for span in spans if span.kind == flow_pb2.SPAN_KIND_BUSY]


def overlap_s(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> float:
    return sum(max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in product(one, other)) / 1e9


@pytest.mark.parametrize("plan", ["temporal", "spatial"])
def test_conversations_overlap_and_none_is_stuck(model, tmp_path: Path, plan: str) -> None:
    result = run(model, tmp_path, plan, [(1, 1, 4), (3, 5, 4), (2, 2, 5), (4, 5, 3), (6, 7, 9)])
    assert not result.tombstones
    groups = [item.fields for item in result.outputs]
    assert [group["prompt"] for group in groups] == ["(1+1)*4", "(3+5)*4", "(2+2)*5", "(4+5)*3", "(6+7)*9"]
    # A tool that sleeps a second says its argument; one that hangs is an error; both conversations go on.
    assert [group["rewards"] for group in groups] == [[0.0] * 2, [1.0] * 2, [0.0] * 2, [0.0] * 2, [0.0] * 2]
    assert "error: took longer than 2" in groups[2]["completions"][0]
    assert [counts["tool/timeouts"] for group in groups for counts in group["counts"]] == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0]
    # While the slow tools are at work, the engine works for the others.
    tools, speaks = busy(result, "tools.call"), busy(result, "rollout.speak")
    assert overlap_s(tools, speaks) > 0.1
    assert max(end - start for start, end in tools) > 1.9e9
    # Turns that came together were one batch: fewer calls of the engine than turns.
    num_turns = sum(counts["agent/turns"] for group in groups for counts in group["counts"])
    assert len(speaks) < num_turns / 2


def test_both_plans_give_the_same(model, tmp_path: Path) -> None:
    outputs = []
    for plan in ("temporal", "spatial"):
        result = run(model, tmp_path / plan, plan, [(3, 5, 4), (4, 5, 3), (6, 7, 9)])
        outputs.append([(item.id, item.fields["completions"], item.fields["rewards"]) for item in result.outputs])
    assert outputs[0] == outputs[1]
    assert outputs[0][0][1][0] == "calc(3+5)\n8\ncalc(8*4)\n32\nA: 32\n"
