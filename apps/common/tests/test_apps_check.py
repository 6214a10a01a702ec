"""Checks before a run: each finds its fault with the remedy, and none starts or imports anything."""

import json
import shutil
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from m2flow.apps import model_check
from m2flow.apps.check import collect, missing_packages, run_problems
from m2flow.apps.config import CheckpointConfig, RunConfig, TrainingConfig
from m2flow.apps.errors import CheckFailed
from m2flow.apps.functions import function_problems
from m2flow.apps.language import LanguageModelConfig, ModelConfig
from m2flow.apps.model_check import memory_problems, model_problems, space_problems
from m2flow.apps.safetensors_size import num_parameters


def _model(path: Path, shapes: dict[str, list[int]]) -> Path:
    path.mkdir()
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    return path


def _config(model: Path, **fields: int | str) -> LanguageModelConfig:
    return replace(LanguageModelConfig(model=ModelConfig(source=str(model))), **fields)  # type: ignore[arg-type]


def test_a_whole_model_directory_passes_and_is_counted(tmp_path: Path) -> None:
    model = _model(tmp_path / "model", {"a": [3, 4], "b": [5]})
    assert model_problems(_config(model)) == []
    assert num_parameters(model) == 17


def test_a_missing_model_directory_is_named(tmp_path: Path) -> None:
    (problem,) = model_problems(_config(tmp_path / "nowhere"))
    assert "nowhere', which is no directory, want 'smollm2' or an existing one" in problem


def test_a_directory_that_is_no_model_says_what_it_lacks(tmp_path: Path) -> None:
    problems = model_problems(_config(tmp_path))
    assert [problem.split("holds no ")[1].split(",")[0] for problem in problems] == [
        "config.json",
        "*.safetensors",
        "tokenizer*",
    ]


def test_broken_weights_are_named(tmp_path: Path) -> None:
    model = _model(tmp_path / "model", {})
    (model / "model.safetensors").write_bytes(b"\xff" * 100)
    (problem,) = collect([lambda: model_problems(_config(model))])
    assert "model.safetensors: not a safetensors file" in problem


def test_a_missing_package_is_named_with_the_remedy() -> None:
    problems = missing_packages(["json", "no_such_module"], wanted_by="task=x", remedy="pip install x")
    assert problems == ["task=x: the package no_such_module is missing, want it installed: pip install x"]


def test_no_space_is_said_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(tmp_path / "model", {"a": [1000, 1000, 1000]})
    config = replace(
        _config(model), run=RunConfig(root=str(tmp_path / "new" / "runs")), checkpoint=CheckpointConfig(keep=2)
    )
    usage = shutil.disk_usage(tmp_path)._replace(free=2_500_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    (problem,) = space_problems(config)
    assert problem.startswith(f"run.root: {tmp_path} has 2.50 GB free, want 36.00 GB: free space")
    (problem,) = space_problems(replace(config, run=RunConfig(dir=str(tmp_path / "run"))))
    assert problem.startswith(f"run.dir: {tmp_path} has 2.50 GB free, want 36.00 GB: free space, or set run.dir to")
    usage = usage._replace(free=40_000_000_000)
    assert space_problems(config) == []


def test_too_little_memory_is_said_by_role(tmp_path: Path) -> None:
    huge = _model(tmp_path / "model", {"a": [1_000_000, 1_000_000]})
    (problem,) = memory_problems(_config(huge))
    assert "16000.00 GB for the trainer's weights, gradients and optimiser, 4000.00 GB for rollout" in problem
    assert memory_problems(_config(_model(tmp_path / "small", {"a": [3]}))) == []


def test_what_a_container_has_cached_of_files_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(_model(tmp_path / "model", {"a": [300_000]}))  # 6 MB, of which 1 is free without the cache.
    monkeypatch.setattr(model_check, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("8000000\n")
    (tmp_path / "memory.current").write_text("7000000\n")
    (tmp_path / "memory.stat").write_text("anon 1000000\ninactive_file 6000000\n")
    assert memory_problems(config) == []
    (tmp_path / "memory.stat").write_text("anon 7000000\ninactive_file 0\n")
    (problem,) = memory_problems(config)
    assert problem.startswith("model.source: 0.00 GB of memory are free, want ")


def test_a_run_directory_in_use_and_too_many_cores_are_refused(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("")
    config = TrainingConfig(run=RunConfig(dir=str(tmp_path)), cpu_slots=4096)
    in_use, cores = run_problems(config, resuming=False)
    assert "holds files already, want a new directory" in in_use
    assert cores.startswith("cpu_slots: got 4096, want at most")
    assert run_problems(replace(config, cpu_slots=1), resuming=True) == []


def test_the_home_of_nobody_is_refused_once(tmp_path: Path) -> None:
    config = TrainingConfig(run=RunConfig(root="~nosuchuser/runs"))
    check = partial(run_problems, config, resuming=False)
    (problem,) = collect([check, check])
    assert problem.startswith("~nosuchuser/runs: got ~nosuchuser, which is nobody's home, want")


def test_one_check_that_fails_hides_no_other() -> None:
    def fails() -> list[str]:
        raise CheckFailed(["first", "second"])

    assert collect([fails, lambda: ["third"]]) == ["first", "second", "third"]


MODULE = """
import json as notation
raise RuntimeError("imported")
def score(sample): return 1.0
class Judge:
    def inner(self): pass
strict: object = score
try:
    lenient = score
except NameError:
    def fallback(sample): return 0.0
"""


def test_the_name_of_a_function_is_looked_for_in_its_module_which_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "judging_by_name.py").write_text(MODULE)
    (tmp_path / "judging_by_star.py").write_text("from math import *")
    (tmp_path / "judging_in_vain.py").write_text("def score(:")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("score", "Judge.inner", "strict", "lenient", "fallback", "notation.loads"):
        assert function_problems("f", f"judging_by_name:{name}") == []
    assert function_problems("f", "judging_by_star:sqrt") == []
    assert function_problems("f", "math:sqrt") == []
    (problem,) = function_problems("reward.function", "judging_by_name:scores")
    assert problem.startswith("reward.function: got 'judging_by_name:scores', and ")
    assert problem.endswith("judging_by_name.py has no 'scores': did you mean 'score'?")
    assert "has no 'inner': name a function that is there" in function_problems("f", "judging_by_name:inner")[0]
    assert "judging_in_vain.py is no Python" in function_problems("f", "judging_in_vain:score")[0]
