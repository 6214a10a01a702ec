"""Rewards over gRPC: serves a reward function to programs in any language, and calls such a service.

The messages are `algos/v1`: a `Trajectory` in, a `Score` out, in order; a score with an `error` is none. Every call
brings the service's token as the metadata `m2flow-token`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import grpc

from m2flow.comm.grpc_options import DIRECT
from m2flow.comm.token import TOKEN_KEY, check_token
from m2flow.proto.algos.v1 import algos_pb2 as pb
from m2flow.proto.algos.v1 import algos_pb2_grpc
from m2flow.worker._tokens import TokenInterceptor
from m2flow.worker.errors import LaunchError, RewardFailed
from m2flow.worker.pool import check_limit
from m2flow.worker.reward import SCORE_ZERO, FailurePolicy, Reward, Rewarder, RewardPool

_FIELDS = ("id", "prompt", "completion", "data_source", "ground_truth", "extra_info")
_MOST_BATCHES = 8


class RewardServer(algos_pb2_grpc.RewardServiceServicer):
    """Serves a rewarder at an address such as "127.0.0.1:0", until `close`.

    A call without `token` is refused and logged. The rewarder's policy must be "skip": whoever calls decides what
    becomes of a failure. Items reach its function as the trajectory's fields, strings all. Raises ValueError for a
    token that is empty or not printable ASCII, LaunchError where the address is taken.
    """

    def __init__(self, rewarder: Rewarder, address: str, *, token: str) -> None:
        self._rewarder = rewarder
        threads = ThreadPoolExecutor(_MOST_BATCHES)
        self._server = grpc.server(threads, interceptors=[TokenInterceptor(token)], options=DIRECT)
        algos_pb2_grpc.add_RewardServiceServicer_to_server(self, self._server)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as failure:
            raise LaunchError(f"reward service: cannot listen at {address}: {failure}") from failure
        self.address = f"{address.rpartition(':')[0]}:{port}"
        self._server.start()

    def Score(self, request: pb.ScoreRequest, context: grpc.ServicerContext) -> pb.ScoreResponse:
        """Scores a batch; the method of the service."""
        limit_s = request.timeout_s or None
        try:
            check_limit("reward service", limit_s)
        except ValueError as wrong:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(wrong))
        items = [{name: getattr(one, name) for name in _FIELDS} for one in request.trajectories]
        rewards = self._rewarder.score(items, timeout_s=limit_s)
        return pb.ScoreResponse(
            scores=[
                pb.Score(id=item["id"], reward=reward.score or 0.0, parts=reward.parts, error=reward.error)
                for item, reward in zip(items, rewards, strict=True)
            ]
        )

    def close(self) -> None:
        """Ends the service, not its rewarder. Blocks until batches under way have ended."""
        self._server.stop(grace=None).wait()

    def wait(self) -> None:
        """Blocks until it is closed."""
        self._server.wait_for_termination()


def serve(target: str, address: str, token: str, num_processes: int) -> None:
    """Serves a function in a pool of processes until this process is interrupted. Blocks."""
    with RewardPool(target, num_processes=num_processes, policy=FailurePolicy("skip")) as pool:
        server = RewardServer(pool, address, token=token)
        print(f"{target} is served at {server.address}", flush=True)
        try:
            server.wait()
        except KeyboardInterrupt:
            server.close()


class RewardClient:
    """A rewarder that asks a service, whose token it knows and which has `timeout_s` for a whole batch.

    Raises ValueError for a token that is empty or not printable ASCII, or a `timeout_s` that is not above 0.
    """

    def __init__(
        self, address: str, *, token: str, timeout_s: float = 60.0, policy: FailurePolicy = SCORE_ZERO
    ) -> None:
        check_limit(f"reward service at {address}", timeout_s)
        self._address = address
        self._metadata = ((TOKEN_KEY, check_token(token)),)
        self._timeout_s = timeout_s
        self._policy = policy
        self._counts: Counter[str] = Counter()
        self._channel = grpc.insecure_channel(address, options=DIRECT)
        self._stub = algos_pb2_grpc.RewardServiceStub(self._channel)

    def score(self, items: Sequence[Mapping[str, Any]], *, timeout_s: float | None = None) -> list[Reward]:
        """The rewards of the items' fields, in order, of which those of a `Trajectory` are sent. Blocks.

        Each item has the service's own time, or `timeout_s` where that is less.

        Raises RewardFailed where the policy is "stop" and an item failed, or, under any policy, where the service does
        not answer within `timeout_s`, or refuses the token. Raises ValueError on a `timeout_s` that is not above 0.
        """
        check_limit(f"reward service at {self._address}", timeout_s)
        trajectories = [
            pb.Trajectory(**{name: str(fields[name]) for name in _FIELDS if name in fields}) for fields in items
        ]
        request = pb.ScoreRequest(trajectories=trajectories, timeout_s=timeout_s or 0.0)
        try:
            response = self._stub.Score(request, timeout=self._timeout_s, wait_for_ready=True, metadata=self._metadata)
        except grpc.RpcError as failure:
            raise RewardFailed(
                f"reward service at {self._address}: no answer within {self._timeout_s} s "
                f"for {len(items)} items: {failure}"
            ) from failure
        return [self._reward(score) for score in response.scores]

    def counts(self) -> dict[str, float]:
        """Since the start, for the metrics; what a service counts as a time-out or a death is an error here."""
        return {f"reward/{name}": float(self._counts[name]) for name in ("scored", "errors", "timeouts", "deaths")}

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()

    def __enter__(self) -> "RewardClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reward(self, score: pb.Score) -> Reward:
        self._counts["errors" if score.error else "scored"] += 1
        if score.error:
            return self._policy.failed(score.error)
        return Reward(score.reward, dict(score.parts))
