"""The commands that start nothing: check, config show, plan, report, and what each says when something is wrong."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from m2flow.apps.cli import run_command
from m2flow.apps.commands import _closing_words
from m2flow.apps.metrics import MetricsLog
from m2flow.apps.run_directory import RunDirectory
from m2flow.apps.testing import example_run
from m2flow.apps.testing.toy import TOY
from m2flow.flow import load_plan

Toy = Callable[..., Any]


def test_check_finds_nothing_wrong(toy: Toy, tmp_path: Path) -> None:
    ended = toy("check", f"run.dir={tmp_path / 'run'}")
    assert (ended.code, ended.out) == (0, "nothing is wrong\n"), ended.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("num_stepz=3", "num_stepz: unknown key, the nearest known key is num_steps"),
        ("minibatch_size=5", "minibatch_size: got 5, want a multiple of samples_per_prompt (2)"),
        ("plan=sideways", "plan: got 'sideways', want auto, temporal, spatial, hybrid, or an existing file"),
        ("cpu_slots=4096", "cpu_slots: got 4096, want at most"),
        ("no_such_recipe", "recipe: got 'no_such_recipe', want one of small, or an existing YAML file"),
    ],
)
def test_a_mistake_ends_with_2_before_anything_starts(
    toy: Toy, tmp_path: Path, command: str, word: str, said: str
) -> None:
    words = [word, f"run.dir={tmp_path / 'run'}"]
    ended = toy(command, *words)
    assert ended.code == 2
    assert said in ended.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["plan", "eval"])
def test_more_slots_than_cores_are_refused(toy: Toy, command: str) -> None:
    ended = toy(command, "cpu_slots=4096")
    assert (ended.code, ended.out) == (2, "")
    assert "cpu_slots: got 4096, want" in ended.err


def test_a_name_that_no_file_can_have_is_said(toy: Toy) -> None:
    ended = toy("check", "x" * 300)
    assert ended.code == 1
    assert "File name too long" in ended.err


def test_a_plan_that_does_not_fit_says_why(toy: Toy, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert toy("plan", "--output", str(plan)).code == 0
    tree = json.loads(plan.read_text())
    tree["groups"][0]["device_ids"] = [99]
    plan.write_text(json.dumps(tree))
    ended = toy("check", f"plan={plan}")
    assert ended.code == 2
    assert "has device 99" in ended.err


def test_config_show_prints_what_can_be_used_again(toy: Toy, tmp_path: Path) -> None:
    ended = toy("config show", "optimiser.lr=2e-5")
    assert ended.code == 0
    assert "# derived\n# samples_per_step: 8\n" in ended.out
    file = tmp_path / "mine.yaml"
    file.write_text(ended.out)
    assert yaml.safe_load(toy("config show", str(file)).out) == yaml.safe_load(ended.out)


def test_plan_needs_no_device_and_explains(toy: Toy, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("nodes: [{name: big, count: 1, devices: [{kind: cpu, count: 64}]}]\n")
    ended = toy("plan", "plan=auto", "--cluster", str(cluster), "--output", str(output))
    assert ended.code == 0, ended.err
    assert "s an iteration" in ended.out
    assert load_plan(output).prediction.iteration_s > 0


def test_one_number_of_the_profile_flips_the_choice(toy: Toy, tmp_path: Path) -> None:
    profile = yaml.safe_load(TOY.default_profile.read_text())
    typed = toy("plan", "plan=auto").out
    for sample in profile["samples"]:
        if (sample["stage"], sample["devices"]) == ("actor.train", 2):
            sample["seconds"] = 0.2
    changed = tmp_path / "profile.yaml"
    changed.write_text(yaml.safe_dump(profile))
    assert typed.startswith("Spatial:")
    assert not toy("plan", "plan=auto", "--profile", str(changed)).out.startswith("Spatial:")


def test_an_unreadable_profile_is_named(toy: Toy, tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text("samplez: []\n")
    ended = toy("plan", "--profile", str(profile))
    assert ended.code == 2
    assert "profile.yaml: unknown key 'samplez'" in ended.err
    assert "did you mean 'samples'?" in ended.err


@pytest.mark.parametrize("content", [b"", b"[1]", bytes(range(256)), b"nodes: [{name: a, count: 0}]"])
@pytest.mark.parametrize("option", ["--profile", "--cluster"])
def test_a_broken_file_ends_plan_with_2(toy: Toy, tmp_path: Path, option: str, content: bytes) -> None:
    file = tmp_path / "broken.yaml"
    file.write_bytes(content)
    ended = toy("plan", option, str(file))
    assert (ended.code, ended.out) == (2, ""), ended.err


def test_a_kept_profile_that_cannot_be_read_is_passed_over(toy: Toy, tmp_path: Path) -> None:
    profiles = tmp_path / "profiles"
    trained = toy("train", f"run.dir={tmp_path / 'run'}", f"run.profiles={profiles}")
    assert trained.code == 0, trained.err
    (kept,) = profiles.iterdir()
    assert f"Profile: {kept}\n" in toy("plan", f"run.profiles={profiles}").out
    kept.write_text("{")
    assert f"Profile: {TOY.default_profile}\n" in toy("plan", f"run.profiles={profiles}").out


def test_profiles_that_cannot_be_kept_are_found_by_check(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = toy("check", f"run.profiles={tmp_path / 'file'}")
    assert ended.code == 2
    assert "run.profiles: " in ended.err
    assert "cannot be written to, want a writable directory" in ended.err


@pytest.mark.medium
@pytest.mark.parametrize(("words", "unbuffered"), [("--help", ""), ("config show", ""), ("plan", "1")])
def test_nobody_who_reads_on_is_no_error(tmp_path: Path, words: str, unbuffered: str) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "m2flow.apps.testing", *words.split()]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered, "HOME": str(tmp_path)}
    ended = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, env=environment, text=True, timeout=30, check=False
    )
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize(("word", "said"), [("--version", "m2flow-toy "), ("--help", "workers sleep and add")])
def test_a_command_says_what_it_is(capsys: pytest.CaptureFixture[str], word: str, said: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        run_command(TOY, [word])
    assert said in capsys.readouterr().out


def test_the_closing_words_pass_over_what_was_not_finite(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    lost = {"critic/score/mean": math.nan, "eval/accuracy": math.nan}
    with MetricsLog(run) as log:
        log.write(1, lost)
        assert _closing_words(run) == f"report: {run.report}"
        log.write(2, {"critic/score/mean": 0.5, "eval/accuracy": 0.25})
        log.write(3, {"critic/score/mean": 1.0, "eval/accuracy": 0.75})
        log.write(4, lost)
    assert _closing_words(run).splitlines()[:2] == [
        "mean training reward of the last 2 steps: 0.750",
        "held-out accuracy: 0.250 before, 0.750 after",
    ]


def test_report_makes_the_page_again(toy: Toy, tmp_path: Path) -> None:
    run: RunDirectory = example_run(tmp_path / "run")
    ended = toy("report", str(run.path))
    assert (ended.code, ended.out) == (0, f"{run.report}\n")
    assert "held-out greedy accuracy" in run.report.read_text()
    assert toy("report", str(tmp_path / "nowhere")).code == 2
