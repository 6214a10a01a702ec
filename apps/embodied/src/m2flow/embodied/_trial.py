"""`python -m m2flow.embodied._trial ID PIXELS` makes an environment, then with PIXELS one to be filmed.

What either refuses is said on the last line, with exit code 2: an environment does it in ways of its own.
"""

import sys

from m2flow.worker.engines.env.gymnasium import GymnasiumEnv, GymnasiumEnvConfig

__all__ = ["main"]


def main(env_id: str, pixels: int) -> int:
    """Returns the exit code."""
    if (reason := _refusal(env_id)) is not None:
        return _said(f"env.id: got {env_id!r} ({reason}), want an id that Gymnasium makes, with a box of actions")
    if pixels and (reason := _refusal(env_id, pixels)) is not None:
        return _said(f"evaluation.film: {env_id} refuses ({reason}), want one that takes them", "evaluation.film=false")
    return 0


def _refusal(env_id: str, pixels: int = 0) -> str | None:
    try:
        GymnasiumEnv(GymnasiumEnvConfig(env_id, pixels=pixels)).close()
    except Exception as error:
        return " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return None


def _said(problem: str, remedy: str = "correct it") -> int:
    print(f"{problem}: {remedy}", flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
