"""Runs cases and prints a table: ``python -m tests.faults [--strategies ...] [--every N]``.

``make fault-injection`` runs this module. With ``--minutes``, as in ``make soak``, it draws random cases until the time
is over. With ``--at-once``, it runs several cases in parallel. Cases with this package's strategies that only exceeded
the time limit then run again, one at a time, and the second result counts.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tests.faults.cases import EXT, KINDS, Case, Result, all_cases, try_case
from tests.support.namespace_hosts import NoHostsError, two_hosts
from tests.support.ranks import WITHOUT_MPI

#: Number of lines that are printed of the output, and of each rank's file, of a case that failed.
NUM_LINES = 60


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument(
        "--strategies", nargs="+", default=[*EXT, "ddp"], help="strategies to test; ddp is Lightning's strategy"
    )
    parser.add_argument(
        "--worlds", nargs="+", default=["2", "3", "1x2", "2x2"], help="numbers of ranks, or numbers of ranks x hosts"
    )
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--moments", nargs="+")
    parser.add_argument(
        "--accelerator", default="cpu", help="gpu: all ranks share one GPU, each as a separate host: 1x2"
    )
    parser.add_argument("--every", type=int, default=1, help="run only each Nth case")
    parser.add_argument("--offset", type=int, default=0, help="index of the first case")
    parser.add_argument("--at-once", type=int, default=1, help="number of cases that run in parallel")
    parser.add_argument("--minutes", type=float, help="run random cases for this number of minutes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random cases")
    options = parser.parse_args()
    worlds = [(int(ranks) * int(hosts or 1), int(hosts or 1)) for ranks, _, hosts in map(split, options.worlds)]
    cases = [
        replace(case, accelerator=options.accelerator)
        for case in all_cases(tuple(options.strategies), tuple(worlds))
        if case.kind in options.kinds and (options.moments is None or case.moment in options.moments)
    ]
    if options.accelerator != "cpu":  # its hosts have no virtual network between them
        cases = [case for case in cases if case.hosts == case.world_size and case.kind != "cable"]
    elif any(case.hosts > 1 for case in cases):
        try:
            with tempfile.TemporaryDirectory() as directory, two_hosts(Path(directory)):
                pass
        except NoHostsError as error:
            print(f"Cases with two hosts are skipped: {error}", flush=True)
            cases = [case for case in cases if case.hosts == 1]
    os.environ.update(WITHOUT_MPI)
    if options.minutes is not None:
        results = [tried(case) for case in drawn(cases, options)]
    else:
        with ThreadPoolExecutor(options.at_once) as pool:
            results = list(pool.map(tried, cases[options.offset :: options.every]))
    if options.at_once > 1:
        again = [index for index, result in enumerate(results) if result.is_late_only]
        print(f"{len(again)} cases that exceeded the time limit run again, one at a time.", flush=True)
        for index in again:
            results[index] = tried(results[index].case)
    print(table(results))
    return int(any(result.problems for result in results if result.case.strategy != "ddp"))


def split(world: str) -> tuple[str, str, str]:
    """Parses a world: returns the number of ranks per host and the number of hosts."""
    return world.partition("x")


def tried(case: Case) -> Result:
    """Runs a case and prints its result. If a strategy of this package fails, prints the end of its output."""
    shown: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        result = try_case(case, Path(directory))
        if result.problems and case.strategy != "ddp":
            files = sorted(Path(directory).glob("failures/*/*.txt"))
            texts = [result.output, *(f"{path.name}:\n{path.read_text()}" for path in files)]
            shown = [line for text in texts for line in text.splitlines()[-NUM_LINES:]]
    took = "none" if result.seconds is None else f"{result.seconds:5.1f} s"
    codes = ", ".join(map(str, result.exit_codes))
    print("\n    ".join([f"{case}: {took}, exit code {codes}", *result.problems, *shown]), flush=True)
    return result


def drawn(cases: list[Case], options: argparse.Namespace) -> Iterator[Case]:
    """Yields random cases until the time is over."""
    generator, deadline = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    while time.monotonic() < deadline:
        yield generator.choice(cases)


def table(results: list[Result]) -> str:
    """Returns a Markdown table with the number of passed cases, by kind of fault and strategy."""
    found: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for result in results:
        found[result.case.kind, name_of(result.case)].append(not result.problems)
    names = sorted({name for _, name in found})
    lines = ["| | " + " | ".join(names) + " |", "| --- " * (len(names) + 1) + "|"]
    for kind in KINDS:
        if any(kind == other for other, _ in found):
            cells = [f"{sum(good)} of {len(good)}" if (good := found.get((kind, name))) else "" for name in names]
            lines.append(f"| {kind.replace('_', ' ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def name_of(case: Case) -> str:
    """Returns the column of a case in the table."""
    return f"`{case.strategy}`" + (f", {case.hosts} hosts" if case.hosts > 1 else "")


if __name__ == "__main__":
    sys.exit(main())
