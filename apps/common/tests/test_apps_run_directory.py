"""The run directory: names, rows, and that a failed write leaves what was there."""

import errno
import os
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from m2flow.apps.atomic import append_line, new_directory, replace_file
from m2flow.apps.errors import RunDirectoryError, RunInUseError
from m2flow.apps.metrics import MetricsLog
from m2flow.apps.run_directory import RunDirectory


def test_a_new_run_is_named_by_app_and_time(tmp_path: Path) -> None:
    run = RunDirectory.create("reasoning", root=str(tmp_path))
    assert run.path.parent == tmp_path
    assert run.path.name.startswith("reasoning-2")
    assert (run.path / "samples").is_dir()


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("")
    with pytest.raises(RunDirectoryError, match="holds files already, want a new directory"):
        RunDirectory.create("reasoning", root="unused", directory=str(tmp_path))


def test_what_cannot_be_made_is_blamed_on_the_setting_that_named_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    below = str(tmp_path / "file" / "run")
    with pytest.raises(RunDirectoryError, match=r"cannot be made .Not a directory.: choose another run\.dir"):
        RunDirectory.create("reasoning", root="unused", directory=below)
    with pytest.raises(RunDirectoryError, match=r"choose another run\.root"):
        RunDirectory.create("reasoning", root=below)


def test_runs_that_begin_in_one_second_get_a_directory_each(tmp_path: Path) -> None:
    assert len({RunDirectory.create("reasoning", root=str(tmp_path)).path for _ in range(3)}) == 3


def test_a_run_is_held_by_one(tmp_path: Path) -> None:
    run = RunDirectory.create("reasoning", root=str(tmp_path))
    with run.held(), pytest.raises(RunInUseError, match="another process runs it"), run.held():
        pass
    with run.held():
        pass


def test_opening_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no run there"):
        RunDirectory.open(tmp_path)


def test_metrics_go_to_the_rows_and_to_tensorboard(tmp_path: Path) -> None:
    run = RunDirectory.create("reasoning", root="unused", directory=str(tmp_path / "run"))
    with MetricsLog(run) as log:
        log.write(1, {"critic/score/mean": 0.25, "actor/pg_loss": float("nan")})
        log.write(2, {"critic/score/mean": 0.5})
    first, second = run.read_metrics()
    assert first["critic/score/mean"] == 0.25
    assert first["actor/pg_loss"] is None
    assert second["step"] == 2
    (events,) = run.path.glob("events.out.tfevents.*")
    seen = [(event.step, value.tag) for event in EventFileLoader(str(events)).Load() for value in event.summary.value]
    assert seen == [(1, "critic/score/mean"), (1, "actor/pg_loss"), (2, "critic/score/mean")]


def test_a_last_line_cut_short_is_skipped_and_a_broken_one_before_it_is_not(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.metrics.write_text('{"step": 1}\n{"step": 2, "cri')
    assert run.read_metrics() == [{"step": 1}]
    run.metrics.write_bytes(b'{"step": 1}\n\x00\xff\n')
    assert run.read_metrics() == [{"step": 1}]
    run.metrics.write_text('5\n{"step": 2}\n')
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl:1: not JSON .got int"):
        run.read_metrics()
    run.metrics.write_text('{"st\n{"step": 2}\n')
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl:1: not JSON"):
        run.read_metrics()


def test_rows_samples_and_films_after_a_step_are_dropped(tmp_path: Path) -> None:
    run = RunDirectory.create("reasoning", root="unused", directory=str(tmp_path / "run"))
    for step in (1, 2, 3):
        run.append_metrics({"step": step})
        run.write_samples(step, [{"prompt": str(step)}])
        run.write_film(step, b"film")
    run.drop_after(2)
    assert [row["step"] for row in run.read_metrics()] == [1, 2]
    assert run.read_samples() == {1: [{"prompt": "1"}], 2: [{"prompt": "2"}]}
    assert list(run.read_films()) == [1, 2]


def test_a_failed_replacement_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    replace_file(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunDirectoryError, match=r"cannot be written .No space left on device.: free space"):
        replace_file(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_regular_file_is_written_into(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for number, path in enumerate([pipe, Path(f"/proc/self/fd/{reading}")]):
            replace_file(path, f"plan {number}")
            assert os.read(reading, 100) == f"plan {number}".encode()
    finally:
        os.close(reading)
    assert pipe.is_fifo()
    with pytest.raises(RunDirectoryError, match=f"{tmp_path}: cannot be written .Is a directory.: .* another place"):
        replace_file(tmp_path, "plan")
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_link_stays_and_what_it_names_is_replaced(tmp_path: Path) -> None:
    there, link = tmp_path / "there.json", tmp_path / "link.json"
    link.symlink_to(there)
    for text in ("new", "newer"):
        replace_file(link, text)
        assert (link.readlink(), there.read_text()) == (there, text)


def test_a_failed_append_leaves_the_old_length(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full, which refuses every write as a full disk does")
    append_line(tmp_path / "rows", "one")
    assert (tmp_path / "rows").read_text() == "one\n"
    with pytest.raises(RunDirectoryError, match="No space left"):
        append_line(Path("/dev/full"), "two")


def test_a_failed_directory_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "step_1"
    with new_directory(path) as new:
        (new / "weights").write_text("old")

    def fail() -> None:
        with new_directory(path) as new:
            (new / "weights").write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RunDirectoryError, match="No space left"):
        fail()
    assert (path / "weights").read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with new_directory(path) as new:
        (new / "weights").write_text("new")
    assert (path / "weights").read_text() == "new"
