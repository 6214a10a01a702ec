"""GRPO as a macro flow."""

from m2flow.apps.grading import grade
from m2flow.flow import Flow, StageProxy, Stream

__all__ = ["grpo"]


def grpo(
    flow: Flow,
    rollout: StageProxy,
    reward: StageProxy,
    actor: StageProxy,
    *,
    groups_per_minibatch: int = 1,
    num_epochs: int = 1,
) -> Stream:
    """Samples of each prompt, judged, compared with each other, learned from; then the sampler gets the new weights.

    Old logprobs are those of the step's one forward pass, or the sampler's where an iteration has several optimiser
    steps (see `m2flow.apps.policy_loss`).
    """
    prompts = flow.source("prompts")
    samples = rollout.generate(prompts)
    scored = reward.score(samples)
    groups = flow.gather(scored, by="prompt")  # waits for the whole group, not for the whole batch
    graded = flow.map(grade, groups)
    # Minibatches are filled by source order; inside one, groups are learned from as they come.
    windows = flow.ordered(graded, window=groups_per_minibatch)
    metrics = actor.train(flow.epochs(windows, num_epochs))
    flow.publish(actor, to=rollout)
    return metrics
