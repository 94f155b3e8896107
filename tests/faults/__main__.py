"""Tries cases and prints a table: ``python -m tests.faults [--strategies ...] [--every N]``, see ``make faults``.

With ``--minutes``, cases are drawn at random until the time is over, see ``make soak``.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.faults.cases import KINDS, OURS, Case, Result, all_cases, try_case


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--strategies", nargs="+", default=[*OURS, "ddp"], help="ddp is Lightning's")
    parser.add_argument("--world-sizes", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--moments", nargs="+")
    parser.add_argument("--every", type=int, default=1, help="try each Nth case only")
    parser.add_argument("--offset", type=int, default=0, help="the first of them")
    parser.add_argument("--minutes", type=float, help="for how long to try cases at random")
    parser.add_argument("--seed", type=int, default=0, help="of these")
    options = parser.parse_args()
    cases = [
        case
        for case in all_cases(tuple(options.strategies), tuple(options.world_sizes))
        if case.kind in options.kinds and (options.moments is None or case.moment in options.moments)
    ]
    results = []
    for case in cases[options.offset :: options.every] if options.minutes is None else drawn(cases, options):
        with tempfile.TemporaryDirectory() as directory:
            result = try_case(case, Path(directory))
        results.append(result)
        took = "none" if result.seconds is None else f"{result.seconds:5.1f} s"
        print(f"{case}: {took}, exit code {result.exit_code}", *result.problems, sep="\n    ", flush=True)
    print(table(results))
    return int(any(result.problems for result in results if result.case.strategy != "ddp"))


def drawn(cases: list[Case], options: argparse.Namespace) -> Iterator[Case]:
    """Cases at random, until the time is over."""
    generator, deadline = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    while time.monotonic() < deadline:
        yield generator.choice(cases)


def table(results: list[Result]) -> str:
    """How many of the cases of each kind were as they should be, by strategy, in Markdown."""
    found: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for result in results:
        found[result.case.kind, result.case.strategy].append(not result.problems)
    strategies = sorted({strategy for _, strategy in found})
    lines = [
        "| | " + " | ".join(f"`{strategy}`" for strategy in strategies) + " |",
        "| --- " * (len(strategies) + 1) + "|",
    ]
    for kind in KINDS:
        if any(kind == other for other, _ in found):
            cells = [f"{sum(good)} of {len(good)}" if (good := found.get((kind, name))) else "" for name in strategies]
            lines.append(f"| {kind.replace('_', ' ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
