"""Who puts into a channel and who takes from it, and what is known of each."""

import hashlib
from collections.abc import Hashable, Iterable, Sequence

from m2flow.comm._intervals import Intervals


class Producer:
    """One declared producer. `lost` is a death that nobody has taken over yet."""

    def __init__(self) -> None:
        self.ended = Intervals()
        self.closed = False
        self.lost = False
        self.session: Hashable | None = None
        self.successor = ""

    def owes(self, iteration: int | None) -> bool:
        """Says whether something of an iteration, or of any, may still come from it."""
        return not self.closed and (iteration is None or iteration not in self.ended)


class Consumer:
    """One declared consumer. `gone` when it closed the channel or died."""

    def __init__(self) -> None:
        self.closed = False
        self.lost = False

    @property
    def gone(self) -> bool:
        """Says whether it takes no more."""
        return self.closed or self.lost


class Members:
    """The members of one channel."""

    def __init__(self, producers: Iterable[str], consumers: Iterable[str]) -> None:
        self.producers = {name: Producer() for name in producers}
        self.consumers = {name: Consumer() for name in consumers}

    def over(self, iteration: int) -> bool:
        """Says whether every producer has ended an iteration; those that closed the channel count as having done so."""
        states = self.producers.values()
        return not any(state.owes(iteration) for state in states) and any(iteration in state.ended for state in states)

    def all_closed(self) -> bool:
        """Says whether every producer has closed the channel."""
        return bool(self.producers) and all(state.closed for state in self.producers.values())

    def owing(self, iteration: int | None) -> list[str]:
        """Names the producers that may still put something of an iteration, or of any."""
        return [name for name, state in self.producers.items() if state.owes(iteration)]

    def lost_owing(self, iteration: int | None) -> list[str]:
        """Names those of them that died without a successor."""
        return [name for name, state in self.producers.items() if state.lost and state.owes(iteration)]

    def announce_successor(self, lost: str, successor: str) -> None:
        """Lets a producer that died, or will, be followed by another, which consumers then wait for."""
        self.producers.setdefault(successor, Producer())
        state = self.producers.get(lost)
        if state is not None and lost != successor:
            state.successor = successor
            if state.lost:
                del self.producers[lost]

    def replace(self, producers: Sequence[str], consumers: Sequence[str]) -> None:
        """Declares other members; those that stay keep their state."""
        self.producers = {name: self.producers.get(name) or Producer() for name in producers}
        self.consumers = {name: self.consumers.get(name) or Consumer() for name in consumers}

    def producer_lost(self, name: str, session: Hashable) -> None:
        """Notes that the connection of a producer broke."""
        state = self.producers.get(name)
        if state is None or state.closed or state.session not in (None, session):
            return
        state.lost = True
        if state.successor:
            del self.producers[name]

    def route_of(self, key: str) -> str:
        """Returns the consumer that a key is put on: the same one for as long as it lives."""
        living = [name for name, state in self.consumers.items() if not state.gone]
        return max(living or self.consumers, key=lambda name: hashlib.blake2b(f"{name}\0{key}".encode()).digest())
