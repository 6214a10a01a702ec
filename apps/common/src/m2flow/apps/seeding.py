"""The one seed of a run, spread: each use gets numbers of its own, by name and place."""

import hashlib

__all__ = ["derived_seed"]


def derived_seed(seed: int, *path: str | int) -> int:
    """Returns a number in [0, 2**64) that depends on `seed` and on each part of `path`, in order, and on no process."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
