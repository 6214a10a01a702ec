"""Re-placing a trainer of a real model from one rank to two and back: parameters and optimiser state, to the bit.

`python libs/worker/bench/replacing.py --model DIRECTORY` with the directory of a Hugging Face model; without one, a
random model of 135M parameters is written first. The machine needs some 12 GiB.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _rows import row

from m2flow.worker import Cluster, WorkerGroup, launch_run
from m2flow.worker.engines.trainer.testing import TrainerProbe

TARGET_S = 15.0
SAMPLES = [[[5, 6, 7], [10, 11, 12]], [[5, 6, 9], [20]]]


def write_random_model(path: Path) -> Path:
    """A Llama of SmolLM2-135M's shape; 30 layers, 576 hidden, 49,152 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def measure(model: Path) -> list[dict[str, Any]]:
    """One to two, and two to one, after a step; raises where a tensor is not the same to the bit."""
    rows = []
    cluster = Cluster.virtual(2)
    with launch_run(cluster, preload=["m2flow.worker.engines.trainer.testing"]) as session:
        config = {"path": str(model), "microbatch_tokens": 256}
        group: WorkerGroup = session.start(TrainerProbe.group(config, device_kind="virtual"), "0")
        group.train(SAMPLES, 4.0).wait()
        (before,) = group.digests().result()
        for name, placement in (("one rank to two", "0-1"), ("two ranks to one", "0")):
            start = time.perf_counter()
            group = session.replace(group, placement)
            rows.append(row(f"trainer of 135M, {name}", time.perf_counter() - start, "s", TARGET_S))
            assert all(digests == before for digests in group.digests().result()), "the state has changed on the way"
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(options.model or write_random_model(Path(scratch) / "model"))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))
    for one in rows:
        print(f"{one['name']:45} {one['value']:10.4g} {one['unit']:3} holds {one['holds']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
