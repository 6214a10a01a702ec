"""What a trainer engine is, and the words it speaks. The engines themselves are modules of this folder."""

from m2flow.worker.engines.trainer.engine import LossFn, LossInputs, Metrics, Sample, TrainerEngine, train_minibatch

__all__ = ["LossFn", "LossInputs", "Metrics", "Sample", "TrainerEngine", "train_minibatch"]
