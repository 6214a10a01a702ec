"""What every launcher must do; a launcher's tests inherit this and name it.

    class TestProcess(LauncherConformance):
        launcher = "process"

The suite needs no test framework: methods named `test_*` assert, `setup_class` and `teardown_class` hold the run.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from m2flow.worker.cluster import Cluster
from m2flow.worker.errors import (
    CallCancelled,
    CallTimeout,
    LaunchError,
    PlacementError,
    SessionClosedError,
    WorkerFailed,
)
from m2flow.worker.group import WorkerGroup
from m2flow.worker.launch import launch_run
from m2flow.worker.session import Session
from m2flow.worker.spec import GroupSpec
from m2flow.worker.testing.probe import DropProbe, Probe, RelapsingProbe, RetryProbe, WarmProbe
from m2flow.worker.testing.sharded import ShardedProbe

Failure = TypeVar("Failure", bound=BaseException)

COMPANION = "m2flow.worker.testing:Companion"
DEADLINE_S = 15.0 if os.environ.get("CI") == "true" else 5.0
"""In which a failure must reach the caller, and all that a run started must end; a busy CI machine has more."""


class LauncherConformance:
    """The suite. `launcher` names what it runs on, `dies` whether its ranks can be killed.

    With `ranks_per_process` 2 the ranks of each device of the shared group, and all of others, share a process.
    """

    launcher: ClassVar[str]
    dies: ClassVar[bool] = True
    ranks_per_process: ClassVar[int] = 1
    session: ClassVar[Session]
    group: ClassVar[WorkerGroup]

    @classmethod
    def launch(cls) -> Session:
        """A run on two virtual devices; a launcher that needs more than a name overrides this."""
        return launch_run(Cluster.virtual(2, memory_bytes=1 << 20), launcher=cls.launcher, on_log=lambda *_: None)

    @classmethod
    def setup_class(cls) -> None:
        """Starts the run that the healthy tests share."""
        cls.session = cls.launch()
        cls.group = cls.session.start(cls.spec({"size": 3}, name="shared"), "0-1*2")

    @classmethod
    def teardown_class(cls) -> None:
        """Ends it."""
        cls.session.close()

    @classmethod
    def spec(cls, config: Any = None, *, worker: type[Probe] = Probe, name: str | None = None) -> GroupSpec:
        """A group of probes."""
        return worker.group(config, name=name, device_kind="virtual", ranks_per_process=cls.ranks_per_process)

    def test_results_come_in_rank_order(self) -> None:
        """Every rank knows its place, its devices and its config."""
        answers = self.group.whoami().result(30)
        assert [answer["rank"] for answer in answers] == [0, 1, 2, 3]
        assert [answer["devices"] for answer in answers] == [[0], [0], [1], [1]]
        assert all(answer["world_size"] == 4 and answer["config"] == {"size": 3} for answer in answers)
        assert [answer["pid"] for answer in answers] == self.group.pids
        if self.dies:
            assert len(set(self.group.pids)) == 4 // self.ranks_per_process

    def test_what_a_class_preloads_is_imported_once_before_its_ranks_are_set_up(self) -> None:
        """Not by each of them: a process that is forked from another has what that one has."""
        group = self.session.start(self.spec(worker=WarmProbe, name="warm"), "0*2")
        try:
            importers = set(group.importer().result(30))
            assert len(importers) == 1
            if self.dies:
                assert importers.isdisjoint([os.getpid(), *group.pids])
        finally:
            self.session.stop(group)

    def test_payload_trees_come_back_as_they_went(self) -> None:
        """No pickle, and nothing lost."""
        tree = {"text": "a", "bytes": b"\0\1", "numbers": [1, 2.5, None, True], "pair": (1, ("x",))}
        assert self.group.on(0).echo(tree).result(30) == [tree]

    def test_broadcast_scatter_and_chosen_ranks(self) -> None:
        """Who gets which arguments."""
        assert self.group.echo(7).result(30) == [7, 7, 7, 7]
        assert self.group.echo.scatter([1, 2, 3, 4]).result(30) == [1, 2, 3, 4]
        assert self.group.on(3, 1).echo.scatter(["c", "a"]).result(30) == ["c", "a"]
        refused(ValueError, "3 entries, want 4", lambda: self.group.echo.scatter([1, 2, 3]))
        refused(ValueError, "want some of", lambda: self.group.on(4))

    def test_calls_of_a_rank_run_in_order_one_at_a_time(self) -> None:
        """Without waiting in between."""
        rank = self.group.on(2)
        before = rank.add(0).result(30)[0]
        handles = [rank.add(1) for _ in range(50)]
        assert [handle.result(30)[0] for handle in handles] == list(range(before + 1, before + 51))

    def test_a_busy_rank_keeps_no_other_from_a_call(self) -> None:
        """Whether they share a process or not."""
        before = self.group.on(3).add(0).result(30)[0]
        busy = self.group.on(0).sleep(1.0)
        everywhere = self.group.add(1)
        assert self.group.on(3).add(0).result(30)[0] == before + 1
        assert not busy.done()
        everywhere.wait(30)

    def test_ten_thousand_calls_under_way(self) -> None:
        """No thread is held by a call."""
        num_threads = threading.active_count()
        handles = [self.group.on(number % 4).echo(number) for number in range(10_000)]
        assert threading.active_count() <= num_threads
        assert [handle.result(50)[0] for handle in handles] == list(range(10_000))

    def test_seconds_and_timers(self) -> None:
        """Of the method on the rank, not of the wire."""
        handle = self.group.sleep.scatter([0.0, 0.0, 0.0, 0.1])
        assert 0.1 <= handle.seconds("max") < 5
        assert handle.seconds("min") < handle.seconds("mean") < handle.seconds("max") < handle.seconds("sum")
        assert 0.1 <= handle.timers("max")["sleep"] < 5

    def test_a_wait_that_runs_out_names_the_ranks(self) -> None:
        """And the call goes on."""
        handle = self.group.sleep.scatter([0.0, 0.0, 0.5, 0.0])
        time.sleep(0.2)
        assert not handle.done()
        refused(CallTimeout, r"ranks [2]", lambda: handle.wait(0.01))
        assert handle.result(30) == [0.0, 0.0, 0.5, 0.0]

    def test_a_cancelled_call_does_not_run(self) -> None:
        """If it had not begun."""
        rank = self.group.on(1)
        before = rank.add(0).result(30)[0]
        running = rank.sleep(0.3)
        waiting = rank.add(100)
        waiting.cancel()
        assert waiting.done()
        refused(CallCancelled, "cancelled", waiting.result)
        running.wait(30)
        assert rank.add(0).result(30)[0] == before

    def test_a_handle_can_be_awaited(self) -> None:
        """In a coroutine."""

        async def two() -> list[list[int]]:
            return list(await asyncio.gather(_awaited(self.group, 1), _awaited(self.group, 2)))

        assert asyncio.run(two()) == [[1] * 4, [2] * 4]

    def test_an_object_beside_each_worker(self) -> None:
        """Its calls run beside the worker's, and take the worker's turn when they need it."""
        beside = self.group.attach("beside", COMPANION, "hello")
        assert beside.greet().result(30) == [f"hello {rank} of start 0" for rank in range(4)]
        sleeping = self.group.sleep(0.5)
        time.sleep(0.1)
        assert beside.on(0).greet().result(30) == ["hello 0 of start 0"]
        assert not sleeping.done()
        before = self.group.on(0).add(0).result(30)[0]
        assert beside.on(0).count_with(1).result(30) == [before + 1]
        refused(AttributeError, "did you mean 'greet'", lambda: beside.great)

    def test_groups_start_and_stop_within_a_run(self) -> None:
        """And a name is taken only once at a time."""
        spec = self.spec(name="brief")
        brief = self.session.start(spec, "0")
        refused(LaunchError, "one of that name already", lambda: self.session.start(spec, "0"))
        self.session.stop(brief)
        assert self.session.start(spec, "1").whoami().result(30)[0]["devices"] == [1]
        self.session.stop(self.session.groups["brief"])
        refused(SessionClosedError, "it was stopped", lambda: brief.echo(1))

    def test_a_stopped_rank_closes_what_it_started(self, tmp_path: Path) -> None:
        """Each of a group's ranks, before the stop returns."""
        brief = self.session.start(self.spec({"closed": str(tmp_path)}, name="brief"), "0-1")
        assert not list(tmp_path.iterdir())
        self.session.stop(brief)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]

    def test_a_rank_that_exits_as_it_closes_has_stopped(self) -> None:
        """Before its grace is over."""
        brief = self.session.start(self.spec({"close": "exit"}, name="brief"), "0-1")
        began = time.monotonic()
        self.session.stop(brief, grace_s=10.0)
        assert time.monotonic() - began < 5.0

    def test_calls_of_a_stopped_group_end(self) -> None:
        """Those that it had no time to answer."""
        if self.dies:
            brief = self.session.start(self.spec(name="brief"), "0")
            under_way, behind = brief.sleep(60.0), brief.echo(1)
            self.session.stop(brief, grace_s=0.0)
            refused(SessionClosedError, "group brief was stopped", lambda: under_way.result(10))
            refused(SessionClosedError, "group brief was stopped", lambda: behind.result(10))

    def test_a_start_that_takes_too_long_says_which_limit(self) -> None:
        """The run's own, or that of the call."""
        spec = self.spec({"setup": "sleep 1"}, name="slow")
        refused(LaunchError, "raise launch_run's start_timeout_s", lambda: self.session.start(spec, "0", timeout_s=0.1))
        self.session.stop(self.session.groups["slow"])

    def test_a_group_is_re_placed_and_its_state_goes_with_it(self) -> None:
        """From one rank to four and back, to the bit, cut anew each time; processes stay where they are."""
        config = {"rows": 5, "columns": 7}
        one = self.session.start(ShardedProbe.group(config, device_kind="virtual"), "0")
        one.fill(3).wait(30)
        (whole,) = one.held().result(30)
        pids = one.pids
        four = self.session.replace(one, "0-1*2")
        assert (four.name, four.world_size, self.session.groups[one.name]) == ("sharded_probe", 4, four)
        refused(SessionClosedError, "it was stopped", lambda: one.held())
        parts = four.held().result(30)
        assert [part["begins"] for part in parts] == [[0, 0], [1, 1], [2, 3], [3, 5]]
        for name, axis in (("rows", 0), ("columns", 1)):
            assert np.array_equal(np.concatenate([part[name] for part in parts], axis), whole[name])
        if self.dies:
            assert not set(four.pids) & set(pids)
        again = self.session.replace(four, "1")
        (back,) = again.held().result(30)
        assert all(np.array_equal(back[name], whole[name]) for name in ("rows", "columns", "count"))
        refused(PlacementError, "beyond the end", lambda: self.session.replace(again, "9"))
        assert again.held().result(30)[0]["count"] == 3
        self.session.stop(again)

    def test_a_re_placed_rank_restarts_and_fails_under_its_name(self) -> None:
        """As one that was never moved."""
        if self.dies:
            with self.launch() as session:
                retry, probe = session.start_all([(self.spec(worker=RetryProbe), "0"), (self.spec(), "1")])
                retry, probe = session.replace(retry, "1"), session.replace(probe, "0")
                assert retry.die_once().result(30) == [1]
                probe.say("last words").wait(30)
                failure = refused(WorkerFailed, "last words", lambda: probe.die().result(30))
                assert (failure.group, failure.rank, failure.phase) == ("probe", 0, "die")

    def test_what_does_not_fit_is_refused_before_anything_starts(self) -> None:
        """With the reason."""
        spec = self.spec(name="never")
        refused(PlacementError, "beyond the end", lambda: self.session.start(spec, "0-9"))
        refused(AttributeError, "did you mean 'whoami'", lambda: self.group.whoam)
        assert "never" not in self.session.groups

    def test_an_exception_ends_the_run_with_its_traceback(self) -> None:
        """First cause first: rank, phase, traceback; the others are stopped."""
        failure = self.fails(lambda group: group.on(1).fail("no such prompt"))
        assert (failure.group, failure.rank, failure.phase) == ("victim", 1, "fail")
        assert failure.cause == "ValueError: no such prompt"
        assert "in fail" in failure.traceback

    def test_sys_exit_is_a_failure(self) -> None:
        """Named as such."""
        failure = self.fails(lambda group: group.on(0).exit(3))
        assert (failure.rank, failure.phase, failure.cause) == (0, "exit", "sys.exit(3)")

    def test_a_failing_setup_ends_the_run(self) -> None:
        """In phase start."""
        with self.launch() as session:
            spec = self.spec({"setup": "raise"})
            failure = refused(WorkerFailed, "told to fail in setup", lambda: session.start(spec, "0"))
            assert failure.phase == "start"
            assert session.failure is failure

    def test_a_class_that_is_not_there_ends_the_run(self) -> None:
        """In phase start."""
        with self.launch() as session:
            spec = self.spec()
            object.__setattr__(spec, "target", "m2flow.worker.nowhere:Probe")
            failure = refused(WorkerFailed, "No module named", lambda: session.start(spec, "0"))
            assert failure.phase == "start"

    def test_calls_on_a_closed_run_are_refused(self) -> None:
        """Those under way as well."""
        with self.launch() as session:
            group = session.start(self.spec(), "0")
            handle = group.sleep(60.0) if self.dies else group.echo(1)
        if self.dies:
            refused(SessionClosedError, "closed", lambda: handle.result(10))
        refused(SessionClosedError, "launch_run", lambda: group.echo(1))

    def test_a_silent_death_is_explained(self) -> None:
        """By signal, with the last log lines, ahead of what its peers saw."""
        if self.dies:
            failure = self.fails(_die_with_listener)
            assert (failure.rank, failure.phase) == (0, "die")
            assert failure.cause.startswith("SIGKILL")
            assert failure.last_log_lines[-1] == "last words"

    def test_an_exit_without_a_word_is_explained(self) -> None:
        """By its code."""
        if self.dies:
            failure = self.fails(lambda group: group.on(1).exit_hard(3))
            assert (failure.rank, failure.phase, failure.cause) == (1, "exit_hard", "exit code 3")

    def test_retry_starts_the_rank_again_and_gives_its_calls_again(self) -> None:
        """With the objects beside it."""
        if self.dies:
            with self.launch() as session:
                group = session.start(self.spec(worker=RetryProbe), "0-1")
                beside = group.attach("beside", COMPANION, "hello")
                beside.attached.wait(30)
                assert group.on(0).die_once().result(30) == [1]
                other = int(self.ranks_per_process > 1)  # It went, and came again, with its process.
                assert beside.greet().result(30) == ["hello 0 of start 1", f"hello 1 of start {other}"]
                assert session.failure is None

    def test_retry_has_a_limit(self) -> None:
        """Then the run ends."""
        if self.dies:
            with self.launch() as session:
                group = session.start(self.spec(worker=RetryProbe), "0")
                refused(WorkerFailed, "phase 'die'", lambda: group.die().result(30))

    def test_a_rank_that_dies_as_it_is_started_again_is_started_once_more(self) -> None:
        """Its calls wait for that."""
        if self.dies:
            with self.launch() as session:
                group = session.start(self.spec(2, worker=RelapsingProbe), "0-1")
                assert group.on(0).die_once().result(30) == [3]
                assert group.echo("end").result(30) == ["end", "end"]
                assert session.failure is None

    def test_who_dies_at_every_start_after_the_first_ends_the_run(self) -> None:
        """In the phase in which it died last."""
        if self.dies:
            with self.launch() as session:
                group = session.start(self.spec(1000, worker=RelapsingProbe), "0")
                refused(WorkerFailed, "phase 'start': SIGKILL", lambda: group.die_once().result(30))

    def test_drop_starts_the_rank_again_without_its_calls(self) -> None:
        """The caller hears of it; the run goes on."""
        if self.dies:
            with self.launch() as session:
                group = session.start(self.spec(worker=DropProbe), "0")
                handle = group.die_once()
                refused(WorkerFailed, "SIGKILL", lambda: handle.result(30))
                assert [answer["attempt"] for answer in group.whoami().result(30)] == [1]
                assert session.failure is None

    def fails(self, act: Callable[[WorkerGroup], object]) -> WorkerFailed:
        """The failure of a run in which `act` makes a rank fail: it comes in time, and to every caller."""
        with self.launch() as session:
            group = session.start(self.spec(name="victim"), "0-1")
            waiting = group.attach("beside", COMPANION, "hello").attached
            waiting.wait(30)
            start = time.monotonic()
            act(group)
            while session.failure is None:
                assert time.monotonic() - start < DEADLINE_S
                time.sleep(0.01)
            failure = session.failure
            assert refused(WorkerFailed, "", lambda: group.echo(1)) is failure
        return failure


def refused(kind: type[Failure], text: str, act: Callable[[], object]) -> Failure:
    """The error of that kind, with that text in it, that `act` must raise."""
    try:
        act()
    except kind as failure:
        if text in str(failure):
            return failure
        raise AssertionError(f"got {failure}, want {text!r} in it") from failure
    raise AssertionError(f"got no error, want a {kind.__name__} with {text!r}")


async def _awaited(group: WorkerGroup, value: int) -> list[int]:
    return list(await group.echo(value))


def _die_with_listener(group: WorkerGroup) -> None:
    group.on(0).say("last words").wait(30)
    group.on(1).listen("victim.0")
    group.on(0).die()
