"""A worker that answers, prints, sleeps, fails and dies as it is told: what a launcher is tested with."""

import os
import signal
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from m2flow.worker.base import Worker
from m2flow.worker.context import WorkerContext


class Probe(Worker):
    """Does what it is told. `config` is a tree that it gives back; {"setup": "raise"} makes its setup fail,
    {"setup": "sleep 1"} makes it slow, {"closed": path} makes its end leave a file there, {"close": "exit"} makes it
    exit."""

    def setup(self) -> None:
        self.count = 0
        # What is asked to wait is never answered: only the rank's end ends it.
        self.context.endpoint.handle("probe", lambda asked: asked.args if asked.method == "echo" else Future())
        told, _, rest = str(self.config.get("setup", "")).partition(" ") if isinstance(self.config, dict) else ("",) * 3
        if told == "raise":
            raise RuntimeError("the probe was told to fail in setup")
        if told == "sleep":
            time.sleep(float(rest))

    def close(self) -> None:
        if isinstance(self.config, dict) and "closed" in self.config:
            (Path(self.config["closed"]) / str(self.context.rank)).touch()
        if isinstance(self.config, dict) and self.config.get("close") == "exit":
            sys.exit("the probe was told to exit in close")

    def echo(self, value: Any) -> Any:
        """Gives the value back."""
        return value

    def whoami(self) -> dict[str, Any]:
        """Its rank, process, devices, cores, config and start."""
        context = self.context
        return {
            "group": context.group,
            "rank": context.rank,
            "world_size": context.world_size,
            "pid": os.getpid(),
            "devices": list(context.device_ids),
            "cores": sorted(os.sched_getaffinity(0)),
            "torch": "torch" in sys.modules,
            "config": self.config,
            "attempt": context.attempt,
        }

    def add(self, amount: int) -> int:
        """Counts, in the life of this process."""
        self.count += amount
        return self.count

    def sleep(self, seconds: float) -> float:
        """Sleeps, under the timer "sleep"."""
        with self.context.timer("sleep"):
            time.sleep(seconds)
        return seconds

    def say(self, line: str) -> None:
        """Prints a line."""
        print(line, flush=True)

    def fill_memory(self, size_bytes: int) -> int:
        """Takes memory, and writes to all of it."""
        return len(bytearray(b"x") * size_bytes)

    def fail(self, message: str) -> None:
        """Raises a ValueError."""
        raise ValueError(message)

    def exit(self, code: int) -> None:
        """Calls sys.exit."""
        sys.exit(code)

    def exit_hard(self, code: int) -> None:
        """Ends the process without a word to anyone."""
        os._exit(code)

    def die(self) -> None:
        """Kills its own process by SIGKILL."""
        os.kill(os.getpid(), signal.SIGKILL)

    def die_once(self) -> int:
        """Kills its own process the first time that the rank is started; then says how often it was."""
        if self.context.attempt == 0:
            self.die()
        return self.context.attempt

    def put(self, channel: str, value: Any) -> None:
        """Puts an item into a channel that the driver hosts."""
        self.context.endpoint.channel(channel, host="driver").put(value)

    def get(self, channel: str) -> Any:
        """Gets one."""
        own_end = self.context.endpoint.channel(channel, host="driver")
        lease = own_end.get(timeout_s=20.0)
        own_end.ack(lease)
        return lease.item

    def ask(self, peer: str, value: Any) -> Any:
        """Asks another rank to give a value back."""
        return self.context.endpoint.request(peer, "probe", "echo", value, timeout_s=20.0)

    def listen(self, peer: str) -> Any:
        """Asks another rank and fails when that one dies: an echo, not a cause."""
        return self.context.endpoint.request(peer, "probe", "wait")


class RetryProbe(Probe):
    """A probe that is restarted and given its calls again."""

    on_death = "retry"


class RelapsingProbe(RetryProbe):
    """A probe that, once it has died, dies in setup as often as `config` says before it comes up again."""

    def setup(self) -> None:
        """Dies, or does as any other."""
        if 0 < self.context.attempt <= self.config:
            self.die()
        super().setup()


class WarmProbe(Probe):
    """A probe whose ranks need a module that its own does not import."""

    preload = ("m2flow.worker.testing.preloaded",)

    def setup(self) -> None:
        """Finds the module there."""
        super().setup()
        self.imported_by = int(sys.modules[self.preload[0]].IMPORTED_BY)

    def importer(self) -> int:
        """The process that imported what it preloads."""
        return self.imported_by


class DropProbe(Probe):
    """A probe that is restarted without its calls."""

    on_death = "drop"


class Companion:
    """An object that lives beside a probe."""

    def __init__(self, worker: Probe, context: WorkerContext, word: str) -> None:
        self.worker = worker
        self.context = context
        self.word = word

    def greet(self) -> str:
        """A word and the rank."""
        return f"{self.word} {self.context.rank} of start {self.context.attempt}"

    def count_with(self, amount: int) -> int:
        """Counts on the worker, within its turn."""
        with self.context.turn:
            return self.worker.add(amount)
