"""The base of every worker: a plain class that runs as one rank of a group, on the devices that a plan gives it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from m2flow.worker.spec import GroupSpec, group_name, method_names
from m2flow.worker.stage import pulls, stage_names
from m2flow.worker.target import target_of

if TYPE_CHECKING:
    from m2flow.worker.context import WorkerContext


class Worker:
    """One rank of a group.

    A subclass marks stages with `@stage`; its other public methods are plain calls. Calls run one at a time on one
    thread, the process's main thread where it holds one rank. Nothing heavy belongs in `__init__`: devices are bound
    and `context` is set before `setup()`.
    """

    on_death: ClassVar[Literal["retry", "drop", "stop"]] = "stop"
    """What follows from a rank's death: "retry" restarts it and gives its unfinished items out again, "drop" restarts
    it and lets them go as tombstones, "stop" ends the run."""

    in_step: ClassVar[bool] = False
    """Whether the ranks move together, as a sharded trainer's do; else they are independent replicas."""

    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that `setup` imports and the class's own module does not, so that a driver, which only names the class,
    is spared them: they are imported before its first rank is forked, and ranks start warm."""

    context: "WorkerContext"

    def __init__(self, config: Any) -> None:
        self.config = config

    def setup(self) -> None:
        """Builds what is heavy. Runs once, after the devices are bound."""

    def close(self) -> None:
        """Ends what `setup` started, such as processes. Runs once, when the rank is stopped; not when it dies."""

    def onload(self) -> None:
        """Moves the state onto the devices."""

    def offload(self) -> None:
        """Moves the state off the devices."""

    def shards(self) -> Mapping[str, Any]:
        """What the group must keep when it is re-placed, as far as this rank has it: arrays or tensors by name.

        Names are those of the whole group. A `m2flow.comm.Shard` is a part of a larger one. All ranks are asked at
        once; those of the new placement, after `setup`, too: what they give says which parts they want.
        """
        return {}

    def load_shards(self, shards: Mapping[str, Any]) -> None:
        """Takes what the ranks before had, cut as this rank's own `shards` are; a few names at a time, to be copied."""

    def resident_bytes(self) -> int:
        """The bytes that the state takes on each of its devices now."""
        return 0

    @classmethod
    def group(
        cls,
        config: Any = None,
        *,
        name: str | None = None,
        device_kind: str = "cpu",
        devices_per_rank: int | None = 1,
        ranks_per_process: int = 1,
        min_devices: int = 1,
        max_devices: int = 0,
    ) -> GroupSpec:
        """A specification of a group of this class; nothing starts.

        `config` is a payload tree, given to every rank. `name` is the class's name in snake case, without "worker",
        unless given. Each rank takes `devices_per_rank` devices of `device_kind`; None means that one rank takes the
        group's whole placement. `ranks_per_process` consecutive ranks are threads of one process, which dies as one:
        for many light ones. `max_devices` 0 is without bound. Raises ValueError on a name or a number that cannot be,
        and where ranks that move in step would pull from an inbox each for itself.
        """
        stages = stage_names(cls)
        if pulling := [name for name in stages if cls.in_step and pulls(getattr(cls, name))]:
            raise ValueError(
                f"{cls.__name__}.{pulling[0]} takes an inbox, and its ranks move in step: let it take a list of items"
            )
        return GroupSpec(
            name=group_name(cls.__name__) if name is None else name,
            target=target_of(cls),
            config=config,
            methods=method_names(cls),
            stages=stages,
            device_kind=device_kind,
            devices_per_rank=devices_per_rank,
            ranks_per_process=ranks_per_process,
            min_devices=min_devices,
            max_devices=max_devices,
            can_offload=cls.offload is not Worker.offload,
            in_step=cls.in_step,
            on_death=cls.on_death,
        )
