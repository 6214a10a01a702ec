"""A fixed slice of the fuzz target; M2FLOW_PROOFS=1 tries a million inputs."""

import importlib.util
import os
from pathlib import Path

import pytest

TARGET = Path(__file__).parents[1] / "fuzz" / "fuzz_payload.py"
PROOFS = os.environ.get("M2FLOW_PROOFS") == "1"
NUM_INPUTS = 1_000_000 if PROOFS else 2_000


@pytest.mark.timeout(3600 if PROOFS else 60)
def test_the_fuzz_target_finds_nothing_and_learns() -> None:
    spec = importlib.util.spec_from_file_location("fuzz_payload", TARGET)
    assert spec is not None
    assert spec.loader is not None
    target = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(target)
    found = target.run(NUM_INPUTS, seed=0)
    assert found["kept"] > 30
    assert found["edges"] > 150
    assert found["slowest_s"] < 5
