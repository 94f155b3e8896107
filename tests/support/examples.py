"""Runs the programs of ``examples/`` as users do, and reads their tables and pictures.

output = run_example("digits.py", "--epochs", "4", directory=tmp_path)
assert number(output, "accuracy on 360 held-out images") > 0.9
"""

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path

import numpy as np

from tests.support.ranks import LIMIT_S, REPOSITORY, run_script
from tests.support.virtual_environments import table

EXAMPLES = REPOSITORY / "examples"
#: Where ``make test`` installs scikit-learn and matplotlib, see the Makefile.
EXAMPLE_PACKAGES = Path(sysconfig.get_path("purelib", vars={"base": str(Path(sys.prefix, "examples"))}))
#: Environment of an example: these packages, and a terminal that is wide enough for its tables.
EXAMPLE_ENVIRONMENT = {"COLUMNS": "160", "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{EXAMPLE_PACKAGES}"}


def run_example(name: str, *options: str | Path, directory: Path) -> str:
    """Runs an example, which must succeed, in a directory for its files; returns its output."""
    result = run_script(EXAMPLES / name, *options, env=EXAMPLE_ENVIRONMENT, cwd=directory, timeout_s=LIMIT_S)
    assert result.returncode == 0, result.stdout
    return result.stdout


def rows(output: str) -> dict[str, list[str]]:
    """Returns the rows of the tables in an output, by their first cells, which must differ."""
    found = [row for row in table(output) if row and row[0]]
    by_name = {name: cells for name, *cells in found}
    assert len(by_name) == len(found), output
    return by_name


def number(output: str, row: str, column: int = 0) -> float:
    """Returns a number in a table."""
    cells = rows(output).get(row)
    assert cells is not None, output
    return float(cells[column].replace(",", ""))


@contextmanager
def example_packages() -> Iterator[None]:
    """Lets this process, and processes that it spawns, import packages that only the examples need."""
    sys.path.append(str(EXAMPLE_PACKAGES))
    try:
        yield
    finally:
        sys.path.remove(str(EXAMPLE_PACKAGES))


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Reads scikit-learn's digits from its files: an import of scikit-learn would take two seconds in each rank.

    Returns:
        1,797 images of 64 pixels with values from 0 to 16, and their labels.
    """
    found = PathFinder.find_spec("sklearn", [str(EXAMPLE_PACKAGES), *sys.path])
    assert found is not None, "scikit-learn is missing; `make .venv/examples/.installed` installs it"
    assert found.origin is not None
    rows = np.loadtxt(Path(found.origin).with_name("datasets") / "data/digits.csv.gz", delimiter=",")
    return rows[:, :-1], rows[:, -1].astype(int)


def assert_shows_something(picture: Path) -> None:
    """Fails if all pixels of a picture have one color."""
    with example_packages():
        from matplotlib import image

    assert image.imread(picture)[..., :3].std() > 0.05, picture
