"""Macro flows become graphs; what cannot be traced is refused with its line and a remedy."""

import inspect
import itertools

import pytest
from google.protobuf import json_format

from m2flow.flow import Flow, Graph, Stream, TraceError, trace
from m2flow.flow.testing import FakeSpec, as_it_is, goes_round, is_mixed, is_odd, mean_reward, whiten
from m2flow.proto.flow.v1 import flow_pb2 as pb

ROLLOUT = FakeSpec("rollout", ("generate",))
ACTOR = FakeSpec("actor", ("train", "logprobs"), in_step=True)


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


def traced(program, **options):
    return trace(program, {"rollout": ROLLOUT, "actor": ACTOR}, source_items=4, **options)


def test_a_program_becomes_stages_and_streams(graph):
    assert graph.order == (
        "prompts",
        "rollout.generate",
        "reward.score",
        "gather:prompt",
        "map:mean_reward",
        "actor.train",
        "publish:actor->rollout",
        "sink",
    )
    edges = {(s.producer, s.consumer) for s in graph.streams}
    assert ("reward.score", "gather:prompt") in edges
    assert ("map:mean_reward", "actor.train") in edges
    assert ("actor.train", "sink") in edges
    publish = graph.stages["publish:actor->rollout"]
    assert (publish.group, publish.to, list(publish.after)) == ("actor", "rollout", ["actor.train"])


def test_volumes_follow_expansion_and_gather(graph):
    # By hand: 4 prompts, 8 samples each, gathered into 4 groups.
    assert [graph.volume(n) for n in ("rollout.generate", "reward.score", "gather:prompt", "actor.train")] == [
        4,
        32,
        32,
        4,
    ]
    assert graph.volume_out("rollout.generate") == 32
    assert graph.stages["gather:prompt"].expansion == 0.125


def test_a_trainer_sees_source_order_unless_told(graph):
    assert graph.stages["actor.train"].order_window == 1
    assert graph.stages["rollout.generate"].order_window == 0

    def windowed(flow, rollout, actor):
        return actor.train(flow.epochs(flow.ordered(rollout.generate(flow.source("p")), window=2), 3))

    stage = traced(windowed).stages["actor.train"]
    assert (stage.order_window, stage.epochs) == (2, 3)


def test_locations_are_the_programs_lines():
    def program(flow, rollout, actor):
        samples = rollout.generate(flow.source("p"))
        return actor.train(samples)

    stage = traced(program).stages["actor.train"]
    assert stage.location == f"test_flow_tracing.py:{line_of(program, 'actor.train')}"


@pytest.mark.parametrize(
    ("use", "word"),
    [
        (lambda s: 1 if s else 2, "truth value"),
        (lambda s: [x for x in s], "looped"),  # noqa: C416
        (lambda s: len(s), "length"),
        (lambda s: bool(s), "truth value"),
        (lambda s: s[0], "indexed"),
        (lambda s: 3 in s, "searched"),
        (lambda s: s == 3, "compared"),
        (lambda s: s < 3, "compared"),
        (lambda s: s.reward, "no attribute 'reward'"),
        (lambda s: s + s, "computed"),
    ],
)
def test_control_flow_on_a_stream_is_refused_with_line_and_remedy(use, word):
    def program(flow, rollout, actor):
        samples = rollout.generate(flow.source("p"))
        use(samples)
        return samples

    with pytest.raises(TraceError, match=word) as caught:
        traced(program)
    # The line is the one inside `use`, which is where the stream was misused.
    assert str(caught.value).startswith(f"test_flow_tracing.py:{use.__code__.co_firstlineno}: ")
    assert str(caught.value).count(": ") >= 2


def test_an_if_on_configuration_is_fine():
    for train in (True, False):

        def program(flow, rollout, actor, train=train):
            samples = rollout.generate(flow.source("p"))
            return actor.train(samples) if train else samples

        assert ("actor.train" in traced(program).stages) is train


