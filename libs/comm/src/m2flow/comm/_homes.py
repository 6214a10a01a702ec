"""Which consumer takes what is for which, in a channel that is routed by key."""

import hashlib
from collections.abc import Collection


class Homes:
    """Each consumer has a home, and each key one home for good: what is queued stays there, whoever comes and goes.

    A consumer takes from its own home and from those that it has inherited: while one is gone, another takes from its
    home. Who that is depends on nothing but who lives.
    """

    def __init__(self, consumers: Collection[str]) -> None:
        self._consumers = list(consumers)
        self._heirs: dict[str, list[str]] = {}
        # By consumer: the homes that it takes from. By home: who does.
        self.taken_by: dict[str, list[str]] = {}
        self.taker_of: dict[str, str] = {}
        self.share_out(consumers)

    def of(self, key: str) -> str:
        """Returns the home of a key."""
        consumers = self._consumers
        return consumers[_draw(key) % len(consumers)] if len(consumers) > 1 else consumers[0]

    def share_out(self, living: Collection[str]) -> None:
        """Lets each consumer that lives take from its own home, and one of them from each home of one who does not."""
        self.taken_by = {name: [] for name in self._consumers}
        for home in self._consumers:
            heirs = [home] if home in living else self._heirs_of(home)
            self.taker_of[home] = taker = next((name for name in heirs if name in living), home)
            self.taken_by[taker].append(home)

    def _heirs_of(self, home: str) -> list[str]:
        """Returns the consumers in the order in which they inherit a home: each has its own."""
        heirs = self._heirs.get(home)
        if heirs is None:
            heirs = self._heirs[home] = sorted(self._consumers, key=lambda name: _draw(f"{home}\0{name}"))
        return heirs


def _draw(text: str) -> int:
    """Returns a number of a text, the same in every run."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
