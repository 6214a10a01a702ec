"""Workflows, profiles, clusters and plans as files: YAML by the messages' field names, or the messages as JSON.

Short forms: enum values by their last word (`kind: work`), a stream as a pair `[producer, consumer]`, bytes with a
unit (`80GB`, `64MiB`), a device by the name of its hardware (`hardware: h100-sxm`), exponents without a dot (`1e12`).
"""

import difflib
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import yaml
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from m2flow.proto.flow.v1 import flow_pb2
from m2flow.proto.sched.v1 import sched_pb2
from m2flow.sched.errors import InputError
from m2flow.sched.roofline import named_device

M = TypeVar("M", bound=Message)
Field = Any  # the two descriptor classes of protobuf, Python and C, share no base
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_QUANTITY = re.compile(r"([-+0-9.eE]+)\s*([kmgt]i?|)b?", re.IGNORECASE)


def read_request(
    workflow: str | pathlib.Path, profile: str | pathlib.Path, cluster: str | pathlib.Path
) -> sched_pb2.PlanRequest:
    """Reads the three inputs of a plan.

    Raises:
        InputError: a file is missing or is not YAML or JSON; a key is unknown; a value has the wrong type.
    """
    return sched_pb2.PlanRequest(
        workflow=read_message(workflow, flow_pb2.WorkflowGraph),
        profile=read_message(profile, sched_pb2.Profile),
        cluster=read_message(cluster, sched_pb2.ClusterSpec),
    )


def read_case(folder: str | pathlib.Path) -> sched_pb2.PlanRequest:
    """Reads `workflow.yaml`, `profile.yaml` and `cluster.yaml` of a folder; errors as `read_request`."""
    home = pathlib.Path(folder)
    return read_request(home / "workflow.yaml", home / "profile.yaml", home / "cluster.yaml")


def read_message(path: str | pathlib.Path, kind: type[M]) -> M:
    """Reads one message from a .yaml or .json file; errors as `read_request`."""
    file, message = pathlib.Path(path), kind()
    name = message.DESCRIPTOR.name
    try:
        if not file.is_file():
            raise InputError(f"{file} is not a file, want a {name} in YAML or JSON: check the path")
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix != ".json":
            data = yaml.load(text, _Loader)
        elif isinstance(json.loads(text), dict):
            return json_format.Parse(text, message)
        else:
            raise InputError(f"{file} has no JSON object, want a {name} with keys {_names(message)}: mend the file")
    except InputError:
        raise
    except (OSError, ValueError, RecursionError, yaml.YAMLError, json_format.ParseError) as wrong:
        raise InputError(f"{file} cannot be read as a {name}: {wrong}: mend the file") from None
    fill(message, {} if data is None else data, str(file))
    return message


def to_json(message: Message) -> str:
    """The message as JSON, field names as in the .proto files."""
    return json.dumps(json_format.MessageToDict(message, preserving_proto_field_name=True), indent=2) + "\n"


def fill(message: Message, data: object, where: str) -> None:
    """Sets a message's fields from plain data; `where` names the place in errors, which are `InputError`s."""
    if isinstance(message, flow_pb2.Stream) and isinstance(data, list) and len(data) == 2:
        data = {"producer": data[0], "consumer": data[1]}
    if not isinstance(data, Mapping):
        raise InputError(f"{where} is {data!r}, want a {message.DESCRIPTOR.name} with keys {_names(message)}")
    entries = dict(data)
    if isinstance(message, sched_pb2.DeviceSpec) and "hardware" in entries:
        message.CopyFrom(named_device(str(entries.pop("hardware"))))
    for key, value in entries.items():
        field = message.DESCRIPTOR.fields_by_name.get(key)
        if field is None:
            near = difflib.get_close_matches(str(key), _names(message), 1, 0.0)
            raise InputError(f"{where}: unknown key {key!r}, want one of {_names(message)}: did you mean {near[0]!r}?")
        _set(message, field, value, f"{where}: {key}")


