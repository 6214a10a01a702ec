"""A language model small enough for a test: two layers, a token per character, random weights."""

import string
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import PreTrainedTokenizerFast

from m2flow.worker.engines.testing import VOCABULARY, save_tiny_model

__all__ = ["save_tiny_language_model"]


def save_tiny_language_model(path: Path, *, seed: int = 0) -> Path:
    """Writes model and tokenizer to `path`; returns it. Digits, letters, + = ( ) * : space, newline: a token each."""
    save_tiny_model(path, seed=seed)
    characters = ["<unk>", "<s>", "</s>", "\n", *string.digits, "+", "=", " ", *string.ascii_letters, *"()*:"]
    vocabulary = {character: number for number, character in enumerate(characters)}
    vocabulary |= {f"<{number}>": number for number in range(len(characters), VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.save_pretrained(path)
    return path
