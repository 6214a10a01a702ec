"""The micro flow: what each worker rank does, in time and space.

Passes make it from a graph and a plan (`m2flow.flow.passes`); the runtime executes it. Everything here is plain data
that travels to the workers as a payload.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from m2flow.comm import decode, encode, register

DRIVER = "driver"


@register
@dataclass(frozen=True)
class Op:
    """One piece of glue: `kind` is its word ("gather"), `inputs` the operations or producers that feed it.

    A `local` gather takes only what became of one item: of others it would not see all. Where an operation is `looped`,
    items come again and again. What a filter drops becomes a tombstone for its `reason`, and leaves none where that is
    "". Of several inboxes that run the same operation one `counts` what is lost in it.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    function: str = ""
    by: str = ""
    branch: str = ""
    local: bool = False
    looped: bool = False
    reason: str = ""
    count: int = 0
    carry_surplus: bool = False
    counts: bool = True


@register
@dataclass(frozen=True)
class Inbox:
    """How items reach a stage: through one channel that all its far producers share, then through its glue.

    `ports` are the far producers, `feedback` those of them that send items round again; `head` is the operation or the
    producer whose items the stage takes; `window` is the order that they come in. In a `routed` inbox an item goes to
    the rank that its source position names, so that what must meet meets. `capacity` 0 is without bound, and so is
    `in_flight`: how many items of one rank are in the loop that begins here. `sieves` are filters that the producers
    run themselves, each what one of them gives: what fails is not sent.
    """

    ports: tuple[str, ...]
    head: str
    ops: tuple[Op, ...] = ()
    sieves: tuple[Op, ...] = ()
    feedback: tuple[str, ...] = ()
    window: int = 0
    epochs: int = 1
    routed: bool = False
    capacity: int = 0
    in_flight: int = 0


@register
@dataclass(frozen=True)
class MicroStage:
    """One stage on every rank of its group.

    `granularity` counts items per chunk over all ranks, `share` those of one rank. An `eager` stage takes what is
    there, up to its share: inside a loop, or where a quota decides what comes, nobody knows how much will. A `locked`
    stage takes its devices in turn, at `position`; it keeps its turn from chunk to chunk where it `hold`s. `lag`: how
    many versions its weights may be behind, -1 where nobody sends it weights. In a loop that gathers nothing a stage
    `keeps` items whole: each goes on as itself.
    """

    name: str
    kind: str
    group: str = ""
    method: str = ""
    to: str = ""
    inbox: Inbox = field(default_factory=lambda: Inbox((), ""))
    after: tuple[str, ...] = ()
    granularity: int = 1
    share: int = 1
    eager: bool = False
    locked: bool = False
    position: int = 0
    hold: bool = False
    lag: int = -1
    keeps: bool = False


@register
@dataclass(frozen=True)
class MicroGroup:
    """A worker group in place: the devices of each rank.

    `offload`: it leaves its devices at the end of a turn; `restarts`: a rank that dies comes back.
    """

    name: str
    in_step: bool = False
    ranks: tuple[tuple[int, ...], ...] = ()
    offload: bool = False
    restarts: bool = False

    @property
    def devices(self) -> tuple[int, ...]:
        """Every device of the group, once, in order."""
        return tuple(sorted({device for rank in self.ranks for device in rank}))

    def unit(self, rank: int) -> tuple[str, tuple[int, ...]]:
        """Who takes turns for a rank, and on what: the whole group where it moves in step, else the rank alone."""
        return (self.name, self.devices) if self.in_step else (f"{self.name}.{rank}", self.ranks[rank])


