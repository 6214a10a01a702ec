"""Fixtures: endpoints that are closed again, and plain Python processes that are ended again."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from m2flow.comm import Endpoint

TOKEN = "token-of-this-run"


class MakeEndpoint(Protocol):
    def __call__(self, name: str, *, token: str = TOKEN, quota_bytes: int | None = None) -> Endpoint: ...


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A private directory for one run's sockets."""
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def make_endpoint(run_dir: Path) -> Iterator[MakeEndpoint]:
    """Makes endpoints of one run in this process that treat each other as if they were in others."""
    made: list[Endpoint] = []

    def make(name: str, *, token: str = TOKEN, quota_bytes: int | None = None) -> Endpoint:
        made.append(Endpoint(run_dir, name, token=token, quota_bytes=quota_bytes, by_reference=False))
        return made[-1]

    yield make
    for endpoint in reversed(made):
        endpoint.close()


class Peer:
    """A Python process that runs a text, with `endpoint` and `say(line)` in it."""

    _PRELUDE = """
        import sys, time
        from pathlib import Path
        import numpy as np
        from m2flow.comm import *
        endpoint = Endpoint(Path(sys.argv[1]), sys.argv[2], token=sys.argv[3])
        def say(line):
            print(line, flush=True)
    """

    def __init__(self, run_dir: Path, name: str, text: str) -> None:
        program = textwrap.dedent(self._PRELUDE) + textwrap.dedent(text)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", program, str(run_dir), name, TOKEN],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def line(self) -> str:
        """Returns the next line that it says; empty when it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        """Ends it as a crash would."""
        self.process.kill()
        self.process.wait()

    def finish(self) -> int:
        """Waits for its end."""
        return self.process.wait(30)


@pytest.fixture
def peer(run_dir: Path) -> Iterator[Callable[[str, str], Peer]]:
    """Starts processes with an endpoint of a name, running a text."""
    started: list[Peer] = []

    def start(name: str, text: str) -> Peer:
        started.append(Peer(run_dir, name, text))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        for pipe in (process.process.stdout, process.process.stdin):
            assert pipe is not None
            pipe.close()
