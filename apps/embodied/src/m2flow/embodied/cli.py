"""The command m2flow-embodied."""

from collections.abc import Sequence

from m2flow.apps.cli import run_command
from m2flow.embodied.app import APP

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; `argv` is sys.argv's arguments unless given."""
    return run_command(APP, argv)
