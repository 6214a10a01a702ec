"""Which of several failures was first, and a cause rather than an echo of it."""

import threading
from collections.abc import Callable

from m2flow.proto.worker.v1 import worker_pb2 as pb

SETTLE_S = 0.1
"""Reports of one moment are compared by their own clocks for so long."""

ECHO_S = 2.0
"""How long the sight of another's end waits for the report of that end."""


class Verdict:
    """Takes failure reports in any order and names one of them, once."""

    def __init__(self, decide: Callable[[pb.FailureReport], None]) -> None:
        self._decide = decide
        self._mutex = threading.Lock()
        self._causes: list[pb.FailureReport] = []
        self._echoes: list[pb.FailureReport] = []
        self._timer: threading.Timer | None = None
        self._decided = False

    def hear(self, report: pb.FailureReport) -> None:
        """One report, a cause or the sight of another's end. Does not block."""
        with self._mutex:
            if self._decided:
                return
            (self._echoes if report.consequence else self._causes).append(report)
            first_cause = not report.consequence and len(self._causes) == 1
            if self._timer is None or first_cause:
                self._arm(ECHO_S if report.consequence else SETTLE_S)

    def _arm(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(delay_s, self._settle)
        self._timer.daemon = True
        self._timer.start()

    def _settle(self) -> None:
        with self._mutex:
            if self._decided:
                return
            self._decided = True
            heard = sorted(self._causes or self._echoes, key=lambda report: report.time_s)
        # The ranks of one process end as one: the one that ran something stands for all.
        together = [report for report in heard if (report.host, report.pid) == (heard[0].host, heard[0].pid)]
        self._decide(next((report for report in together if report.phase != "idle"), heard[0]))
