"""A model's tokenizer, as its directory holds it."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

__all__ = ["load_tokenizer"]


def load_tokenizer(model: str | Path) -> Any:
    """Returns transformers' tokenizer of a model directory: a second. No download is tried."""
    return AutoTokenizer.from_pretrained(Path(model), local_files_only=True)
