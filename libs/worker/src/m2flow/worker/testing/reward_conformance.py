"""What every rewarder must do; its tests inherit this and make one over `m2flow.worker.testing.rewards:obedient`."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from functools import partial
from math import nan

from m2flow.worker.errors import RewardFailed
from m2flow.worker.reward import FailurePolicy, Reward, Rewarder
from m2flow.worker.testing.conformance import refused

OBEDIENT = "m2flow.worker.testing.rewards:obedient"
ITEM_TIMEOUT_S = 0.5


class RewarderConformance(ABC):
    """The suite: each item has `ITEM_TIMEOUT_S`, in two processes."""

    @abstractmethod
    def make(self, policy: FailurePolicy) -> AbstractContextManager[Rewarder]:
        """A rewarder under a policy, within a `with`."""

    def test_scores_come_in_order_with_their_parts(self) -> None:
        """Whichever finishes first."""
        with self.make(FailurePolicy()) as rewarder:
            rewards = rewarder.score(asked("four", "sleep 0.2", "seven77"))
            assert rewards == [Reward(score, {"format": 1.0}) for score in (4.0, 5.0, 7.0)]
            assert rewarder.score([]) == []

    def test_what_fails_follows_the_policy_and_is_counted(self) -> None:
        """Errors, time-outs and deaths alike, and the others are not lost."""
        words = ("sleep 60", "raise", "exit 3", "four")
        with self.make(FailurePolicy(failure_score=-1.0)) as rewarder:
            rewards = rewarder.score(asked(*words))
            assert [reward.score for reward in rewards] == [-1.0, -1.0, -1.0, 4.0]
            assert "longer than 0.5 s" in rewards[0].error
            assert "no answer in the completion" in rewards[1].error
            assert "exit code 3" in rewards[2].error
            counts = rewarder.counts()
            assert counts["reward/scored"] == 1.0
            assert sum(counts.values()) == 4.0
        with self.make(FailurePolicy("skip")) as rewarder:
            assert rewarder.score(asked("raise"))[0].score is None

    def test_what_is_no_number_is_a_failure(self) -> None:
        """As any other."""
        with self.make(FailurePolicy("skip")) as rewarder:
            (reward,) = rewarder.score(asked("nan"))
            assert reward.score is None
            assert "it is not finite" in reward.error

    def test_a_caller_may_give_less_time(self) -> None:
        """Than the rewarder gives by itself."""
        with self.make(FailurePolicy("skip")) as rewarder:
            (reward,) = rewarder.score(asked("sleep 0.3"), timeout_s=0.1)
            assert "longer than 0.1 s" in reward.error

    def test_a_time_that_never_passes_or_has_passed_is_refused(self) -> None:
        """Nothing would end an item, or nothing could be done."""
        with self.make(FailurePolicy("skip")) as rewarder:
            for timeout_s in (nan, 0.0, -1.0):
                refused(ValueError, "want more than 0 s", partial(rewarder.score, asked("four"), timeout_s=timeout_s))
            assert rewarder.score(asked("four"))[0].score == 4.0

    def test_stop_raises_and_leaves_it_usable(self) -> None:
        """With the reason."""
        with self.make(FailurePolicy("stop")) as rewarder:
            refused(RewardFailed, "no answer in the completion", lambda: rewarder.score(asked("raise")))
            assert rewarder.score(asked("four"))[0].score == 4.0


def asked(*completions: str) -> list[dict[str, str]]:
    """Items with these completions."""
    return [{"completion": completion} for completion in completions]
