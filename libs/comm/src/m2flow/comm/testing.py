"""What every backend must do, as tests to inherit: implement the seam, name a fixture `ranks`, and these run on it."""

import threading
import time
from typing import Any

import numpy as np
import pytest

from m2flow.comm.collectives import Backend, RankGroup, move_rows
from m2flow.comm.errors import PayloadError, TimeoutError_

Ranks = tuple[Backend, ...]


class BackendConformance:
    """Inherit it and provide `ranks`: three backends of one run, named "r0", "r1", "r2", in this process.

    `hands_over` says that trees are passed as objects, so that nothing is encoded; `device` is where the backend's
    tensors lie.
    """

    hands_over = False
    device = "cpu"

    def test_a_tree_arrives_as_it_was(self, ranks: Ranks) -> None:
        a, b, _ = ranks
        tree: Any = {"x": np.arange(12).reshape(3, 4).T, "y": [1, None, "text", b"bytes", 2.5, (True,)]}
        sent = a.isend("r1", tree)
        arrived = b.irecv("r0").result(20)
        sent.result(20)
        assert np.array_equal(arrived["x"], tree["x"])
        assert arrived["y"] == tree["y"]

    def test_tensors_of_any_form_arrive_where_such_tensors_lie(self, ranks: Ranks) -> None:
        torch = pytest.importorskip("torch")
        a, b, _ = ranks
        full = torch.arange(1.0, 25.0, device=self.device).reshape(4, 6)
        forms = {"whole": full, "turned": full.t(), "strided": full[1:3, ::2], "scalar": full[0, 0], "empty": full[:0]}
        types = {"bool": full > 3, **{name: full.to(getattr(torch, name)) for name in ("bfloat16", "float8_e4m3fn")}}
        sent = a.isend("r1", [forms, (types,), "beside"])
        arrived = b.irecv("r0").result(20)
        sent.result(20)
        assert arrived[2] == "beside"
        for name, tensor in {**forms, **types}.items():
            found = {**arrived[0], **arrived[1][0]}[name]
            assert found.device.type == tensor.device.type
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found.cpu().float(), tensor.cpu().float())

    def test_messages_of_one_tag_keep_their_order(self, ranks: Ranks) -> None:
        a, b, _ = ranks
        received = [b.irecv("r0", tag="t") for _ in range(20)]
        sent = [a.isend("r1", index, tag="t") for index in range(20)]
        assert [future.result(20) for future in received] == list(range(20))
        for future in sent:
            future.result(20)

    def test_both_directions_at_once(self, ranks: Ranks) -> None:
        a, b, _ = ranks
        large = np.arange(1 << 18)
        sends = [a.isend("r1", large), b.isend("r0", large + 1)]
        assert b.irecv("r0").result(20)[-1] == large[-1]
        assert a.irecv("r1").result(20)[-1] == large[-1] + 1
        for future in sends:
            future.result(20)

    def test_what_cannot_be_encoded_fails_at_once(self, ranks: Ranks) -> None:
        if self.hands_over:
            assert ranks[0].isend("r1", marker := object()) is not None
            assert ranks[1].irecv("r0").result(20) is marker
            return
        with pytest.raises(PayloadError):
            ranks[0].isend("r1", object())

    def test_every_collective(self, ranks: Ranks) -> None:
        results: dict[str, Any] = {}

        def run(backend: Backend) -> None:
            group = RankGroup(backend, "g", ["r0", "r1", "r2"])
            me = group.rank
            results[backend.name] = (
                group.broadcast(np.arange(3) if me == 1 else None, root=1, timeout_s=20).wait().tolist(),
                group.scatter(["a", "b", "c"] if me == 2 else None, root=2, timeout_s=20).wait(),
                group.gather(me, root=0, timeout_s=20).wait(),
                group.all_gather(me * 10, timeout_s=20).wait(),
                group.all_to_all([(me, to) for to in range(3)], timeout_s=20).wait(),
                group.barrier(timeout_s=20).wait(),
            )

        _on_threads(run, ranks)
        for rank in range(3):
            assert results[f"r{rank}"] == (
                [0, 1, 2],
                "abc"[rank],
                [0, 1, 2] if rank == 0 else None,
                [0, 10, 20],
                [(source, rank) for source in range(3)],
                None,
            )

    @pytest.mark.parametrize("wanted", [{"r1": 1, "r2": 4, "r0": 2}, {"r1": 3, "r2": 0, "r0": 4}])
    def test_rows_are_dealt_anew_unevenly(self, ranks: Ranks, wanted: dict[str, int]) -> None:
        rows = np.arange(14).reshape(7, 2)
        counts = {"r0": 5, "r1": 2}
        starts, results = {"r0": 0, "r1": 5}, {}

        def run(backend: Backend) -> None:
            start = starts.get(backend.name)
            mine = None if start is None else rows[start : start + counts[backend.name]]
            moved = move_rows(backend, mine, tag="rows", sources=counts, targets=wanted, timeout_s=20).wait()
            assert moved is not None
            results[backend.name] = moved

        _on_threads(run, ranks)
        assert {name: moved.shape for name, moved in results.items()} == {name: (wanted[name], 2) for name in wanted}
        assert np.array_equal(np.concatenate([results[name] for name in wanted]), rows)


class PatientConformance(BackendConformance):
    """For backends that can also give up a receive and go on: an endpoint's."""

    def test_tags_do_not_wait_for_each_other(self, ranks: Ranks) -> None:
        a, b, _ = ranks
        first, second = a.isend("r1", 1, tag="one"), a.isend("r1", 2, tag="two")
        assert b.irecv("r0", tag="two").result(20) == 2
        assert b.irecv("r0", tag="one").result(20) == 1
        first.result(20)
        second.result(20)

    def test_a_collective_that_waits_too_long_names_who_is_missing(self, ranks: Ranks) -> None:
        group = RankGroup(ranks[0], "g", ["r0", "r1", "r2"])
        for number, (own_s, timeout_s) in enumerate([(0.05, None), (0.05, 20), (20, 0.05), (None, 0.05)], 1):
            handle = group.barrier(timeout_s=own_s)
            assert not handle.done()
            with pytest.raises(TimeoutError_, match=rf"'g/barrier/{number}': waited 0\.\d+ s for r1, r2$"):
                handle.wait(timeout_s)

    def test_a_collective_that_waits_too_long_does_not_name_who_is_there(self, ranks: Ranks) -> None:
        here, there, _ = (RankGroup(rank, "g", ["r0", "r1", "r2"]) for rank in ranks)
        there.barrier()
        handle = here.barrier()
        since, missing = time.monotonic(), ""
        while missing != "r2":
            assert time.monotonic() - since < 20, f"{missing} missing, want r2 alone"
            with pytest.raises(TimeoutError_) as caught:
                handle.wait(0.02)
            missing = caught.value.peer

    def test_a_cancelled_receive_takes_nothing(self, ranks: Ranks) -> None:
        a, b, _ = ranks
        assert b.irecv("r0").cancel()
        sent = a.isend("r1", "kept")
        assert b.irecv("r0").result(20) == "kept"
        sent.result(20)


def _on_threads(run: Any, ranks: Ranks) -> None:
    failures: list[BaseException] = []

    def guarded(backend: Backend) -> None:
        try:
            run(backend)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(backend,), daemon=True) for backend in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    if failures:
        raise failures[0]
