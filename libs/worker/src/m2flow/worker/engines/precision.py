"""Which number format generation runs in: the one place that asks the hardware."""

from pathlib import Path

import torch

_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


def generation_dtype(cpuinfo: Path = Path("/proc/cpuinfo")) -> torch.dtype:
    """bfloat16 where it is faster than float32, else float32.

    A GPU has fast bfloat16. A CPU has it with the AVX512-BF16 or AMX instructions; without them torch emulates it, an
    eighth of float32's speed on the AVX2 machine where it was measured. `cpuinfo` is the kernel's description of the
    processor; where there is none the answer is float32.
    """
    if torch.cuda.is_available():
        return torch.bfloat16
    if not cpuinfo.is_file():
        return torch.float32
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return torch.bfloat16 if _BF16_FLAGS & set(value.split()) else torch.float32
    return torch.float32
