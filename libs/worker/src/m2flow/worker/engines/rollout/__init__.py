"""What a rollout engine is, and the words it speaks. The engines themselves are modules of this folder."""

from m2flow.worker.engines.rollout.engine import Completion, More, Prompt, RolloutEngine, SamplingParams

__all__ = ["Completion", "More", "Prompt", "RolloutEngine", "SamplingParams"]
