"""The Python calls of a training step, of each strategy: how many they are, and how many are recorded.

The record is ``tests/guards/calls_per_step.json``: first the number of calls of this package's functions per strategy
and case, then the same by function, which explains a difference. What a step and a call are, and why the number does
not depend on the load of the machine, is in :mod:`.steps` and :mod:`.profiler`. This command prints all numbers, those
of Lightning and torch included, and with ``--write`` rewrites the record::

    python -m tests.guards [--write]
"""

import itertools
import json
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.guards.profiler import OWNERS
from tests.guards.steps import CASES, CONTENDERS, STARTS, Start, train_all
from tests.guards.versions import COMMAND, versions_of
from tests.support.ranks import run_ranks, run_script

RECORD = Path(__file__).with_suffix(".json")
_PACKAGES = ("Python", "torch", "lightning")


@dataclass(frozen=True)
class Calls:
    """The calls of one step.

    Attributes:
        totals: Owner of the code → number of calls.
        functions: ``"module:function"`` of this package → number of calls.
    """

    totals: dict[str, int]
    functions: dict[str, int]

    def __str__(self) -> str:
        return ", ".join(f"{owner} {num_calls}" for owner, num_calls in self.totals.items())


@cache
def measure(start: Start) -> dict[tuple[str, str], Calls]:
    """Trains with all strategies of a start; returns (strategy, case) → calls of a step.

    Raises:
        AssertionError: If a training fails, if a step does not repeat, or if ranks differ.
    """
    with tempfile.TemporaryDirectory() as directory:
        if start == "ranks":
            run_ranks(train_all, start, directory)
        else:
            module = ("-m", "tests.guards.steps", directory, start)
            torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
            command = (*torchrun, *module) if start == "torchrun" else module
            done = run_script(*command, env={"OMP_NUM_THREADS": "1"}, cwd=Path(directory))
            assert done.returncode == 0, done.stdout
        names = [contender.name for contender in CONTENDERS if contender.start == start]
        return {
            (name, case): _of_all_ranks(name, case, sorted(Path(directory).glob(f"{name}.{case}.*.json")))
            for name, case in itertools.product(names, CASES)
        }


def _of_all_ranks(name: str, case: str, paths: list[Path]) -> Calls:
    assert paths, f"{name}, {case}: no rank has written its calls"
    of_ranks = [_of_steps(f"{path.name}", json.loads(path.read_text())) for path in paths]
    different = [calls for calls in of_ranks if calls.functions != of_ranks[0].functions]
    assert not different, f"{name}, {case}: the ranks differ: {[str(calls) for calls in of_ranks]}"
    return of_ranks[0]


def _of_steps(name: str, steps: list[Any]) -> Calls:
    """The calls of a step as most steps have them."""
    counts = Counter(totals["ours"] for totals, _ in steps)
    [(most_frequent, num_steps)] = counts.most_common(1)
    assert num_steps > len(steps) / 2, f"{name}: the steps differ: {dict(counts)}"
    return next(Calls(*step) for step in steps if step[0]["ours"] == most_frequent)


# --- the record ---


def versions() -> str:
    """The installed versions that the numbers depend on."""
    return versions_of(*_PACKAGES)


def read() -> dict[str, Any]:
    """The record."""
    return json.loads(RECORD.read_text())


def explain(name: str, case: str, calls: Calls) -> str:
    """What differs from the record, with the command that accepts it; empty if the number is the recorded one."""
    record = read()
    recorded = record["calls"].get(name, {}).get(case)
    if recorded == calls.totals["ours"]:
        return ""
    before = Counter(record["functions"].get(f"{name}, {case}", {}))
    changes = [
        f"  {calls.functions.get(function, 0) - before[function]:+d} {function}"
        for function in sorted(before.keys() | calls.functions.keys())
        if calls.functions.get(function, 0) != before[function]
    ]
    return "\n".join(
        [
            f"{name}, {case}: a step calls {calls.totals['ours']} functions of this package; recorded are {recorded}.",
            *changes,
            f"Remove the calls; or run `{COMMAND}`, and give the reason for a larger number in the commit message.",
        ]
    )


def measure_all() -> dict[tuple[str, str], Calls]:
    """Measures all strategies and prints the numbers."""
    calls = {}
    print(f"{'':60}" + "".join(f"{owner:>10}" for owner in OWNERS))
    for start in STARTS:
        for (name, case), measured in measure(start).items():
            calls[name, case] = measured
            print(f"{f'{name}, {case}':60}" + "".join(f"{measured.totals[owner]:10}" for owner in OWNERS), flush=True)
    return calls


def write(calls: dict[tuple[str, str], Calls]) -> None:
    """Rewrites the record."""
    table: dict[str, dict[str, int]] = {}
    for (name, case), measured in calls.items():
        table.setdefault(name, {})[case] = measured.totals["ours"]
    rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(cases)}" for name, cases in table.items())
    functions = {f"{name}, {case}": dict(sorted(measured.functions.items())) for (name, case), measured in calls.items()}
    listed = json.dumps(functions, indent=2).replace("\n", "\n  ")
    RECORD.write_text(
        f'{{\n  "versions": {json.dumps(versions())},\n  "calls": {{\n{rows}\n  }},\n  "functions": {listed}\n}}\n'
    )
