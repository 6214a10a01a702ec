"""A model directory that holds a model in form only, and the toy app's command line."""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from m2flow.apps.cli import run_command
from m2flow.apps.testing.toy import TOY


@dataclass(frozen=True)
class Ended:
    """What a command came to."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    header = json.dumps({"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    for name in ("config.json", "tokenizer.json"):
        (path / name).write_text("{}")
    return path


@pytest.fixture
def toy(model: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Runs one command of the toy app in this process."""

    def run(command: str, *words: str) -> Ended:
        named = [] if command == "report" or "--resume" in words else [f"model.source={model}"]
        if named and not any(word.startswith("run.profiles=") for word in words):
            named.append('run.profiles=""')
        code = run_command(TOY, [*command.split(), *words, *named])
        out, err = capfd.readouterr()
        return Ended(code, out, err)

    return run
