"""A fixed slice of the fuzz target; the full run is named in its docstring."""

import importlib.util
from pathlib import Path

TARGET = Path(__file__).parents[1] / "fuzz" / "fuzz_payload.py"


def test_a_slice_of_the_fuzz_target_finds_nothing_and_learns() -> None:
    spec = importlib.util.spec_from_file_location("fuzz_payload", TARGET)
    assert spec is not None
    assert spec.loader is not None
    target = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(target)
    found = target.run(2_000, seed=0)
    assert found["kept"] > 30
    assert found["edges"] > 150
    assert found["slowest_s"] < 5
