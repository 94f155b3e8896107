"""Runs the programs of ``examples/`` as users do, and reads the tables and pictures that they leave.

output = run_example("digits.py", "--epochs", "4", directory=tmp_path)
assert number(output, "accuracy on 360 held-out images") > 0.9
"""

from pathlib import Path

from tests.support.environments import table
from tests.support.ranks import LIMIT_S, REPOSITORY, run_script

EXAMPLES = REPOSITORY / "examples"
#: Tables are not cut.
WIDE = {"COLUMNS": "160"}


def run_example(name: str, *options: str | Path, directory: Path) -> str:
    """What an example prints, with a directory for what it leaves; it must succeed."""
    result = run_script(EXAMPLES / name, *options, env=WIDE, cwd=directory, timeout_s=LIMIT_S)
    assert result.returncode == 0, result.stdout
    return result.stdout


def rows(output: str) -> dict[str, list[str]]:
    """The rows of the tables in an output, by their first cells, of which none may be there twice."""
    found = [row for row in table(output) if row and row[0]]
    by_name = {name: cells for name, *cells in found}
    assert len(by_name) == len(found), output
    return by_name


def number(output: str, row: str, column: int = 0) -> float:
    """A number in a table."""
    cells = rows(output).get(row)
    assert cells is not None, output
    return float(cells[column].replace(",", ""))


def assert_shows_something(picture: Path) -> None:
    """Fails if a picture is all of one colour."""
    from matplotlib import image

    assert image.imread(picture)[..., :3].std() > 0.05, picture
