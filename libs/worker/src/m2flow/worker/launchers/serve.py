"""A worker started by hand, on a computer that no launcher reaches: it is its own agent, and waits to be joined.

One driver at a time: a session that ends takes its ranks with it, and the next one finds a fresh agent at the same
address. Only the class that is served can be started. The wire is not encrypted, and the token is its only lock: it
belongs on a network that you trust.
"""

import shutil
import sys
import tempfile

from m2flow.worker.launchers._agent_process import AgentProcess
from m2flow.worker.launchers._boot import AgentOptions
from m2flow.worker.target import resolve_target


def serve(target: str, address: str, token: str) -> None:
    """Serves `target` at "HOST:PORT" until this process ends; prints each address that it waits at. Blocks.

    Raises ImportError or AttributeError where there is no such class, LaunchError where the address is taken.
    """
    preload = [target.partition(":")[0], *resolve_target(target).preload]
    while True:
        directory = tempfile.mkdtemp(prefix="m2flow-")
        try:
            options = AgentOptions(directory, token, address=address, preload=preload, allow=[target])
            agent = AgentProcess(options)
            try:
                address = agent.address
                print(f"{target} waits at {address}", flush=True)
                agent.wait()
            finally:
                agent.end()
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
