"""Items from a GPU wait in pinned host memory and go to the device that their reader names."""

import gc
from typing import Any

import numpy as np
import pytest
import torch

from m2flow.comm import _torch, decode, encode, route


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what is pinned now, where tensors of one type stand for those on a GPU."""
    sizes: list[int] = []

    def pin(data: np.ndarray[Any, Any]) -> bool:
        sizes.append(data.size)
        return True

    monkeypatch.setattr(_torch, "on_gpu", lambda flat: True)
    monkeypatch.setattr(_torch, "pin", pin)
    monkeypatch.setattr(_torch, "unpin", lambda data: sizes.remove(data.size))
    return sizes


def test_an_item_from_a_gpu_is_copied_once_to_pinned_memory(pinned: list[int], make_endpoint: Any) -> None:
    host, producer = make_endpoint("host"), make_endpoint("p")
    host.host_channel("q", producers=["p"], consumers=["host"])
    puts, gets = producer.channel("q", host="host"), host.channel("q", host="host")
    for index in range(3):
        puts.put({"x": torch.full((100, 300), index).t(), "small": torch.tensor(index)}, id=str(index))
    assert len(pinned) == 1
    way = route(producer.address, producer.address_of("host"), "cuda", parked=True)
    assert way.backend == "shared_memory"
    assert "parked in host memory" in way.reason
    leases = gets.get_batch(3, timeout_s=5)
    for index, lease in enumerate(leases):
        assert torch.equal(lease.item["x"], torch.full((300, 100), index))
        assert int(lease.item["small"]) == index
    gets.ack(leases)
    del leases, lease
    producer.close()
    gc.collect()
    assert pinned == []


def test_a_payload_from_a_gpu_has_the_bytes_of_any_other(pinned: list[int]) -> None:
    tree = [torch.arange(5.0), "between", torch.ones(3, 2).to(torch.bfloat16).t(), np.arange(3)]
    encoded = encode(tree)
    assert encoded.from_gpu
    arrived = decode(encoded.to_bytes())
    assert torch.equal(arrived[0], tree[0])
    assert torch.equal(arrived[2], tree[2])
    assert arrived[3].tolist() == [0, 1, 2]


def test_tensors_go_to_the_device_that_their_reader_names(make_endpoint: Any) -> None:
    host, producer = make_endpoint("host"), make_endpoint("p")
    host.host_channel("q", producers=["p"], consumers=["host"])
    producer.channel("q", host="host").put({"x": torch.ones(3), "y": np.ones(3)})
    item = host.channel("q", host="host", device="meta").get(timeout_s=5).item
    assert item["x"].device.type == "meta"
    assert item["y"].tolist() == [1, 1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: parking needs a CUDA device, here none")
def test_a_gpu_item_is_parked_and_comes_back(make_endpoint: Any) -> None:
    host, producer = make_endpoint("host"), make_endpoint("p")
    host.host_channel("q", producers=["p"], consumers=["host"])
    tensor = torch.arange(1 << 20, device="cuda").reshape(1024, 1024)
    producer.channel("q", host="host").put(tensor.t())
    assert all(slab._pinned for slab in producer._fabric.pool._slabs.values())
    item = host.channel("q", host="host", device="cuda:0").get(timeout_s=5).item
    assert torch.equal(item, tensor.t())
