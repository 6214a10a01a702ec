"""The run's directory: a name goes to one endpoint, and a directory that cannot be is refused in words."""

import errno
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from m2flow.comm import CommError, Endpoint


@pytest.mark.parametrize("name", ["a", "x" * 64])
def test_a_name_goes_to_one_of_those_that_take_it_at_once(
    run_dir: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def slow_rename(*names: str, **directories: int) -> None:
        time.sleep(0.02)
        rename(*names, **directories)

    monkeypatch.setattr(os, "rename", slow_rename)
    made: list[Endpoint] = []
    refused: list[str] = []
    for _ in range(3):
        at_once = threading.Barrier(4)

        def take(at_once: threading.Barrier = at_once) -> None:
            at_once.wait()
            try:
                made.append(Endpoint(run_dir, name, token="t", by_reference=False))
            except CommError as error:
                refused.append(str(error))

        # What a dead one has left is replaced, too.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
            dead.bind(str(run_dir / "dead"))
        (run_dir / "dead").rename(run_dir / f"{name}.sock")
        threads = [threading.Thread(target=take) for _ in range(at_once.parties)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 1
        made.pop().close()
    assert all("names are unique in a run" in words for words in refused)
    assert len(refused) == 9
    assert list(run_dir.iterdir()) == []


def test_a_directory_that_cannot_be_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    for wrong in ("file", "file/below", "dangling"):
        with pytest.raises(CommError, match=f"cannot use {tmp_path / wrong} as a run's directory: "):
            Endpoint(tmp_path / wrong, "a", token="t")


def test_a_directory_that_may_not_be_written_is_refused_in_words(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    # To root all may be written.
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CommError, match=r"cannot listen as 'a' in .*: Read-only file system"):
        Endpoint(run_dir, "a", token="t")
    assert list(run_dir.iterdir()) == []
