"""``python -m tests.clients``: compares this package's strategies with Lightning's in programs of other libraries.

The command writes the table in ``docs/other_libraries.md``. It fails if results differ, unless :mod:`.cases` expects
the difference.
"""

import argparse
import json
import math
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tests.clients.cases import CASES, Case
from tests.support.ranks import REPOSITORY, WITHOUT_MPI, run_command

BEGIN, END = "<!-- written by `make clients` -->", "<!-- end of what is written -->"
PROGRAMS = Path(__file__).parent / "programs"
#: Maximum relative difference of equal numbers: `dp_ext` sums over the batch in a different order than one device.
TOLERANCE = 1e-3
#: Time limit of a program with one strategy: `optuna_search` starts ten processes, each of which imports for seconds.
LIMIT_S = 900
_LONGEST_REASON = 220


@dataclass(frozen=True)
class Run:
    """The results of one program with one strategy.

    Attributes:
        results: One result per training run of the program, or None if the program failed.
        problem: Last line of the output, if the program failed.
        output: The whole output.
        seconds: Run time in seconds.
    """

    results: list[dict[str, Any]] | None
    problem: str
    output: str
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """The text of a cell of the table, and whether the result is expected."""

    text: str
    is_expected: bool = True


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__.splitlines()[0])
    parser.add_argument(
        "programs", nargs="*", metavar="program", help=f"programs to run, by default all: {', '.join(CASES)}"
    )
    parser.add_argument(
        "--report", type=Path, help="page whose table is updated; rows of other programs are not changed"
    )
    options = parser.parse_args(arguments)
    unknown = set(options.programs) - CASES.keys()
    if unknown:
        parser.error(f"there is no program {', '.join(sorted(unknown))}")
    problems: list[str] = []
    for name in options.programs or CASES:
        missing = [package for package in CASES[name].packages if version_of(package) is None]
        if missing:
            problems.append(f"{name}: not installed: {', '.join(missing)}")
            continue
        row, failures = run_case(name, CASES[name])
        problems += failures
        if options.report:
            write_row(options.report, name, row)
    print("\n".join(problems) or "All results are as expected.")
    return 1 if problems else 0


def run_case(name: str, case: Case) -> tuple[list[str], list[str]]:
    """Runs a program with all its strategies.

    Returns:
        The cells of the program's row, and the unexpected results.
    """
    runs = {strategy: run(name, strategy, case) for strategy in case.strategies}
    comparisons = {strategy: compare(strategy, runs, case) for strategy in case.ext}
    failures = []
    for strategy, comparison in comparisons.items():
        if not comparison.is_expected:
            print(runs[strategy].output, flush=True)
            failures.append(f"{name}, {strategy}: {comparison.text}")
    versions = ", ".join(f"{package} {version_of(package)}" for package in case.packages)
    stock = runs[case.stock]
    trained = f"`{case.stock}`: " + ("trains" if stock.results is not None else f"fails: {stock.problem}")
    ext = "; ".join(f"`{strategy}`: {comparison.text}" for strategy, comparison in comparisons.items())
    return [versions, describe(name), trained, ext, case.notes], failures


def run(name: str, strategy: str, case: Case) -> Run:
    """Runs a program in a new directory, in processes that compute in one thread.

    A program that exceeds :data:`LIMIT_S` counts as failed, so that the rows of the remaining programs are written.
    """
    begin = time.monotonic()
    environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "STRATEGY": strategy, **WITHOUT_MPI}
    with tempfile.TemporaryDirectory(prefix="client-") as directory:
        command = (sys.executable, str(PROGRAMS / f"{name}.py"), *case.arguments)
        try:
            result = run_command(*command, env=environment, cwd=Path(directory), timeout_s=LIMIT_S)
        except AssertionError as error:  # the time limit; the message contains the output
            problem = f"took more than {LIMIT_S} s"
            print(f"{name}, {strategy}: {problem}", flush=True)
            return Run(None, problem, str(error), time.monotonic() - begin)
    seconds = time.monotonic() - begin
    lines = result.stdout.splitlines()
    results = [json.loads(line.partition("RESULT ")[2]) for line in lines if "RESULT " in line]
    has_failed = result.returncode != 0 or not results
    problem = find_error(lines) if has_failed else ""
    print(f"{name}, {strategy}: {problem or 'trained'} ({seconds:.0f} s)", flush=True)
    return Run(None if has_failed else results, problem, result.stdout, seconds)


def find_error(lines: Sequence[str]) -> str:
    """Returns the first sentence of the last line of a program's output that names an exception."""
    named = [line.partition("]: ")[2] if line.startswith("[rank") else line for line in lines]
    named = [line.strip() for line in named if re.match(r"[\w.]*(Error|Exception)\b", line)]
    line = (named or [line.strip() for line in lines if line.strip()] or ["the output is empty"])[-1]
    line = line.partition(". ")[0].replace("|", "\\|").replace(str(REPOSITORY), ".")
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}…"


