"""Everything that can be wrong before any process starts, found all at once and starting nothing."""

import importlib.util
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from m2flow.apps.config import TrainingConfig
from m2flow.apps.errors import CheckFailed
from m2flow.apps.paths import expanded

__all__ = ["collect", "existing", "missing_packages", "run_problems"]


def collect(checks: Iterable[Callable[[], list[str]]]) -> list[str]:
    """Returns the problems of all checks, each once; one that raises CheckFailed adds its own and stops no other."""
    problems: list[str] = []
    for check in checks:
        try:
            problems += check()
        except CheckFailed as error:
            problems += error.problems
    return list(dict.fromkeys(problems))


def missing_packages(names: Iterable[str], *, wanted_by: str, remedy: str) -> list[str]:
    """Returns a problem for each module that cannot be found; nothing is imported."""
    return [
        f"{wanted_by}: the package {name} is missing, want it installed: {remedy}"
        for name in names
        if importlib.util.find_spec(name) is None
    ]


def run_problems(config: TrainingConfig, *, resuming: bool) -> list[str]:
    """Returns what is wrong with where the run is to be written, and with the cores that it asks for."""
    problems: list[str] = []
    key = "run.dir" if config.run.dir else "run.root"
    target = expanded(config.run.dir or config.run.root)
    if config.run.dir and not resuming and target.is_dir() and any(target.iterdir()):
        problems.append(f"run.dir: {target} holds files already, want a new directory: resume it or name another")
    written = {key: target}
    if config.run.profiles:
        written["run.profiles"] = expanded(config.run.profiles)
    for name, path in written.items():
        parent = existing(path)
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            problems.append(f"{name}: {parent} cannot be written to, want a writable directory: choose another {name}")
    cores = len(os.sched_getaffinity(0))
    if config.launcher != "ray" and config.cpu_slots != "all" and config.cpu_slots > cores:
        problems.append(f"cpu_slots: got {config.cpu_slots}, want at most {cores}, the cores at hand: lower it")
    return problems


def existing(path: Path) -> Path:
    """Returns the nearest ancestor, or the path itself, that exists."""
    absolute = path.absolute()
    return next(parent for parent in (absolute, *absolute.parents) if parent.exists())
