"""Plans as files, and who makes them.

A planner answers a `PlanRequest` with a `PlanResponse`: the search of m2flow-sched is one, and so is another process
behind `SchedulerService`. flow knows the messages only.
"""

import difflib
from pathlib import Path
from typing import Any, Protocol

import yaml
from google.protobuf import json_format

from m2flow.flow.errors import PlanError
from m2flow.proto.flow.v1 import flow_pb2 as pb
from m2flow.proto.sched.v1 import sched_pb2


class Planner(Protocol):
    """Whoever can find a plan."""

    def plan(self, request: sched_pb2.PlanRequest) -> sched_pb2.PlanResponse:
        """Returns the best plans, best first. May block for as long as it searches."""
        ...


def save_plan(plan: pb.ExecutionPlan, path: Path) -> None:
    """Writes a plan as YAML, or as JSON where the name ends in .json."""
    if path.suffix == ".json":
        path.write_text(json_format.MessageToJson(plan, preserving_proto_field_name=True) + "\n")
    else:
        tree = json_format.MessageToDict(plan, preserving_proto_field_name=True)
        path.write_text(yaml.safe_dump(tree, sort_keys=False))


def load_plan(path: Path) -> pb.ExecutionPlan:
    """Reads a plan from YAML or JSON.

    Raises PlanError, with the file and the place in it, on anything that is not a plan.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise PlanError([f"{path}: not YAML or JSON: {error}"]) from None
    if not isinstance(tree, dict):
        raise PlanError([f"{path}: got {type(tree).__name__}, want the fields of a plan ('mode', 'groups', ...)"])
    if wrong := _unknown_field(tree, pb.ExecutionPlan.DESCRIPTOR, ""):
        raise PlanError([f"{path}: {wrong}"])
    try:
        return json_format.ParseDict(tree, pb.ExecutionPlan())
    except json_format.ParseError as error:
        raise PlanError([f"{path}: {error}"]) from None


def _unknown_field(tree: dict[str, Any], kind: Any, where: str) -> str:
    known = {name for field in kind.fields for name in (field.name, field.json_name)}
    for key, value in tree.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), sorted(known), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"want one of {', '.join(f.name for f in kind.fields)}"
            return f"{where}unknown field {key!r}: {hint}"
        field = next(field for field in kind.fields if key in (field.name, field.json_name))
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if field.message_type is None or is_map:
            continue
        for number, part in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(part, dict) and (
                wrong := _unknown_field(part, field.message_type, f"{where}{key}[{number}].")
            ):
                return wrong
    return ""
