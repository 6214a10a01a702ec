"""GRPO over conversations with tools, as a macro flow."""

from m2flow.apps.grading import grade
from m2flow.flow import Flow, StageProxy, Stream
from m2flow.worker import Item

__all__ = ["calls_tool", "grpo"]


def calls_tool(conversation: Item) -> bool:
    """Whether a conversation waits for a tool; else it has ended."""
    return bool(conversation.fields["tool"])


def grpo(
    flow: Flow,
    agent: StageProxy,
    rollout: StageProxy,
    tools: StageProxy,
    actor: StageProxy,
    *,
    groups_per_minibatch: int = 1,
    num_epochs: int = 1,
    rounds: float = 2.0,
) -> Stream:
    """Several conversations about each problem; those about one are compared with each other, whole, and learned from.

    A conversation goes round as long as the model calls tools, `rounds` times in the mean. Nobody waits for another's
    tool: the rollout takes whatever conversations have come back to it.
    """
    waiting = flow.loop(agent.open(flow.source("problems")), rounds=rounds)
    heard = agent.read(rollout.speak(waiting))
    calls, ended = flow.split(calls_tool, heard)
    waiting.feed(agent.write(tools.call(calls)))
    graded = flow.map(grade, flow.gather(ended, by="prompt"))
    # Minibatches are filled by source order; inside one, groups are learned from as they come.
    windows = flow.ordered(graded, window=groups_per_minibatch)
    metrics = actor.train(flow.epochs(windows, num_epochs))
    flow.publish(actor, to=rollout)
    return metrics
