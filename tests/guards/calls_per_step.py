"""The number of Python calls in a training step of each strategy, measured and recorded.

The record is ``tests/guards/calls_per_step.json``. It has the number of calls of this package's functions per strategy
and case. To explain a difference, it also has the calls by function: one number per case, or the name of another
strategy whose steps call the same functions. :mod:`.steps` and :mod:`.profiler` define a step and a call, and explain
why the number does not depend on the load of the machine.

Calls of Lightning's, torch's and other code are printed, but not recorded. With Horovod, the last number depends on
time, because a rank polls. This command prints all numbers, and ``--write`` rewrites the record::

    python -m tests.guards [--write]
"""

import itertools
import json
import re
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
#: Time limit, which only a hang reaches: with ten busy processes per core, a program has taken two minutes.
_TIMEOUT_S = 800
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


def measure(start: Start) -> dict[tuple[str, str], Calls]:
    """Trains with all strategies of a start, once per process; returns (strategy, case) → calls of a step.

    Raises:
        AssertionError: If a training fails, if a step does not repeat, or if ranks differ.
    """
    measured = _measure_once(start)
    if isinstance(measured, AssertionError):
        raise measured
    return measured


@cache
def _measure_once(start: Start) -> dict[tuple[str, str], Calls] | AssertionError:
    # The error is a value, because the cache would not keep an exception: each test would train again, and fail again.
    try:
        return _measure(start)
    except AssertionError as error:
        return error


def _measure(start: Start) -> dict[tuple[str, str], Calls]:
    with tempfile.TemporaryDirectory() as directory:
        if start == "ranks":
            run_ranks(train_all, start, directory, timeout_s=_TIMEOUT_S)
        else:
            module = ("-m", "tests.guards.steps", directory, start)
            torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
            command = (*torchrun, *module) if start == "torchrun" else module
            done = run_script(*command, env={"OMP_NUM_THREADS": "1"}, cwd=Path(directory), timeout_s=_TIMEOUT_S)
            assert done.returncode == 0, done.stdout
        names = [contender.name for contender in CONTENDERS if contender.start == start]
        return {
            (name, case): of_all_ranks(name, case, sorted(Path(directory).glob(f"{name}.{case}.*.json")))
            for name, case in itertools.product(names, CASES)
        }


def of_all_ranks(name: str, case: str, paths: list[Path]) -> Calls:
    """Merges the files of the ranks into the calls of a step.

    Raises:
        AssertionError: If a step does not repeat, or if ranks differ.
    """
    num_ranks = 1 if "dp_ext" in re.split(r"\W+", name) else 2
    assert len(paths) == num_ranks, f"{name}, {case}: {len(paths)} of {num_ranks} ranks have written their calls"
    of_ranks = [_of_steps(f"{path.name}", json.loads(path.read_text())) for path in paths]
    different = [calls for calls in of_ranks if calls.functions != of_ranks[0].functions]
    assert not different, f"{name}, {case}: the ranks differ: {[str(calls) for calls in of_ranks]}"
    return of_ranks[0]


def _of_steps(name: str, steps: list[Any]) -> Calls:
    """Returns the most frequent calls of a step."""
    counts = Counter(totals["ext"] for totals, _ in steps)
    [(most_frequent, num_steps)] = counts.most_common(1)
    assert num_steps > len(steps) / 2, f"{name}: the steps differ: {dict(counts)}"
    return next(Calls(*step) for step in steps if step[0]["ext"] == most_frequent)


# --- the record ---


def versions() -> str:
    """Returns the installed versions that the numbers depend on."""
    return versions_of(*_PACKAGES)


def read() -> dict[str, Any]:
    """Reads the record."""
    return json.loads(RECORD.read_text())


def explain(name: str, case: str, calls: Calls) -> str:
    """Describes a difference from the record, with the command that accepts it; empty if the numbers agree."""
    record = read()
    recorded = record["calls"].get(name, {}).get(case)
    if recorded == calls.totals["ext"]:
        return ""
    before = _functions_of(record, name, case)
    changes = {
        function: calls.functions.get(function, 0) - before[function] for function in before.keys() | calls.functions
    }
    return "\n".join(
        [
            f"{name}, {case}: a step calls {calls.totals['ext']} functions of this package; recorded are {recorded}.",
            *(f"  {change:+d} {function}" for function, change in sorted(changes.items()) if change),
            f"Remove the calls; or run `{COMMAND}`, and give the reason for a larger number in the commit message.",
        ]
    )


def _functions_of(record: dict[str, Any], name: str, case: str) -> Counter[str]:
    functions = record["functions"].get(name, {})
    if isinstance(functions, str):  # the calls of another strategy
        functions = record["functions"][functions]
    index = list(CASES).index(case)
    return Counter({function: counts[index] for function, counts in functions.items()})


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
    numbers: dict[str, dict[str, int]] = {}
    functions: dict[str, dict[str, list[int]] | str] = {}
    for name in dict.fromkeys(name for name, _ in calls):
        of_cases = [calls[name, case] for case in CASES]
        numbers[name] = {case: measured.totals["ext"] for case, measured in zip(CASES, of_cases, strict=True)}
        called = sorted({function for measured in of_cases for function in measured.functions})
        counts = {function: [measured.functions.get(function, 0) for measured in of_cases] for function in called}
        functions[name] = next((other for other, other_counts in functions.items() if other_counts == counts), counts)
    RECORD.write_text(
        f'{{\n"versions": {json.dumps(versions())},\n'
        f'"calls": {_one_per_line(numbers)},\n'
        f'"functions": {_one_per_line(functions, depth=2)}\n}}\n'
    )


def _one_per_line(value: Any, depth: int = 1) -> str:
    """Returns JSON with one key per line, down to a depth."""
    if depth == 0 or not isinstance(value, dict):
        return json.dumps(value)
    rows = (f"{json.dumps(key)}: {_one_per_line(inner, depth - 1)}" for key, inner in value.items())
    return "{\n" + ",\n".join(rows) + "\n}"
