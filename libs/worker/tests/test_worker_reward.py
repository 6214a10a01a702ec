import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from m2flow.worker.errors import LaunchError, RewardFailed, SessionClosedError
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
            for token in ("", "another"):
                with (
                    RewardClient(server.address, token=token, timeout_s=20) as client,
                    pytest.raises(RewardFailed, match="UNAUTHENTICATED"),
                ):
                    client.score(asked("four"))
            server.close()
        assert caplog.text.count("its token is not this service's") == 2
        assert "of the run" not in caplog.text

    def test_no_service_is_a_failure_that_names_it(self) -> None:
        with (
            RewardClient("127.0.0.1:1", token="t", timeout_s=0.2) as client,
            pytest.raises(RewardFailed, match=r"service at 127\.0\.0\.1:1: no answer within 0\.2 s for 1 items"),
        ):
            client.score(asked("four"))

    def test_a_taken_address_is_refused(self) -> None:
        with self.make(FailurePolicy("skip")) as client, pytest.raises(LaunchError, match="cannot listen at"):
            RewardServer(client, "nowhere.invalid:70000", token="t")


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


def test_what_cannot_be_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RewardPool(OBEDIENT, num_processes=0)
    with pytest.raises(ValueError, match="'score', 'skip' or 'stop'"):
        FailurePolicy("ignore")  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        RewardPool("m2flow.worker.testing.rewards:missing")
