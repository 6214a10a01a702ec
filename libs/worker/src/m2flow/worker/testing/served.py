"""A worker started by hand, for as long as a test wants it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def served(
    target: str, address: str, token: str, prefix: Sequence[str] = ()
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A worker that waits, and the address that it printed."""
    command = [*prefix, sys.executable, "-m", "m2flow.worker", "serve", target, "--address", address]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "M2FLOW_TOKEN": token})
    assert server.stdout is not None
    try:
        yield server, server.stdout.readline().strip().rpartition(" ")[2]
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=20)
