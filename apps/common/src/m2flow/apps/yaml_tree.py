"""YAML text to plain trees and back, and `a.b=c` overrides on such trees."""

import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from m2flow.apps.errors import ConfigError

__all__ = ["Value", "dump_yaml", "load_yaml", "merge_overrides", "parse_yaml"]

Value = bool | int | float | str | list["Value"] | dict[str, "Value"] | None


class _Loader(yaml.SafeLoader):
    """The core of YAML 1.2: 1e-5 is a number, `no` and 2026-11-29 are text, and no key comes twice in one mapping."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|false|False", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.inf)", "-+.0123456789"),
    ("null", r"~|null|", "~n\0"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), [*_first, ""])


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[object, object]:
    seen: set[object] = set()
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.YAMLError(f"line {key_node.start_mark.line + 1}: a key is a list or a mapping, want a word")
        key = loader.construct_object(key_node)
        if key in seen:
            line = key_node.start_mark.line + 1
            raise ConfigError([f"{key}: got it twice (again in line {line}), want each key once: remove one"])
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


def _whole_number(loader: _Loader, node: yaml.ScalarNode) -> int:
    """010 is ten, and 08 a number: YAML 1.1 reads a leading zero as octal."""
    return int(str(loader.construct_scalar(node)))


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)


def _parse(text: str) -> object:
    """What YAML text holds. Raises YAMLError; ConfigError where a key comes twice."""
    try:
        return yaml.load(text, Loader=_Loader)  # _Loader is a SafeLoader
    except (ValueError, AttributeError, RecursionError) as error:  # 5,000 digits, `!!timestamp x`, 1,000 brackets
        raise yaml.YAMLError(str(error)) from None


def parse_yaml(text: str, *, origin: str) -> dict[str, Value]:
    """Returns the mapping that `text` holds; `origin` names it in errors. Empty text is an empty mapping."""
    try:
        tree = _parse(text)
    except yaml.YAMLError as error:
        raise ConfigError([f"{origin}: not YAML ({' '.join(str(error).split())}): correct the file"]) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError([f"{origin}: got {type(tree).__name__}, want a mapping of keys to values: see `config show`"])
    return typing.cast(dict[str, Value], tree)


def load_yaml(path: Path) -> dict[str, Value]:
    """Returns the mapping in the file. Raises ConfigError when it cannot be read or is not a mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read ({error}): give the path of a YAML file"]) from None
    return parse_yaml(text, origin=str(path))


def merge_overrides(tree: Mapping[str, Value], overrides: Sequence[str]) -> dict[str, Value]:
    """Returns a copy of `tree` with every `a.b=c` applied; values are read as YAML, so `a=1e-5` is a number."""
    merged: dict[str, Value] = _copy(tree)
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path.strip():
            raise ConfigError([f"override {override!r}: got no key=value, want a.b=c: write for example num_steps=10"])
        try:
            value = typing.cast(Value, _parse(text))
        except yaml.YAMLError:
            raise ConfigError([f"override {override!r}: the value is not YAML: quote it, as in a='b: c'"]) from None
        *sections, leaf = path.strip().split(".")
        node = merged
        for section in sections:
            child = node.setdefault(section, {})
            if not isinstance(child, dict):
                child = node[section] = {}
            node = child
        node[leaf] = "" if value is None else value
    return merged


def dump_yaml(config: object) -> str:
    """Returns the config as YAML, each key with its meaning; `parse_yaml` and `build` make an equal config of it."""
    return "\n".join(_lines(config, "")) + "\n"


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that the loader would read as something else."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
_Dumper.add_representer(  # a line break inside a value is written as \\n, so that a value stays on its line
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\n" in text else None),
)


def _lines(config: object, indent: str) -> Iterator[str]:
    assert dataclasses.is_dataclass(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield f"{indent}{field.name}:"
            yield from _lines(value, indent + "  ")
        else:
            text = yaml.dump([_plain(value)], Dumper=_Dumper, default_flow_style=True, width=10**6).strip()[1:-1]
            meaning = field.metadata.get("meaning", "")
            yield f"{indent}{field.name}: {text}" + (f"  # {meaning}" if meaning else "")


def _plain(value: object) -> Value:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return typing.cast(Value, value)


def _copy(tree: Mapping[str, Value]) -> dict[str, Value]:
    return {key: _copy(value) if isinstance(value, dict) else value for key, value in tree.items()}
