"""The index of a channel under any order of events: nothing is lost, nothing doubled, nobody sleeps beside an item."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any, Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from m2flow.comm._entries import Entry, Filter, Held
from m2flow.comm._index import ChannelIndex
from m2flow.comm._waiting import Caller, Refusal

PRODUCERS, SPARES, CONSUMERS = ["p", "q"], ["r", "s"], ["c", "d", "e"]
CAPACITY = 5
KEYS = ["", "k", "l", "a", "g", "h"]
keys = st.sampled_from(KEYS)
iterations = st.integers(0, 2)


class Memory(Held):
    def __init__(self) -> None:
        self.drops = 0

    def drop(self) -> None:
        self.drops += 1


class Owed:
    """What one of the declared producers owes, and who may put it."""

    def __init__(self, name: str) -> None:
        self.names = [name]
        self.ended: set[int] = set()
        self.closed = False
        self.lost = False


def takers() -> dict[tuple[frozenset[str], str], str]:
    """Says who takes each key, by who lives: what channels do from which nobody but the others was ever heard."""
    found = {}
    for count in range(1, len(CONSUMERS) + 1):
        for living in map(frozenset, combinations(CONSUMERS, count)):
            index = ChannelIndex("q", capacity=0, producers=PRODUCERS, consumers=CONSUMERS, route="by_key")
            for member in CONSUMERS:
                if member not in living:
                    index.left(member, member)
            entries = [Entry("", key, 1.0, 0, "p", "", None) for key in KEYS]
            index.put(Caller("p", "p", 0, lambda found, refusal: None), entries, wait=True)
            for member in living:
                taken: list[Entry] = []
                caller = Caller(member, member, 0, lambda found, refusal, taken=taken: taken.extend(found))
                index.get(caller, Filter(None, None), len(KEYS), 0)
                found |= {(living, entry.key): member for entry in taken}
    return found


TAKERS = takers()


class Get:
    """A get that was asked; `answered` once it was."""

    def __init__(self, member: str, wanted: Filter, weight: float) -> None:
        self.member, self.wanted, self.weight = member, wanted, weight
        self.answered = False


class ChannelMachine(RuleBasedStateMachine):
    route: Literal["any", "by_key"] = "any"

    def __init__(self) -> None:
        super().__init__()
        self.index = ChannelIndex("q", capacity=CAPACITY, producers=PRODUCERS, consumers=CONSUMERS, route=self.route)
        self.requests = 0
        self.sessions = dict.fromkeys(PRODUCERS + SPARES + CONSUMERS, 0)
        self.memories: dict[tuple[int, str], Memory] = {}
        self.offered: list[Entry] = []
        self.held: dict[str, list[Entry]] = {name: [] for name in CONSUMERS}
        self.acked: set[tuple[int, str]] = set()
        self.gets: list[Get] = []
        self.owed = [Owed(name) for name in PRODUCERS]
        self.closed: set[str] = set()
        self.dead: set[str] = set()

    def session(self, member: str) -> tuple[str, int]:
        return member, self.sessions[member]

    def owed_by(self, member: str) -> list[Owed]:
        return [owed for owed in self.owed if member in owed.names]

    def over(self, iteration: int) -> bool:
        return all(owed.closed or iteration in owed.ended for owed in self.owed) and any(
            iteration in owed.ended for owed in self.owed
        )

    def living(self) -> frozenset[str]:
        return frozenset(CONSUMERS) - self.closed - self.dead

    def may_have(self, get: Get, entry: Entry) -> bool:
        return (
            get.wanted.key in (None, entry.key)
            and get.wanted.iteration in (None, entry.iteration)
            and (self.route == "any" or TAKERS.get((self.living(), entry.key)) == get.member)
        )

    def queued_for(self, get: Get) -> list[Entry]:
        return [entry for entry in self.index._queue.all() if self.may_have(get, entry)]

    def waits_to_be_put(self, get: Get) -> bool:
        """Says whether something that a get could have was accepted and has no room yet."""
        return any(self.may_have(get, entry) for put in self.index._waiting.puts.values() for entry in put.entries)

    @rule(
        member=st.sampled_from(PRODUCERS * 3 + SPARES),
        count=st.integers(1, 3),
        key=keys,
        iteration=iterations,
        wait=st.booleans(),
        data=st.data(),
    )
    def put(self, member: str, count: int, key: str, iteration: int, wait: bool, data: st.DataObject) -> None:
        self.requests += 1
        entries = []
        for _ in range(count):
            name = (
                f"{self.owed_by(member)[0].names[0] if self.owed_by(member) else member}{data.draw(st.integers(0, 30))}"
            )
            weight = data.draw(st.sampled_from([0.5, 1.0, 2.0, 9.0]))
            entries.append(Entry(name, key, weight, iteration, member, "", Memory()))
        answers: list[Refusal | None] = []

        def answer(found: Sequence[Entry], refusal: Refusal | None) -> None:
            assert not answers, "answered twice"
            answers.append(refusal)
            assert refusal is None or refusal.type in wrong or refusal.type in ("TimeoutError_", "ChannelClosedError")

        owed = self.owed_by(member)
        wrong: tuple[str, ...] = ()
        if not owed:
            wrong = ("CommError",)
        elif self.over(iteration):
            wrong = ("IterationOverError",)
        if owed and (all(part.closed for part in owed) or self.closed == set(CONSUMERS)):
            wrong = ("ChannelClosedError",)
        if not wrong:
            # Who is refused for want of room lives too.
            for part in owed:
                part.lost = False
        crowded = not wait and (self.index.num_queued + count > CAPACITY or self.index.num_waiting_puts > 0)
        if not wrong and crowded:
            wrong = ("ChannelFullError",)
        self.offered += entries
        self.index.put(Caller(self.session(member), member, self.requests, answer), entries, wait=wait)
        if wrong and not (crowded and answers[0] is None):
            assert answers[0] is not None
            for get in self.gets if crowded and answers[0].type == "ChannelFullError" else ():
                assert get.answered or not self.queued_for(get), "not all was given out"
            return
        assert wait or answers, "asked not to wait, and waits"

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
        get = Get(member, Filter(key, iteration), weight if at_least is None else at_least)
        self.closed.discard(member)
        self.dead.discard(member)

        def answer(found: Sequence[Entry], refusal: Refusal | None) -> None:
            assert not get.answered, "answered twice"
            get.answered = True
            assert not (found and refusal)
            total = sum(entry.weight for entry in found)
            assert len(found) <= 1 or total <= weight + 1e-6
            assert found or refusal or at_least == 0
            assert [entry.order for entry in found] == sorted(entry.order for entry in found)
            assert all(self.may_have(get, entry) for entry in found)
            # What came first is taken first.
            assert all(entry.order > found[-1].order for entry in self.queued_for(get) if found)
            self.held[member] += found
            match refusal.type if refusal else None:
                case "IterationEnded":
                    assert iteration is not None
                    assert self.over(iteration)
                    assert not self.waits_to_be_put(get)
                case "PeerLostError":
                    assert any(owed.lost and not owed.closed for owed in self.owed)
                case "ChannelClosedError":
                    drained = all(owed.closed for owed in self.owed) and not self.waits_to_be_put(get)
                    assert member in self.closed or drained

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
    def consumer_leaves(self, member: str) -> None:
        session = self.session(member)
        self.sessions[member] += 1
        self.held[member] = []
        self.gets = [get for get in self.gets if get.member != member]
        self.dead.add(member)
        self.index.left(session, member)

    @rule(member=st.sampled_from(PRODUCERS + SPARES))
    def producer_leaves(self, member: str) -> None:
        session = self.session(member)
        self.sessions[member] += 1
        for owed in self.owed_by(member):
            if len(owed.names) > 1:
                owed.names.remove(member)
            else:
                owed.lost = True
        self.index.left(session, member)

    @rule(lost=st.sampled_from(PRODUCERS + SPARES), successor=st.sampled_from(PRODUCERS + SPARES))
    def announce_successor(self, lost: str, successor: str) -> None:
        followed = self.owed_by(lost)
        if not followed:
            return
        self.index.announce_successor(lost, successor)
        for owed in followed:
            owed.names = [successor] if owed.lost else [*owed.names, successor]
            owed.lost = False

    @rule(member=st.sampled_from(PRODUCERS + SPARES), iteration=iterations)
    def end(self, member: str, iteration: int) -> None:
        for owed in self.owed_by(member):
            owed.ended.add(iteration)
            owed.lost = False
        answered: list[Any] = []
        caller = Caller(self.session(member), member, 0, lambda found, refusal: answered.append(refusal))
        expected = bool(self.owed_by(member))
        self.index.end(caller, iteration)
        assert [refusal is None for refusal in answered] == [expected]

    @rule(member=st.sampled_from(PRODUCERS + CONSUMERS))
    def close(self, member: str) -> None:
        if member in PRODUCERS and not self.owed_by(member):
            return
        for owed in self.owed_by(member):
            owed.closed = True
        if member in CONSUMERS:
            self.held[member] = []
            self.closed.add(member)
        answered: list[Any] = []
        caller = Caller(self.session(member), member, 0, lambda found, refusal: answered.append(refusal))
        self.index.close(caller)
        assert answered == [None]

    @rule()
    def cancel_last(self) -> None:
        for member in self.sessions:
            self.index.cancel(self.session(member), self.requests)

    @invariant()
    def every_item_is_in_one_place(self) -> None:
        for entry in self.offered:
            if entry.order:
                assert isinstance(entry.payload, Memory)
                self.memories[entry.iteration, entry.id] = entry.payload
        queued = [(entry.iteration, entry.id) for entry in self.index._queue.all()]
        held = [(entry.iteration, entry.id) for entries in self.held.values() for entry in entries]
        everywhere = [*queued, *held, *self.acked]
        assert len(everywhere) == len(set(everywhere))
        assert self.index.num_leased == len(held)
        assert self.index.counts.put == len(everywhere)

    @invariant()
    def memory_is_dropped_once_and_only_when_nobody_will_take_it(self) -> None:
        waiting = [entry for put in self.index._waiting.puts.values() for entry in put.entries]
        for entry in self.offered:
            memory: Any = entry.payload
            done = (entry.iteration, entry.id) in self.acked if entry.order else entry not in waiting
            assert memory.drops == done

    @invariant()
    def nobody_sleeps_beside_an_item_or_for_nothing(self) -> None:
        for get in self.gets:
            if get.answered:
                continue
            queued = self.queued_for(get)
            iteration = get.wanted.iteration
            if queued:
                assert get.weight > sum(entry.weight for entry in queued) - 1e-6
                if self.index.num_queued >= CAPACITY:
                    assert len(queued) < self.index.num_queued
                    assert self.index.num_waiting_puts == 0
            else:
                waits = self.waits_to_be_put(get)
                assert waits or iteration is None or not self.over(iteration)
                assert waits or not all(owed.closed for owed in self.owed)
                assert not any(
                    owed.lost and not owed.closed and (iteration is None or iteration not in owed.ended)
                    for owed in self.owed
                )
        if self.closed == set(CONSUMERS):
            assert self.index.num_waiting_puts == 0

    @invariant()
    def nothing_is_remembered_of_what_is_closed_and_drained(self) -> None:
        left = self.index.num_queued + self.index.num_leased + self.index.num_waiting_puts
        if all(owed.closed for owed in self.owed) and not left:
            assert not self.index._seen
            assert not self.index._remaining

    @invariant()
    def sums_are_those_of_the_entries(self) -> None:
        total = sum(entry.weight for entry in self.index._queue.all())
        assert abs(self.index.queued_weight - total) < 1e-6
        assert self.index.num_queued <= CAPACITY + self.index.counts.regiven


class ByKeyMachine(ChannelMachine):
    route = "by_key"


def test_who_is_gone_has_one_heir_and_who_lives_keeps_what_is_his() -> None:
    everybody = frozenset(CONSUMERS)
    homes = {key: TAKERS[everybody, key] for key in KEYS}
    assert set(homes.values()) == everybody
    for living in {living for living, _ in TAKERS}:
        taken = {(home, TAKERS[living, key]) for key, home in homes.items()}
        assert len(taken) == len(CONSUMERS), "a home is taken by one"
        assert all(taker in living and (home not in living or taker == home) for home, taker in taken)


TestChannelMachine = ChannelMachine.TestCase
TestByKeyMachine = ByKeyMachine.TestCase
TestChannelMachine.settings = TestByKeyMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
