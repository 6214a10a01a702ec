"""Checkpoints: a directory that `transformers` loads with `from_pretrained`, plus what a run needs to go on.

A run draws its data and its sampling noise from (seed, step, position) alone, so that its data position and random
state are these numbers; what is heavy (weights, optimiser) is written by the trainer itself. No iteration is under way
while it is written: what is in flight then is what quotas carry over.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from m2flow.apps.atomic import new_directory
from m2flow.apps.errors import CheckpointError
from m2flow.apps.identity import package_version
from m2flow.comm import decode, encode
from m2flow.worker import Item

__all__ = ["FORMAT", "ResumeState", "latest_checkpoint", "read_in_flight", "read_resume_state", "write_checkpoint"]

FORMAT = 2
_STATE = "resume.json"
_CARRIED = "in_flight.bin"


@dataclass(frozen=True)
class ResumeState:
    """What goes on where it stopped. `step` steps are done; step `step` + 1 is next.

    `files` are the bytes of every other file of the checkpoint, by name: a copy that lost some is refused.
    """

    step: int
    seed: int
    items_drawn: int
    policy_version: int
    package_version: str = field(default_factory=package_version)
    format: int = FORMAT
    files: Mapping[str, int] = field(default_factory=dict)


def write_checkpoint(
    root: Path,
    state: ResumeState,
    write: Callable[[Path], object],
    *,
    keep: int,
    in_flight: Mapping[str, Sequence[Item]] | None = None,
) -> Path:
    """Returns <root>/step_N, which holds what `write` put in the directory given to it, and the resume state.

    `in_flight` are items that the next iteration begins with, by quota.

    The directory appears complete or not at all; older ones beyond the newest `keep` are removed after that. Blocks
    until it is on disk. Raises RunDirectoryError when it cannot be written. One process at a time: what a writer that
    was killed left half done is removed.
    """
    path = root / f"step_{state.step}"
    for half in root.glob(".step_*.tmp"):
        shutil.rmtree(half, ignore_errors=True)
    with new_directory(path) as temporary:
        write(temporary)
        if in_flight:
            (temporary / _CARRIED).write_bytes(encode(dict(in_flight)).to_bytes())
        whole = replace(state, files=_sizes(temporary))
        (temporary / _STATE).write_text(json.dumps(asdict(whole), indent=2) + "\n", encoding="utf-8")
    for old in _complete(root)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def read_in_flight(path: Path) -> Mapping[str, Sequence[Item]]:
    """Returns the `in_flight` of a checkpoint that `read_resume_state` found whole."""
    file = path / _CARRIED
    carried: Mapping[str, Sequence[Item]] = decode(file.read_bytes()) if file.exists() else {}
    return carried


def latest_checkpoint(root: Path) -> Path | None:
    """Returns the newest complete checkpoint under `root`, or None."""
    complete = _complete(root)
    return complete[-1] if complete else None


def read_resume_state(path: Path) -> ResumeState:
    """Returns the state in a checkpoint. Raises CheckpointError when it is missing, of another format, or not whole."""
    try:
        fields = json.loads((path / _STATE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: no readable {_STATE} ({error}): name a complete step_N directory") from None
    got = fields.get("format") if isinstance(fields, dict) else None
    if got != FORMAT:
        raise CheckpointError(f"{path}: got format {got}, want {FORMAT}: use the m2flow-apps that wrote it")
    try:
        state = ResumeState(**fields)
    except TypeError as error:
        raise CheckpointError(f"{path}: {_STATE} does not fit ({error}): use the m2flow-apps that wrote it") from None
    present = _sizes(path)
    for name, size_bytes in state.files.items():
        if present.get(name) != size_bytes:
            got = f"{present[name]} bytes of {name}" if name in present else f"no {name}"
            raise CheckpointError(
                f"{path}: got {got}, want {size_bytes} bytes: remove this directory to go on from an older checkpoint"
            )
    return state


def _sizes(root: Path) -> dict[str, int]:
    """Bytes by name of every file but the state itself."""
    files = [file for file in root.rglob("*") if file.is_file() and file.name != _STATE]
    return {str(file.relative_to(root)): file.stat().st_size for file in files}


def _complete(root: Path) -> list[Path]:
    named = [path for path in root.glob("step_*") if path.name.removeprefix("step_").isdecimal()]
    steps = [path for path in named if (path / _STATE).is_file()]
    return sorted(steps, key=lambda path: int(path.name.removeprefix("step_")))
