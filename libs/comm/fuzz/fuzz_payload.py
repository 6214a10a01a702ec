"""A coverage-guided fuzz target for payloads: whatever bytes arrive, `decode` returns a tree or raises PayloadError.

    python fuzz/fuzz_payload.py --inputs 1000000 --seed 0

Inputs that reach a new edge of the decoder are kept and mutated further. Each is also tried as a tree with a correct
header, as the check in the header would otherwise stop nearly all of them at the door. All of it runs in an address
space that has little room left, so that a size that is believed before it is checked is a find too.
"""

import argparse
import contextlib
import random
import resource
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from m2flow.comm import PayloadError, _dtypes, _registry, _torch, _tree, decode, encode, payload, register


@register
class Sample(NamedTuple):
    """A registered class for the inputs to name."""

    x: Any
    y: Any


_TRACED = {module.__file__ for module in (_dtypes, _registry, _torch, _tree, payload)}
_ROOM_BYTES = 256 << 20
_SEEDS: tuple[Any, ...] = (
    None,
    {"id": 7, "text": "completion", "ids": b"\x01\x02", "more": {"reward": 0.5, "none": None, "": {}}},
    {"a": [1, 2.5, True, "text", b"bytes", 1 << 80], ("k", 1): (None,)},
    [np.arange(6).reshape(2, 3), np.float32(1), np.array("2020-01-01", "M8[D]"), np.zeros((0, 3))],
    ["x" * 2000, b"y" * 2000],
    Sample(torch.arange(6).reshape(2, 3).to(torch.bfloat16), torch.ones(2).to(torch.float8_e4m3fn)),
)
_WORDS = (
    b"\x00",
    b"\xff",
    b"\xff\xff\xff\xff",
    b"\x00\x00\x00\x80",
    bytes(8),
    b"\xff" * 8,
    *(bytes([tag]) for tag in _tree.TAGS),
)
MAX_INPUT_BYTES = 4096


def fuzz_one(data: bytes) -> None:
    """Decodes bytes as they are, and as a tree under a right header; anything but PayloadError is a find."""
    for candidate in (data, with_header(data)):
        try:
            decode(candidate)
        except PayloadError:
            continue


def with_header(tree: bytes) -> bytes:
    """Returns a payload that consists of a header that fits, the tree and its check."""
    header = payload._HEADER.pack(payload._MAGIC, payload._LAYOUT, len(tree), payload._AROUND_BYTES + len(tree))
    return header + tree + zlib.crc32(header + tree).to_bytes(4, "little")


def mutated(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Returns an input near another: flipped, cut, doubled, spliced or with a word put in."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(5):
            case 0 if out:
                out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
            case 1:
                del out[at : at + rng.randrange(8)]
            case 2:
                out[at:at] = out[at : at + rng.randrange(16)]
            case 3:
                out[at : at + rng.choice((0, 1, 4, 8))] = rng.choice(_WORDS)
            case _:
                out[at:] = other[rng.randrange(len(other) + 1) :]
    return bytes(out[:MAX_INPUT_BYTES])


class Edges:
    """The lines of the decoder in the order they follow each other: what an input has reached."""

    def __init__(self) -> None:
        self.found: set[tuple[str, int, int]] = set()
        self._last = 0
        self.is_new = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> "Edges | None":
        if frame.f_code.co_filename not in _TRACED:
            return None
        edge = (frame.f_code.co_name, self._last, frame.f_lineno)
        self._last = frame.f_lineno
        if edge not in self.found:
            self.found.add(edge)
            self.is_new = True
        return self


@contextlib.contextmanager
def little_room() -> Iterator[None]:
    """Lets this process map no more than 256 MiB beyond what it has: what asks for more gets a MemoryError."""
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + _ROOM_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def run(num_inputs: int, seed: int) -> dict[str, float]:
    """Tries inputs; returns how many, how many were kept, the edges they reached and the seconds of the slowest."""
    rng, edges = random.Random(seed), Edges()
    corpus = [encode(tree).to_bytes() for tree in _SEEDS]
    corpus += [data[payload._HEADER.size :] for data in corpus]
    slowest_s = 0.0
    with little_room():
        for _ in range(num_inputs):
            data = mutated(rng, rng.choice(corpus), rng.choice(corpus))
            edges.is_new = False
            started = time.perf_counter()
            sys.settrace(edges)
            try:
                fuzz_one(data)
            except BaseException:
                sys.settrace(None)
                print(f"found: {data!r}", file=sys.stderr)
                raise
            finally:
                sys.settrace(None)
            slowest_s = max(slowest_s, time.perf_counter() - started)
            if edges.is_new:
                corpus.append(data)
    return {"inputs": num_inputs, "kept": len(corpus), "edges": len(edges.found), "slowest_s": slowest_s}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(run(options.inputs, options.seed))
