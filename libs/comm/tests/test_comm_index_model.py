"""The index of a channel under any order of events: nothing is lost, nothing doubled, nobody sleeps beside an item."""

from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from m2flow.comm._index import Caller, ChannelIndex, Entry, Refusal
from m2flow.comm._views import Filter

PRODUCERS, CONSUMERS = ["p", "q"], ["c", "d"]
CAPACITY = 5
keys = st.sampled_from(["", "k", "l"])
iterations = st.integers(0, 2)


class Memory:
    def __init__(self) -> None:
        self.drops = 0

    def drop(self) -> None:
        self.drops += 1


class Get:
    """A get that was asked; `answered` once it was."""

    def __init__(self, member: str, session: int, wanted: Filter, weight: float) -> None:
        self.member, self.session, self.wanted, self.weight = member, session, wanted, weight
        self.answered = False


class ChannelMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = ChannelIndex("q", capacity=CAPACITY, producers=PRODUCERS, consumers=CONSUMERS)
        self.requests = 0
        self.sessions = dict.fromkeys(PRODUCERS + CONSUMERS, 0)
        self.memories: dict[tuple[int, str], Memory] = {}
        self.accepted: list[tuple[int, str]] = []
        self.offered: dict[int, list[Entry]] = {}
        self.doubles: list[Memory] = []
        self.held: dict[str, list[Entry]] = {name: [] for name in CONSUMERS}
        self.acked: set[tuple[int, str]] = set()
        self.gets: list[Get] = []
        self.ended: dict[str, set[int]] = {name: set() for name in PRODUCERS}

    def session(self, member: str) -> tuple[str, int]:
        return member, self.sessions[member]

    @rule(member=st.sampled_from(PRODUCERS), count=st.integers(1, 3), key=keys, iteration=iterations, data=st.data())
    def put(self, member: str, count: int, key: str, iteration: int, data: st.DataObject) -> None:
        self.requests += 1
        entries = []
        for _ in range(count):
            name = f"{member}{data.draw(st.integers(0, 30))}"
            weight = data.draw(st.sampled_from([0.5, 1.0, 2.0, 9.0]))
            entries.append(Entry(name, key, weight, iteration, member, "", Memory()))
        self.offered[self.requests] = list(entries)
        request = self.requests

        def answer(found: Sequence[Entry], refusal: Refusal | None) -> None:
            offered = self.offered.pop(request)
            if refusal is not None:
                assert refusal.type in ("CommError", "TimeoutError_")

            for entry in offered:
                self._note(entry)

        wait = data.draw(st.booleans())
        caller = Caller(self.session(member), member, request, answer)
        if not wait and self.index.num_queued + count > CAPACITY:
            self.offered.pop(request)
            refused: list[Any] = []
            self.index.put(caller._replace(answer=lambda found, refusal: refused.append(refusal)), entries, wait=False)
            assert refused[0] is not None
            return
        self.index.put(caller, entries, wait=wait)
        for entry in self.offered.get(request, []):
            self._note(entry)

    def _note(self, entry: Entry) -> None:
        """Learns which of the offered entries the index took in: those that have an order."""
        identity = (entry.iteration, entry.id)
        memory = entry.payload
        assert isinstance(memory, Memory)
        if entry.order and identity not in self.memories:
            self.memories[identity] = memory
            self.accepted.append(identity)

    @rule(
        member=st.sampled_from(CONSUMERS),
        key=st.none() | st.sampled_from(["k", "l"]),
        iteration=st.none() | iterations,
        weight=st.sampled_from([0.0, 0.0, 1.0, 3.0]),
        at_least=st.sampled_from([None, None, 0.0, 1.0]),
    )
    def get(self, member: str, key: str | None, iteration: int | None, weight: float, at_least: float | None) -> None:
        self.requests += 1
        at_least = at_least if weight else None
        enough = weight if at_least is None else at_least
        get = Get(member, self.sessions[member], Filter(key, iteration), enough)

        def answer(found: Sequence[Entry], refusal: Refusal | None) -> None:
            assert not get.answered, "answered twice"
            get.answered = True
            assert not (found and refusal)
            total = sum(entry.weight for entry in found)
            assert len(found) <= 1 or total <= weight + 1e-6
            assert found or refusal or at_least == 0
            assert [entry.order for entry in found] == sorted(entry.order for entry in found)
            for entry in found:
                assert key in (None, entry.key)
                assert iteration in (None, entry.iteration)
            self.held[member] += found
            if refusal is not None and refusal.type == "IterationEnded":
                assert iteration is not None
                assert all(iteration in done for done in self.ended.values())

        self.gets.append(get)
        caller = Caller(self.session(member), member, self.requests, answer)
        self.index.get(caller, Filter(key, iteration), weight, at_least)
        assert get.answered or at_least != 0, "asked not to wait, and waits"

    @precondition(lambda self: any(self.held.values()))
    @rule(member=st.sampled_from(CONSUMERS), give_back=st.booleans(), data=st.data())
    def ack(self, member: str, give_back: bool, data: st.DataObject) -> None:
        held = self.held[member]
        if not held:
            return
        chosen = data.draw(st.lists(st.sampled_from(held), unique_by=id, min_size=1))
        leases = [entry.lease for entry in chosen]
        self.held[member] = [entry for entry in held if entry not in chosen]
        self.index.ack(self.session(member), leases, give_back=give_back)
        if not give_back:
            self.acked |= {(entry.iteration, entry.id) for entry in chosen}

    @rule(member=st.sampled_from(CONSUMERS))
    def consumer_dies(self, member: str) -> None:
        session = self.session(member)
        self.sessions[member] += 1
        self.held[member] = []
        self.gets = [get for get in self.gets if get.member != member]
        self.index.left(session, member, lost=True)

    @rule(member=st.sampled_from(PRODUCERS), iteration=iterations)
    def end(self, member: str, iteration: int) -> None:
        self.ended[member].add(iteration)
        answered: list[Any] = []
        caller = Caller(self.session(member), member, 0, lambda found, refusal: answered.append(refusal))
        self.index.end(caller, iteration)
        assert answered == [None]

    @rule()
    def cancel_last(self) -> None:
        for member in PRODUCERS + CONSUMERS:
            self.index.cancel(self.session(member), self.requests)

    @invariant()
    def every_item_is_in_one_place(self) -> None:
        for entries in self.offered.values():
            for entry in entries:
                self._note(entry)
        queued = [(entry.iteration, entry.id) for entry in self.index._queue.all()]
        held = [(entry.iteration, entry.id) for entries in self.held.values() for entry in entries]
        everywhere = [*queued, *held, *self.acked]
        assert len(everywhere) == len(set(everywhere))
        assert self.index.num_leased == len(held)
        assert self.index.counts.put == len(everywhere)

    @invariant()
    def memory_is_dropped_once_and_only_when_acknowledged(self) -> None:
        for identity, memory in self.memories.items():
            assert memory.drops == (identity in self.acked)

    @invariant()
    def nobody_sleeps_beside_an_item(self) -> None:
        for get in self.gets:
            view = self.index._queue.view(get.wanted)
            if not get.answered and view is not None:
                assert get.weight > sum(entry.weight for entry in view) - 1e-6

    @invariant()
    def sums_are_those_of_the_entries(self) -> None:
        total = sum(entry.weight for entry in self.index._queue.all())
        assert abs(self.index.queued_weight - total) < 1e-6
        assert self.index.num_queued <= CAPACITY + self.index.counts.regiven


TestChannelMachine = ChannelMachine.TestCase
TestChannelMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
