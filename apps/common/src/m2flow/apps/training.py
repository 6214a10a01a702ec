"""The driver: plans a job, launches it, and walks it from step to step; evaluation, checkpoints and files on the way.

It is not on the data path: an iteration runs between the workers, and the driver waits for its end.
"""

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from m2flow.apps.app import Job, StepOutcome
from m2flow.apps.atomic import replace_file
from m2flow.apps.checkpoint import ResumeState, write_checkpoint
from m2flow.apps.config import TrainingConfig
from m2flow.apps.errors import CheckFailed, StepLost
from m2flow.apps.metrics import MetricsLog, spoken
from m2flow.apps.planning import Planning, difference
from m2flow.apps.progress import Progress, StepView
from m2flow.apps.report import write_report
from m2flow.apps.run_directory import RunDirectory
from m2flow.apps.stage_times import stage_seconds
from m2flow.apps.timeline_file import write_timeline
from m2flow.apps.worker_logs import WorkerLogs
from m2flow.flow import Graph, IterationResult, Pending, Runtime, account, account_table, trace
from m2flow.sched.files import to_json
from m2flow.worker import Cluster, Item, LaunchError, Session, find_cluster, launch_run

__all__ = ["Driver", "cluster_of", "traced"]


def traced(job: Job, config: TrainingConfig, *, name: str) -> Graph:
    """Returns the graph of the job's macro flow. Starts nothing."""
    return trace(job.program, job.groups, source_items=config.source_items, name=name, expansions=job.expansions)


def cluster_of(config: TrainingConfig) -> Cluster:
    """Returns the devices that the config asks for, and the app's own resources.

    They are this machine's, or with launcher=ray those of the Ray cluster at hand, which is found or started. Raises
    CheckFailed on more slots than cores, and where Ray is not there.
    """
    try:
        cluster = find_cluster(config.launcher, None if config.cpu_slots == "all" else config.cpu_slots)
    except (ValueError, LaunchError) as error:
        raise CheckFailed([str(error)]) from None
    for kind, count in config.resources.items():
        cluster = cluster.with_resource(kind, count=count)
    return cluster


