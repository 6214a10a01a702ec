"""The processes that a person starts by hand, and those that this package starts.

serve   waits to be joined by a driver, as `launch_run(agents={node: AgentAddress(address, token)})`
reward  serves a reward function as `m2flow.proto.algos.v1.RewardService`
agent   a launcher's agent; it reads what it needs from standard input
rank    a rank of an agent that cannot fork it
tasks   a task pool's template
"""

import argparse
import os
import sys
from pathlib import Path

from m2flow.worker._tasks import run_tasks
from m2flow.worker.base import Worker
from m2flow.worker.errors import LaunchError
from m2flow.worker.launchers._entry import run_agent, run_cold_rank
from m2flow.worker.target import resolve_target

_TOKEN = "M2FLOW_TOKEN"
_MAX_PORT = 65535


def main(arguments: list[str]) -> None:
    """Becomes the process that the arguments name. Blocks until it ends."""
    options = _parser().parse_args(arguments)
    if options.command == "agent":
        run_agent()
    elif options.command == "rank":
        run_cold_rank()
    elif options.command == "tasks":
        run_tasks(options.target, options.num_processes)
    elif options.command == "reward":
        _serve(options, "m2flow.worker.reward_service:serve", options.num_processes)
    else:
        _serve(options, "m2flow.worker.launchers.serve:serve")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m m2flow.worker", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve")
    serve.add_argument("target", help="the worker's class, as module:Class")
    serve.add_argument(
        "--address", type=_address, required=True, help="where to wait, as HOST:PORT; port 0 takes a free one"
    )
    serve.add_argument("--token-file", type=Path, help=f"holds the secret that a driver must know; else ${_TOKEN}")
    reward = commands.add_parser("reward")
    reward.add_argument("target", help="the function, as module:function")
    reward.add_argument(
        "--address", type=_address, required=True, help="where to serve, as HOST:PORT; port 0 takes a free one"
    )
    reward.add_argument("--token-file", type=Path, help=f"holds the secret that a caller must know; else ${_TOKEN}")
    reward.add_argument("--num-processes", type=int, default=os.cpu_count() or 1)
    commands.add_parser("agent")
    commands.add_parser("rank")
    tasks = commands.add_parser("tasks")
    tasks.add_argument("target")
    tasks.add_argument("num_processes", type=int)
    return parser


def _serve(options: argparse.Namespace, how: str, *more: int) -> None:
    _find(options.command, options.target)
    token = _token(options.command, options.token_file)
    try:
        # By name, because an agent must not have gRPC before its fork.
        resolve_target(how)(options.target, options.address, token, *more)
    except LaunchError as error:
        sys.exit(f"{options.command}: {error}")


def _find(command: str, target: str) -> None:
    try:
        found = resolve_target(target)
    except (ImportError, AttributeError, ValueError) as error:
        sys.exit(f"{command}: got {target!r}, want module:qualname of what can be imported here: {error}")
    if command == "serve":
        fits, wanted = isinstance(found, type) and issubclass(found, Worker), "a class of Worker"
    else:
        fits, wanted = callable(found), "a function"
    if not fits:
        sys.exit(f"{command}: got {target!r}, want {wanted}")


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    # gRPC takes a larger port for another.
    if not host or not port.isdecimal() or int(port) > _MAX_PORT:
        raise argparse.ArgumentTypeError(f"got {text!r}, want HOST:PORT with a port of 0 to {_MAX_PORT}")
    return text


def _token(command: str, file: Path | None) -> str:
    try:
        token = file.read_text().strip() if file is not None else os.environ.get(_TOKEN, "")
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"{command}: cannot read --token-file {file}: {error}")
    if not token:
        wanted = f"want one in --token-file or ${_TOKEN}: whoever knows it may use what runs here"
        sys.exit(f"{command}: got no token, {wanted}")
    return token


if __name__ == "__main__":
    main(sys.argv[1:])
