"""What a container may use bounds what an endpoint takes."""

import os
from pathlib import Path

import pytest

from m2flow.comm import Endpoint, endpoint
from m2flow.comm._memory import memory_bytes

PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def write(root: Path, groups: str, **files: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for path, text in files.items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.mark.parametrize(
    ("groups", "files", "wanted"),
    [
        pytest.param("0::/\n", {"memory.max": "4096\n"}, 4096, id="v2"),
        pytest.param(
            "0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "4096\n"}, 4096, id="v2 of the one above"
        ),
        pytest.param("0::/a\n", {"a/memory.max": "max\n"}, PHYSICAL, id="v2 without a limit"),
        pytest.param("0::/a\n", {}, PHYSICAL, id="v2 without the files"),
        pytest.param("4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "4096\n"}, 4096, id="v1 beside v2"),
        pytest.param(
            "4:cpu,memory:/of/the/host\n", {"memory/memory.limit_in_bytes": "4096\n"}, 4096, id="v1 in a container"
        ),
        pytest.param(
            "4:memory:/\n", {"memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n"}, PHYSICAL, id="v1 without a limit"
        ),
        pytest.param("3:cpu:/a\n", {"a/memory.max": "4096\n"}, PHYSICAL, id="no memory controller"),
    ],
)
def test_the_least_limit_counts(tmp_path: Path, groups: str, files: dict[str, str], wanted: int) -> None:
    write(tmp_path, groups, **files)
    assert memory_bytes(tmp_path) == wanted


def test_without_control_groups_it_is_the_machines_memory(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) == PHYSICAL


def test_an_endpoint_takes_a_quarter_of_it(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "memory_bytes", lambda: 4 << 20)
    with Endpoint(run_dir, "e", token="t") as made:
        assert made._fabric.pool.quota_bytes == 1 << 20
