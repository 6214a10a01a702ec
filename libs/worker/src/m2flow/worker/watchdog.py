"""Says who waits for whom when a run has been silent for too long.

Silence is the absence of `stir`. Witnesses are asked only then: each gives lines on who waits for what, for how long.
"""

import threading
import time
from collections.abc import Callable, Sequence

Witness = Callable[[float], Sequence[str]]
"""Given the time on the watchdog's clock: lines such as "rollout.0: in generate for 61 s"."""


class Watchdog:
    """Reports each silence once when it has lasted `silence_s`, and again each time it has doubled. Thread-safe."""

    def __init__(
        self, silence_s: float, say: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not silence_s > 0:  # NaN too: no silence would last as long.
            raise ValueError(f"watchdog: got a silence of {silence_s} s, want more than 0")
        self._silence_s = silence_s
        self._say = say
        self._clock = clock
        self._witnesses: list[Witness] = []
        self._last = clock()
        self._next_s = silence_s
        self._ended = threading.Event()

    def add_witness(self, witness: Witness) -> None:
        """Asks `witness` too, on the watchdog's thread, from now on."""
        self._witnesses.append(witness)

    def stir(self) -> None:
        """Something happened."""
        self._last = self._clock()
        self._next_s = self._silence_s

    def look(self) -> float:
        """Reports if it is time to; the seconds until it may be."""
        now = self._clock()
        silent_s = now - self._last
        if silent_s >= self._next_s:
            self._next_s = 2 * silent_s
            lines = [line for witness in self._witnesses for line in witness(now)]
            told = "\n".join(f"  {line}" for line in lines or ["nobody waits for anything"])
            self._say(f"nothing has happened for {silent_s:.0f} s\n{told}")
        return max(0.0, self._last + self._next_s - now)

    def start(self) -> None:
        """Looks by itself from now on, on a thread of its own, until `end`."""
        self.stir()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def end(self) -> None:
        """Looks no more."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self.look()):
            pass
