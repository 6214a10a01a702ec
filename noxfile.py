"""Every check of the workspace. Bare `nox` is what CI runs; `nox -s train` is what a newcomer runs.

Nothing here lists packages: they, their order and their requirements are read from the pyproject files. All sessions
share one constraints file, and uv links the same unpacked files into each environment instead of copying them.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import nox

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tools"))
import packages as workspace  # noqa: E402
from packages import Package, distribution, load, needs  # noqa: E402

PACKAGES = load(ROOT)
CONSTRAINTS = ROOT / "constraints.txt"
WHEELS = ROOT / ".nox" / "wheels"
SKIPS = ROOT / ".nox" / "skips.txt"
SECONDS: list[tuple[str, float]] = []

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True


def _pip_find_links() -> str:
    """Where pip was told to look for files: uv does not read pip's settings, and torch's CPU build may lie there."""
    asked = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    found = [line.partition("=")[2].strip("'\"") for line in asked.stdout.splitlines() if ".find-links=" in line]
    return " ".join(dict.fromkeys(" ".join(found).split()))


def _uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.exists() else "uv"


def _newest_python() -> list[str]:
    """The newest Python at hand, on the PATH or among pyenv's, if it is not the one that runs nox."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    os.environ["PATH"] += "".join(f":{folder}" for folder in sorted(pyenv.glob("3.*/bin")))
    for minor in range(15, sys.version_info.minor, -1):
        find = [_uv(), "python", "find", "--no-python-downloads", f"3.{minor}"]
        if subprocess.run(find, capture_output=True, check=False).returncode == 0:
            return [f"3.{minor}"]
    return []


os.environ.setdefault("UV_FIND_LINKS", _pip_find_links())
os.environ.setdefault("UV_NO_PROGRESS", "1")
# Where nothing that is compiled may be kept, each process of each test compiles torch anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def timed(run: Callable[..., None]) -> Callable[..., None]:
    """Notes the seconds of a session; they are printed when nox ends."""

    @functools.wraps(run)
    def wrapper(session: nox.Session, **parameters: str) -> None:
        started = time.monotonic()
        try:
            run(session, **parameters)
        finally:
            SECONDS.append((" ".join([run.__name__, *parameters.values()]), time.monotonic() - started))

    return wrapper


@atexit.register
def _summary() -> None:
    if not SECONDS:
        return
    print("\nseconds  session")
    for name, seconds in SECONDS:
        print(f"{seconds:7.1f}  {name}")
    print(f"{sum(s for _, s in SECONDS):7.1f}  in all")
    skips = SKIPS.read_text().splitlines() if SKIPS.exists() else []
    print("skipped: " + ("\n         ".join(skips) if skips else "nothing"))


@functools.cache
def wheels() -> dict[str, Path]:
    """Builds every package once per run of nox; returns the wheels by package name."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    SKIPS.unlink(missing_ok=True)
    subprocess.run([_uv(), "build", "-q", "--all-packages", "--wheel", "--out-dir", str(WHEELS)], cwd=ROOT, check=True)
    return {p.name: next(WHEELS.glob(f"{p.dist.replace('-', '_')}-*.whl")) for p in PACKAGES.values()}


def _wheel(package: Package, *, extras: bool) -> str:
    names = f"[{','.join(sorted(package.extras))}]" if extras and package.extras else ""
    return f"{package.dist}{names} @ {wheels()[package.name].as_uri()}"


def install(session: nox.Session, packages: list[Package], *more: str, extras: bool = False) -> None:
    """Installs the wheels of `packages` and of all that they need from the workspace, under the one set of pins.

    Each wheel is named with the extras that a package in the list asks of it, so that nothing is resolved elsewhere.
    """
    wanted = {need.name: need for package in packages for need in needs(package, PACKAGES)}
    chosen = [_wheel(p, extras=extras and p in packages) for p in wanted.values()]
    session.install("-q", "-c", str(CONSTRAINTS), *chosen, *more)
    system_packages(session, *sorted({name for package in packages for name in package.system_packages}))
    if data := sorted({name for package in packages for name in package.test_data}):
        session.install("-q", "--no-deps", *data)


def pytest(session: nox.Session, *args: str, **env: str) -> None:
    """Runs pytest with the workspace's settings; skips are collected for the summary."""
    session.run("pytest", "-q", "-c", "pyproject.toml", *args, env={"M2FLOW_SKIPS": str(SKIPS), **env})


