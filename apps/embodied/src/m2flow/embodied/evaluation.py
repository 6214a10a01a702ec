"""How good the policy is by its mean action, on episodes that are never trained on; and a film of one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from m2flow.embodied.seeds import episode_seed
from m2flow.worker import WorkerFailed, WorkerGroup
from m2flow.worker.group import RankSet

__all__ = ["Evaluation"]

Groups = Mapping[str, WorkerGroup]
# How often episodes are begun again whose processes die; the session's own bound on restarts comes first.
_ATTEMPTS = 10


@dataclass(frozen=True)
class Evaluation:
    """Attributes:
    num_episodes: episodes of one evaluation, the same ones each time and in every run.
    episodes_per_lane: how many the environments of one rank play at once.
    """

    num_episodes: int
    episodes_per_lane: int

    def __call__(self, groups: Groups, step: int) -> Mapping[str, float]:
        """Returns eval/success_at_end, eval/success_once and eval/return of the weights that "policy" has. Blocks."""
        env, size = groups["env"], self.episodes_per_lane
        found: dict[str, list[float]] = {"success_at_end": [], "success_once": [], "returns": []}
        for start in range(0, self.num_episodes, size * env.world_size):
            # The last wave is filled up with episodes that count for nothing.
            wave = [_seed(start + number) for number in range(size * env.world_size)]
            seeds = [wave[at : at + size] for at in range(0, len(wave), size)]
            for verdict in _watched(env, groups["policy"], seeds, "verdict"):
                for name, values in found.items():
                    values += verdict[name]
        counted = {name: values[: self.num_episodes] for name, values in found.items()}
        means = {name: sum(values) / len(values) for name, values in counted.items()}
        return {
            "eval/success_at_end": means["success_at_end"],
            "eval/success_once": means["success_once"],
            "eval/return": means["returns"],
        }

    def film(self, groups: Groups) -> bytes:
        """Returns the first episode of an evaluation as an animated WebP. Blocks."""
        (film,) = _watched(groups["env"].on(0), groups["policy"], [[_seed(0)]], "film")
        assert isinstance(film, bytes)
        return film


def _seed(number: int) -> int:
    return episode_seed(0, "evaluation", number)


class _Gone(Exception):
    """The process in which episodes had begun is not there any more."""


def _watched(env: RankSet, policy: WorkerGroup, seeds: list[list[int]], outcome: str) -> list[Any]:
    """Plays an episode a seed to its end, a list of them on each rank; returns each rank's "verdict" or "film".

    Where an environment process dies they are all played again, in the one that follows it: they come out the same.
    """
    for _ in range(_ATTEMPTS):
        try:
            _play(env, policy, seeds, filmed=outcome == "film")
            found = env.method(outcome)().result()
            if None in found:
                raise _Gone
            return list(found)
        except (_Gone, WorkerFailed) as error:
            last = error
    raise last


def _play(env: RankSet, policy: WorkerGroup, seeds: list[list[int]], *, filmed: bool) -> None:
    """Plays them once. Raises WorkerFailed where a process dies meanwhile, _Gone where one had died before."""
    observations = env.method("begin")(seeds, filmed).result()
    playing = [True] * len(observations)
    thinker = policy.on(0).method("decide")
    while any(playing):
        (actions,) = thinker([part for part, on in zip(observations, playing, strict=True) if on]).result()
        ranks = [rank for rank, on in zip(env.ranks, playing, strict=True) if on]
        for rank, view in zip(ranks, env.on(*ranks).method("advance").scatter(actions).result(), strict=True):
            if view is None:
                raise _Gone
            place = env.ranks.index(rank)
            observations[place], playing[place] = view["observations"], view["is_playing"]
