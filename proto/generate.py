"""Regenerates the Python code beside the .proto files; `--check` says what differs and changes nothing.

Run with the oldest grpcio-tools that m2flow supports: code of a newer protoc does not load on an older runtime.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

SOURCE = pathlib.Path(__file__).parent / "src"


def generate(target: pathlib.Path) -> list[pathlib.Path]:
    """Writes the generated modules of every .proto file under `target`; returns their paths, relative to it."""
    written = []
    for proto in sorted(SOURCE.rglob("*.proto")):
        name = proto.relative_to(SOURCE)
        outputs = [f"--python_out={target}", f"--pyi_out={target}"]
        suffixes = ["_pb2.py", "_pb2.pyi"]
        if "\nservice " in proto.read_text():
            outputs.append(f"--grpc_python_out={target}")
            suffixes.append("_pb2_grpc.py")
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCE}", *outputs, str(name)], check=True)
        written += [name.with_name(name.stem + suffix) for suffix in suffixes]
    return written


def differences() -> list[str]:
    """Names the committed modules that a fresh generation would change, and those that it would not make."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(pathlib.Path(scratch))
        stale = [str(p) for p in fresh if _text(SOURCE / p) != _text(pathlib.Path(scratch) / p)]
    committed = {p.relative_to(SOURCE) for p in SOURCE.rglob("*_pb2*") if p.suffix in {".py", ".pyi"}}
    return sorted(stale + [f"{p} (no .proto makes it)" for p in committed - set(fresh)])


def _text(path: pathlib.Path) -> str:
    return path.read_text() if path.exists() else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 on a difference")
    if not parser.parse_args().check:
        generate(SOURCE)
        return 0
    stale = differences()
    for path in stale:
        print(f"differs from what its .proto makes: {path}; run python proto/generate.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
