"""What the m2flow applications share."""

from m2flow.apps.config import TrainingConfig, load_config
from m2flow.apps.errors import AppError, CheckFailed, CheckpointError, ConfigError, ResumeError, RunDirectoryError
from m2flow.apps.parsing import build, setting
from m2flow.apps.run_directory import RunDirectory
from m2flow.apps.yaml_tree import dump_yaml, merge_overrides

__all__ = [
    "AppError",
    "CheckFailed",
    "CheckpointError",
    "ConfigError",
    "ResumeError",
    "RunDirectory",
    "RunDirectoryError",
    "TrainingConfig",
    "build",
    "dump_yaml",
    "load_config",
    "merge_overrides",
    "setting",
]
