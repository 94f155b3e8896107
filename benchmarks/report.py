"""Results of benchmarks: paired statistics, the environment, tables, and JSON files.

Contenders alternate, round by round, so a machine that is slower for a while slows all of them. Ratios are therefore
computed within each round, and their median over rounds is reported. The ratio of two medians would depend on the load
of the machine.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_strategies_ext import __version__

DEFAULT_OUTPUT = Path("benchmarks", "results")
#: Directory of the results of ``--quick``, which are not valid measurements; git ignores it.
QUICK_OUTPUT = DEFAULT_OUTPUT / "quick"
#: Number of runnable processes on this host before the benchmark starts its own; they increase the spread.
LOAD_AT_START = round(os.getloadavg()[0], 2)


@dataclass(frozen=True)
class Spread:
    """Summary of samples: median, quartiles, extremes, and their number."""

    median: float
    lower_quartile: float
    upper_quartile: float
    minimum: float
    maximum: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """Summarizes at least one sample."""
        lower, _, upper = quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
        return cls(median(samples), lower, upper, min(samples), max(samples), len(samples))

    def text(self, digits: int = 2) -> str:
        """Formats the median with its quartiles, for a table."""
        return f"{self.median:.{digits}f} [{self.lower_quartile:.{digits}f}, {self.upper_quartile:.{digits}f}]"


def parse(parser: argparse.ArgumentParser, quick: str, **smaller: object) -> argparse.Namespace:
    """Parses the command line of a benchmark that has ``--quick`` and ``--output``, too.

    Args:
        parser: Parser with the other arguments.
        quick: Description of the measurement with ``--quick``.
        **smaller: Values of other arguments with ``--quick``.
    """
    parser.add_argument("--quick", action="store_true", help=f"{quick}, to check that the program runs")
    where = f"directory of the JSON and the plot: {DEFAULT_OUTPUT}, or with --quick {QUICK_OUTPUT}"
    parser.add_argument("--output", type=Path, help=where)
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(smaller)
    if not getattr(arguments, "against", None):  # it has a separate directory
        arguments.output = arguments.output or (QUICK_OUTPUT if arguments.quick else DEFAULT_OUTPUT)
    return arguments


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Returns the ratios within each round, summarized over the rounds.

    Args:
        numerators: One sample per round.
        denominators: One sample per round, in the same order.
    """
    return Spread.of([above / below for above, below in zip(numerators, denominators, strict=True)])


def of_slowest_rank(per_rank: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Merges the measurements of the ranks by name: in each round, a job is as slow as its slowest rank."""
    return {
        name: [max(samples) for samples in zip(*(rank[name] for rank in per_rank), strict=True)] for name in per_rank[0]
    }


def rotated(names: Sequence[str], round_index: int) -> list[str]:
    """Returns the order of the contenders in a round: each is first, and follows each of the others, equally often."""
    start = round_index % len(names)
    order = [*names[start:], *names[:start]]
    return order[::-1] if (round_index // len(names)) % 2 else order


def environment() -> dict[str, Any]:
    """Describes the machine and the software, without names of hosts and paths."""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "lightning": version("lightning"),
        "lightning-strategies-ext": __version__,
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load at start": LOAD_AT_START,
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def cpu_model() -> str:
    """Returns the name of the processor from the operating system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
    """Prints a table with a left-aligned first column, and the environment below it."""
    about = ", ".join(f"{name} {value}" for name, value in environment().items())
    below = "\n".join(filter(None, [caption, about]))
    # Escaped, because rich parses brackets as markup.
    table = Table(title=escape(title), caption=escape(below), caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(escape(column), justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    # In a file or a pipe, rich would wrap the table at 80 columns.
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def print_goals(goals: Sequence[dict[str, Any]]) -> None:
    """Prints the goals with the reached values.

    Args:
        goals: Goals, each with ``goal``, ``case``, ``wanted``, ``reached`` and ``is_met``.
    """
    print_table(
        "Goals, with the medians that were reached",
        ["goal", "case", "wanted", "reached", ""],
        [
            [
                goal["goal"],
                goal["case"],
                goal["wanted"],
                f"{goal['reached']:.2f}",
                "met" if goal["is_met"] else "missed",
            ]
            for goal in goals
        ],
    )


def write_json(directory: Path, name: str, payload: dict[str, Any]) -> Path:
    """Writes ``<directory>/<name>.json``: the environment, then ``payload``. Returns the file."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{name}.json"
    file.write_text(json.dumps({"benchmark": name, "environment": environment(), **payload}, indent=1) + "\n")
    return file
