"""The batch that m2flow and its peers are compared on."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Batch = dict[str, Tensor]


@pytest.fixture(params=range(5))
def batch(request: pytest.FixtureRequest) -> Batch:
    """Return [B, T] operands in float64 with right padding, rows of one token up to all of them."""
    generator = torch.Generator().manual_seed(request.param)
    rows, steps = 6, 9

    def noise(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(rows, steps, generator=generator, dtype=torch.float64)

    logprobs = -noise().abs() - 0.1
    lengths = torch.tensor([1, 4, 9, 2, 7, 9])
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + noise(0.3),
        "ref_logprobs": logprobs + noise(0.3),
        "rollout_logprobs": logprobs + noise(0.3),
        "advantages": noise(),
        "rewards": noise(),
        "values": noise(),
        "old_values": noise(),
        "returns": noise(),
        "scores": torch.randn(rows, generator=generator, dtype=torch.float64),
        "group_ids": torch.tensor([3, 3, 0, 0, 0, 3]),
        "mask": torch.arange(steps) < lengths[:, None],
        "logits": 3 * torch.randn(rows, steps, 11, generator=generator, dtype=torch.float64),
        "teacher_logits": 3 * torch.randn(rows, steps, 11, generator=generator, dtype=torch.float64),
        "tokens": torch.randint(11, (rows, steps), generator=generator),
    }


@pytest.fixture
def close() -> Callable[[Tensor, Tensor], None]:
    """Return the comparison: 1e-6, absolute and relative."""

    def compare(ours: Tensor, theirs: Tensor) -> None:
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, check_dtype=False)

    return compare
