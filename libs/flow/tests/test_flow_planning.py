"""Plans as files: what is written is read; what is not a plan is refused with its place."""

import pytest

from m2flow.flow import PlanError, load_plan, save_plan
from m2flow.flow.modes import spatial_plan


@pytest.mark.parametrize("name", ["plan.yaml", "plan.json"])
def test_a_plan_round_trips(graph, cluster, tmp_path, name):
    plan = spatial_plan(graph, cluster)
    plan.edges.add(producer="rollout.generate", consumer="reward.score", capacity=64)
    plan.prediction.peak_bytes[3] = 1 << 34
    save_plan(plan, tmp_path / name)
    assert load_plan(tmp_path / name) == plan


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1, 2]", "got list, want the fields of a plan"),
        ("mode: [", "not YAML"),
        ("moed: spatial", "unknown field 'moed': did you mean 'mode'"),
        ("stages: [{stage: a, granularty: 3}]", r"stages\[0\]\.unknown field 'granularty': did you mean 'granularity'"),
        ("staleness: few", "few"),
        (b"\xff\xfe", "not YAML"),
        ("[" * 5000, "not YAML"),
    ],
)
def test_what_is_not_a_plan_is_refused(tmp_path, text, reason):
    path = tmp_path / "plan.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PlanError, match=reason) as caught:
        load_plan(path)
    assert str(path) in str(caught.value)
