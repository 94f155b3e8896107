"""Costs of elastic training, for ``python -m benchmarks.horovod --elastic``: each commit, and the loss of a rank.

    python -m benchmarks.horovod_elastic                     # the same
    python -m benchmarks.horovod_elastic --against HEAD~1    # two revisions in turns: see benchmarks/against.py

Each round starts two CPU ranks under an elastic `horovodrun`, one torch thread each, which train a net of linear
layers with Adam, 32 samples per rank and batch. They commit every few steps. At a given step, rank 1 kills itself.

- **Commit over step**: the time between the end of a batch and the beginning of the next batch with a commit between
  them, minus the same time without a commit, over the time of a batch. Both are medians of a round, of rank 0, after
  the second commit (the first commit allocates memory). Divided by `commit_every_n_steps`, it is the share of commits
  in the training time.
- **Kill to next step**: from shortly before the SIGKILL until the surviving rank, which has restored the commit and
  created its loaders again, begins the next step; and until the end of that step.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks import against
from benchmarks.horovod_commands import FIRST, SECOND, elastic_horovodrun
from benchmarks.report import Spread, parse, print_table, write_json
from benchmarks.turns import Part, Row

COMMIT_EVERY = 5
NUM_COMMITS = 4
#: Figure → its name in the table.
COLUMNS = {
    "step_ms": "step, ms",
    "commit_ms": "commit, ms",
    "commit_over_step": "commit/step",
    "next_step_s": "kill to next step, s",
    "step_done_s": "to its end, s",
}


def measure_round(num_parameters: int) -> dict[str, float]:
    """Trains once.

    Returns:
        ``step_ms``, ``commit_ms``, ``next_step_s`` and ``step_done_s``.

    Raises:
        RuntimeError: If the run fails.
    """
    kill_at = COMMIT_EVERY * NUM_COMMITS + 2
    with tempfile.TemporaryDirectory() as directory:
        command = elastic_horovodrun(Path(directory), (FIRST, SECOND), 1)
        numbers = [num_parameters, kill_at + 3, COMMIT_EVERY, kill_at]
        script = [sys.executable, "-m", "benchmarks.horovod_elastic_script", directory, *map(str, numbers)]
        result = subprocess.run([*command, *script], capture_output=True, text=True, timeout=600)
        if result.returncode:
            raise RuntimeError(result.stdout + result.stderr)
        lines = [json.loads(line) for path in Path(directory).glob("process*") for line in path.open()]
    lines.sort(key=lambda line: line["at"])
    killed_at = next(line["at"] for line in lines if line["what"] == "kill")
    after = [line for line in lines if line["at"] > killed_at and line["world"] == 1]
    first = {event: next(line["at"] for line in after if line["what"] == event) for event in ("start", "end")}
    own = [line for line in lines if line["rank"] == 0 and line["world"] == 2]
    steps = [
        (start["step"], end["at"] - start["at"], start["at"] - before["at"])
        for before, start, end in zip(own[1::2], own[2::2], own[3::2], strict=False)
        if start["step"] > 2 * COMMIT_EVERY - 1
    ]
    with_commit = median(gap for step, _, gap in steps if step % COMMIT_EVERY == 0)
    without = median(gap for step, _, gap in steps if step % COMMIT_EVERY)
    return {
        "step_ms": 1e3 * median(duration for _, duration, _ in steps),
        "commit_ms": 1e3 * (with_commit - without),
        "next_step_s": first["start"] - killed_at,
        "step_done_s": first["end"] - killed_at,
    }


def rows(millions: list[int]) -> dict[str, Row]:
    """Returns the rows of ``--against``, per number of parameters."""

    def measure(size: int) -> dict[str, float]:
        found = measure_round(size * 10**6)
        return {f"{size} M parameters: {COLUMNS[name]}": figure for name, figure in found.items()}

    return {f"{size} M parameters": Row(partial(measure, size), ["horovod_elastic"]) for size in millions}


def measure_elastic(rounds: int, sizes: list[int], output: Path) -> None:
    """Measures, prints the table, and writes the JSON file.

    Args:
        rounds: Number of runs per size.
        sizes: Numbers of parameters, in millions.
        output: Directory of the JSON file.
    """
    measured: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    for number in range(rounds):
        for size in sizes:
            measured[size].append(measure_round(size * 10**6))
            print(f"{size} M parameters: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    rows, results = [], []
    for size, found in measured.items():
        spreads = {name: Spread.of([one[name] for one in found]) for name in found[0]}
        spreads["commit_over_step"] = Spread.of([one["commit_ms"] / one["step_ms"] for one in found])
        rows.append([f"{size} M", *(spreads[name].text() for name in COLUMNS)])
        results.append({"million_parameters": size, **{name: vars(spread) for name, spread in spreads.items()}})
    print_table(
        "Elastic training, 2 CPU ranks, Adam: median [quartiles]",
        ["parameters", *COLUMNS.values()],
        rows,
        caption="commit/step is the cost of one commit, which occurs every `commit_every_n_steps` (100 by default).",
    )
    write_json(output, "horovod_elastic", {"settings": {"rounds": rounds}, "results": results})


def main() -> None:
    """Measures, prints the table, and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="runs per number of parameters")
    parser.add_argument("--parameters", type=int, nargs="+", default=[1, 100], help="in millions")
    against.add_arguments(parser)
    arguments = parse(parser, "one round of one million parameters", rounds=1, parameters=[1])
    if arguments.rounds < 1:
        parser.error("--rounds must be positive")
    if arguments.against:
        part = Part("benchmarks.horovod_elastic:rows", arguments.rounds, {"millions": arguments.parameters})
        against.compare("elastic", arguments, [part])
    else:
        measure_elastic(arguments.rounds, arguments.parameters, arguments.output)


if __name__ == "__main__":
    main()
