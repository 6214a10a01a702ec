"""The README's example, and the paper's cases: their files are what `derive.py` writes, and they plan."""

import importlib.util
import pathlib
import re
from types import ModuleType

import pytest

from m2flow.sched import plan
from m2flow.sched.files import read_case

HOME = pathlib.Path(__file__).parents[1]
CASES = sorted(p.parent for p in (HOME / "cases").glob("*/workflow.yaml"))


def _derive() -> ModuleType:
    spec = importlib.util.spec_from_file_location("derive", HOME / "cases" / "derive.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code = re.findall(r"```python\n(.*?)```", (HOME / "README.md").read_text(), re.DOTALL)[0]
    monkeypatch.chdir(HOME.parents[1])
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("temporal (rollout.generate ; inference.forward ; actor.train)")


def test_the_cases_are_what_their_formulas_give(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _derive()
    monkeypatch.setattr(module, "HOME", tmp_path)
    module.main()
    fresh = {p.relative_to(tmp_path): p.read_text() for p in tmp_path.rglob("*.yaml")}
    committed = {p.relative_to(HOME / "cases"): p.read_text() for p in (HOME / "cases").rglob("*.yaml")}
    assert fresh == committed
    assert len(CASES) == 14


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_case_plans_and_simulates_as_searched(case: pathlib.Path) -> None:
    request = read_case(case)
    request.device_quantum = max(8, request.cluster.nodes[0].count)
    best = plan(request).plans[0]
    assert best.simulated_s == pytest.approx(best.searched_s, rel=0.03)
