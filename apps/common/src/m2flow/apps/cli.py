"""The command line that every app has: train, eval, plan, check, config show, report.

Exit codes: 0 done, 1 a run failed, 2 something was wrong before any process started, 130 Ctrl-C, 143 SIGTERM,
141 nobody reads on.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from m2flow.apps import commands
from m2flow.apps.app import App
from m2flow.apps.config import TrainingConfig
from m2flow.apps.errors import AppError
from m2flow.apps.identity import package_version
from m2flow.apps.interrupts import Terminated, orderly_interrupts
from m2flow.flow import FlowError
from m2flow.worker import WorkerError, WorkerFailed

__all__ = ["run_command"]

C = TypeVar("C", bound=TrainingConfig)


def run_command(app: App[C], argv: Sequence[str] | None = None) -> int:
    """Runs one command of `app` and returns its exit code; `argv` is sys.argv's arguments unless given. Blocks."""
    arguments = _parse(_parser(app), argv)
    try:
        with orderly_interrupts():
            return _run(app, arguments)
    except Terminated:
        return _interrupted("terminated", 143)
    except KeyboardInterrupt:
        return _interrupted("interrupted", 130)
    except AppError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except WorkerFailed as error:
        print(_first_failure(error), file=sys.stderr)
        return 1
    except BrokenPipeError as error:
        print(flush=True)  # raises again where it is standard output that nobody reads
        print(error, file=sys.stderr)
        return 1
    except (WorkerError, FlowError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Settings may stand before and after options, which argparse alone refuses."""
    arguments, rest = parser.parse_known_args(argv)
    if any(word.startswith("-") for word in rest) or (rest and "settings" not in arguments):
        parser.error(f"got {' '.join(rest)}, want no more than the command takes: see --help")
    if rest:
        arguments.settings += rest
    return arguments


def _first_failure(error: WorkerFailed) -> str:
    where = f"{error.group} rank {error.rank} on {error.host} (pid {error.pid}) failed in {error.phase}: {error.cause}"
    log = [f"  {line}" for line in error.last_log_lines]
    return "\n".join([where, *error.traceback.rstrip().splitlines(), *(["its last lines:", *log] if log else [])])


def _run(app: App[C], arguments: argparse.Namespace) -> int:
    command = commands.resume if getattr(arguments, "resume", None) else arguments.run
    return int(command(app, arguments))


def _interrupted(word: str, code: int) -> int:
    print(f"{word}: all workers have ended", file=sys.stderr)
    return code


def _parser(app: App[C]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"m2flow-{app.name}", description=app.purpose)
    version = f"%(prog)s {package_version(f'm2flow-{app.name}')}"
    parser.add_argument("--version", action="version", version=version)
    parsers = parser.add_subparsers(required=True, metavar="command")

    command = parsers.add_parser("train", help="train, or go on with a run")
    _add_settings(command, app)
    command.add_argument("--resume", type=Path, metavar="RUN", help="go on from the newest checkpoint of this run")
    command.set_defaults(run=commands.train)

    command = parsers.add_parser("eval", help="measure a model, or a checkpoint, on held-out problems")
    _add_settings(command, app)
    which = "a step_N directory, or a run for its newest; measured by its run's settings unless a recipe is named"
    command.add_argument("--checkpoint", type=Path, metavar="DIR", help=which)
    command.set_defaults(run=commands.evaluate)

    command = parsers.add_parser("plan", help="find the best plan from a profile and say why; needs no device")
    _add_settings(command, app)
    command.add_argument("--profile", type=Path, help="measured (profile.json of a run) or typed by hand, JSON or YAML")
    command.add_argument("--cluster", type=Path, help="a ClusterSpec as JSON or YAML; else this machine's cores")
    command.add_argument("--output", type=Path, help="write the plan to this file, for plan=FILE")
    command.set_defaults(run=commands.plan)

    command = parsers.add_parser("check", help="find what would go wrong; starts nothing; exit code 2 if it would")
    _add_settings(command, app)
    command.set_defaults(run=commands.check)

    command = parsers.add_parser("config", help="show the resolved configuration")
    command.add_argument("action", choices=["show"])
    _add_settings(command, app)
    command.set_defaults(run=commands.show_config)

    command = parsers.add_parser("report", help="make report.html of a run again")
    command.add_argument("directory", type=Path, metavar="RUN")
    command.set_defaults(run=commands.report)
    return parser


def _add_settings(command: argparse.ArgumentParser, app: App[C]) -> None:
    names = ", ".join(app.recipes)
    command.add_argument(
        "settings",
        nargs="*",
        metavar="[RECIPE] [a.b=c ...]",
        help=f"a shipped recipe ({names}; {app.default_recipe} unless given) or a YAML file, then overrides",
    )
