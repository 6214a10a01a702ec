"""Bytes on one device: a transformer's weights, gradients, optimiser, activations and cache in closed form.

With P weights of w bytes, data-, tensor- and pipeline-parallel degrees d, t, p, and T tokens in flight on one
data-parallel rank (bf16 activations, attention that keeps no score matrix, layers recomputed in the backward pass):

    weights      P w / (t p)             training: / (d t p), fully sharded
    gradients    4 P / (d t p)           training
    optimiser    12 P / (d t p)          training: fp32 weights and two moments
    activations  T (2 h L / p + 34 h / t + 4 V / t)   training; forward alone: T (34 h / t + 4 V / t)
    cache        T 2 L k s w_kv / (t p)  generation: k KV heads of size s, 2 bytes

What was measured corrects it: see `fit_memory`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched._fit import Array, robust
from m2flow.sched._series import degrees_of
from m2flow.sched.errors import InputError


@dataclass(frozen=True)
class Footprint:
    """Bytes on one device while a stage runs."""

    weights: float
    gradients: float
    optimiser: float
    activations: float
    cache: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimiser + self.activations + self.cache


def num_parameters(shape: sched_pb2.Transformer) -> float:
    """Weights of the model: attention, gated MLP (all experts), norms, embeddings."""
    return _parameters(shape, shape.experts or 1)


def active_parameters(shape: sched_pb2.Transformer) -> float:
    """Weights that one token passes: of the experts only the active ones."""
    return _parameters(shape, shape.active_experts or 1)


def footprint(model: sched_pb2.StageModel, *, data: int, tensor: int, pipeline: int) -> Footprint:
    """Returns the closed form of the module's docstring for one device.

    Raises:
        InputError: a degree is under 1, or the model has no shape or no phase.
    """
    if min(data, tensor, pipeline) < 1:
        raise InputError(f"footprint: layout {data}x{tensor}x{pipeline}, want degrees of 1 or more: give each one")
    shape = model.transformer
    if not shape.layers or not shape.hidden or not model.phase:
        raise InputError(f"model of stage {model.stage!r} lacks layers, hidden or phase: give all three")
    total, split = num_parameters(shape), tensor * pipeline
    tokens = model.tokens_in_flight
    width = 34.0 * shape.hidden / tensor + 4.0 * shape.vocabulary / tensor
    weight_bytes = model.weight_bytes or 2.0
    if model.phase == sched_pb2.PHASE_TRAIN:
        shards = split * data
        activations = tokens * (2.0 * shape.hidden * shape.layers / pipeline + width)
        return Footprint(total * weight_bytes / shards, 4 * total / shards, 12 * total / shards, activations, 0.0)
    if model.phase == sched_pb2.PHASE_GENERATE:
        per_token = 2.0 * shape.layers * (shape.kv_heads or shape.heads) * head_size(shape) * 2.0
        return Footprint(total * weight_bytes / split, 0.0, 0.0, 0.0, tokens * per_token / split)
    return Footprint(total * weight_bytes / split, 0.0, 0.0, tokens * width, 0.0)


def head_size(shape: sched_pb2.Transformer) -> float:
    return float(shape.head_size or shape.hidden / max(shape.heads, 1))


@dataclass(frozen=True)
class StageMemory:
    """Peak bytes of a stage on one device: `factor` times the closed form, or a fitted `a + b/n + c x/n`."""

    model: sched_pb2.StageModel | None
    layout: tuple[int, int]
    factor: float
    coefficients: Array

    def peak_bytes(self, items: float | Array, devices: Array) -> Array:
        """[N] bytes for chunks of `items` items (one number, or [N]) on each of `devices` [N]."""
        if self.model is not None:
            counts, inverse = np.unique(devices, return_inverse=True)
            known = [_footprint(self.model, int(n), *self.layout) for n in counts]
            return np.array([self.factor * f.total for f in known])[inverse.reshape(-1)]
        terms = np.stack([np.ones_like(devices), 1.0 / devices, items / devices], axis=1)
        return np.asarray(terms @ self.coefficients)


def fit_memory(
    samples: Sequence[sched_pb2.Sample], model: sched_pb2.StageModel | None, layout: tuple[int, int] = (1, 1)
) -> StageMemory | None:
    """What is known of a stage's memory; None if neither a peak was measured nor a model is given.

    The closed form, in the tensor and pipeline degrees of `layout`, is corrected by the median ratio of measured to
    computed, each sample in its own degrees; without a model the peaks are fitted.
    """
    peaks = [s for s in samples if s.peak_bytes > 0 and s.items > 0]
    n = np.array([float(s.devices) for s in peaks])
    measured = np.array([s.peak_bytes for s in peaks])
    if model is not None and model.transformer.layers:
        bare = [_footprint(model, s.devices, *degrees_of(s, layout)).total for s in peaks]
        factor = float(np.median(measured / np.array(bare))) if len(peaks) else 1.0
        return StageMemory(model, layout, factor, np.zeros(3))
    if not len(peaks):
        return None
    x = np.array([s.items for s in peaks])
    features = np.stack([np.ones_like(n), 1.0 / n, x / n], axis=1)
    terms = [0, *([1] if len(np.unique(n)) > 1 else []), *([2] if len(np.unique(x / n)) > 2 else [])]
    coefficients = np.zeros(3)
    coefficients[terms] = robust(features[:, terms], measured)[0]
    return StageMemory(None, layout, 1.0, coefficients)


def _footprint(model: sched_pb2.StageModel, devices: int, tensor: int, pipeline: int) -> Footprint:
    return footprint(model, data=max(1, devices // (tensor * pipeline)), tensor=tensor, pipeline=pipeline)


def _parameters(shape: sched_pb2.Transformer, experts: float) -> float:
    hidden, size = shape.hidden, head_size(shape)
    kv_heads = shape.kv_heads or shape.heads
    attention = hidden * size * (2 * shape.heads + 2 * kv_heads)
    mlp = 3.0 * hidden * shape.intermediate * experts
    router = float(hidden * shape.experts)
    embeddings = hidden * shape.vocabulary * (1 if shape.tied_embeddings else 2)
    return float(shape.layers * (attention + mlp + router + 2 * hidden) + embeddings + hidden)
