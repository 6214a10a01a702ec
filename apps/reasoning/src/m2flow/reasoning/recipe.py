"""GRPO as a macro flow."""

from m2flow.apps.grading import grade
from m2flow.flow import Flow, StageProxy, Stream

__all__ = ["grpo"]


def grpo(flow: Flow, rollout: StageProxy, reward: StageProxy, actor: StageProxy) -> Stream:
    """Samples of each prompt, judged, compared with each other, learned from; then the sampler gets the new weights.

    Old logprobs are those of the step's one forward pass, or the sampler's where an iteration has several optimiser
    steps (see `m2flow.apps.policy_loss`).
    """
    prompts = flow.source("prompts")
    samples = rollout.generate(prompts)
    scored = reward.score(samples)
    groups = flow.gather(scored, by="prompt")  # waits for the whole group, not for the whole batch
    graded = flow.map(grade, groups)
    metrics = actor.train(graded)
    flow.publish(actor, to=rollout)
    return metrics
