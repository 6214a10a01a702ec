"""Checks that importing a facade loads nothing heavy: run with an interpreter that has the packages installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from packages import load

HEAVY = ("torch", "ray", "transformers", "vllm", "megatron", "tensorboard", "datasets", "gymnasium", "mujoco")


def loaded(module: str) -> set[str]:
    """The heavy modules that a fresh interpreter has loaded after importing `module`."""
    code = f"import sys, {module}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def main() -> int:
    failed = 0
    for package in load().values():
        heavy = sorted(loaded(package.module) - package.facade_imports)
        failed += bool(heavy)
        print(f"{package.module}: " + (f"loads {', '.join(heavy)}" if heavy else "light"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
