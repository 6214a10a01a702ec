"""What the agent of a node says, in which order, of ranks that end."""

import threading
from collections.abc import Sequence

from m2flow.proto.worker.v1 import worker_pb2 as pb
from m2flow.worker._node import NodeAgent, RankKey

KEY = ("reward", 0)
STOP = pb.SessionRequest(stop=pb.StopWorker(group="reward", rank=0, grace_s=1.0))


class Ranks:
    """Ranks that do nothing by themselves."""

    def start(self, order: pb.StartWorker) -> None:
        pass

    def ask(self, keys: Sequence[RankKey], request: pb.SessionRequest) -> None:
        pass

    def stop(self, key: RankKey, grace_s: float) -> None:
        pass

    def kill(self, key: RankKey) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_rank_that_ends_ahead_of_its_stop_is_not_told_of_after_it() -> None:
    """It hears of its stop by another way than the agent; the driver forgets it with the agent's word that it ended."""
    said: list[str | None] = []

    def emit(response: pb.SessionResponse) -> None:
        if response.HasField("failure"):
            stopper = threading.Thread(target=node.handle, args=(STOP,), daemon=True)
            stopper.start()
            stopper.join(10)
        said.append(response.WhichOneof("kind"))

    node = NodeAgent(lambda _: Ranks(), emit)
    node.handle(pb.SessionRequest(start=pb.StartWorker(group="reward", rank=0)))
    node._on_event(pb.SessionResponse(stopped=pb.Stopped(group="reward", rank=0)))
    assert said == ["failure", "stopped"]
    node.handle(STOP)
    assert said == ["failure", "stopped", "stopped"]


def test_who_hears_of_a_rank_that_had_gone_may_wait_for_another_that_speaks_to_the_agent() -> None:
    """The driver's threads waited for each other's locks where both are in one process."""
    spoke: list[bool] = []

    def emit(response: pb.SessionResponse) -> None:
        speaker = threading.Thread(target=node.handle, args=(pb.SessionRequest(peers=pb.Peers()),), daemon=True)
        speaker.start()
        speaker.join(2)
        spoke.append(not speaker.is_alive())

    node = NodeAgent(lambda _: Ranks(), emit)
    node.handle(STOP)
    assert spoke == [True]
