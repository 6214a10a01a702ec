"""The command m2flow-reasoning."""

from collections.abc import Sequence

from m2flow.apps.entry import run_app

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; `argv` is sys.argv's arguments unless given."""
    return run_app("m2flow.reasoning.app:APP", argv)