def test_a_program_that_changes_is_refused_with_both_lines():
    ticks = itertools.count()

    def program(flow, rollout, actor):
        samples = rollout.generate(flow.source("p"))
        if next(ticks) % 2:
            return actor.logprobs(samples)
        return actor.train(samples)

    first, second = line_of(program, "actor.train"), line_of(program, "actor.logprobs")
    with pytest.raises(TraceError, match=rf"py:{second}: traced twice, actor.train at .*py:{first} became"):
        traced(program)


def test_a_program_that_grows_is_refused():
    seen = []

    def program(flow, rollout, actor):
        seen.append(1)
        stream = flow.source("p")
        for _ in seen:
            stream = rollout.generate(stream)
        return stream

    with pytest.raises(TraceError, match="traced twice"):
        traced(program)


def test_unknown_stages_are_refused_with_the_nearest():
    def program(flow, rollout, actor):
        return rollout.genrate(flow.source("p"))

    with pytest.raises(AttributeError, match="group rollout has no stage 'genrate': did you mean 'generate'"):
        traced(program)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda flow, s: flow.map(lambda item: item, s), "cannot import"),
        (lambda flow, s: flow.map(3, s), "map got a int"),
        (lambda flow, s: flow.map(mean_reward, [s]), "got a list"),
        (lambda flow, s: flow.gather(s, by=""), "empty `by`"),
        (lambda flow, s: flow.first(0, s), "count=0"),
        (lambda flow, s: flow.ordered(s, window=0), "window=0"),
        (lambda flow, s: flow.epochs(s, 0), "count=0"),
        (lambda flow, s: flow.merge(), "got no stream"),
        (lambda flow, s: flow.source("again"), "second source"),
    ],
)
def test_misuse_names_what_would_be_right(misuse, message):
    def program(flow, rollout, actor):
        return misuse(flow, rollout.generate(flow.source("p")))

    with pytest.raises(TraceError, match=message):
        traced(program)


def test_publishing_before_the_training_is_refused():
    def program(flow, rollout, actor):
        flow.publish(actor, to=rollout)
        return rollout.generate(flow.source("p"))

    with pytest.raises(TraceError, match="before any of its stages"):
        traced(program)


def test_each_publication_of_a_group_follows_its_work_alone():
    def program(flow, rollout, actor, judge):
        metrics = actor.train(rollout.generate(flow.source("p")))
        flow.publish(actor, to=rollout)
        flow.publish(actor, to=judge)
        return metrics

    specs = {"rollout": ROLLOUT, "actor": ACTOR, "judge": FakeSpec("judge", ("score",))}
    published = trace(program, specs, source_items=4).kinds(pb.STAGE_KIND_PUBLISH)
    assert [(stage.to, list(stage.after)) for stage in published] == [
        ("rollout", ["actor.train"]),
        ("judge", ["actor.train"]),
    ]


def test_groups_that_a_program_does_not_use_are_not_in_its_graph():
    graph = traced(lambda flow, rollout, actor: rollout.generate(flow.source("p")))
    assert list(graph.groups) == list(graph.specs) == ["rollout"]


def test_a_program_without_a_source_or_a_stream_is_refused():
    with pytest.raises(TraceError, match="no source"):
        traced(lambda flow, rollout, actor: None)
    with pytest.raises(TraceError, match="returned a int"):
        traced(lambda flow, rollout, actor: (flow.source("p"), 3)[1])


def test_a_loop_that_is_never_fed_is_refused():
    def program(flow, rollout, actor):
        return rollout.generate(flow.loop(flow.source("p")))

    with pytest.raises(TraceError, match="never fed"):
        traced(program)


def test_loops_have_feedback_streams(loop_graph):
    back = [s for s in loop_graph.streams if s.feedback]
    assert [(s.producer, s.consumer) for s in back] == [("split:is_live:yes", "policy.act")]
    assert loop_graph.in_cycles == {"policy.act", "env.step", "split:is_live:yes"}


def in_loop(wrap):
    """A loop of an in-step actor and a rollout; `wrap` says what the rollout takes of the actor's stream."""

    def program(flow, rollout, actor):
        head = flow.loop(flow.source("p"))
        turn = rollout.generate(wrap(flow, actor.train(head)))
        again, done = flow.split(goes_round, turn)
        head.feed(again)
        return done

    return traced(program)


