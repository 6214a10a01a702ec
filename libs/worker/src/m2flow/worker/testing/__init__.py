"""What tests of workers share: probes that answer and die as told, and synthetic workers that sleep by a cost model."""

from m2flow.worker.testing.probe import Companion, DropProbe, Probe, RetryProbe
from m2flow.worker.testing.synthetic import (
    SyntheticConfig,
    SyntheticReward,
    SyntheticRollout,
    SyntheticTrainer,
    SyntheticWorker,
)

__all__ = [
    "Companion",
    "DropProbe",
    "Probe",
    "RetryProbe",
    "SyntheticConfig",
    "SyntheticReward",
    "SyntheticRollout",
    "SyntheticTrainer",
    "SyntheticWorker",
]
