"""Skips are counted and, in CI, allowed only for what a machine cannot have: a GPU, or a feature of its kernel."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ALLOWED_IN_CI = ("gpu:", "kernel:")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        if os.environ.get("CI") == "true" and not reason.startswith(ALLOWED_IN_CI):
            report.outcome = "failed"
            report.longrepr = f"skipped in CI: {reason!r}; want it to run, or a reason that starts with gpu: or kernel:"
        elif path := os.environ.get("M2FLOW_SKIPS"):
            with Path(path).open("a") as skips:
                skips.write(f"{item.nodeid}: {reason}\n")
    return report
