"""Workers' output in files: one a rank, whole lines, from several threads."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from m2flow.apps.worker_logs import WorkerLogs


def test_each_rank_has_its_file_of_whole_lines(tmp_path: Path) -> None:
    with WorkerLogs(tmp_path / "logs") as logs, ThreadPoolExecutor(4) as threads:
        for number in range(200):
            threads.submit(logs.write, "rollout", number % 2, f"line {number}")
    for rank in (0, 1):
        lines = (tmp_path / "logs" / f"rollout.{rank}.log").read_text().splitlines()
        assert sorted(lines) == sorted(f"line {number}" for number in range(rank, 200, 2))


def test_nothing_printed_leaves_nothing(tmp_path: Path) -> None:
    with WorkerLogs(tmp_path / "logs"):
        pass
    assert not (tmp_path / "logs").exists()
