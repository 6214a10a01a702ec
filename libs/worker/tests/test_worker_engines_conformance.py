"""The torch engines against the suites that any engine has to pass."""

from pathlib import Path

from m2flow.worker.engines.rollout import RolloutEngine
from m2flow.worker.engines.rollout.torch_engine import TorchRolloutConfig, TorchRolloutEngine
from m2flow.worker.engines.testing import RolloutEngineSuite, TrainerEngineSuite
from m2flow.worker.engines.trainer import TrainerEngine
from m2flow.worker.engines.trainer.adamw import AdamWConfig
from m2flow.worker.engines.trainer.torch_engine import TorchTrainerConfig, TorchTrainerEngine


class TestTorchRolloutEngine(RolloutEngineSuite):
    def make_engine(self, path: Path) -> RolloutEngine:
        return TorchRolloutEngine(TorchRolloutConfig(str(path), dtype="float32"))


class TestTorchRolloutEngineInWaves(RolloutEngineSuite):
    def make_engine(self, path: Path) -> RolloutEngine:
        return TorchRolloutEngine(TorchRolloutConfig(str(path), dtype="float32", max_samples=5, max_prefill_tokens=9))


class TestTorchTrainerEngine(TrainerEngineSuite):
    def make_engine(self, path: Path, *, microbatch_tokens: int = 4096) -> TrainerEngine:
        config = TorchTrainerConfig(str(path), AdamWConfig(lr=self.lr), microbatch_tokens=microbatch_tokens)
        return TorchTrainerEngine(config)
