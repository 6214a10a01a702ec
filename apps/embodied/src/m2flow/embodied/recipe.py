"""PPO over episodes as a macro flow."""

from m2flow.embodied.episodes import batched, is_playing
from m2flow.flow import Flow, StageProxy, Stream

__all__ = ["ppo"]


def ppo(flow: Flow, env: StageProxy, policy: StageProxy, learner: StageProxy, *, rounds: float = 0.0) -> Stream:
    """Each lane of episodes goes round between policy and environments until its last one has ended.

    While one lane is simulated another is acted for. What was played is learned from as a whole, so that a minibatch
    mixes all of its steps; then the policy gets the new weights. `rounds` tells planners how often a lane goes round.
    """
    lanes = flow.source("lanes")
    seen = flow.loop(env.reset(lanes), rounds=rounds)
    again, over = flow.split(is_playing, env.step(policy.act(seen)))
    seen.feed(again)
    played = flow.gather(over, by="rollout")  # a lane that died with its process leaves the others
    judged = learner.judge(flow.map(batched, played))  # values, then advantages
    metrics = learner.train(judged)
    flow.publish(learner, to=policy)
    return metrics
