"""Paths as people write them."""

from pathlib import Path

from m2flow.apps.errors import CheckFailed

__all__ = ["expanded"]


def expanded(path: str) -> Path:
    """Returns `path` with a home in place of a leading ~ or ~USER. Raises CheckFailed where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        problem = f"{path}: got {user}, which is nobody's home, want a user of this machine: correct it"
        raise CheckFailed([problem]) from None
