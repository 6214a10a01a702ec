"""Weights of a model of 135 million parameters in bfloat16, from one and from two ranks to one."""

import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import Queue
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from _rows import Cast, main, row, said

from m2flow.comm import Endpoint, Shard

VERSIONS = 16
# Until every buffer, at both ends, has been written at least once.
WARM = 5


def shapes() -> dict[str, tuple[int, int]]:
    """Returns the matrices of SmolLM2-135M: 30 layers, hidden 576, 9 heads of which 3 for keys, vocabulary 49,152."""
    found = {"embed": (49_152, 576)}
    for layer in range(30):
        for name, shape in (
            ("q", (576, 576)),
            ("k", (192, 576)),
            ("v", (192, 576)),
            ("o", (576, 576)),
            ("gate", (1536, 576)),
            ("up", (1536, 576)),
            ("down", (576, 1536)),
        ):
            found[f"{layer}.{name}"] = shape
    return found


def trainer(endpoint: Endpoint, rank: str, count: str) -> dict[str, float]:
    weights: dict[str, Any] = {}
    for name, (rows, columns) in shapes().items():
        share = rows // int(count)
        data = torch.ones(share, columns, dtype=torch.bfloat16)
        weights[name] = Shard(data, (share * int(rank), 0), (rows, columns))
    times, digests = [], []
    for version in range(VERSIONS):
        staged = endpoint.stage_weights("policy", version, weights)
        times.append(staged.seconds)
        digests.append(staged.digest_seconds)
        # Answered once the version is committed, so that the two sides are timed one after the other.
        endpoint.request("rollout", "staged", "", None)
    return {"stage_s": statistics.median(times[WARM:]), "digest_s": statistics.median(digests[WARM:])}


def rollout(endpoint: Endpoint, count: str, adopts: str) -> dict[str, float]:
    waiting: Queue[Future[None]] = Queue()

    def on_staged(request: Any) -> Future[None]:
        future: Future[None] = Future()
        waiting.put(future)
        return future

    endpoint.handle("staged", on_staged)
    sources = [f"t{rank}" for rank in range(int(count))]
    receiver = endpoint.weight_receiver("policy", sources=sources)
    own: dict[str, Any] = {}

    if adopts == "no":
        own = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes().items()}
    # The peer, in the same process and between the versions: one copy of the same tensors, all of them warm.
    fresh = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes().items()}
    target = {name: value.clone() for name, value in fresh.items()}
    times, copies = [], []
    for version in range(VERSIONS):
        staged = [waiting.get(timeout=60) for _ in sources]
        prepared = receiver.prepare(version)
        started = time.monotonic()
        if adopts == "yes":
            receiver.commit(own.update)
        else:
            receiver.commit_into(own)
        times.append(prepared.seconds + time.monotonic() - started)
        started = time.monotonic()
        for name, value in fresh.items():
            target[name].copy_(value)
        copies.append(time.monotonic() - started)
        for future in staged:
            future.set_result(None)
    return {"receive_s": statistics.median(times[WARM:]), "copy_s": statistics.median(copies[WARM:])}


def transfer(num_trainers: int, adopts: str) -> tuple[float, float, float]:
    """Returns seconds of writing and reading a version, of its digests, and of copying the bytes once."""
    with Cast(__file__) as cast:
        taker = cast.start("rollout", "rollout", num_trainers, adopts)
        makers = [cast.start("trainer", f"t{rank}", rank, num_trainers) for rank in range(num_trainers)]
        found, staged = said(taker), [said(maker) for maker in makers]
    stage_s = max(one["stage_s"] for one in staged)
    return stage_s + found["receive_s"], max(one["digest_s"] for one in staged), found["copy_s"]


def measure() -> Iterator[dict[str, Any]]:
    for num_trainers, adopts, target in ((1, "no", 2.2), (2, "no", 2.2), (1, "yes", 1.2)):
        seconds, digest_s, copy_s = transfer(num_trainers, adopts)
        name = f"weights of 135M parameters, {num_trainers} to 1{', adopted' if adopts == 'yes' else ''}"
        yield row(
            name, seconds, "s", peer="copied once", peer_value=copy_s, target=target, at_least=False, on_ratio=True
        )
    yield row("their digests", digest_s, "s", target=1, at_least=False)


ROLES = {"trainer": trainer, "rollout": rollout}

if __name__ == "__main__":
    main(__file__, measure, ROLES)
