"""The command m2flow-agentic."""

from collections.abc import Sequence

from m2flow.agentic.app import APP
from m2flow.apps.cli import run_command

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; `argv` is sys.argv's arguments unless given."""
    return run_command(APP, argv)
