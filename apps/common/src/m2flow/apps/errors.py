"""What can go wrong in an app, one tree; every message says what was got, what is wanted, and the remedy."""

from collections.abc import Sequence

__all__ = [
    "AppError",
    "CheckFailed",
    "CheckpointError",
    "ConfigError",
    "ResumeError",
    "RunDirectoryError",
    "RunInUseError",
    "StepLost",
]


class AppError(Exception):
    """Base of all errors of m2flow.apps. `exit_code` is what the command ends with when nobody catches it."""

    exit_code = 1


class CheckFailed(AppError):
    """Something is wrong that was found before any process started; `problems` lists all of it."""

    exit_code = 2

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class ConfigError(CheckFailed):
    """The configuration holds an unknown key, a value of the wrong type, or numbers that do not fit together."""


class RunDirectoryError(AppError):
    """A file of the run directory could not be written or read; the old file, if any, is still there."""


class RunInUseError(RunDirectoryError):
    """There is no run where one was named, or one that may not be touched now."""

    exit_code = 2


class CheckpointError(AppError):
    """A checkpoint is missing, incomplete, or written by another version."""

    exit_code = 2


class StepLost(AppError):
    """Nothing of a step reached its end: every item was skipped, or died on its way."""


class ResumeError(AppError):
    """A run cannot be resumed as asked, or resuming it would do nothing."""

    exit_code = 2
