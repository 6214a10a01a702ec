"""What an agent, its zygote and their workers are told at birth."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class AgentOptions:
    """`directory` is the run's private one, for sockets; it is removed at the end where it is `owns_directory`.

    The agent listens at `address`, "HOST:PORT", or in the directory where that is empty; `agent` is its name there.
    `preload` names modules to import before the first fork. Ranks report to the driver itself where `driver_hears`,
    else to the agent; they are of the classes that `allow` names, or of any where it names none. The token is here, and
    not in the arguments, because every user of a machine may read those.
    """

    directory: str
    token: str = field(repr=False)
    agent: str = "agent"
    address: str = ""
    preload: Sequence[str] = ()
    allow: Sequence[str] = ()
    owns_directory: bool = True
    driver_hears: bool = False


@dataclass(frozen=True, kw_only=True)
class Boot(AgentOptions):
    """`liveness_fd` reads end-of-file when the driver is gone. To `ready_fd` the agent writes the address that it got,
    and closes it."""

    liveness_fd: int
    ready_fd: int

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Boot":
        """The reverse of `to_json`."""
        return cls(**json.loads(text))

    @property
    def control(self) -> Path:
        """Where this agent's ranks are told and heard."""
        return control_path(self.path, self.agent)

    @property
    def path(self) -> Path:
        """The private directory."""
        return Path(self.directory)


def control_path(directory: Path, agent: str) -> Path:
    """The socket at which the ranks of an agent are told and heard, by the driver itself or by the agent."""
    return directory / f"{agent}.control"
