"""The packages of the workspace and how they hang together, read from their pyproject files."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class UnknownPathError(ValueError):
    """A changed file belongs to no package and is not at the root."""


@dataclasses.dataclass(frozen=True)
class Package:
    """One package: where it lies, what it is called, and what it declares."""

    path: Path
    dist: str
    module: str
    requires: tuple[str, ...]
    extras: dict[str, tuple[str, ...]]
    groups: dict[str, tuple[str, ...]]
    visible_to: frozenset[str]
    facade_imports: frozenset[str]
    test_data: tuple[str, ...]
    system_packages: tuple[str, ...]

    @property
    def name(self) -> str:
        """The last part of the module: `comm` for m2flow.comm."""
        return self.module.removeprefix("m2flow.")

    @property
    def test_requires(self) -> tuple[str, ...]:
        return self.groups.get("test", ())

    @property
    def source(self) -> Path:
        return self.path / "src" / "m2flow" / self.name

    def declared(self) -> frozenset[str]:
        """Distributions that the source may import: its requirements and those of its extras."""
        every = [*self.requires, *(r for extra in self.extras.values() for r in extra)]
        return frozenset(distribution(requirement) for requirement in every)


def distribution(requirement: str) -> str:
    """The normalised distribution name of a requirement: `m2flow-proto[grpc]>=1` gives m2flow-proto."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    if match is None:
        raise ValueError(f"got the requirement {requirement!r}, want a distribution name first")
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def load(root: Path = ROOT) -> dict[str, Package]:
    """Every package by name, dependencies before dependents."""
    workspace = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]
    folders = [folder for pattern in workspace["members"] for folder in sorted(root.glob(pattern))]
    packages = [_read(folder) for folder in folders if (folder / "pyproject.toml").exists()]
    by_dist = {package.dist: package for package in packages}
    ordered: dict[str, Package] = {}

    def visit(package: Package) -> None:
        if package.name not in ordered:
            for requirement in package.requires:
                if (needed := by_dist.get(distribution(requirement))) is not None:
                    visit(needed)
            ordered[package.name] = package

    for package in packages:
        visit(package)
    return ordered


def _read(folder: Path) -> Package:
    document = tomllib.loads((folder / "pyproject.toml").read_text())
    project, own = document["project"], document["tool"]["m2flow"]
    modules = [p.name for p in (folder / "src" / "m2flow").iterdir() if p.is_dir() and p.name != "__pycache__"]
    if len(modules) != 1:
        raise ValueError(f"{folder}/src/m2flow holds {sorted(modules)}, want the folder of one module")
    return Package(
        path=folder,
        dist=project["name"],
        module=f"m2flow.{modules[0]}",
        requires=tuple(project.get("dependencies", [])),
        extras={k: tuple(v) for k, v in project.get("optional-dependencies", {}).items()},
        groups={k: tuple(v) for k, v in document.get("dependency-groups", {}).items()},
        visible_to=frozenset(own["visible-to"]),
        facade_imports=frozenset(own["facade-imports"]),
        test_data=tuple(own.get("test-data", [])),
        system_packages=tuple(own.get("system-packages", [])),
    )


def needs(package: Package, packages: dict[str, Package]) -> list[Package]:
    """The workspace packages that `package` depends on, itself last."""
    by_dist = {p.dist: p for p in packages.values()}
    found: dict[str, Package] = {}

    def visit(current: Package) -> None:
        for dist in sorted(current.declared()):
            if dist in by_dist and dist not in found:
                visit(by_dist[dist])
        found[current.dist] = current

    visit(package)
    return list(found.values())


def affected(changed: list[str], packages: dict[str, Package], root: Path = ROOT) -> list[str]:
    """Names of the packages that a change of these files (relative to the root) can break, in dependency order.

    A file of a package affects it and its dependents, transitively; a file at the root or under tools/ affects all;
    one under tests/, docs/ or .ci/ affects no package. Raises UnknownPathError for any other.
    """
    touched: set[str] = set()
    for name in changed:
        owner = next((p for p in packages.values() if (root / name).is_relative_to(p.path)), None)
        top = name.split("/", 1)[0]
        if owner is not None:
            touched.add(owner.name)
        elif "/" not in name or top == "tools":
            return list(packages)
        elif top not in {"tests", "docs", ".ci"}:
            raise UnknownPathError(f"{name} belongs to no package; want a file of one, or of the root")
    return [name for name, p in packages.items() if touched & {n.name for n in needs(p, packages)}]
