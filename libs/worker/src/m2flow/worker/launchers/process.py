"""Ranks as processes of this machine, under an agent process with a warm zygote: the embedded default."""

from collections.abc import Mapping, Sequence

from m2flow.worker.device import Device
from m2flow.worker.launchers._agent_process import AgentProcess
from m2flow.worker.launchers._boot import AgentOptions
from m2flow.worker.launchers._link import LocalLink, control_server
from m2flow.worker.wiring import Link, Wiring


class ProcessLink(LocalLink):
    """A session with an agent process that it starts, and whose end it waits for."""

    def __init__(self, wiring: Wiring) -> None:
        options = AgentOptions(str(wiring.directory), wiring.token, preload=wiring.preload, driver_hears=True)
        control = control_server(wiring, options.agent)
        try:
            self.agent = AgentProcess(options)
        except BaseException:
            control.close()
            raise
        try:
            super().__init__(self.agent.address, wiring, control)
        except BaseException:
            self.agent.end()
            raise

    def close(self) -> None:
        """Ends the session, then the agent."""
        super().close()
        self.agent.end()


def connect(nodes: Mapping[str, Sequence[Device]], wiring: Wiring) -> Mapping[str, Link]:
    """One agent for all nodes: they are names on this machine."""
    return dict.fromkeys(nodes, ProcessLink(wiring))
