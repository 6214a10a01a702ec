"""What can be wrong with an environment before any process starts: packages, and what rendering needs."""

import ctypes.util
import os

from m2flow.apps.check import missing_packages
from m2flow.embodied.config import EmbodiedConfig

__all__ = ["env_problems"]

_SIMULATORS = {"gymnasium_robotics": ("gymnasium_robotics", "mujoco", "OpenGL")}


def env_problems(config: EmbodiedConfig) -> list[str]:
    """Returns what is missing for the environment, and for its film; imports none of it."""
    module = config.env.id.partition(":")[0] if ":" in config.env.id else "gymnasium"
    remedy = "pip install 'm2flow-embodied[robotics]'" if module in _SIMULATORS else f"install what brings {module}"
    problems = missing_packages(
        ["gymnasium", *_SIMULATORS.get(module, (module,))], wanted_by=f"env.id={config.env.id}", remedy=remedy
    )
    if module in _SIMULATORS and config.evaluation.film:
        problems += _rendering_problems()
    return problems


def _rendering_problems() -> list[str]:
    """MuJoCo renders without a screen by OSMesa, unless the user has chosen another way."""
    way = os.environ.get("MUJOCO_GL", "osmesa")
    if way != "osmesa" or ctypes.util.find_library("OSMesa"):
        return []
    return [
        "evaluation.film: the library OSMesa is missing, want it for pictures without a screen: apt-get install"
        " libosmesa6 (Debian, Ubuntu), or MUJOCO_GL=egl where there is a GPU, or evaluation.film=false"
    ]
