"""The facade is light: no torch, no gRPC, no thread, no socket."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

PROGRAM = """
import sys, threading, os
before = len(os.listdir("/proc/self/fd"))
import m2flow.comm
assert "torch" not in sys.modules and "grpc" not in sys.modules, "heavy modules"
assert threading.active_count() == 1, "threads"
assert len(os.listdir("/proc/self/fd")) == before, "descriptors"
"""

NUMPY_ONLY = """
import sys
from pathlib import Path

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("torch is not installed here", name=name)

sys.meta_path.insert(0, NoTorch())
import numpy as np
from m2flow.comm import Endpoint, RankGroup, decode, encode

tree, token = {"x": np.arange(100_000), "small": np.ones((2, 3)).T}, "token-of-this-run"

def check(found):
    for name, array in tree.items():
        assert (found[name] == array).all(), name

check(decode(encode(tree).to_bytes()))
with Endpoint(Path(sys.argv[1]), "a", token=token, by_reference=False) as a, \\
        Endpoint(Path(sys.argv[1]), "b", token=token, by_reference=False) as b:
    a.host_channel("q", producers=["b"], consumers=["a"])
    b.channel("q", host="a").put(tree, timeout_s=10)
    lease = a.channel("q", host="a").get(timeout_s=10)
    check(lease.item)
    a.channel("q", host="a").ack(lease)
    a.stage_weights("w", 1, tree)
    check(b.fetch_weights("a", "w", 1, timeout_s=10))
    receiver, copied = b.weight_receiver("w", sources=["a"]), {name: np.zeros_like(tree[name]) for name in tree}
    receiver.prepare(1, timeout_s=10)
    receiver.commit_into(copied)
    check(copied)
    handles = [RankGroup(end, "g", ["a", "b"]).broadcast(tree, root=0, timeout_s=10) for end in (a, b)]
    check(handles[1].wait())
    handles[0].wait()
assert "torch" not in sys.modules
"""


def test_importing_it_starts_and_imports_nothing_heavy() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=50)


def test_arrays_work_where_torch_is_not_installed(run_dir: Path) -> None:
    subprocess.run([sys.executable, "-c", NUMPY_ONLY, str(run_dir)], check=True, timeout=50)


def test_installing_it_brings_nothing_heavy() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    brought = {re.split(r"[^A-Za-z0-9_-]", requirement)[0] for requirement in project["dependencies"]}
    assert brought == {"grpcio", "m2flow-proto", "numpy", "protobuf"}
