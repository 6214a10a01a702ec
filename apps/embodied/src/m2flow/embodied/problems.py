"""What can be wrong with an environment before a run: packages, what rendering needs, what it refuses by itself."""

import ctypes.util
import os
import subprocess
import sys

from m2flow.apps.check import missing_packages
from m2flow.embodied.config import EmbodiedConfig
from m2flow.embodied.prepared import is_prepared

__all__ = ["env_problems"]

_SIMULATORS = {"gymnasium_robotics": ("gymnasium_robotics", "mujoco", "OpenGL")}


def env_problems(config: EmbodiedConfig) -> list[str]:
    """Returns what is missing for the environment, and for its film; imports none of it.

    Where nothing is, an environment that no run has had yet is made, in a process of its own: seconds.
    """
    module = config.env.id.partition(":")[0] if ":" in config.env.id else "gymnasium"
    remedy = "pip install 'm2flow-embodied[robotics]'" if module in _SIMULATORS else f"install what brings {module}"
    problems = missing_packages(
        ["gymnasium", *_SIMULATORS.get(module, (module,))], wanted_by=f"env.id={config.env.id}", remedy=remedy
    )
    if module in _SIMULATORS and config.evaluation.film:
        problems += _rendering_problems()
    return problems if problems or is_prepared(config) else _refusals(config)


def _refusals(config: EmbodiedConfig) -> list[str]:
    pixels = config.evaluation.pixels if config.evaluation.film else 0
    command = [sys.executable, "-m", "m2flow.embodied._trial", config.env.id, str(pixels)]
    tried = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if tried.returncode in (0, 2):
        return tried.stdout.splitlines()[-1:] if tried.returncode else []
    reason = tried.stderr.strip().splitlines()[-1:] or [f"exit code {tried.returncode}"]
    return [f"env.id: got {config.env.id!r}, whose process ended ({reason[0]}), want it made: correct it"]


def _rendering_problems() -> list[str]:
    """MuJoCo renders without a screen by OSMesa, unless the user has chosen another way."""
    way = os.environ.get("MUJOCO_GL", "osmesa")
    if way != "osmesa" or ctypes.util.find_library("OSMesa"):
        return []
    return [
        "evaluation.film: the library OSMesa is missing, want it for pictures without a screen: apt-get install"
        " libosmesa6 (Debian, Ubuntu), or MUJOCO_GL=egl where there is a GPU, or evaluation.film=false"
    ]
