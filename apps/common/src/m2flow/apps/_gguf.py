"""A GGUF file from a package to a Hugging Face directory: `python -m m2flow.apps._gguf PACKAGE DIRECTORY`."""

import importlib.metadata
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def gguf_file(package: str) -> Path:
    """The one .gguf file of an installed distribution, found without importing it."""
    files = [file for file in importlib.metadata.files(package) or [] if file.suffix == ".gguf"]
    if len(files) != 1:
        raise FileNotFoundError(f"{package}: got {len(files)} .gguf files, want 1: reinstall it")
    return Path(str(files[0].locate()))


def convert(gguf: Path, directory: Path) -> None:
    """Writes float32 safetensors, config and tokenizer to `directory`."""
    bars: Any = logging  # typed in some releases of transformers, untyped in others
    bars.disable_progress_bar()
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantised.config
    # save_pretrained refuses a model that says it is quantised; its weights are plain by now.
    del config.quantization_config
    with torch.device("meta"):
        model = type(quantised)(config)
    model.load_state_dict(quantised.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)


def _end_with_parent() -> None:
    """Ends this process when its standard input does: the parent holds the other end, however it dies."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    convert(gguf_file(sys.argv[1]), Path(sys.argv[2]))
