"""What each command does: from the words on the command line to a run, a plan, or a list of problems."""

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from m2flow import sched
from m2flow.apps.app import App
from m2flow.apps.atomic import replace_file
from m2flow.apps.check import collect, run_problems
from m2flow.apps.checkpoint import read_in_flight
from m2flow.apps.config import TrainingConfig
from m2flow.apps.errors import CheckFailed
from m2flow.apps.forecast import Forecast, ProfileStore, new_profile
from m2flow.apps.metrics import spoken
from m2flow.apps.planning import (
    AutoPlanning,
    FixedPlanning,
    Planning,
    cluster_spec,
    fixed_plan,
)
from m2flow.apps.progress import Progress
from m2flow.apps.report import write_report
from m2flow.apps.run_directory import RunDirectory
from m2flow.apps.settings import find_checkpoint, newest_checkpoint, refuse_idle_resume, resolve_config, run_of
from m2flow.apps.training import Driver, cluster_of, traced
from m2flow.apps.yaml_tree import dump_yaml
from m2flow.flow import Graph
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched.files import read_message, to_json
from m2flow.worker import Cluster, GroupSpec, Placement, launch_run

__all__ = ["check", "evaluate", "plan", "report", "show_config", "train"]

C = TypeVar("C", bound=TrainingConfig)


def train(app: App[C], arguments: argparse.Namespace) -> int:
    """Trains from the first step."""
    config = resolve_config(app, arguments.settings)
    _refuse(_problems(app, config, resuming=False))
    weights = app.prepare(config)
    run = RunDirectory.create(app.name, root=config.run.root, directory=config.run.dir)
    with run.held():
        _drive(app, config, run, weights=weights, resume=None, first_step=1)
    return 0


def resume(app: App[C], arguments: argparse.Namespace) -> int:
    """Goes on with a run from its newest checkpoint, under any plan and on any number of devices."""
    run = RunDirectory.open(arguments.resume)
    with run.held():
        checkpoint, state = newest_checkpoint(run)
        config = resolve_config(app, arguments.settings, base=run)
        refuse_idle_resume(config, run, state)
        _refuse(_problems(app, config, resuming=True))
        run.drop_after(state.step)
        _drive(app, config, run, weights=checkpoint, resume=checkpoint, first_step=state.step + 1)
    return 0


def evaluate(app: App[C], arguments: argparse.Namespace) -> int:
    """Prints how good a model is on held-out problems: by a run's settings where it is a run's, else by a recipe's."""
    checkpoint = find_checkpoint(arguments.checkpoint) if arguments.checkpoint else None
    recipe_named = arguments.settings and "=" not in arguments.settings[0]
    base = None if checkpoint is None or recipe_named else run_of(checkpoint)
    config = resolve_config(app, arguments.settings, base=base)
    checks = [lambda: app.problems(config)]
    if checkpoint is None:
        checks.append(lambda: app.model_problems(config))
    _refuse(collect(checks))
    job, cluster = app.build(config, checkpoint or app.prepare(config), None), cluster_of(config)
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="m2flow-"))
        session = stack.enter_context(launch_run(cluster, launcher=config.launcher, run_dir=Path(scratch)))
        groups = {
            name: session.start(job.groups[name], _everywhere(job.groups[name], cluster))
            for name in job.evaluated_groups
        }
        for name, value in job.evaluate(groups, 0).items():
            print(f"{name} {value:.3f}")
    return 0


def plan(app: App[C], arguments: argparse.Namespace) -> int:
    """Prints the best plan for a profile and why it is; needs no device and no model."""
    config = resolve_config(app, arguments.settings)
    try:
        request, origin = _plan_request(app, config, arguments)
        answer = sched.explain(request)
    except sched.SchedError as error:
        raise CheckFailed([str(error)]) from None
    print(answer.text)
    print(f"Profile: {origin}")
    if answer.response.infeasible:
        return 1
    if arguments.output:
        replace_file(arguments.output, to_json(answer.response.plans[0].plan))
    return 0


def check(app: App[C], arguments: argparse.Namespace) -> int:
    """Prints what would go wrong. Starts nothing."""
    config = resolve_config(app, arguments.settings)
    _refuse(_problems(app, config, resuming=False))
    print("nothing is wrong")
    return 0


def show_config(app: App[C], arguments: argparse.Namespace) -> int:
    """Prints every setting with its value and its meaning, and what follows from the batch words."""
    config = resolve_config(app, arguments.settings)
    print(dump_yaml(config), end="")
    print("# derived")
    for name, value in config.derived_numbers().items():
        print(f"# {name}: {value}")
    return 0


def report(app: App[C], arguments: argparse.Namespace) -> int:
    """Makes report.html of a run again."""
    run = RunDirectory.open(arguments.directory)
    write_report(run)
    print(run.report)
    return 0


