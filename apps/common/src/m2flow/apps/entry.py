"""The way into a command. What is heavy is imported only when Ctrl-C and SIGTERM already end it in order."""

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from m2flow.apps.interrupts import Terminated, orderly_interrupts

__all__ = ["run_app"]


def run_app(app: str, argv: Sequence[str] | None = None) -> int:
    """Imports an app, named "module:NAME", and runs one of its commands, as `run_command` does. Blocks."""
    module, _, name = app.partition(":")
    # As `python -m` has it: functions of the user's are found where the command is run.
    if os.getcwd() not in sys.path and not sys.flags.safe_path:
        sys.path.append(os.getcwd())
    try:
        with orderly_interrupts():
            run_command = import_module("m2flow.apps.cli").run_command
            try:
                return int(run_command(getattr(import_module(module), name), argv))
            finally:
                print(end="", flush=True)  # here, not when Python ends
    except BrokenPipeError:
        # Nobody reads on, as of `plan | head -1`.
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.close()
        return 128 + signal.SIGPIPE
    except Terminated:
        word, code = "terminated", 143
    except KeyboardInterrupt:
        word, code = "interrupted", 130
    print(f"{word}: nothing had started", file=sys.stderr)
    return code