def _third_party() -> list[str]:
    every = [r for p in PACKAGES.values() for r in (*p.requires, *p.test_requires, *sum(p.extras.values(), ()))]
    return sorted({r for r in every if not distribution(r).startswith("m2flow-")})


@nox.session
@timed
def lint(session: nox.Session) -> None:
    """ruff: rules and format."""
    session.install("-q", "-c", str(CONSTRAINTS), "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
@timed
def types(session: nox.Session) -> None:
    """mypy, strict, over the sources of every package."""
    group = _group("types")
    session.install("-q", "-c", str(CONSTRAINTS), *group, *_third_party())
    session.run("mypy", *(str(p.path / "src") for p in PACKAGES.values()))


def _group(name: str) -> list[str]:
    return list(tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"][name])


@nox.session(venv_backend="none")
@timed
def deps(session: nox.Session) -> None:
    """Imports are declared, allowed and one-way."""
    session.run(sys.executable, "tools/deps.py", external=True)


@nox.session
@timed
def light(session: nox.Session) -> None:
    """Facades load nothing heavy."""
    install(session, list(PACKAGES.values()))
    session.run("python", "tools/light.py")


@nox.session
@timed
def proto(session: nox.Session) -> None:
    """.proto files are linted, compatible with the last release, and the committed code is what they make."""
    session.install("-q", *_group("proto"))
    session.run("python", "proto/generate.py", "--check")
    with session.chdir("proto"):
        session.run("buf", "lint")
        session.run("buf", "format", "--diff", "--exit-code")
        release = subprocess.run(
            ["git", "describe", "--tags", "--abbrev=0"], capture_output=True, text=True, check=False
        ).stdout.strip()
        if release:
            session.run("buf", "breaking", "--against", f"../.git#tag={release},subdir=proto")


@nox.session
@nox.parametrize("package", list(PACKAGES), ids=list(PACKAGES))
@timed
def tests(session: nox.Session, package: str) -> None:
    """A package's own tests, from its wheel, with its declared dependencies only."""
    _test(session, PACKAGES[package])


def _test(session: nox.Session, package: Package, **env: str) -> None:
    install(session, [package], *package.test_requires)
    pytest(session, _folder(package, "tests"), *session.posargs, **env)


def _folder(package: Package, name: str) -> str:
    return str(package.path.relative_to(ROOT) / name)


def _needs_torch(package: Package) -> bool:
    every = [r for need in needs(package, PACKAGES) for r in need.requires] + list(package.test_requires)
    return "torch" in {distribution(requirement) for requirement in every}


TORCHLESS = [name for name, package in PACKAGES.items() if not _needs_torch(package)]


@nox.session(python=_newest_python())
@nox.parametrize("package", TORCHLESS, ids=TORCHLESS)
@timed
def pythons(session: nox.Session, package: str) -> None:
    """The packages without torch, on the newest Python at hand; torch's one pin is for one Python."""
    _test(session, PACKAGES[package])


@nox.session
@timed
def ray(session: nox.Session) -> None:
    """The Ray launcher, on a real local cluster."""
    worker = PACKAGES["worker"]
    install(session, [worker], *worker.test_requires, extras=True)
    pytest(session, _folder(worker, "ray_tests"), *session.posargs)


@nox.session(default=False)
@timed
def peers(session: nox.Session) -> None:
    """Agreement with public implementations of the same algorithms; verl without its dependencies."""
    algos = PACKAGES["algos"]
    install(session, [algos], *algos.test_requires, *algos.groups["peers"])
    session.install("-q", "--no-deps", "verl==0.9.1")
    pytest(session, _folder(algos, "peers"), *session.posargs)


def _floors(package: Package) -> set[str]:
    every = {distribution(r) for need in needs(package, PACKAGES) for r in need.requires}
    return {name for name in every if not name.startswith("m2flow-")} - {"torch"}


WITH_FLOORS = [name for name, package in PACKAGES.items() if _floors(package)]


@nox.session(default=False)
@nox.parametrize("package", WITH_FLOORS, ids=WITH_FLOORS)
@timed
def minimums(session: nox.Session, package: str) -> None:
    """A package's small tests with the oldest dependencies that it declares; torch keeps its one pin."""
    chosen = PACKAGES[package]
    pins = [line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch==")]
    pins_file = Path(session.create_tmp()) / "pins.txt"
    pins_file.write_text("\n".join(pins) + "\n")
    wanted = [_wheel(p, extras=False) for p in needs(chosen, PACKAGES)]
    session.install("-q", "--resolution", "lowest-direct", "-c", str(pins_file), *wanted, *chosen.test_requires)
    pytest(session, _folder(chosen, "tests"), "-m", "not medium and not large", *session.posargs)


@nox.session(default=False)
@timed
def affected(session: nox.Session) -> None:
    """Tests of the packages that the change since a revision can break: nox -s affected -- --base REV."""
    if len(session.posargs) != 2 or session.posargs[0] != "--base":
        session.error(f"got {session.posargs}, want --base REV")
    diff = ["git", "diff", "--name-only", session.posargs[1]]
    changed = subprocess.run(diff, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    names = workspace.affected(changed, PACKAGES, ROOT)
    session.log(f"affected: {', '.join(names) or 'no package'}")
    for name in names:
        install(session, [PACKAGES[name]], *PACKAGES[name].test_requires)
        pytest(session, _folder(PACKAGES[name], "tests"))


@nox.session
@timed
def docs(session: nox.Session) -> None:
    """Every example of every README and page runs."""
    install(session, list(PACKAGES.values()), *_group("integration"), extras=True)
    pytest(session, "tests/test_examples.py", *session.posargs)


def system_packages(session: nox.Session, *packages: str) -> None:
    """Installs the Debian packages that are missing, where we may; else the tests that need them say so."""
    known = shutil.which("dpkg-query")
    missing = [
        p for p in packages if known and subprocess.run([known, "-s", p], capture_output=True, check=False).returncode
    ]
    if missing and shutil.which("apt-get") and os.geteuid() == 0:
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        session.run("apt-get", "update", "-q", external=True, silent=True)
        session.run(
            "apt-get", "install", "-qy", "--no-install-recommends", *missing, external=True, silent=True, env=quiet
        )


@nox.session
@timed
def integration(session: nox.Session) -> None:
    """What crosses packages: the recipe on the real model, its plans, its failures, its report."""
    if shutil.which("chromium") is None:
        system_packages(session, "chromium")
    install(session, list(PACKAGES.values()), *_group("integration"), extras=True)
    pytest(session, "tests", "--ignore=tests/test_examples.py", *session.posargs)


@nox.session(default=False)
@timed
def train(session: nox.Session) -> None:
    """The main job: SmolLM2-135M learns to add. Arguments after -- are overrides, as in `-- plan=spatial`."""
    app = PACKAGES["reasoning"]
    install(session, [app])
    session.run("m2flow-reasoning", "train", *session.posargs)


@nox.session(default=False)
@timed
def sims(session: nox.Session) -> None:
    """The embodied app on its simulators, in full: FetchReach is learned with three seeds and filmed."""
    embodied = PACKAGES["embodied"]
    install(session, [embodied], *embodied.test_requires, extras=True)
    pytest(session, f"{_folder(embodied, 'tests')}/test_embodied_reach.py", "--timeout=900", M2FLOW_PROOFS="1")


@nox.session(default=False)
@timed
def gpu(session: nox.Session) -> None:
    """The tests that need a CUDA device."""
    install(session, list(PACKAGES.values()), *_group("integration"), extras=True)
    pytest(session, *(_folder(p, "tests") for p in PACKAGES.values()), "-m", "gpu")


@nox.session(default=False)
@timed
def proofs(session: nox.Session) -> None:
    """The long forms of the claims in docs/proofs.md: nox -s proofs [-- PACKAGE ...]."""
    for name in session.posargs or PACKAGES:
        package = PACKAGES[name]
        install(session, [package], *package.test_requires)
        pytest(session, _folder(package, "tests"), "--timeout=3600", M2FLOW_PROOFS="1", M2FLOW_PROOF_CASES="10000")


@nox.session(default=False)
@timed
def bench(session: nox.Session) -> None:
    """A package's benchmarks as one table: nox -s bench [--force-python PYTHON] -- PACKAGE [--json FILE]."""
    if not session.posargs or session.posargs[0] not in PACKAGES:
        session.error(f"got {session.posargs}, want one of {', '.join(PACKAGES)}, then perhaps --json FILE")
    package = PACKAGES[session.posargs[0]]
    install(session, [package], *package.test_requires, *package.groups.get("bench", ()), extras=True)
    session.run("python", "tools/bench.py", str(package.path), *session.posargs[1:])
