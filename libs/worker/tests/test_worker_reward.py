import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import grpc
import pytest

from m2flow.comm.token import TOKEN_KEY
from m2flow.proto.algos.v1 import algos_pb2 as pb
from m2flow.proto.algos.v1 import algos_pb2_grpc
from m2flow.worker.errors import LaunchError, RewardFailed, SessionClosedError
from m2flow.worker.pool import TaskPool
from m2flow.worker.reward import FailurePolicy, Rewarder, RewardPool
from m2flow.worker.reward_service import RewardClient, RewardServer
from m2flow.worker.testing.reward_conformance import ITEM_TIMEOUT_S, OBEDIENT, RewarderConformance, asked

pytestmark = pytest.mark.medium


class TestRewardPool(RewarderConformance):
    def make(self, policy: FailurePolicy) -> AbstractContextManager[Rewarder]:
        return RewardPool(OBEDIENT, num_processes=2, timeout_s=ITEM_TIMEOUT_S, policy=policy)


class TestRewardService(RewarderConformance):
    @contextmanager
    def make(self, policy: FailurePolicy) -> Iterator[Rewarder]:
        pool = RewardPool(OBEDIENT, num_processes=2, timeout_s=ITEM_TIMEOUT_S, policy=FailurePolicy("skip"))
        with pool:
            server = RewardServer(pool, "127.0.0.1:0", token="of the run")
            with RewardClient(server.address, token="of the run", policy=policy) as client:
                yield client
            server.close()

    def test_a_call_without_the_token_is_refused_and_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        with RewardPool(OBEDIENT, policy=FailurePolicy("skip")) as pool:
            server = RewardServer(pool, "127.0.0.1:0", token="of the run")
            with (
                RewardClient(server.address, token="another", timeout_s=20) as client,
                pytest.raises(RewardFailed, match="UNAUTHENTICATED"),
            ):
                client.score(asked("four"))
            with grpc.insecure_channel(server.address) as channel:
                score = channel.stream_unary("/m2flow.proto.algos.v1.RewardService/Score")
                # More than there are threads, and none of them says a word.
                silent = [score.future(iter(queue.SimpleQueue().get, None)) for _ in range(12)]
                assert {call.exception(20).code() for call in silent} == {grpc.StatusCode.UNAUTHENTICATED}
            server.close()
        assert caplog.text.count("its token is not this service's") == 13
        assert "of the run" not in caplog.text

    def test_an_empty_token_is_refused_at_both_ends(self) -> None:
        with RewardPool(OBEDIENT, policy=FailurePolicy("skip")) as pool:
            with pytest.raises(ValueError, match="got an empty token, want a secret"):
                RewardServer(pool, "127.0.0.1:0", token="")
            with pytest.raises(ValueError, match="got a token that is not printable ASCII"):
                RewardClient("127.0.0.1:1", token="Schlüssel")

    def test_no_service_is_a_failure_that_names_it(self) -> None:
        with (
            RewardClient("127.0.0.1:1", token="t", timeout_s=0.2) as client,
            pytest.raises(RewardFailed, match=r"service at 127\.0\.0\.1:1: no answer within 0\.2 s for 1 items"),
        ):
            client.score(asked("four"))

    @pytest.mark.parametrize("address", ["nowhere.invalid:70000", "of another service"])
    def test_an_address_that_cannot_be_had_is_refused(self, address: str) -> None:
        with RewardPool(OBEDIENT, policy=FailurePolicy("skip")) as pool:
            other = RewardServer(pool, "127.0.0.1:0", token="t")
            taken = other.address if address == "of another service" else address
            with pytest.raises(LaunchError, match="cannot listen at"):
                RewardServer(pool, taken, token="t")
            other.close()

    def test_a_time_that_never_passes_is_refused_to_any_client(self) -> None:
        with RewardPool(OBEDIENT, policy=FailurePolicy("skip")) as pool:
            server = RewardServer(pool, "127.0.0.1:0", token="t")
            with grpc.insecure_channel(server.address) as channel:
                request = pb.ScoreRequest(trajectories=[pb.Trajectory(completion="four")], timeout_s=float("nan"))
                ask = algos_pb2_grpc.RewardServiceStub(channel).Score
                with pytest.raises(grpc.RpcError, match="got timeout_s=nan, want more than 0 s") as caught:
                    ask(request, timeout=20, metadata=[(TOKEN_KEY, "t")])
                assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            server.close()

    def test_a_proxy_is_not_asked_for_the_way_to_the_service(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("no_proxy", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        # Where nobody listens.
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        with self.make(FailurePolicy("skip")) as client:
            assert client.score(asked("four"))[0].score == 4.0


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_killed_process_is_replaced_even_when_it_was_idle() -> None:
    with RewardPool(OBEDIENT) as pool:
        pool.score(asked("four"))
        (child,) = children(pool._pool._template.pid)
        os.kill(child, signal.SIGKILL)
        assert pool.score(asked("four"))[0].score in (4.0, 0.0)
        assert pool.score(asked("four"))[0].score == 4.0


def test_closing_ends_the_processes_and_what_runs_in_them() -> None:
    pool = RewardPool(OBEDIENT, num_processes=2, timeout_s=60.0)
    pool.score(asked("four"))
    running = children(pool._pool._template.pid)
    pool._pool.submit(asked("sleep 60")[0])
    pool.close()
    pool.close()
    assert len(running) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in running)
    with pytest.raises(SessionClosedError, match="make another"):
        pool.score(asked("four"))


def test_when_the_template_is_killed_its_processes_end_and_callers_hear_of_it() -> None:
    with RewardPool(OBEDIENT, timeout_s=60.0) as pool:
        pool.score(asked("four"))
        (child,) = children(pool._pool._template.pid)
        future = pool._pool.submit(asked("sleep 60")[0])
        os.kill(pool._pool._template.pid, signal.SIGKILL)
        with pytest.raises(SessionClosedError, match="ended while calls were under way"):
            future.result(5)
        end = time.monotonic() + 5
        while Path(f"/proc/{child}").exists() and time.monotonic() < end:
            time.sleep(0.02)
        assert not Path(f"/proc/{child}").exists()


WILD = "m2flow.worker.testing.rewards:wild"


def test_a_function_that_forks_answers_once() -> None:
    with RewardPool(WILD, num_processes=2, timeout_s=20.0) as pool:
        for _ in range(3):
            assert [reward.score for reward in pool.score(asked(*["fork", "four"] * 4))] == [1.0] * 8


def test_many_long_arguments_and_answers_pass_each_other() -> None:
    with TaskPool(WILD, num_processes=2, timeout_s=20.0) as pool:
        items = [{"completion": "long 300000", "padding": "x" * 100_000} for _ in range(60)]
        assert [len(future.result(20).value) for future in [pool.submit(item) for item in items]] == [300_000] * 60


@pytest.mark.parametrize(
    ("completion", "says"),
    [
        ("text", "got '3', want a finite number, or numbers by name with a 'reward': '3' is a text"),
        ("huge", "too large"),
        ("part", "it is not finite"),
        ("nameless", "it has no 'reward'"),
        ("none", "got None"),
    ],
)
def test_what_is_no_reward_is_an_error_and_is_counted(completion: str, says: str) -> None:
    with RewardPool(WILD, policy=FailurePolicy("skip")) as pool:
        (reward,) = pool.score(asked(completion))
        assert (reward.score, reward.count) == (None, "reward/errors")
        assert says in reward.error
        assert pool.counts() == {"reward/scored": 0, "reward/errors": 1, "reward/timeouts": 0, "reward/deaths": 0}


def test_a_call_on_a_pool_that_has_died_is_refused_and_it_can_be_closed() -> None:
    with TaskPool(WILD) as pool:
        future = pool.submit({"completion": "x"})
        assert not future.cancel()
        assert future.result(20).kind == "done"
        pool._template.kill()
        pool._template.wait()
        with pytest.raises(SessionClosedError, match="ended"):
            pool.submit({"completion": "x"}).result(5)


HOLDER = """
import sys, time
from m2flow.worker.pool import TaskPool
pool = TaskPool("m2flow.worker.testing.rewards:wild", timeout_s=60.0)
pool.submit({"completion": "spawn " + sys.argv[1]}).result()
"""


def test_what_a_function_started_ends_with_the_group_of_who_holds_the_pool(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(noted)], process_group=0)
    _until(lambda: noted.exists() and noted.read_text() != "")
    os.killpg(holder.pid, signal.SIGKILL)
    holder.wait()
    _until(lambda: not Path(f"/proc/{noted.read_text()}").exists())


def test_what_a_function_prints_is_heard_though_it_is_killed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with RewardPool(WILD, timeout_s=0.5, policy=FailurePolicy("skip")) as pool:
        assert pool.score(asked("say judging"))[0].count == "reward/timeouts"
    assert "judging" in capfd.readouterr().err


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_what_cannot_be_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RewardPool(OBEDIENT, num_processes=0)
    for timeout_s in (0.0, float("nan")):
        with pytest.raises(ValueError, match="more than 0 s"):
            RewardPool(OBEDIENT, timeout_s=timeout_s)
        with pytest.raises(ValueError, match="more than 0 s"):
            RewardClient("127.0.0.1:1", token="t", timeout_s=timeout_s)
    with pytest.raises(ValueError, match="'score', 'skip' or 'stop'"):
        FailurePolicy("ignore")  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        RewardPool("m2flow.worker.testing.rewards:missing")
