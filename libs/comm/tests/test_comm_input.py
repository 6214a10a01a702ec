"""What a user can get wrong is refused where it is given, in words, and harms nobody later."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m2flow.comm import CommError, Endpoint, PayloadError, Put, Shard

ARRAY = np.ones(2)


@pytest.mark.parametrize("capacity", [8.0, "8", True, None, -1], ids=repr)
def test_a_capacity_that_is_no_count_is_refused(make_endpoint: Any, capacity: Any) -> None:
    host, producer = make_endpoint("host"), make_endpoint("p")
    with pytest.raises(
        ValueError, match=f"channel 'q': got capacity {capacity!r}, want .*1 or more, or 0 for no bound"
    ):
        host.host_channel("q", capacity=capacity, producers=["p"], consumers=["host"])
    # It was taken, and ended the connection of who put more than there was room for.
    host.host_channel("q", capacity=np.int64(8), producers=["p"], consumers=["host"])
    producer.channel("q", host="host").put_many([Put(item=index) for index in range(8)], timeout_s=10)


@pytest.mark.parametrize("name", ["a b", 5, "", "a/b"], ids=repr)
def test_members_that_no_endpoint_can_be_are_refused(make_endpoint: Any, name: Any) -> None:
    host = make_endpoint("host")
    for members in ({"producers": ["host", name]}, {"consumers": ["host", name]}):
        with pytest.raises(ValueError, match=f"got endpoint name {name!r}, want 1 to 64 of letters"):
            host.host_channel("q", **{"producers": ["host"], "consumers": ["host"], **members})
    host.host_channel("q", producers=["host"], consumers=["host"])
    with pytest.raises(ValueError, match=f"got endpoint name {name!r}, want 1 to 64 of letters"):
        host.announce_successor("q", lost="host", successor=name)


@pytest.mark.parametrize("version", ["1", 1.5, True, None, -1], ids=repr)
def test_a_version_that_is_no_number_is_refused_and_harms_no_other(make_endpoint: Any, version: Any) -> None:
    trainer = make_endpoint("trainer")
    for give in (trainer.stage_weights, trainer.offer_weights):
        with pytest.raises(ValueError, match=f"weights 'w': got version {version!r}, want an int from 0"):
            give("w", version, {"x": ARRAY})
    trainer.stage_weights("w", np.int64(0), {"x": ARRAY})
    assert trainer.newest_weights("trainer", "w") == 0


@pytest.mark.parametrize("wrong", [np.array([object()]), np.zeros(2, [("a", "i4")])], ids=["objects", "records"])
def test_weights_whose_bytes_mean_nothing_elsewhere_are_refused(make_endpoint: Any, wrong: Any) -> None:
    trainer = make_endpoint("trainer")
    for weights in ({"x": wrong}, {"x": Shard(wrong, (0,), (4,))}):
        for give in (trainer.stage_weights, trainer.offer_weights):
            with pytest.raises(PayloadError, match=r"got an array of dtype .*, want numbers"):
                give("w", 1, weights)


def test_a_negative_quota_is_refused(run_dir: Path) -> None:
    with pytest.raises(ValueError, match="got quota_bytes -5, want 0 or more"):
        Endpoint(run_dir, "a", token="t", quota_bytes=-5)
    assert list(run_dir.iterdir()) == []


@pytest.mark.parametrize(
    "use",
    [
        lambda closed: closed.host_channel("q", producers=["a"], consumers=["a"]),
        lambda closed: closed.handle("s", lambda request: None),
        lambda closed: closed.stage_weights("w", 1, {"x": ARRAY}),
        lambda closed: closed.offer_weights("w", 1, {"x": ARRAY}),
        lambda closed: closed.request("a", "s", ""),
        lambda closed: closed.listen("127.0.0.1:0"),
    ],
    ids=["host_channel", "handle", "stage_weights", "offer_weights", "request", "listen"],
)
def test_a_closed_endpoint_says_so(make_endpoint: Any, use: Callable[[Endpoint], Any]) -> None:
    closed = make_endpoint("a")
    closed.close()
    with pytest.raises(CommError, match="endpoint 'a' is closed"):
        use(closed)