def test_items_in_a_loop_have_no_order_even_where_ranks_move_in_step():
    graph = in_loop(lambda flow, stream: stream)
    assert [graph.stages[name].order_window for name in ("actor.train", "rollout.generate")] == [0, 0]


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda flow, s: flow.ordered(s), r"rollout\.generate is inside a loop and asks for order"),
        (lambda flow, s: flow.epochs(s, 2), "asks for several epochs"),
        (lambda flow, s: flow.barrier(s), "barrier is inside a loop and asks for all items at once"),
        (lambda flow, s: flow.first(2, s), "asks for the first of all items"),
    ],
)
def test_what_would_wait_for_the_end_of_its_own_loop_is_refused(wrap, message):
    with pytest.raises(TraceError, match=message):
        in_loop(wrap)


def test_what_follows_a_loop_comes_after_all_of_it():
    def program(flow, rollout, actor):
        head = flow.loop(flow.source("p"))
        again, done = flow.split(goes_round, actor.train(head))
        head.feed(rollout.generate(rollout.generate(rollout.generate(again))))
        flow.publish(actor, to=rollout)
        return actor.logprobs(done)

    order = traced(program).order
    last = order.index("rollout.generate#3")
    assert order.index("publish:actor->rollout") > last
    assert order.index("actor.logprobs") > last


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        pytest.param(
            lambda flow, s, a, b: flow.merge(a.generate(s), b.train(s)),
            r"merge takes rollout\.generate and actor\.train, which may hold the same item: .*join the same item",
            id="two ways of the same items, merged",
        ),
        pytest.param(
            lambda flow, s, a, b: flow.merge(flow.first(1, flow.split(is_odd, s)[0]), flow.split(is_odd, s)[1]),
            "which may hold the same item",
            id="a half that is numbered anew, merged",
        ),
        pytest.param(
            lambda flow, s, a, b: a.generate(b.train(flow.epochs(s, 3))),
            r"rollout\.generate takes items more than once: it comes behind actor\.train, .* 3 times; .* flow\.map",
            id="a stage behind epochs",
        ),
        pytest.param(
            lambda flow, s, a, b: b.train(flow.map(as_it_is, rounds(flow, s, a)[1])),
            r"actor\.train takes items more than once: it takes rollout\.generate out of a loop in every round",
            id="out of a loop without its split",
        ),
        pytest.param(
            lambda flow, s, a, b: flow.first(1, b.train(flow.first(2, s))),
            "first#2 takes what first gives, which never feeds on for it",
            id="a quota behind another",
        ),
        pytest.param(
            lambda flow, s, a, b: fed(flow, flow.loop(s), a, lambda turn: b.train(s)),
            r"begins a loop that actor\.train is fed to, and does not come of",
            id="fed from elsewhere",
        ),
        pytest.param(
            lambda flow, s, a, b: fed(flow, flow.loop(s), a, lambda turn: turn),
            r"rollout\.generate begins a loop that nothing leaves",
            id="a loop without an end",
        ),
        pytest.param(
            lambda flow, s, a, b: flow.ordered(flow.loop(s)),
            "no stage takes the loop of source",
            id="a loop that nothing enters",
        ),
        pytest.param(
            lambda flow, s, a, b: split_at_once(flow, s, a, b),
            "splits a loop where it begins",
            id="split in front of the first stage",
        ),
        pytest.param(
            lambda flow, s, a, b: head_in_head(flow, s, a),
            r"rollout\.generate begins several loops \(map:as_it_is, rollout\.generate\)",
            id="two loops before one stage",
        ),
    ],
)
def test_what_would_lose_or_repeat_items_is_refused(shape, message):
    def program(flow, rollout, actor):
        return shape(flow, flow.source("source"), rollout, actor)

    with pytest.raises(TraceError, match=message):
        traced(program)