def override(request: sched_pb2.PlanRequest, assignment: str) -> None:
    """Applies `a.b.0.c=value` to a request: fields by name, entries of a list by index.

    Raises:
        InputError: the path or the value does not fit the request.
    """
    path, equals, text = assignment.partition("=")
    if not equals:
        raise InputError(f"override {assignment!r} has no '=', want path=value: write workflow.source_items=128, say")
    message: Message = request
    *steps, last = path.split(".")
    index = iter(range(len(steps)))
    for i in index:
        field = message.DESCRIPTOR.fields_by_name.get(steps[i])
        if field is None or field.message_type is None:
            raise InputError(
                f"override {assignment!r}: no message {steps[i]!r}, want one of {_names(message)}: fix the path"
            )
        inner = getattr(message, steps[i])
        if field.is_repeated:
            number = steps[i + 1] if i + 1 < len(steps) else last
            if not (number.isascii() and number.isdigit()) or int(number) >= len(inner):
                raise InputError(
                    f"override {assignment!r}: {number!r} is no index, want 0 to {len(inner) - 1}: count from 0"
                )
            inner = inner[int(number)]
            next(index, None)
        message = inner
    try:
        value = yaml.load(text, _Loader)
    except (ValueError, RecursionError, yaml.YAMLError):
        raise InputError(f"override {assignment!r}: {text!r} is no YAML value: quote or close what is open") from None
    fill(message, {last: value}, f"override {assignment!r}")


class _Loader(yaml.SafeLoader):
    """Reads plain data, and refuses a key that is there twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Returns the mapping; a YAML error names the second of two equal keys."""
        keys = [key.value for key, _ in node.value]
        for i, (key, _) in enumerate(node.value):
            if key.value in keys[:i]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} is there twice, want it once", key.start_mark
                )
        return super().construct_mapping(node, deep)


def _set(message: Message, field: Field, value: object, where: str) -> None:
    if field.is_repeated:
        values = value if isinstance(value, list) else [value]
        target = getattr(message, field.name)
        del target[:]
        for i, one in enumerate(values):
            if field.message_type is not None:
                fill(target.add(), one, f"{where}[{i}]")
            else:
                target.append(_scalar(field, one, f"{where}[{i}]"))
    elif field.message_type is not None:
        fill(getattr(message, field.name), value, where)
    else:
        setattr(message, field.name, _scalar(field, value, where))


def _scalar(field: Field, value: object, where: str) -> object:
    if field.enum_type is not None:
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", field.enum_type.name).upper() + "_"
        names = {n.removeprefix(prefix).lower(): v.number for n, v in field.enum_type.values_by_name.items()}
        word = str(value).removeprefix(prefix).lower()
        if word not in names or not names[word]:
            raise InputError(f"{where} is {value!r}, want one of {sorted(n for n in names if names[n])}: use one")
        return names[word]
    if field.type == FieldDescriptor.TYPE_STRING:
        if not isinstance(value, (str, int, float)) or any("\ud800" <= char <= "\udfff" for char in str(value)):
            raise InputError(f"{where} is {value!r}, want text: write one name")
        return str(value)
    if field.type == FieldDescriptor.TYPE_BOOL:
        if not isinstance(value, bool):
            raise InputError(f"{where} is {value!r}, want true or false: write one of them")
        return value
    number = _number(value, where)
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return number
    most = 2**32 - 1 if field.type == FieldDescriptor.TYPE_UINT32 else 2**63 - 1
    if not 0 <= number <= most or number != int(number):  # not-a-number is neither
        raise InputError(f"{where} is {value!r}, want a whole number of 0 or more, up to {most}: write one")
    return int(number)


def _number(value: object, where: str) -> float:
    match = _QUANTITY.fullmatch(str(value).strip())
    try:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        assert match is not None
        return float(match[1]) * _UNITS[match[2].lower()]
    except (AssertionError, OverflowError, ValueError):
        raise InputError(f"{where} is {value!r}, want a number, or bytes such as 80GB or 64MiB: write one") from None


def _names(message: Message) -> list[str]:
    return [f.name for f in message.DESCRIPTOR.fields]