def _drive(app: App[C], config: C, run: RunDirectory, *, weights: Path, resume: Path | None, first_step: int) -> None:
    job = app.build(config, weights, resume)
    replace_file(run.config, dump_yaml(config))
    with Progress(config.num_steps, first_step=first_step) as progress:
        progress.say(f"run directory: {run.path}")
        for name, value in _numbers(config).items():
            progress.say(f"  {name:<26}{value}")
        graph, cluster = traced(job, config, name=app.name), cluster_of(config)
        store = ProfileStore(config.run.profiles)
        forecast = Forecast(graph, cluster_spec(cluster), store.find(_empty_profile(app, config)))
        planning = _planning(config, graph, cluster, forecast, run, progress, resuming=resume is not None)
        in_flight = {} if resume is None else read_in_flight(resume)
        Driver(job, config, run, graph, cluster, planning, progress, first_step, in_flight).train()
        store.keep(forecast.profile)
        progress.say(_closing_words(run))


def _plan_request(app: App[C], config: C, arguments: argparse.Namespace) -> tuple[sched_pb2.PlanRequest, Path | None]:
    """What is asked of the scheduler, and the file that its profile is from."""
    graph = _graph(app, config)
    if arguments.cluster:
        cluster = read_message(arguments.cluster, sched_pb2.ClusterSpec)
    else:
        cluster = cluster_spec(cluster_of(config))
    store = ProfileStore(config.run.profiles)
    profile = store.find(_empty_profile(app, config))
    origin = store.path(profile)
    if arguments.profile or not profile.samples:
        origin = arguments.profile or app.default_profile
        profile = read_message(origin, sched_pb2.Profile)
    if not profile.samples and not profile.models:
        raise CheckFailed([f"--profile: {origin} holds no samples, want some of each stage: name a run's profile.json"])
    mode = "" if config.plan == "auto" else config.plan
    return sched_pb2.PlanRequest(workflow=graph.to_proto(), profile=profile, cluster=cluster, mode=mode), origin


def _everywhere(spec: GroupSpec, cluster: Cluster) -> Placement:
    """All devices of the group's kind."""
    ids = [device.id for device in cluster.devices if device.has_label(spec.device_kind)]
    return Placement.of(ids, spec.devices_per_rank)


def _graph(app: App[C], config: C) -> Graph:
    return traced(app.build(config, Path(), None), config, name=app.name)


def _problems(app: App[C], config: C, *, resuming: bool) -> list[str]:
    def plan_problems() -> list[str]:
        if config.plan == "auto" and config.staleness:
            wanted = "want plan=temporal, spatial or hybrid: auto compares plans that wait for their weights"
            return [f"staleness: got {config.staleness} and plan=auto, {wanted}"]
        mode = "temporal" if config.plan == "auto" else config.plan
        fixed_plan(mode, _graph(app, config), cluster_of(config), staleness=config.staleness)
        return []

    checks = [
        lambda: app.problems(config),
        lambda: app.model_problems(config),
        lambda: run_problems(config, resuming=resuming),
        lambda: app.room_problems(config),
    ]
    return collect(checks) or collect([plan_problems])


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise CheckFailed(problems)


def _planning(
    config: TrainingConfig,
    graph: Graph,
    cluster: Cluster,
    forecast: Forecast,
    run: RunDirectory,
    progress: Progress,
    *,
    resuming: bool,
) -> Planning:
    if config.plan != "auto":
        return FixedPlanning(fixed_plan(config.plan, graph, cluster, staleness=config.staleness), forecast)
    if resuming and run.profile.exists():  # the run has chosen already
        return FixedPlanning(fixed_plan(str(run.plan), graph, cluster), forecast)
    iterations = config.profile_iterations
    return AutoPlanning(graph, cluster, forecast, run, profile_iterations=iterations, say=progress.say)


def _empty_profile(app: App[C], config: C) -> sched_pb2.Profile:
    """The profile of this workload before anything is measured; the model's place on disk is no part of it."""
    return new_profile(app.name, app.build(config, Path(config.subject), None).groups)


def _numbers(config: TrainingConfig) -> dict[str, int]:
    words = ("num_steps", *config.batch_words)
    return {word: getattr(config, word) for word in words} | dict(config.derived_numbers())


def _closing_words(run: RunDirectory) -> str:
    rows = run.read_metrics()

    def values(name: str) -> list[float]:
        return [float(str(row[name])) for row in rows if row.get(name) is not None]  # null: it was not finite

    lines = []
    if last := values("critic/score/mean")[-5:]:
        lines.append(f"mean training reward of the last {len(last)} steps: {sum(last) / len(last):.3f}")
    for name in dict.fromkeys(name for row in rows for name in row if name.startswith("eval/")):
        if len(measured := values(name)) > 1:
            lines.append(f"held-out {spoken(name)}: {measured[0]:.3f} before, {measured[-1]:.3f} after")
    return "\n".join([*lines, f"report: {run.report}"])
