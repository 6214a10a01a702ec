"""How the source learns when a quota is full: the inbox that decides tells the driver, the driver feeds on or ends.

Several waves of items may be needed for one iteration. They are one iteration to everybody else.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from m2flow.comm import Endpoint, Request
from m2flow.flow.glue import Quota
from m2flow.flow.microflow import DRIVER, Op
from m2flow.worker import Item

_SERVICE = "flow.quota"


class QuotaMaker:
    """Makes the quota operations of one process; `carried` is what each keeps for the next iteration, by its name."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.carried: dict[str, list[Item]] = {}

    def carry(self, carried: Mapping[str, Sequence[Item]]) -> None:
        """Takes what other quotas of these names kept."""
        self.carried |= {name: list(items) for name, items in carried.items()}

    def for_iteration(self, iteration: int) -> Callable[[Op, Counter[str]], Quota]:
        """The maker for one iteration."""

        def make(op: Op, lost: Counter[str]) -> Quota:
            def report(decided: int, passed: int) -> None:
                self._endpoint.request_async(DRIVER, _SERVICE, "report", [op.name, iteration, decided, passed])

            return Quota(op, iteration, self.carried.setdefault(op.name, []), report, lost)

        return make


class QuotaBoard:
    """The driver's side: how far each quota of each iteration is."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._changed = threading.Condition()
        self._progress: dict[tuple[int, str], tuple[int, int]] = {}
        endpoint.handle(_SERVICE, self._on_request)

    def decided(self, iteration: int, op: Op, num_fed: int, timeout_s: float) -> bool | None:
        """Whether a quota is full (True), or wants more after all that was fed (False); None: not known yet.

        Blocks for up to `timeout_s`.
        """

        def verdict() -> bool | None:
            decided, passed = self._progress.get((iteration, op.name), (0, 0))
            return True if passed >= op.count else False if decided >= num_fed else None

        with self._changed:
            self._changed.wait_for(lambda: verdict() is not None, timeout_s)
            return verdict()

    def forget(self, iteration: int) -> None:
        """Drops what is known of an iteration that is over."""
        with self._changed:
            self._progress = {key: value for key, value in self._progress.items() if key[0] != iteration}

    def _on_request(self, request: Request) -> None:
        name, iteration, decided, passed = request.args
        with self._changed:
            known = self._progress.get((iteration, name), (0, 0))
            self._progress[iteration, name] = max(known, (decided, passed))
            self._changed.notify_all()
