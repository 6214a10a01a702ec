"""Log-probability and entropy of a 152k vocabulary, forward and backward, against torch's plain form."""

import ctypes
import subprocess
import sys
from pathlib import Path

import torch
from _rows import Row, command_line, report, row, seconds
from torch import Tensor

from m2flow.algos import logprobs

SHAPE = (1, 1024, 152_000)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [B, T, V] in bfloat16, tokens and a full mask [B, T]."""
    torch.manual_seed(0)
    logits = torch.empty(SHAPE, dtype=torch.bfloat16, device=DEVICE)
    for position in logits[0]:
        position.normal_(0, 3)
    tokens = torch.randint(SHAPE[2], SHAPE[:2], device=DEVICE)
    return logits.requires_grad_(), tokens, torch.ones(SHAPE[:2], dtype=torch.bool, device=DEVICE)


def ours(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Return a scalar of both, by m2flow."""
    logp, entropy = logprobs.from_logits_with_entropy(logits, tokens, mask)
    return (logp + 0.01 * entropy).sum()


def plain(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the same, as torch is written by hand."""
    logp = logits.float().log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return (logp.gather(-1, tokens[..., None])[..., 0] + 0.01 * entropy).sum()


FORMS = {"ours": ours, "plain": plain}


def extra_bytes(form: str) -> int:
    """Return the peak memory of one forward and backward beyond the logits and their gradient, in this process."""
    logits, tokens, mask = inputs()
    size = logits.numel() * logits.element_size()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(FORMS[form](logits, tokens, mask), logits)
        return torch.cuda.max_memory_allocated() - before - size
    # The kernels' own code is paged in first, on a little, and the memory of that given back.
    torch.autograd.grad(FORMS[form](logits[:, :8], tokens[:, :8], mask[:, :8]), logits)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    torch.autograd.grad(FORMS[form](logits, tokens, mask), logits)
    return _resident("VmHWM") - before - size


def _resident(field: str) -> int:
    """Return a field of this process's memory in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}, want one: run on Linux")


def main(json_path: str | None) -> None:
    """Measure, print, write."""
    torch.set_num_threads(1)
    extra = {
        form: int(subprocess.run([sys.executable, __file__, form], check=True, capture_output=True, text=True).stdout)
        for form in FORMS
    }
    logits, tokens, mask = inputs()
    took = {
        form: seconds(lambda run=run: torch.autograd.grad(run(logits, tokens, mask), logits), repeats=2)
        for form, run in FORMS.items()
    }
    name, peer = "logprob and entropy, forward and backward, [1, 1024, 152k] bf16", "torch log_softmax in float32"
    rows: list[Row] = [
        row(f"{name}: time", took["ours"], "s", peer=peer, peer_value=took["plain"], at_least=1),
        row(
            f"{name}: memory beyond logits and gradient",
            extra["ours"] / 2**20,
            "MiB",
            peer=peer,
            peer_value=extra["plain"] / 2**20,
            at_least=4,
        ),
    ]
    report(rows, json_path)


if __name__ == "__main__":
    if sys.argv[1:] in (["ours"], ["plain"]):
        torch.set_num_threads(1)
        print(extra_bytes(sys.argv[1]))
    else:
        command_line(main)
