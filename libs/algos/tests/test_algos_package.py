"""The package as a user meets it: examples run, the README names everything, signatures agree, the wheel is small."""

import inspect
import io
import re
import zipfile
from pathlib import Path

import pytest
import torch

from m2flow import algos

README = Path(__file__).parents[1] / "README.md"
MODULES = [vars(algos)[name] for name in algos.__all__ if inspect.ismodule(vars(algos)[name])]


def public() -> list[tuple[str, object]]:
    """Return every public function by its full name."""
    return [
        (f"{module.__name__.removeprefix('m2flow.algos.')}.{name}", function)
        for module in MODULES
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    ]


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL))
def test_readme_example_runs(example: str) -> None:
    torch.manual_seed(0)
    exec(compile(example, str(README), "exec"), {})


def test_readme_names_every_function() -> None:
    text = README.read_text()
    missing = [name for name, _ in public() if not re.search(rf"`{name.rsplit('.', 1)[1]}`", text)]
    assert not missing


def test_a_wheel_of_the_package_is_under_100_kb() -> None:
    with zipfile.ZipFile(packed := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as wheel:
        for source in Path(algos.__file__).parent.glob("*.py"):
            wheel.write(source, source.name)
    assert packed.tell() < 100_000


def test_operands_come_first_and_settings_by_name() -> None:
    for name, function in public():
        parameters = list(inspect.signature(function).parameters.values())  # type: ignore[arg-type]
        assert all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters), name
        for p in parameters:
            # A number is a setting and has its name written; tensors and modules come in order.
            if p.annotation in (float, int, bool):
                assert p.kind is p.KEYWORD_ONLY, f"{name}: {p.name}"
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        if "mask" in positional and name != "filters.drop_truncated":
            assert positional[-1] == "mask", name
