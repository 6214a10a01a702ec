"""What the tests of flow share."""

import pytest

from m2flow.flow.graph import Graph
from m2flow.flow.testing import FakeSpec, episodes, grpo_graph
from m2flow.flow.tracing import trace
from m2flow.worker import Cluster


@pytest.fixture
def graph() -> Graph:
    """GRPO on 4 prompts of 8 samples."""
    return grpo_graph()


@pytest.fixture
def loop_graph() -> Graph:
    """An environment and a policy in a loop."""
    specs = {"env": FakeSpec("env", ("reset", "step")), "policy": FakeSpec("policy", ("act",))}
    return trace(episodes, specs, source_items=6)


@pytest.fixture
def cluster() -> Cluster:
    """Four virtual devices of 16 GiB."""
    return Cluster.virtual(4, memory_bytes=16 << 30)
