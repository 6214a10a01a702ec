"""The recipe as it is traced, what `check` says, and the learner's and the policy's arithmetic by hand."""

import ctypes.util
import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from m2flow.apps.config import load_config
from m2flow.apps.errors import ConfigError
from m2flow.apps.training import traced
from m2flow.embodied import problems, recipe
from m2flow.embodied.app import APP
from m2flow.embodied.cli import main
from m2flow.embodied.episodes import batched, lane_item
from m2flow.embodied.film import webp
from m2flow.embodied.learner import LearnerWorker
from m2flow.embodied.outcome import measure
from m2flow.embodied.policy import GaussianPolicy, PolicyShape, load_policy, save_policy
from m2flow.proto.flow.v1 import flow_pb2
from m2flow.worker import Item


def test_the_recipe_is_short() -> None:
    assert len(inspect.getsource(recipe).splitlines()) < 100


@pytest.mark.parametrize("name", sorted(APP.recipes))
def test_every_shipped_recipe_traces_to_a_loop(name: str) -> None:
    config = load_config(APP.config_class, APP.recipes[name])
    graph = traced(APP.build(config, Path("none"), None), config, name="ppo").to_proto()
    (back,) = [stream for stream in graph.streams if stream.feedback]
    assert back.consumer == "policy.act"
    kinds = {stage.name: stage.kind for stage in graph.stages}
    assert kinds["env.step"] == kinds["learner.train"] == flow_pb2.STAGE_KIND_WORK


def test_lanes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"episodes_per_step: got 7, want a multiple of num_lanes \(2\).* 6 or 8"):
        load_config(APP.config_class, APP.recipes["point"], ["episodes_per_step=7"])


def test_plan_needs_neither_simulator_nor_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "plan=auto"]) == 0
    assert "s an iteration" in capsys.readouterr().out


def test_check_names_the_packages_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", f"run.dir={tmp_path / 'run'}"]
    monkeypatch.setattr(problems, "missing_packages", lambda names, **told: [])
    monkeypatch.setattr(problems, "is_prepared", lambda config: True)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "apt-get install libosmesa6" in said
    assert main([*words, "evaluation.film=false"]) == 0
    monkeypatch.undo()
    assert main([*words, "env.id=no_such_simulator:Reach-v0"]) == 2
    assert "the package no_such_simulator is missing" in capsys.readouterr().err