@dataclass
class Driver:
    """One training run. `first_step` is 1, or the step after a checkpoint's; `in_flight` is what that one kept.

    Where the plan's staleness lets it, steps are begun before the last ones are over, but never past an evaluation or a
    checkpoint: both find nothing under way.
    """

    job: Job
    config: TrainingConfig
    run: RunDirectory
    graph: Graph
    cluster: Cluster
    planning: Planning
    progress: Progress
    first_step: int
    in_flight: Mapping[str, Sequence[Item]]

    def __post_init__(self) -> None:
        self._under_way: deque[Pending] = deque()
        self._results: deque[IterationResult] = deque(maxlen=self.config.run.timeline_iterations)

    def train(self) -> None:
        """Runs every step. Blocks; raises the first failure after all workers have ended and the files are written."""
        self._write_plan()
        with MetricsLog(self.run) as self._log, self._kept_files(), WorkerLogs(self.run.logs) as logs:
            self.progress.doing("starting the workers")
            path = self.run.path
            with (
                launch_run(self.cluster, launcher=self.config.launcher, run_dir=path, on_log=logs.write) as session,
                _first_cause(session),
                Runtime(self.graph, self.planning.plan, session) as runtime,
            ):
                runtime.start(self.first_step, carried=self.in_flight)
                self._walk(runtime)
        self.progress.say(self._device_table())

    def _walk(self, runtime: Runtime) -> None:
        if self.first_step == 1:
            self._evaluate(runtime, 0)
        for step in range(self.first_step, self.config.num_steps + 1):
            self._step(runtime, step)
            if self._due(step, self.config.evaluation.every):
                self._evaluate(runtime, step)
            if self._due(step, self.config.checkpoint.every):
                self._checkpoint(runtime, step)

    def _due(self, step: int, *periods: int) -> bool:
        return step == self.config.num_steps or any(step % every == 0 for every in periods)

    def _begin(self, runtime: Runtime, step: int) -> None:
        """Begins a step unless it has been, and those after it that may run ahead."""
        every = self.config.evaluation.every, self.config.checkpoint.every
        last = next(later for later in itertools.count(step) if self._due(later, *every))
        first = step + len(self._under_way)
        for number in range(first, min(last, step + self.planning.plan.staleness) + 1):
            self._under_way.append(runtime.submit(number, self.job.items(number)))

    def _step(self, runtime: Runtime, step: int) -> None:
        self.progress.doing(f"plan {self.planning.plan.mode}")
        predicted_s = self.planning.predicted_s
        self._begin(runtime, step)
        result = self._under_way.popleft().result()
        if not result.outputs:
            lost = ", ".join(f"{reason} {count}" for reason, count in result.tombstones.items())
            raise StepLost(f"step {step}: got nothing to learn from ({lost}), want a sample: {self.run.logs} says why")
        self._record(step, self.job.measure(result.outputs), result, predicted_s)
        self._results.append(result)
        remaining, before = self.config.num_steps - step, self.planning.plan
        if self.planning.observe(result.timeline, remaining_iterations=remaining) and remaining:
            self._write_plan()
            changed = difference(before, self.planning.plan)
            self.progress.say(f"step {step}: the next plan is {self.planning.plan.mode} ({changed})")
            self.progress.doing("changing the plan")
            began = time.perf_counter()
            runtime.apply(self.planning.plan)
            self.planning.switch_s = time.perf_counter() - began

    def _record(self, step: int, outcome: StepOutcome, result: IterationResult, predicted_s: float | None) -> None:
        # Of a step that began while the last one went on, what it took beyond that.
        before_ns = self._results[-1].end_ns if self._results else 0
        seconds = (result.end_ns - max(result.start_ns, before_ns)) / 1e9
        # Weights that were published before the iteration began are no part of it.
        spans = [span for span in result.timeline.spans if span.start_ns >= result.start_ns]
        stages = stage_seconds(spans, self.graph.order)
        rate = outcome.volume / seconds
        metrics = {
            **outcome.metrics,
            **{f"timing_s/{stage}": value for stage, value in stages.items()},
            "timing_s/step": seconds,
            f"throughput/{self.job.unit}_per_s": rate,
            "plan/measured_s": seconds,
            **{f"tombstones/{reason}": float(count) for reason, count in result.tombstones.items()},
        }
        if predicted_s is not None:
            metrics["plan/predicted_s"] = predicted_s
        self._log.write(step, metrics)
        self.run.write_samples(step, outcome.samples[: self.config.run.samples])
        reward = outcome.metrics["critic/score/mean"]
        predicted = "" if predicted_s is None else f"predicted {predicted_s:.2f} s"
        self.progress.step(StepView(step, reward, rate, self.job.unit, seconds, stages, predicted))
        for warning in filter(None, [outcome.warning, _skipped(result.tombstones, self.graph)]):
            self.progress.say(f"step {step}: warning: {warning}")

    def _evaluate(self, runtime: Runtime, step: int) -> None:
        self.progress.doing("evaluating")
        began = time.perf_counter()
        # What never leaves its devices is there anyway.
        leaving = [name for name in self.job.evaluated_groups if self.job.groups[name].can_offload]
        with runtime.loaded(*leaving):
            metrics = dict(self.job.evaluate(runtime.groups, step))
            if self.job.film is not None:
                self.run.write_film(step, self.job.film(runtime.groups))
        self._log.write(step, {**metrics, "timing_s/evaluation": time.perf_counter() - began})
        shown = ", ".join(f"{spoken(name)} {value:.3f}" for name, value in metrics.items())
        self.progress.say(f"step {step}: held-out {shown}")

    def _checkpoint(self, runtime: Runtime, step: int) -> None:
        self.progress.doing("writing a checkpoint")
        state = ResumeState(
            step=step,
            seed=self.config.seed,
            items_drawn=step * self.config.source_items,
            policy_version=step,
        )
        trainer = runtime.groups[self.job.trainer]

        def write(directory: Path) -> None:
            with runtime.loaded(self.job.trainer):
                trainer.method("save_checkpoint")(str(directory)).result()

        keep = self.config.checkpoint.keep
        path = write_checkpoint(self.run.checkpoints, state, write, keep=keep, in_flight=runtime.carried())
        self.progress.say(f"step {step}: checkpoint {path}")
        self._write_timeline()

    @contextlib.contextmanager
    def _kept_files(self) -> Iterator[None]:
        """Writes the timeline and the report at the end, however it comes; a failure of theirs never hides another."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):
                self._write_files()
            raise
        self._write_files()

    def _write_files(self) -> None:
        self._write_timeline()
        write_report(self.run)

    def _device_table(self) -> str:
        last = self._results[-1]
        accounts = account(last.timeline, last.start_ns, last.end_ns, [device.id for device in self.cluster.devices])
        return f"where the devices' time went in step {last.iteration}:\n{account_table(accounts)}"

    def _write_plan(self) -> None:
        replace_file(self.run.plan, to_json(self.planning.plan))

    def _write_timeline(self) -> None:
        write_timeline(self.run, self._results, device_ids=[device.id for device in self.cluster.devices])


@contextlib.contextmanager
def _first_cause(session: Session) -> Iterator[None]:
    """Raises what failed first in the run in place of what followed from it."""
    try:
        yield
    except Exception as error:
        if session.failure is None or session.failure is error:
            raise
        raise session.failure from error


def _skipped(tombstones: Mapping[str, int], graph: Graph) -> str:
    """Words for the items that were lost otherwise than the program asks for, by its filters and quotas; or none."""
    lost = {reason: n for reason, n in tombstones.items() if reason not in graph.stages and reason != "surplus"}
    reasons = ", ".join(f"{reason} {count}" for reason, count in lost.items())
    return f"{sum(lost.values())} items were skipped ({reasons}): logs/ says why" if lost else ""
