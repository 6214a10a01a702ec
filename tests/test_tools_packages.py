"""The tools that hold the workspace's rules: each is shown a workspace that breaks the rule."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import deps  # noqa: E402
import packages  # noqa: E402


def make_package(root: Path, name: str, *, requires: list[str], visible_to: list[str], source: dict[str, str]) -> None:
    folder = root / "libs" / name / "src" / "m2flow" / name
    folder.mkdir(parents=True)
    for file, text in source.items():
        (folder / file).write_text(text)
    (root / "libs" / name / "pyproject.toml").write_text(
        f'[project]\nname = "m2flow-{name}"\ndependencies = {requires}\n'
        f"[tool.m2flow]\nvisible-to = {visible_to}\nfacade-imports = []\n"
    )


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('[tool.uv.workspace]\nmembers = ["libs/*"]\n')
    make_package(tmp_path, "low", requires=[], visible_to=["high"], source={"__init__.py": "", "_inner.py": ""})
    return tmp_path


def add_high(root: Path, text: str, requires: list[str], more: dict[str, str] | None = None) -> list[str]:
    make_package(
        root, "high", requires=requires, visible_to=[], source={"__init__.py": "", "a.py": text, **(more or {})}
    )
    return deps.problems(root)


def test_a_declared_import_is_allowed(workspace: Path) -> None:
    assert add_high(workspace, "import m2flow.low\n", ["m2flow-low"]) == []


def test_an_undeclared_import_is_named(workspace: Path) -> None:
    (line,) = add_high(workspace, "import os\nimport m2flow.low\nimport json\n", [])
    assert "a.py:2" in line
    assert "declare m2flow-low" in line


def test_an_undeclared_distribution_is_named(workspace: Path) -> None:
    (line,) = add_high(workspace, "import numpy\n", [])
    assert "numpy" in line


def test_a_private_module_is_refused(workspace: Path) -> None:
    lines = add_high(workspace, "from m2flow.low import _inner\n", ["m2flow-low"])
    assert any("private" in line for line in lines)


def test_an_invisible_package_is_refused(workspace: Path) -> None:
    make_package(
        workspace, "far", requires=["m2flow-low"], visible_to=[], source={"__init__.py": "import m2flow.low\n"}
    )
    (line,) = deps.problems(workspace)
    assert "visible to ['high'] only" in line


def test_a_circle_of_modules_is_drawn(workspace: Path) -> None:
    lines = add_high(workspace, "from m2flow.high import b\n", [], {"b.py": "from m2flow.high import a\n"})
    assert any("m2flow.high.a -> m2flow.high.b -> m2flow.high.a is a circle" in line for line in lines)


def test_a_namespace_init_is_refused(workspace: Path) -> None:
    (workspace / "libs" / "low" / "src" / "m2flow" / "__init__.py").write_text("")
    (line,) = deps.problems(workspace)
    assert "hides the sibling packages" in line


def test_dependents_of_a_change_are_affected(workspace: Path) -> None:
    add_high(workspace, "import m2flow.low\n", ["m2flow-low"])
    found = packages.load(workspace)
    assert packages.affected(["libs/low/src/m2flow/low/_inner.py"], found, workspace) == ["low", "high"]
    assert packages.affected(["libs/high/README.md"], found, workspace) == ["high"]
    assert packages.affected(["pyproject.toml"], found, workspace) == ["low", "high"]
    assert packages.affected(["docs/index.md"], found, workspace) == []


def test_an_unknown_path_is_an_error(workspace: Path) -> None:
    with pytest.raises(packages.UnknownPathError, match=r"elsewhere/x\.py"):
        packages.affected(["elsewhere/x.py"], packages.load(workspace), workspace)


def test_the_workspace_itself_keeps_the_rules() -> None:
    done = subprocess.run([sys.executable, "tools/deps.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
