"""Seconds of a transformer's stage from its shape and the hardware's two ceilings: an estimate, with its range.

    generate  per rank: steps * weights / bandwidth  +  per sequence: prefill flops, decode flops and cache reads
    forward   2 A flops a token (A: active weights), plus attention
    train     6 A flops a token, plus attention; with recomputation 8 A

The work reaches between 25% and 90% of a ceiling in practice; the estimate takes 45%.
"""

import numpy as np

from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched.cost import StageCost
from m2flow.sched.errors import InputError
from m2flow.sched.memory import active_parameters, head_size, num_parameters

_EFFICIENCY = 0.45  # the geometric middle of 0.25 and 0.9, nearly
_RANGE = 1.0  # relative: from half to twice the estimate

# Dense bf16 FLOP/s, bytes/s of memory, bytes of memory, from the vendors' data sheets.
HARDWARE: dict[str, tuple[float, float, float]] = {
    "a100-80gb": (312e12, 2.04e12, 80e9),
    "h100-sxm": (989e12, 3.35e12, 80e9),
    "h200-sxm": (989e12, 4.8e12, 141e9),
    "b200": (2250e12, 8.0e12, 180e9),
    "l40s": (362e12, 0.864e12, 48e9),
    "rtx-4090": (165e12, 1.008e12, 24e9),
    "cpu-core": (68e9, 1.0e10, 0.0),
}


def named_device(name: str) -> sched_pb2.DeviceSpec:
    """One device with the ceilings of the named hardware.

    Raises:
        InputError: the hardware is not in the table.
    """
    if name not in HARDWARE:
        raise InputError(f"hardware {name!r} is not known, want one of {sorted(HARDWARE)}: or give its ceilings")
    flops, bandwidth, memory = HARDWARE[name]
    return sched_pb2.DeviceSpec(
        kind="cpu" if name == "cpu-core" else "cuda",
        count=1,
        memory_bytes=memory,
        flops_per_s=flops,
        memory_bytes_per_s=bandwidth,
    )


def roofline(model: sched_pb2.StageModel, device: sched_pb2.DeviceSpec, *, split: int = 1) -> StageCost:
    """The stage's cost on `device`, as a `StageCost` whose origin is "roofline".

    Args:
        model: Its items are the stage's inputs.
        split: Devices that one rank's model spans (tensor times pipeline parallel).

    Raises:
        InputError: the device's ceilings, or the model's phase, are not given.
    """
    if not device.flops_per_s or not device.memory_bytes_per_s:
        raise InputError(
            f"device kind {device.kind!r} has no flops_per_s or memory_bytes_per_s: give both for a roofline"
        )
    if not model.phase:
        raise InputError(f"model of stage {model.stage!r} has no phase, want generate, forward or train: give one")
    flops_per_s, bytes_per_s = device.flops_per_s * _EFFICIENCY, device.memory_bytes_per_s * _EFFICIENCY
    shape, sequences = model.transformer, model.sequences or 1.0
    active = active_parameters(shape)
    total_tokens = model.prompt_tokens + model.new_tokens
    attention = 2.0 * shape.layers * shape.heads * head_size(shape) * total_tokens**2  # QK and AV, causal
    fixed, per_item = 0.0, 0.0
    if model.phase == sched_pb2.PHASE_GENERATE:
        weight_reads = num_parameters(shape) * (model.weight_bytes or 2.0)
        fixed = model.new_tokens * weight_reads / (bytes_per_s * split)
        cache = 4.0 * shape.layers * (shape.kv_heads or shape.heads) * head_size(shape)
        reads = cache * model.new_tokens * (model.prompt_tokens + model.new_tokens / 2)
        flops = 2.0 * active * total_tokens + attention
        per_item = sequences * (flops / flops_per_s + reads / bytes_per_s)
    elif model.phase == sched_pb2.PHASE_FORWARD:
        per_item = sequences * (2.0 * active * total_tokens + attention) / flops_per_s
    else:
        per_item = sequences * (8.0 * active * total_tokens + 4.0 * attention) / flops_per_s
    empty = np.zeros((0, 2))
    return StageCost(np.array([fixed, per_item, 0.0, 0.0]), empty, np.zeros(0), _RANGE, origin="roofline")


def hardware_scale(measured: sched_pb2.DeviceSpec, target: sched_pb2.DeviceSpec) -> tuple[float, float]:
    """How many times longer the same work takes on `target`, and the relative error of saying so.

    Compute-bound work scales by FLOP/s, the rest by bandwidth: the factor is the middle of the two.
    (1, 0) where either device's ceilings are unknown.
    """
    ceilings = measured.flops_per_s, measured.memory_bytes_per_s, target.flops_per_s, target.memory_bytes_per_s
    if not all(ceilings):
        return 1.0, 0.0
    compute, bandwidth = ceilings[0] / ceilings[2], ceilings[1] / ceilings[3]
    return float(np.sqrt(compute * bandwidth)), float(np.sqrt(max(compute, bandwidth) / min(compute, bandwidth)) - 1)
