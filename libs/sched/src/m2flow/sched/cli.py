"""`m2flow-sched plan|explain|simulate|compare`: from files to a plan, its reasons and its picture."""

import argparse
import contextlib
import pathlib
import signal
import sys
from importlib import metadata

from google.protobuf.message import Message

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched.comparison import compare
from m2flow.sched.errors import SchedError
from m2flow.sched.explanation import explain
from m2flow.sched.files import override, read_case, read_message, read_request, to_json
from m2flow.sched.picture import perfetto, svg
from m2flow.sched.planning import plan
from m2flow.sched.simulation import simulate

_SHOWN = 5
_AGREE = 0.0005


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 if nothing fits, or 2 for inputs that cannot be used; 141, as a shell says of
    SIGPIPE, if whoever reads the answer has closed it."""
    parsed = _parser().parse_args(arguments)
    try:
        code = int(parsed.run(parsed))
        sys.stdout.flush()
    except SchedError as wrong:
        print(f"m2flow-sched: {wrong}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.close()  # or Python tries again at its exit
        return 128 + signal.SIGPIPE
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="m2flow-sched", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(required=True, metavar="plan|explain|simulate|compare")
    for name, run, what in (
        ("plan", _plan, "search the best plans"),
        ("explain", _explain, "search, and say why"),
        ("simulate", _simulate, "run a plan, or the best one, on a clock"),
        ("compare", _compare, "plan two cases and say what differs"),
    ):
        command = commands.add_parser(name, help=what, description=what)
        command.set_defaults(run=run)
        count = 2 if name == "compare" else "?"
        command.add_argument(
            "case", nargs=count, help="a folder with workflow.yaml, profile.yaml, cluster.yaml", metavar="CASE"
        )
        if name != "compare":
            for part in ("workflow", "profile", "cluster"):
                command.add_argument(f"--{part}", metavar="FILE", help=f"the {part}, instead of CASE/{part}.yaml")
            command.add_argument("--svg", metavar="FILE", help="write the timeline as a picture")
            command.add_argument("--perfetto", metavar="FILE", help="write the timeline as a Perfetto trace")
        if name == "simulate":
            command.add_argument("--plan", metavar="FILE", help="an execution plan in JSON or YAML; else the best one")
        command.add_argument(
            "--mode", default="", choices=["", "temporal", "spatial", "hybrid"], help="only such plans"
        )
        command.add_argument("--staleness", type=int, default=0, help="iterations that may start early (default 0)")
        quantum = "devices are given out in multiples of this many (default 0: chosen by the case)"
        command.add_argument("--quantum", type=int, default=0, help=quantum)
        command.add_argument(
            "--set", action="append", default=[], metavar="PATH=VALUE", help="what if: change an input"
        )
        command.add_argument("--json", action="store_true", help="the whole answer, for machines")
    return parser


def _version() -> str:
    try:
        return metadata.version("m2flow-sched")
    except metadata.PackageNotFoundError:
        return "source"


def _request(parsed: argparse.Namespace, case: str | None) -> sched_pb2.PlanRequest:
    files = {part: getattr(parsed, part, None) for part in ("workflow", "profile", "cluster")}
    if case is None and not all(files.values()):
        raise SchedError("no inputs, want a folder CASE or --workflow, --profile and --cluster: give one or the other")
    if case is not None and not any(files.values()):
        request = read_case(case)
    else:
        home = pathlib.Path(case or ".")
        request = read_request(*(files[p] or home / f"{p}.yaml" for p in ("workflow", "profile", "cluster")))
    request.mode = parsed.mode
    for option in ("staleness", "quantum"):
        if not 0 <= getattr(parsed, option) < 2**32:
            raise SchedError(f"--{option} {getattr(parsed, option)}, want 0 to {2**32 - 1}: give a count")
    request.max_staleness, request.device_quantum = parsed.staleness, parsed.quantum
    for assignment in parsed.set:
        override(request, assignment)
    return request


def _plan(parsed: argparse.Namespace) -> int:
    request = _request(parsed, parsed.case)
    answer = plan(request)
    _draw(parsed, request, answer)
    lines = [
        f"{i}. {p.simulated_s:.4g} s  {p.plan.mode:8}  {p.shape}{_difference(p)}"
        for i, p in enumerate(answer.plans[:_SHOWN], start=1)
    ]
    lines += [f"Note: {note}." for note in answer.notes]
    lines.append(f"searched in {answer.search_s * 1e3:.1f} ms of CPU")
    return _answer(parsed, answer, answer.infeasible or "\n".join(lines), bool(answer.plans))


def _difference(ranked: sched_pb2.RankedPlan) -> str:
    """How far the closed form is from the simulation, where they disagree."""
    error = ranked.searched_s / ranked.simulated_s - 1
    return f"  (closed form {error:+.1%})" if abs(error) >= _AGREE else ""


def _explain(parsed: argparse.Namespace) -> int:
    request = _request(parsed, parsed.case)
    answer = explain(request)
    _draw(parsed, request, answer.response)
    return _answer(parsed, answer, answer.text, bool(answer.response.plans))


def _simulate(parsed: argparse.Namespace) -> int:
    request = _request(parsed, parsed.case)
    if parsed.plan:
        chosen = read_message(parsed.plan, flow_pb2.ExecutionPlan)
    else:
        answer = plan(request)
        if not answer.plans:
            return _answer(parsed, answer, answer.infeasible, False)
        chosen = answer.plans[0].plan
    result = simulate(sched_pb2.SimulateRequest(request=request, plan=chosen))
    _write(parsed, result.timeline, f"{chosen.mode}, {result.iteration_s:.4g} s")
    return _answer(parsed, result, f"{result.iteration_s:.6g} s an iteration, {len(result.timeline.spans)} spans", True)


def _compare(parsed: argparse.Namespace) -> int:
    left, right = (_request(parsed, case) for case in parsed.case)
    answer = compare(sched_pb2.CompareRequest(left=left, right=right))
    return _answer(parsed, answer, answer.text, bool(answer.left.plans and answer.right.plans))


def _draw(parsed: argparse.Namespace, request: sched_pb2.PlanRequest, answer: sched_pb2.PlanResponse) -> None:
    if answer.plans and (parsed.svg or parsed.perfetto):
        best = answer.plans[0]
        result = simulate(sched_pb2.SimulateRequest(request=request, plan=best.plan))
        _write(parsed, result.timeline, f"{best.plan.mode}: {best.shape}, {result.iteration_s:.4g} s")


def _write(parsed: argparse.Namespace, timeline: flow_pb2.Timeline, title: str) -> None:
    if parsed.svg:
        _save(parsed.svg, svg(timeline, title=title))
    if parsed.perfetto:
        _save(parsed.perfetto, perfetto(timeline))


def _save(file: str, text: str) -> None:
    try:
        pathlib.Path(file).write_text(text, encoding="utf-8")
    except OSError as wrong:
        raise SchedError(f"{file} cannot be written: {wrong.strerror}: name a file that can") from None


def _answer(parsed: argparse.Namespace, message: Message, text: str, good: bool) -> int:
    print(to_json(message) if parsed.json else text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
