"""How many cases the properties try, and the batches that they are tried on."""

import os
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from torch import Tensor

# A fixed-seed slice here; `nox -s proofs` sets M2FLOW_PROOFS=1 and tries new cases, many more of them.
settings.register_profile("slice", max_examples=20, derandomize=True, deadline=None, database=None)
settings.register_profile("proofs", max_examples=2000, deadline=None, database=None)
PROOFS = os.environ.get("M2FLOW_PROOFS") == "1"
settings.load_profile("proofs" if PROOFS else "slice")

Batch = dict[str, Tensor]


def pytest_collection_finish() -> None:
    """Load the compiler, which takes seconds, in nobody's time: not in that of the first test to need it."""
    torch.compile(torch.neg, backend="eager")(torch.zeros(1))


@pytest.fixture
def compiled() -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Return torch.compile that refuses a graph break; in the proofs the one graph is also lowered to code."""
    torch._dynamo.reset()

    def compile_(function: Callable[..., object]) -> Callable[..., object]:
        inner = torch.compile(function, fullgraph=True, backend="inductor" if PROOFS else "eager")

        def run(*operands: object) -> object:
            with warnings.catch_warnings():
                # Lowering imports parts of torch that warn of other parts of torch.
                warnings.simplefilter("ignore", DeprecationWarning)
                return inner(*operands)

        return run

    return compile_


@pytest.fixture(scope="session")
def batch() -> Callable[..., Batch]:
    """Return a maker of batches [B, T] by shape and seed: masks have holes, ratios lie on both sides of a clip."""

    def make(rows: int, steps: int, seed: int, dtype: torch.dtype = torch.float64) -> Batch:
        generator = torch.Generator().manual_seed(seed)

        def noise(scale: float = 1.0) -> Tensor:
            return scale * torch.randn(rows, steps, generator=generator, dtype=torch.float64)

        logprobs = -noise().abs() - 0.1
        made = {
            "logprobs": logprobs,
            "old_logprobs": logprobs + noise(0.3),
            "ref_logprobs": logprobs + noise(0.3),
            "rollout_logprobs": logprobs + noise(0.3),
            "teacher_logprobs": logprobs + noise(0.3),
            "advantages": noise(),
            "rewards": noise(),
            "values": noise(),
            "old_values": noise(),
            "returns": noise(),
            "next_values": noise(),
            "x": noise(),
            "loss": noise(),
            "divergence": noise().abs(),
        }
        batch = {name: x.to(dtype) for name, x in made.items()}
        batch["mask"] = torch.rand(rows, steps, generator=generator) < 0.7
        batch["terminated"] = torch.rand(rows, steps, generator=generator) < 0.1
        batch["truncated"] = torch.rand(rows, steps, generator=generator) < 0.1
        return batch

    return make
