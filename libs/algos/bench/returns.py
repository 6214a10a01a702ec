"""GAE over 4,096 steps against the loop over columns that it replaces."""

import torch
from _rows import command_line, report, row, seconds
from torch import Tensor

from m2flow.algos import returns

ROWS, STEPS = 256, 4096


def loop(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Return the advantages by a loop over columns, with masked steps passed over."""
    onward = torch.zeros_like(rewards[:, 0])
    follows = values[:, -1]
    columns = []
    for t in range(STEPS - 1, -1, -1):
        inside = mask[:, t]
        delta = rewards[:, t] + gamma * follows - values[:, t]
        onward = torch.where(inside, delta + gamma * lam * onward, onward)
        follows = torch.where(inside, values[:, t], follows)
        columns.append(onward)
    return torch.stack(columns[::-1], 1).masked_fill(~mask, 0.0)


def main(json_path: str | None) -> None:
    """Measure, print, write."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rewards = torch.randn(ROWS, STEPS, device=device)
    values = torch.randn(ROWS, STEPS + 1, device=device)
    mask = torch.rand(ROWS, STEPS, device=device) < 0.9
    ours, _ = returns.gae(rewards, values, mask, gamma=0.99, lam=0.95)
    torch.testing.assert_close(ours, loop(rewards, values, mask, 0.99, 0.95), rtol=1e-4, atol=1e-4)
    fast = seconds(lambda: returns.gae(rewards, values, mask, gamma=0.99, lam=0.95), repeats=10)
    slow = seconds(lambda: loop(rewards, values, mask, 0.99, 0.95), repeats=10)
    name = f"GAE on [{ROWS}, {STEPS}] float32"
    report([row(name, fast, "s", peer="loop over columns", peer_value=slow, at_least=4)], json_path)


if __name__ == "__main__":
    command_line(main)
