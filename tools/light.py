"""Checks that importing a facade, and planning with an app, load nothing heavy: run where the packages are installed.

An app's `plan` builds its job, traces the recipe and searches, as the driver of `train` does before it starts workers.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from packages import load

HEAVY = ("torch", "ray", "transformers", "vllm", "megatron", "tensorboard", "datasets", "gymnasium", "mujoco")
# What an app's driver leaves to its ranks.
OF_RANKS = ("torch", "ray", "transformers", "safetensors", "vllm", "megatron", "datasets", "mujoco")


def loaded(code: str, heavy: tuple[str, ...]) -> set[str]:
    """Those of the heavy modules that a fresh interpreter has loaded after running `code`."""
    code = f"import sys; {code}; print(*[m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    return set(done.stdout.splitlines()[-1].split())


def told(what: str, heavy: set[str]) -> bool:
    """Prints what was loaded; whether it was anything."""
    print(f"{what}: " + (f"loads {', '.join(sorted(heavy))}" if heavy else "light"))
    return bool(heavy)


def main() -> int:
    failed = 0
    for package in load().values():
        failed += told(package.module, loaded(f"import {package.module}", HEAVY) - package.facade_imports)
        if (package.source / "recipe.py").exists():
            plan = f"from {package.module}.cli import main; assert main(['plan']) == 0"
            failed += told(f"{package.module}: plan", loaded(plan, OF_RANKS))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
