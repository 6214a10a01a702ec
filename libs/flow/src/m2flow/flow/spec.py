"""What flow needs to know of a worker group before it runs: the part of worker's `GroupSpec` that tracing reads."""

from collections.abc import Sequence
from typing import Protocol


class Spec(Protocol):
    """A worker group that has not started: worker's `GroupSpec` is one, and a test's own class can be."""

    @property
    def name(self) -> str:
        """The group's name."""
        ...

    @property
    def stages(self) -> Sequence[str]:
        """The names of the stages, for tracing."""
        ...

    @property
    def device_kind(self) -> str:
        """The kind of device it runs on."""
        ...

    @property
    def devices_per_rank(self) -> int | None:
        """Devices of one rank; None: one rank takes all that it is given."""
        ...

    @property
    def in_step(self) -> bool:
        """Whether its ranks move together, as a trainer's do."""
        ...

    @property
    def can_offload(self) -> bool:
        """Whether it can give its memory back while it waits."""
        ...

    @property
    def on_death(self) -> str:
        """What follows from a rank's death: "retry", "drop" or "stop"."""
        ...
