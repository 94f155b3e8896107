"""Virtual environments with this project's wheel, for tests of installed files.

    environment, site = make_environment(build_wheel(directory), tmp_path)
    assert environment.report("import json, torch; print(json.dumps(torch.ones(2).tolist()))").value == [1.0, 1.0]

The dependencies of the project are linked from the interpreter that runs the tests, without downloads.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path

from lightning_utilities.core.imports import RequirementCache

from tests.support.ranks import LIMIT_S, REPOSITORY, run_command

PACKAGE = "lightning_strategies_ext"
#: Lightning before 2.6 fails if mpi4py is installed but finds no MPI. pip's Open MPI belongs to this interpreter.
_MPI = {} if RequirementCache("lightning>=2.6") else {"LD_LIBRARY_PATH": f"{sys.prefix}/lib"}


@dataclass(frozen=True)
class Environment:
    """The interpreter of a virtual environment."""

    python: Path
    work_dir: Path

    def run(
        self, *command: str | Path, env: dict[str, str] | None = None, timeout_s: float = LIMIT_S
    ) -> "subprocess.CompletedProcess[str]":
        """Runs the interpreter outside of the repository, so that only installed packages can be imported."""
        own = {"PYTHONPATH": "", "COLUMNS": "400", **_MPI, **(env or {})}
        return run_command(
            self.python, *command, env=own, cwd=self.work_dir, stderr=subprocess.PIPE, timeout_s=timeout_s
        )

    def report(self, script: str, *options: str, env: dict[str, str] | None = None) -> "Report":
        """Runs a script that prints one JSON value, and must succeed."""
        result = self.run(*options, "-c", script, env=env)
        assert result.returncode == 0, result.stdout + result.stderr
        notices = [line for line in result.stderr.splitlines() if line.startswith("lightning-strategies-ext:")]
        return Report(json.loads(result.stdout.splitlines()[-1]), notices)


@dataclass(frozen=True)
class Report:
    """The value that a script printed, and this package's lines on standard error."""

    value: object
    messages: list[str]


#: A line of a table, which may begin with the prefix that horovodrun adds.
_ROW = re.compile(r"(\[\d+\]<\w+>:)?\s*[│┃|]")


def table(output: str) -> list[list[str]]:
    """Returns the rows of the tables that rich printed, without progress bars."""
    rows = [re.split("[│┃|]", line) for line in output.splitlines() if _ROW.match(line)]
    return [[cell.strip() for cell in row[1:-1]] for row in rows if len(row) > 2]


def copy_checkout(directory: Path) -> None:
    """Copies the files of this checkout that an installation needs into a new directory."""
    directory.mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, directory)
    ignore = shutil.ignore_patterns("__pycache__", "pytorch_lightning")
    shutil.copytree(REPOSITORY / PACKAGE, directory / PACKAGE, ignore=ignore)


def build_wheel(directory: Path, source: Path = REPOSITORY, env: dict[str, str] | None = None) -> Path:
    """Builds this project's wheel from a checkout, or from a source distribution."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", directory, source]
    build = subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=LIMIT_S)
    assert build.returncode == 0, build.stdout + build.stderr
    (path,) = directory.glob("*.whl")
    return path


def make_environment(wheel: Path | None, directory: Path, without: Sequence[str] = ()) -> tuple[Environment, Path]:
    """Creates a virtual environment with a wheel, and with all packages of this interpreter.

    Args:
        wheel: The wheel. It takes precedence over an installed package of the same name. None installs none.
        directory: An empty directory for the environment.
        without: Patterns of packages, and of their metadata, that are omitted.

    Returns:
        The environment, and its directory for packages.
    """
    venv.create(directory / "venv", symlinks=True)
    (site,) = (directory / "venv" / "lib").glob("python*/site-packages")
    installed = [Path(path) for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    if without:
        installed = [_links(installed, directory / "links", without)]
    (site / "installed.pth").write_text("".join(f"{path}\n" for path in installed))
    if wheel is not None:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    (directory / "work").mkdir()
    return Environment(directory / "venv" / "bin" / "python", directory / "work"), site


def _links(sources: Sequence[Path], directory: Path, without: Sequence[str]) -> Path:
    """Links the entries of directories from another directory, without those that match a pattern; returns it."""
    directory.mkdir()
    for entry in chain.from_iterable(source.iterdir() for source in sources):
        link = directory / entry.name
        if not link.exists() and not any(fnmatch(entry.name, pattern) for pattern in without):
            link.symlink_to(entry)
    return directory
