"""What a vector environment is, and the words it speaks. The adapters are modules of this folder."""

from m2flow.worker.engines.env.engine import Floats, Step, VectorEnv

__all__ = ["Floats", "Step", "VectorEnv"]