def compare(strategy: str, runs: Mapping[str, Run], case: Case) -> Comparison:
    """Compares a strategy of this package with its reference: Lightning's strategy, or one device for ``dp_ext``."""
    ext, reference = runs[strategy], runs[case.reference(strategy)]
    expected = case.exceptions.get(strategy)
    if ext.results is None:
        if expected is not None and expected in ext.output:
            return Comparison(f"refuses: {ext.problem}")
        return Comparison(f"fails: {ext.problem}", is_expected=False)
    if reference.results is None:
        return Comparison("trains", expected is None)
    is_whole = False
    pairs = []
    for result, other in zip(ext.results, reference.results, strict=False):
        left_out = set(case.left_out)
        if are_half(other.get("predictions"), result.get("predictions")):
            is_whole = True
            left_out.add("predictions")
        pairs.append([{key: one[key] for key in one.keys() - left_out} for one in (result, other)])
    difference = max(number for pair in pairs for number in differences(*pair))
    if len(ext.results) != len(reference.results):
        return Comparison(f"{len(ext.results)} results, not {len(reference.results)}", is_expected=False)
    if difference > TOLERANCE:
        reason = f", because {expected}" if expected else ""
        keys = ", ".join(dict.fromkeys(key for pair in pairs for key in differing_keys(*pair)))
        amount = f" by {difference:.1g}" if math.isfinite(difference) else ""
        return Comparison(f"differs{amount} in {keys}{reason}", expected is not None)
    text = "same" if difference == 0 else f"same to {difference:.0e}"
    return Comparison(text + (", and all predictions in order" if is_whole else ""), expected is None)


def are_half(stock: Any, whole: Any) -> bool:
    """Returns whether a rank has every second prediction. Libraries may set the other predictions to NaN."""
    if not isinstance(stock, list) or not isinstance(whole, list):
        return False
    own = [row for row in stock if not is_nan(row)]
    return len(own) < len(whole) and own == whole[::2]


def is_nan(row: Any) -> bool:
    """Returns whether a prediction, or its first number, is NaN."""
    while isinstance(row, list):
        row = row[0]
    return isinstance(row, float) and math.isnan(row)


def differences(ext: Any, reference: Any) -> Iterator[float]:
    """Yields the relative differences of all numbers; infinity for any other difference."""
    yield 0.0
    if isinstance(ext, dict) and isinstance(reference, dict) and ext.keys() == reference.keys():
        for key, value in ext.items():
            yield from differences(value, reference[key])
    elif isinstance(ext, list) and isinstance(reference, list) and len(ext) == len(reference):
        for value, other in zip(ext, reference, strict=True):
            yield from differences(value, other)
    elif isinstance(ext, float) and isinstance(reference, float):
        if not (math.isnan(ext) and math.isnan(reference)):
            difference = abs(ext - reference) / max(1.0, abs(reference))
            yield math.inf if math.isnan(difference) else difference
    elif ext != reference:
        yield math.inf


def differing_keys(ext: Mapping[str, Any], reference: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of results that differ by more than :data:`TOLERANCE`, or that one strategy does not have."""
    for key in [*ext, *(reference.keys() - ext.keys())]:
        if max(differences(ext.get(key), reference.get(key))) > TOLERANCE:
            yield key


def describe(name: str) -> str:
    """Returns the description of a program: its docstring, without the library's name."""
    first = (PROGRAMS / f"{name}.py").read_text().splitlines()[0].strip('"')
    return first.partition(": ")[2].rstrip(".")


def write_row(page: Path, name: str, row: Sequence[str]) -> None:
    """Writes a program's row into the sorted table, without a change of other rows."""
    before, _, rest = page.read_text().partition(BEGIN)
    table, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{page} lacks the lines {BEGIN!r} and {END!r}, which enclose the generated table")
    rows = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| `")}
    rows[f"`{name}`"] = f"| {' | '.join([f'`{name}`', *row])} |"
    day = datetime.now(timezone.utc).date()
    where = (
        f"Last run: {day}, torch {torch.__version__}, lightning {version_of('lightning')}, pytorch-lightning "
        f"{version_of('pytorch-lightning')}, Python {platform.python_version()}, two ranks on CPU."
    )
    columns = ("program", "library", "description", "stock", "ext", "notes")
    lines = [where, "", f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    lines += [rows[key] for key in sorted(rows)]
    page.write_text("\n".join([f"{before}{BEGIN}\n", *lines, f"\n{END}{after}"]))


def version_of(package: str) -> str | None:
    """Returns the version of a distribution, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
