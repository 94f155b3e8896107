"""Tests the oldest and newest versions that pyproject.toml declares, one session per combination: ``make matrix``.

Each session creates an environment, builds Horovod, runs the tests of ``make test``, and writes its row of
``docs/versions.md``. It then removes the environment, which takes up to 8 GB with torch's CUDA packages. The wheel has
one session per extra: run ``make dist``, then ``make matrix CORNERS=wheel``.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from glob import glob
from pathlib import Path
from typing import NamedTuple

import nox
from nox.command import CommandFailed


class Corner(NamedTuple):
    """Versions that are tested together: a Python interpreter, by version or name, and requirements for pip."""

    python: str
    torch: str
    lightning: str


#: Excludes malicious releases: GHSA-w37p-236h-pfx3.
LIGHTNING = "lightning!=2.6.2,!=2.6.3"
PYTORCH_LIGHTNING = f"pytorch-{LIGHTNING}"
CORNERS = {
    "default": Corner(os.environ.get("PYTHON", "python3"), os.environ.get("TORCH", "torch"), LIGHTNING),
    "py310": Corner("3.10", "torch==2.5.1", "lightning==2.5.0"),
    "py311": Corner("3.11", "torch==2.7.1", "lightning==2.5.6"),
    "py312": Corner("3.12", "torch==2.8.0", "lightning==2.6.0"),
    "py313": Corner("3.13", "torch==2.15.0", LIGHTNING),
    "torch214": Corner("3.11", "torch==2.14.1", LIGHTNING),
    "other_name": Corner(os.environ.get("PYTHON", "python3"), os.environ.get("TORCH", "torch"), PYTORCH_LIGHTNING),
}
# Package index with smaller builds of torch than PyPI, for example CPU builds.
TORCH_INDEX = os.environ.get("MATRIX_TORCH_INDEX")
# Keeps the environments for an inspection of failures.
IS_KEEPING = bool(os.environ.get("MATRIX_KEEP"))
HOROVOD_OPTIONS = os.environ.get("HOROVOD_OPTIONS", "--mpi").split()
PYTEST_OPTIONS = shlex.split(os.environ.get("MATRIX_PYTEST_OPTIONS", ""))
#: The command of the Makefile that runs the same tests.
TESTS = os.environ.get("MATRIX_TESTS", "make test-all")

nox.options.default_venv_backend = "venv"


def find_python(wanted: str) -> str | None:
    """Returns the interpreter of a version, from PATH or from pyenv; None if neither has one."""
    candidates = [wanted]
    if wanted[0].isdigit():
        root = os.environ.get("PYENV_ROOT") or _output("pyenv", "root")
        among_pyenvs = sorted(glob(f"{root}/versions/{wanted}.*/bin/python{wanted}")) if root else []
        candidates = [f"python{wanted}", *reversed(among_pyenvs)]
    # Some of pyenv's launchers on PATH have no interpreter to start, so each candidate is executed.
    found = (_output(candidate, "-c", "import sys; print(sys.executable)") for candidate in candidates)
    return next(filter(None, found), None)


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def run_corner(session: nox.Session, name: str, corner: Corner) -> None:
    """Installs the versions, builds Horovod, runs the tests (arguments can select some), and records the results."""
    if not session.python:
        write_row(session, name, "--problem", f"no Python {corner.python} was found")
        session.error(f"Python {corner.python} was found neither on PATH nor in pyenv.")
    with tempfile.TemporaryDirectory(prefix="matrix-") as directory:
        report, horovod_log = Path(directory, "report.xml"), Path(directory, "horovod.log")
        findings, problem = ["--tests", TESTS, "--report", str(report)], "pip could not install the corner"
        try:
            install(session, corner)
            problem = "the run was interrupted"
            if not build_horovod(session, horovod_log):
                findings += ["--horovod-log", str(horovod_log)]
            tests = Path.cwd()
            if name == "other_name":
                tests = Path(directory, "tests")
                Path(directory).chmod(0o755)  # some tests run as another user
                session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "lightning")
                session.run("python", "-m", "tests.support.mirrored_repository", str(tests))
            try:
                with session.chdir(tests):
                    session.run(
                        "python",
                        "-m",
                        "pytest",
                        *PYTEST_OPTIONS,
                        f"--junitxml={report}",
                        *session.posargs,
                    )
                problem = ""
            except CommandFailed as failure:
                if failure.reason == "Returned code 1":  # the tests have run, and some have failed
                    problem = ""
                raise
        finally:
            if not session.posargs:
                write_row(session, name, *findings, "--problem", problem)
            if not IS_KEEPING:
                shutil.rmtree(session.virtualenv.location, ignore_errors=True)


def install(session: nox.Session, corner: Corner) -> None:
    """Installs the corner's torch and Lightning, and the package with its test dependencies."""
    # pip's cache of several versions of torch and CUDA would fill the disk.
    session.env["PIP_NO_CACHE_DIR"] = os.environ.get("PIP_NO_CACHE_DIR", "1")
    if TORCH_INDEX:
        session.install(corner.torch, "--index-url", TORCH_INDEX)
    session.install(corner.torch, corner.lightning, "--editable", ".[bench,dev,examples]")


def build_horovod(session: nox.Session, log: Path) -> bool:
    """Builds Horovod; returns whether that succeeded. Without Horovod, the session skips the tests that need it."""
    command = ("python", "-m", "lightning_strategies_ext", "install-horovod", *HOROVOD_OPTIONS)
    try:
        with log.open("w") as output:
            session.run(*command, stdout=output)
    except CommandFailed:
        session.warn(f"Horovod could not be built:\n{log.read_text()}")
        return False
    return True


def write_row(session: nox.Session, name: str, *findings: str) -> None:
    """Records results with the corner's interpreter, or with nox's interpreter if the corner has none."""
    python = "python" if session.python else sys.executable
    session.run(python, "-m", "docs.versions_table", name, *findings, external=True)


@nox.session(python=find_python(CORNERS["default"].python) or False, default=False)
@nox.parametrize(
    "extra", ["", "lightning", "pytorch-lightning", "horovod-build", "examples", "bench", "docs", "dist", "dev"]
)
def wheel(session: nox.Session, extra: str) -> None:
    """Tests this machine's wheel from dist/ with one extra, in a new environment outside of the checkout."""
    (path,) = Path("dist").resolve().glob(f"*_{platform.machine()}.whl")
    check = Path("tests", "wheel_check.py").resolve()
    try:
        session.install(CORNERS["default"].torch)
        session.install(f"lightning-strategies-ext[{extra}] @ {path.as_uri()}")
        with tempfile.TemporaryDirectory(prefix="wheel-") as directory, session.chdir(directory):
            session.run("python", str(check), extra)
    finally:
        if not IS_KEEPING:
            shutil.rmtree(session.virtualenv.location, ignore_errors=True)


for _name, _corner in CORNERS.items():
    _run = partial(run_corner, name=_name, corner=_corner)
    _run.__doc__ = ", ".join(_corner)
    nox.session(_run, name=_name, python=find_python(_corner.python) or False)