def test_every_reason_is_given_with_its_line_and_what_follows_from_one_is_not():
    def program(flow, rollout, actor):
        metrics = actor.train(flow.epochs(flow.source("p"), 2))
        actor.logprobs(metrics)
        return rollout.generate(rollout.generate(metrics))

    with pytest.raises(TraceError) as caught:
        traced(program)
    assert {reason.partition(" takes")[0] for reason in str(caught.value).splitlines()} == {
        f"test_flow_tracing.py:{line_of(program, 'actor.logprobs')}: actor.logprobs",
        f"test_flow_tracing.py:{line_of(program, 'rollout.generate')}: rollout.generate",
    }


def test_a_stream_that_is_split_twice_by_one_test_has_halves_that_fit():
    def program(flow, rollout, actor):
        stream = flow.source("p")
        (odd, _), (_, even) = flow.split(is_odd, stream), flow.split(is_odd, stream)
        return flow.merge(rollout.generate(odd), actor.train(even))

    graph = traced(program)
    assert graph.other_halves("split:is_odd:yes") == {"split:is_odd:no", "split:is_odd:no#2"}
    assert graph.other_halves("rollout.generate") == set()


def test_halves_of_halves_are_merged_in_any_order():
    def program(flow, rollout, actor):
        odd, rest = flow.split(is_odd, flow.source("p"))
        more, none = flow.split(goes_round, rest)
        return actor.train(flow.merge(flow.merge(rollout.generate(none), odd), more))

    assert traced(program).volume("merge#2") == 12  # as each half may hold all


def rounds(flow, stream, stage):
    """What is done in a loop of one stage, and what comes by in each round."""
    head = flow.loop(stream)
    turn = stage.generate(head)
    again, done = flow.split(goes_round, turn)
    head.feed(again)
    return done, turn


def fed(flow, head, stage, back):
    turn = stage.generate(head)
    head.feed(back(turn))
    return turn


def split_at_once(flow, stream, one, other):
    head = flow.loop(stream)
    odd, even = flow.split(is_odd, head)
    turn = flow.merge(one.generate(odd), other.train(even))
    again, done = flow.split(goes_round, turn)
    head.feed(again)
    return done


def head_in_head(flow, stream, stage):
    outer = flow.loop(stream)
    inner = flow.loop(flow.map(as_it_is, outer))
    again, out = flow.split(is_odd, stage.generate(inner))
    inner.feed(again)
    around, done = flow.split(goes_round, out)
    outer.feed(around)
    return done


def test_several_streams_into_a_stage_are_joined():
    def program(flow: Flow, rollout, actor) -> Stream:
        samples = rollout.generate(flow.source("p"))
        old = actor.logprobs(flow.barrier(samples, whiten))
        return actor.train(samples, old)

    graph = traced(program)
    assert graph.stages["join:actor.train"].kind == pb.STAGE_KIND_JOIN
    assert graph.volume("actor.train") == 4


def test_quotas_bound_what_follows():
    def program(flow: Flow, rollout, actor) -> Stream:
        groups = flow.gather(rollout.generate(flow.source("p")), by="prompt")
        return actor.train(flow.first(3, groups, where=is_mixed, carry_surplus=True))

    graph = traced(program, expansions={"rollout.generate": 2})
    assert graph.volume("actor.train") == 3
    assert graph.stages["first:is_mixed"].quota.carry_surplus


def test_expansions_of_no_stage_are_refused():
    with pytest.raises(TraceError, match=r"'rollout.genrate'.*did you mean 'rollout.generate'"):
        traced(lambda flow, rollout, actor: rollout.generate(flow.source("p")), expansions={"rollout.genrate": 2})


def test_text_mermaid_and_proto_show_every_stage(graph):
    text, chart = graph.to_text(), graph.to_mermaid()
    for name in graph.stages:
        assert name in text
        assert f'"{name}"' in chart
    assert "[32 -> 4]  by prompt" in text
    assert chart.startswith("flowchart LR\n")
    again = Graph(graph.to_proto())
    assert again.to_text() == text
    assert json_format.Parse(graph.to_json(), pb.WorkflowGraph()) == graph.to_proto()
