"""Adapters to the engines that generate and that train; a folder each, the Protocol beside its implementations.

Nothing here is imported by the rest of `m2flow.worker`, and importing this package loads nothing heavy: name the
engine's own module (`m2flow.worker.engines.rollout.torch_engine`) to load it.
"""

__all__: list[str] = []
