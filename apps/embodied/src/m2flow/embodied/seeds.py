"""Seeds of episodes: each from the run's one seed and from what the episode is for."""

from m2flow.apps.seeding import derived_seed

__all__ = ["episode_seed"]


def episode_seed(seed: int, *path: str | int) -> int:
    """Returns a number in [0, 2**31), which every simulator takes."""
    return derived_seed(seed, "episode", *path) % (1 << 31)