@pytest.mark.medium
@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize(
    ("env_id", "said"),
    [
        ("CartPole-v1", "env.id: got 'CartPole-v1' (CartPole-v1: got actions Discrete(2), want a Box"),
        ("gymnasium:Nosuch-v1", "env.id: got 'gymnasium:Nosuch-v1' (Environment `Nosuch` doesn't exist), want an id"),
        ("Pendulum-v1", "evaluation.film: Pendulum-v1 refuses (PendulumEnv.__init__() got an unexpected keyword"),
    ],
)
def test_what_an_environment_refuses_is_said_in_a_line_before_a_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    env_id: str,
    said: str,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main([command, "point", f"env.id={env_id}", f"run.dir={tmp_path / 'run'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said)
    assert not (tmp_path / "run").exists()


@pytest.mark.medium
def test_what_has_been_made_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["point", "env.id=Pendulum-v1", "evaluation.film=false", "num_steps=1", "evaluation.num_episodes=1"]
    assert main(["train", *words, "launcher=inproc", f"run.dir={tmp_path / 'run'}"]) == 0
    config = load_config(APP.config_class, APP.recipes["point"], words[1:])
    monkeypatch.setattr(problems, "_refusals", lambda config: ["tried"])
    assert problems.env_problems(config) == []
    filmed = load_config(APP.config_class, APP.recipes["point"], ["env.id=Pendulum-v1"])
    assert problems.env_problems(filmed) == ["tried"]


def lane(lengths: list[int], ends: list[str]) -> dict[str, NDArray[Any]]:
    """A lane of episodes of these lengths, whose rewards are 1 a step and whose observations count the steps."""
    n, steps = len(lengths), max(lengths)
    mask = np.arange(steps)[None] < np.array(lengths)[:, None]
    at_end = np.arange(steps)[None] == np.array(lengths)[:, None] - 1
    by = {end: at_end & (np.array(ends) == end)[:, None] for end in ("terminated", "truncated")}
    counts = np.minimum(np.arange(steps + 1)[None], np.array(lengths)[:, None]).astype(np.float32)
    return {
        "observations": counts[..., None],
        "actions": np.zeros((n, steps, 1), dtype=np.float32),
        "logprobs": np.zeros((n, steps), dtype=np.float32),
        "rewards": mask.astype(np.float32),
        "mask": mask,
        "successes": at_end & (np.array(ends) == "terminated")[:, None],
        **by,
    }


def batch() -> Item:
    lanes = [lane([2, 2], ["terminated", "truncated"]), lane([3, 1], ["truncated", "terminated"])]
    members = tuple(
        Item(item.seq, item.iteration, fields, item.groups)
        for item, fields in zip([lane_item(1, n, 2, [0]) for n in range(2)], lanes, strict=True)
    )
    return batched(Item((0,), 1, members=members))


@pytest.fixture
def learner(tmp_path: Path) -> LearnerWorker:
    save_policy(GaussianPolicy(PolicyShape(1, 1, (8,), -0.5), seed=3), tmp_path)
    settings: dict[str, Any] = dict.fromkeys(("weight_decay", "entropy_coef"), 0.0)
    settings |= {"model": str(tmp_path), "seed": 0, "minibatch_size": 4, "num_epochs": 2, "gamma": 0.9, "lam": 0.5}
    settings |= {"clip": 0.2, "value_coef": 0.5, "lr": 1e-2, "betas": [0.9, 0.999], "max_grad_norm": 1.0}
    worker = LearnerWorker(settings)
    worker.setup()
    return worker


def test_lanes_are_padded_to_the_longest() -> None:
    fields = batch().fields
    assert fields["mask"].sum(1).tolist() == [2, 2, 3, 1]
    assert fields["observations"].shape == (4, 4, 1)
    assert fields["actions"].shape == (4, 3, 1)


def test_what_was_cut_off_is_worth_the_value_of_its_last_observation(learner: LearnerWorker) -> None:
    (judged,) = learner.judge([batch()])
    policy = load_policy(Path(learner.config["model"]))
    v = policy.value(torch.arange(4.0)[:, None]).detach().tolist()
    # returns = advantages + values; one step before the end a trace of lam * gamma reaches back.
    terminated = [1 - v[1], 1 + 0.9 * v[1] - v[0]]
    truncated = [1 + 0.9 * v[2] - v[1], 1 + 0.9 * v[1] - v[0]]
    for row, (last, first) in ((0, terminated), (1, truncated)):
        want = [first + 0.45 * last + v[0], last + v[1]]
        assert judged.fields["returns"][row, :2].tolist() == pytest.approx(want, abs=1e-5)
    assert judged.fields["returns"][3].tolist() == pytest.approx([1.0, 0.0, 0.0], abs=1e-6)
    white = judged.fields["advantages"][judged.fields["mask"]]
    assert (white.mean(), white.std(ddof=1)) == (pytest.approx(0, abs=1e-6), pytest.approx(1, abs=1e-4))


def test_the_learner_steps_over_every_step_of_every_pass(learner: LearnerWorker) -> None:
    (receipt,) = learner.train(list(learner.judge([batch()])))
    assert learner.num_updates() == 2 * 2  # eight steps by four, twice
    outcome = measure([receipt], num_episodes=6)
    assert outcome.volume == 8
    assert outcome.metrics["env/episodes_dropped"] == 2
    assert outcome.metrics["env/terminated"] == 0.5
    assert [row["ended"] for row in outcome.samples] == ["terminated", "truncated", "truncated", "terminated"]
    assert json.dumps(list(outcome.samples))


def test_a_step_without_any_episode_left_is_told() -> None:
    outcome = measure([], num_episodes=6)
    assert outcome.metrics["env/episodes_dropped"] == 6
    assert "every episode of the step died" in outcome.warning


def test_logprobs_are_those_of_the_gaussian() -> None:
    policy = GaussianPolicy(PolicyShape(3, 2, (8,), -0.5), seed=1)
    observations, noise = torch.randn(5, 3), torch.randn(5, 2)
    actions, logprobs = policy.action(observations, noise)
    normal = torch.distributions.Normal(policy.mean(observations), policy.log_std.exp())
    assert torch.allclose(logprobs, normal.log_prob(actions).sum(-1), atol=1e-5)
    assert torch.allclose(policy.logprob(observations, actions), logprobs, atol=1e-5)
    assert policy.entropy().item() == pytest.approx(normal.entropy().sum(-1)[0].item(), rel=1e-5)


def test_a_film_moves_and_begins_again() -> None:
    from io import BytesIO

    from PIL import Image

    frames = [np.full((16, 16, 3), 80 * shade, dtype=np.uint8) for shade in range(3)]
    with Image.open(BytesIO(webp(frames))) as film:
        assert (film.format, film.n_frames, film.info["loop"]) == ("WEBP", 3, 0)
