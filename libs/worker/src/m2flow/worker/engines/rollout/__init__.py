"""What a rollout engine is, and the words it speaks. The engines themselves are modules of this folder."""

from m2flow.worker.engines.rollout.engine import Completion, Prompt, RolloutEngine, SamplingParams

__all__ = ["Completion", "Prompt", "RolloutEngine", "SamplingParams"]
