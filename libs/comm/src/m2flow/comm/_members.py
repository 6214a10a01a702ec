"""Who puts into a channel and who takes from it, and what is known of each."""

from collections.abc import Hashable, Iterable

from m2flow.comm._intervals import Intervals


class Producer:
    """What one declared producer owes. `names` may put it: itself, until it has left, and its successors.

    `lost` says that the last of them was gone before it closed the channel, and has not been back.
    """

    def __init__(self, name: str) -> None:
        self.names = [name]
        self.ended = Intervals()
        self.closed = False
        self.lost = False

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
        # By the name of who puts: a successor has what it owes itself and what those owed that it follows.
        self.producers = {name: [Producer(name)] for name in producers}
        self.consumers = {name: Consumer() for name in consumers}
        # All who are or have been members, those too whom a successor has followed.
        self.known = {*self.producers, *self.consumers}
        self._all_owed = [owed for states in self.producers.values() for owed in states]
        # The connection that each was last heard on.
        self._sessions: dict[str, Hashable] = {}

    def over(self, iteration: int) -> bool:
        """Says whether every producer has ended an iteration; those that closed the channel count as having done so."""
        found = False
        for state in self._all_owed:
            if iteration in state.ended:
                found = True
            elif not state.closed:
                return False
        return found

    def all_closed(self) -> bool:
        """Says whether every producer has closed the channel."""
        for state in self._all_owed:
            if not state.closed:
                return False
        return bool(self._all_owed)

    def living(self) -> set[str]:
        """Names the consumers that are not gone."""
        return {name for name, state in self.consumers.items() if not state.gone}

    def none_takes(self) -> bool:
        """Says whether every consumer has closed the channel."""
        for state in self.consumers.values():
            if not state.closed:
                return False
        return bool(self.consumers)

    def owing(self, iteration: int | None) -> list[str]:
        """Names those who may still put something of an iteration, or of any."""
        names = [name for state in self._all_owed if state.owes(iteration) for name in state.names]
        return list(dict.fromkeys(names))

    def lost_owing(self, iteration: int | None) -> list[str]:
        """Names those of them that are gone without a successor."""
        return [state.names[0] for state in self._all_owed if state.lost and state.owes(iteration)]

    def puts(self, name: str, session: Hashable) -> list[Producer]:
        """Notes that a producer lives; returns what it may put."""
        self._sessions[name] = session
        states = self.producers[name]
        for state in states:
            state.lost = False
        return states

    def takes(self, name: str, session: Hashable) -> bool:
        """Notes that a consumer lives; says whether it had been gone."""
        self._sessions[name] = session
        state = self.consumers[name]
        was_gone = state.gone
        state.closed = state.lost = False
        return was_gone

    def left(self, name: str, session: Hashable) -> None:
        """Notes that the connection of a member ended; the end of an earlier one says nothing."""
        if self._sessions.get(name, session) != session:
            return
        self._sessions.pop(name, None)
        if name in self.consumers:
            self.consumers[name].lost = True
        for state in self.producers.get(name, ()):
            if len(state.names) > 1:
                state.names.remove(name)
            else:
                state.lost = True
        self._file(name)

    def announce_successor(self, lost: str, successor: str) -> None:
        """Lets another producer put what one owes that died, or will, beside what it owes itself.

        Raises ValueError where there is no producer of that name.
        """
        if lost not in self.producers:
            raise ValueError(f"got {lost!r} to be followed, want one of the producers {', '.join(self.producers)}")
        self.known.add(successor)
        for state in self.producers[lost]:
            if state.lost:
                state.names, state.lost = [successor], False
            else:
                state.names.append(successor)
        self._file(successor)
        self._file(lost)

    def _file(self, name: str) -> None:
        states = [state for state in self._all_owed if name in state.names]
        if states:
            self.producers[name] = states
        else:
            self.producers.pop(name, None)