@register
@dataclass(frozen=True)
class MicroFlow:
    """All stages and groups of a program, and how many source items an iteration has.

    `generation` counts the plans of a run: each has channels of its own.
    """

    name: str
    source_items: int
    stages: tuple[MicroStage, ...]
    groups: tuple[MicroGroup, ...] = ()
    staleness: int = 0
    generation: int = 0

    def stage(self, name: str) -> MicroStage:
        """The stage of that name."""
        return next(stage for stage in self.stages if stage.name == name)

    def group(self, name: str) -> MicroGroup:
        """The group of that name."""
        return next(group for group in self.groups if group.name == name)

    def stages_of(self, group: str) -> tuple[MicroStage, ...]:
        """What a group runs, in order."""
        return tuple(stage for stage in self.stages if stage.group == group)

    def takers(self, producer: str) -> tuple[MicroStage, ...]:
        """The stages whose inbox a stage puts into."""
        return tuple(stage for stage in self.stages if producer in stage.inbox.ports)

    def is_entry(self, stage: MicroStage) -> bool:
        """Whether items come to the stage's group by this stage first: none of the group's others is on their way."""
        return all(self.stage(name).group != stage.group for name in self._before(stage, feedback=False))

    def is_in_loop(self, stage: MicroStage) -> bool:
        """Whether items come to the stage again."""
        return stage.name in self._before(stage, feedback=True)

    def _before(self, stage: MicroStage, *, feedback: bool) -> set[str]:
        """The stages that items may have passed on their way to one, round loops too with `feedback`."""
        before: set[str] = set()
        frontier = [stage]
        while frontier:
            inbox = frontier.pop().inbox
            fresh = set(inbox.ports) - (set() if feedback else set(inbox.feedback)) - before
            before |= fresh
            frontier += [self.stage(name) for name in fresh]
        return before

    def endpoints(self, stage: str) -> tuple[str, ...]:
        """The names of the processes that run a stage: "rollout.0" ..., or the driver."""
        group = self.stage(stage).group
        return tuple(f"{group}.{rank}" for rank in range(self.num_ranks(stage))) if group else (DRIVER,)

    def num_ranks(self, stage: str) -> int:
        """The number of processes that run a stage."""
        group = self.stage(stage).group
        return len(self.group(group).ranks) if group else 1

    def comes_back(self, endpoint: str) -> bool:
        """Whether a process that died is started again under its name: "rollout.3" of a group that restarts."""
        name, _, rank = endpoint.rpartition(".")
        return any(group.name == name and group.restarts and int(rank) < len(group.ranks) for group in self.groups)

    def map_stages(self, changed: Mapping[str, MicroStage]) -> "MicroFlow":
        """The same flow with some stages replaced by name."""
        return replace(self, stages=tuple(changed.get(stage.name, stage) for stage in self.stages))

    def to_text(self) -> str:
        """A line per stage: where, in what pieces, in whose turn."""
        lines = [f"{self.name}: {self.source_items} items an iteration, staleness {self.staleness}"]
        width = max(len(stage.name) for stage in self.stages)
        for stage in self.stages:
            lines.append(f"  {stage.name:<{width}}  {_describe(self, stage)}")
        return "\n".join(lines) + "\n"


@lru_cache(maxsize=4)
def pack(flow: MicroFlow) -> bytes:
    """A flow as it travels to the workers."""
    return encode(flow).to_bytes()


@lru_cache(maxsize=4)
def unpack(packed: bytes) -> MicroFlow:
    """The flow that `pack` packed: one for all ranks of a process, and for all iterations."""
    flow: MicroFlow = decode(packed)
    return flow


def _describe(flow: MicroFlow, stage: MicroStage) -> str:
    words = []
    if stage.inbox.ports:
        sifted = {op.inputs[0]: f" ({op.name})" for op in stage.inbox.sieves}
        path = " + ".join(f"{port}{sifted.get(port, '')}" for port in stage.inbox.ports)
        words.append(f"<- {path}" + "".join(f" | {op.name}" for op in stage.inbox.ops))
    if stage.group and flow.groups:
        group = flow.group(stage.group)
        words.append(f"on {len(group.ranks)} x {len(group.ranks[0])} devices {list(group.devices)}")
        words.append(f"chunks of {stage.granularity}")
        if stage.locked:
            turn = "holds" if stage.hold else "yields"
            words.append(f"turn {stage.position}, {turn}{', offloads' if group.offload else ''}")
    if stage.lag >= 0:
        words.append(f"weights at most {stage.lag} old")
    if stage.after:
        words.append(f"after {', '.join(stage.after)}")
    return "; ".join(words)
