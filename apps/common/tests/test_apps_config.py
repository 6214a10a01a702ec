"""Configuration: what is refused, with which words, and that what is shown can be read back."""

from dataclasses import replace
from pathlib import Path

import pytest

from m2flow.apps.config import RunConfig, load_config
from m2flow.apps.errors import ConfigError
from m2flow.apps.language import LanguageModelConfig
from m2flow.apps.parsing import build, known_keys
from m2flow.apps.yaml_tree import dump_yaml, merge_overrides, parse_yaml


def _build(*overrides: str) -> LanguageModelConfig:
    return build(LanguageModelConfig, merge_overrides({}, overrides))


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("lr=3", "optimiser.lr"),
        ("optimiser.lrr=3", "optimiser.lr"),
        ("prompt_per_step=3", "prompts_per_step"),
        ("optimizer.betas=[0.9, 0.9]", "optimiser.betas"),
        ("checkpoint.evry=3", "checkpoint.every"),
        ("run.directory=x", "run.dir"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(override: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key, the nearest known key is {nearest}:"):
        _build(override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimiser.lr=fast", "optimiser.lr: got 'fast' (str), want a number: write for example optimiser.lr=1.0e-5"),
        ("num_steps=true", "num_steps: got True (bool), want a whole number: write for example num_steps=8"),
        ("num_steps=1.5", "num_steps: got 1.5 (float), want a whole number: write for example num_steps=8"),
        ("num_steps=0", "num_steps: got 0, want at least 1: raise it"),
        ("optimiser.lr=0", "optimiser.lr: got 0.0, want more than 0: raise it"),
        ("optimiser.betas=[0.9]", "optimiser.betas: got 1 entries, want 2: write it as a list of 2"),
        (
            "launcher=slurm",
            "launcher: got 'slurm' (str), want one of process, inproc, ray: write for example launcher=process",
        ),
        ("cpu_slots=few", "cpu_slots: got 'few' (str), want a whole number or one of all"),
        ("optimiser=3", "optimiser: got 3 (int), want a section: set its keys one by one (lr, betas,"),
        ("num_steps", "override 'num_steps': got no key=value, want a.b=c"),
        ("run.dir=a: b: c", "override 'run.dir=a: b: c': the value is not YAML: quote it"),
    ],
)
def test_a_wrong_value_says_got_wanted_and_remedy(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _build(override)
    assert message in str(caught.value)


def test_all_problems_are_found_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        _build("lr=3", "num_steps=0", "optimiser.betas=2")
    assert len(caught.value.problems) == 3
    assert caught.value.exit_code == 2


def test_values_are_read_as_yaml_1_2() -> None:
    config = _build("optimiser.lr=1e-5", "run.dir=2026-11-29", "cpu_slots=2", "model.source=no")
    assert config.optimiser.lr == 1e-5
    assert config.run.dir == "2026-11-29"
    assert config.cpu_slots == 2
    assert config.model.source == "no"
    assert _build("num_steps=08").num_steps == 8
    assert _build("seed=010").seed == 10


@pytest.mark.parametrize("value", ["!!int x", "!!timestamp x", "9" * 5000, "{[1]: 2}", "&a {b: *a}", "[" * 5000])
def test_a_value_that_yaml_chokes_on_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="the value is not YAML"):
        _build(f"num_steps={value}")


def test_numbers_that_training_cannot_use_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        _build("optimiser.lr=.inf", "optimiser.betas=[0.9, 1.0]", "sampling.temperature=.inf")
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "optimiser.lr",
        "optimiser.betas",
        "sampling.temperature",
    ]


def test_a_huge_batch_is_checked_at_once() -> None:
    assert LanguageModelConfig(prompts_per_step=10**15, samples_per_prompt=8, minibatch_size=64).batch_problems() == []
    (problem,) = LanguageModelConfig(prompts_per_step=10**15, minibatch_size=60).batch_problems()
    assert "set it to one of 8, 16, 32" in problem


def test_an_age_that_no_sample_reaches_is_refused(tmp_path: Path) -> None:
    assert _build("loss.max_staleness=0", "staleness=1").batch_problems() == []
    (problem,) = _build("loss.max_staleness=1", "staleness=1", "plan=spatial").batch_problems()
    assert problem.startswith("loss.max_staleness: got 1 and staleness 1, which no sample exceeds: lower it")
    plan = tmp_path / "plan.yaml"
    plan.write_text("staleness: 2")
    assert _build("loss.max_staleness=1", f"plan={plan}").batch_problems() == []


def test_a_later_override_wins_and_the_tree_is_not_changed() -> None:
    tree = parse_yaml("num_steps: 3\noptimiser: {lr: 1.0e-4}\n", origin="test")
    merged = merge_overrides(tree, ["optimiser.lr=2e-5", "optimiser.lr=3e-5"])
    assert merged == {"num_steps": 3, "optimiser": {"lr": 3e-5}}
    assert tree == {"num_steps": 3, "optimiser": {"lr": 1e-4}}


def test_a_key_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_steps: got it twice"):
        parse_yaml("num_steps: 3\nnum_steps: 4\n", origin="test")


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "7"])
def test_what_is_not_a_mapping_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"recipe\.yaml"):
        parse_yaml(text, origin="recipe.yaml")


def test_what_is_shown_reads_back_equal_with_every_key_and_its_meaning() -> None:
    config = replace(LanguageModelConfig(), plan="null", cpu_slots=2, run=RunConfig(dir="a\n b"))
    text = dump_yaml(config)
    assert build(LanguageModelConfig, parse_yaml(text, origin="shown")) == config
    assert all(key.rpartition(".")[2] + ":" in text for key in known_keys(LanguageModelConfig))
    assert "# AdamW's decay rates" in text


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        load_config(LanguageModelConfig, tmp_path / "nowhere.yaml")


def test_batch_words_that_do_not_divide_name_what_would() -> None:
    path_words = LanguageModelConfig(prompts_per_step=6, samples_per_prompt=4, minibatch_size=16)
    (problem,) = path_words.batch_problems()
    assert problem.startswith("minibatch_size: got 16, want a multiple of samples_per_prompt (4)")
    assert problem.endswith("set it to one of 4, 8, 12, 24")
    assert replace(path_words, minibatch_size=12).batch_problems() == []


def test_batch_words_are_checked_when_a_config_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("prompts_per_step: 8\nsamples_per_prompt: 8\n")
    assert load_config(LanguageModelConfig, file).minibatch_size == 64
    with pytest.raises(ConfigError, match="minibatch_size: got 48"):
        load_config(LanguageModelConfig, file, ["minibatch_size=48"])


def test_derived_numbers() -> None:
    words = LanguageModelConfig(num_steps=10, prompts_per_step=6, samples_per_prompt=4, minibatch_size=12, num_epochs=3)
    assert words.derived_numbers() == {
        "samples_per_step": 24,
        "groups_per_minibatch": 3,
        "minibatches_per_epoch": 2,
        "optimiser_steps_per_step": 6,
        "total_optimiser_steps": 60,
        "total_prompts": 60,
        "total_samples": 240,
    }
