"""Seconds and memory around training in spawned workers: Lightning's ``ddp_spawn`` and ``ddp_spawn_ext``.

    python -m benchmarks.spawn
    python -m benchmarks.spawn --sizes 400 --rounds 15
    python -m benchmarks.spawn --quick
    python -m benchmarks.spawn --ray
    python -m benchmarks.spawn --against HEAD~1    # two revisions in turns: see benchmarks/against.py

Two CPU workers on this host, a tiny model, data in memory. The program measures:

* start: from the call of ``trainer.fit`` to the first batch in rank 0's worker, and the same for ``trainer.validate``
  and then ``trainer.test`` of the same Trainer (the stock strategy raises an error in a second ``fit``);
* large data: whole consecutive stages of a few batches, while the main process has 1 GB of data in memory;
* bring back: from the end of ``fit`` in rank 0's worker (its ``teardown`` hook) to the return of ``trainer.fit``, after
  the worker has changed 10, 100, or 400 MB of frozen weights, in tensors of 10 MB;
* predictions: 3200 rows of 8192 floats, 100 MB, from the call to the result in the main process, and from rank 0's last
  batch. The stock strategy returns no predictions, so its contender uses its workaround: each rank writes a file
  (``BasePredictionWriter``), and the main process loads the files and sorts the rows in the order of the dataset;
* script: ``fit``, ``test``, and ``predict`` in a new interpreter, from its start to its exit.

Method: each sample has a separate interpreter, and the contenders alternate in an order that changes from round to
round. A first turn, which is not counted, fills the page cache. Workers and main process read the same clock. Ratios
are computed within a round. Every measurement checks that the result has arrived.

Peak extra memory is the memory of the main process only: its largest resident size while it receives results, sampled
by another process, minus its size at the beginning (rank 0's end of ``fit``, or its last batch of ``predict``), over
the size of the result. It does not include memory of workers, files, and memory that the main process has not mapped.
The sampling interval is one millisecond, so the few milliseconds in which ``ddp_spawn_ext`` receives 10 MB may be
missed. MB are 2**20 bytes.

With ``--ray``, the program compares ``ddp_ray_ext`` with a ``TorchTrainer`` of Ray Train per stage, with Lightning's
``ddp`` over gloo as in Ray's documentation. It measures start and bring back, on one Ray cluster on this machine, to
which each interpreter is connected before the clock starts. The ``TorchTrainer`` returns a checkpoint, which the main
process loads.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import psutil

from benchmarks import against, spawn_ray
from benchmarks.contenders import silence_lightning
from benchmarks.plots import draw_plot
from benchmarks.report import Spread, paired_ratio, parse, print_table, rotated, write_json
from benchmarks.spawn_cases import EXT, KINDS, PREDICTIONS_MB, TENSOR_MB, Case, Contender
from benchmarks.turns import Part, Row

SAMPLE_MEMORY_EVERY_S = 0.001

#: Goals on Ray: largest ratio of the time of ``ddp_ray_ext`` to the time of the peer.
TIME_GOALS_ON_RAY = {
    "start: validate after fit": 0.05,
    "start: test after validate": 0.05,
    "bring back 400 MB": 0.5,
}
#: Goals with the stock strategy as the peer.
TIME_GOALS = {"start: fit": 0.8, **TIME_GOALS_ON_RAY}
#: Goal: largest ratio of the extra memory to the size of the result.
MEMORY_GOAL = 1.2


@dataclass(frozen=True)
class Pair:
    """Two strategies that are compared.

    Attributes:
        peer: The other strategy.
        ext: Strategy of this package.
        time_goals: Largest accepted ratio of the time of ``ext`` to the time of ``peer``, by case.
        environment: Environment variables of the interpreters.
    """

    peer: str
    ext: str = EXT
    time_goals: Mapping[str, float] = field(default_factory=lambda: TIME_GOALS)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, str]:
        """Names of both strategies."""
        return self.peer, self.ext


class MemorySampler(threading.Thread):
    """Samples the resident memory of another process until its exit.

    Args:
        pid: Process ID of the other process.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.samples: list[tuple[float, int]] = []

    def run(self) -> None:
        """Samples until the exit of the process."""
        process = psutil.Process(self.pid)
        while True:
            try:
                self.samples.append((time.monotonic(), process.memory_info().rss))
            except psutil.Error:  # the process has exited
                return
            if not self.samples[-1][1]:  # the process has exited, and its parent has not reaped it yet
                return
            time.sleep(SAMPLE_MEMORY_EVERY_S)

    def peak_extra_mb(self, started_at: float, ended_at: float) -> float:
        """Returns the largest size in a window minus the size at its start, in MB."""
        before = [rss for at, rss in self.samples if at <= started_at][-1]
        within = [rss for at, rss in self.samples if started_at < at <= ended_at]
        return (max([before, *within]) - before) / 2**20


def take_sample(case: Case, strategy: str, environment: Mapping[str, str]) -> tuple[dict[str, float], float | None]:
    """Measures once, in a new interpreter.

    Args:
        case: The case.
        strategy: Strategy of the contender.
        environment: Environment variables, in addition to those of this process.

    Returns:
        Seconds by label, and the peak extra memory in MB where the case has a result.

    Raises:
        RuntimeError: If the interpreter fails.
    """
    with TemporaryDirectory() as directory, TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        request = json.dumps({**asdict(case), "strategy": strategy, "directory": directory})
        started_at = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.spawn", "--measure", request],
            stdout=output,
            stderr=errors,
            env={**os.environ, **environment},
        )
        sampler = MemorySampler(process.pid)
        if case.result_mb:
            sampler.start()
        exit_code = process.wait()
        ended_at = time.monotonic()
        output.seek(0)
        errors.seek(0)
        if exit_code != 0:
            raise RuntimeError(f"{case.label} with {strategy} exited with code {exit_code}:\n{errors.read()}")
        measured = json.loads(output.read().splitlines()[-1])
    seconds = measured["seconds"] or {f"{case.label}: fit, test, predict": ended_at - started_at}
    return seconds, sampler.peak_extra_mb(*measured["window"]) if case.result_mb else None


def take_sample_again_if_it_fails(
    case: Case, strategy: str, environment: Mapping[str, str], times: int = 2
) -> tuple[dict[str, float], float | None]:
    """Measures once, and again after a failure: torch sometimes aborts a worker of the stock strategy at its exit.

    Raises:
        RuntimeError: If the interpreter fails once more than ``times``.
    """
    for _ in range(times):
        try:
            return take_sample(case, strategy, environment)
        except RuntimeError as error:
            print(f"{strategy}: {str(error).splitlines()[-1]}; measured again", file=sys.stderr, flush=True)
    return take_sample(case, strategy, environment)


def take_local_sample(request: str) -> None:
    """Measures, and prints the result as the last line. Runs in the new interpreter."""
    silence_lightning()
    arguments = json.loads(request)
    strategy, directory = arguments.pop("strategy"), Path(arguments.pop("directory"))
    if strategy in spawn_ray.NAMES:
        spawn_ray.connect()
        contender: Any = spawn_ray.ContenderOnRay(strategy, directory)
    else:
        contender = Contender(strategy, directory)
    case = Case(**arguments)
    print(json.dumps(KINDS[case.kind](contender, case)))


def rows(cases: list[dict[str, Any]]) -> dict[str, Row]:
    """Returns the rows of ``--against``: ``ddp_spawn_ext``, in a new interpreter per sample."""

    def measure(case: Case) -> dict[str, float]:
        seconds, extra_mb = take_sample_again_if_it_fails(case, EXT, {})
        figures = {f"{label}, s": value for label, value in seconds.items()}
        return figures if extra_mb is None else {**figures, f"{case.label}: peak extra memory, MB": extra_mb}

    return {case.label: Row(partial(measure, case), ["DDPSpawnStrategy"]) for case in (Case(**one) for one in cases)}


def measure(case: Case, pair: Pair, rounds: int) -> list[dict[str, Any]]:
    """Measures a case round by round.

    Returns:
        A summary per label: of seconds, and of memory where the case has a result.
    """
    names = pair.names
    seconds: dict[str, dict[str, list[float]]] = {}
    extra_mb: dict[str, list[float]] = {name: [] for name in names}
    for round_index in range(rounds):
        for name in rotated(names, round_index):
            by_label, extra = take_sample_again_if_it_fails(case, name, pair.environment)
            for label, value in by_label.items():
                seconds.setdefault(label, {name: [] for name in names})[name].append(value)
            if extra is not None:
                extra_mb[name].append(extra)
    print(f"measured {case.label}", file=sys.stderr, flush=True)
    summaries = [summarize_time(label, pair, samples) for label, samples in seconds.items()]
    return [*summaries, *([summarize_memory(case, extra_mb)] if case.result_mb else [])]


def summarize_time(label: str, pair: Pair, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Returns medians, the ratios within rounds, and the goal as the smallest accepted ratio."""
    goal = pair.time_goals.get(label)
    return {
        "case": label,
        "seconds": {name: vars(Spread.of(samples)) for name, samples in seconds.items()},
        "ratios": {f"{pair.peer}/{pair.ext}": vars(paired_ratio(seconds[pair.peer], seconds[pair.ext]))},
        "goal": None if goal is None else {"least_ratio": round(1 / goal, 4)},
        "rounds_seconds": {name: [round(sample, 4) for sample in samples] for name, samples in seconds.items()},
    }


def summarize_memory(case: Case, extra_mb: dict[str, list[float]]) -> dict[str, Any]:
    """Summarizes the peak extra memory over the size of the result."""
    return {
        "case": case.label,
        "result_mb": case.result_mb,
        "extra_over_result": {
            name: vars(Spread.of([sample / case.result_mb for sample in samples])) for name, samples in extra_mb.items()
        },
        "goal": {"largest_extra_over_result": MEMORY_GOAL},
        "rounds_extra_mb": {name: [round(sample, 1) for sample in samples] for name, samples in extra_mb.items()},
    }


def present(summaries: list[dict[str, Any]], pair: Pair) -> None:
    """Prints the tables."""
    times = [summary for summary in summaries if "seconds" in summary]
    memory = [summary for summary in summaries if "extra_over_result" in summary]
    (ratio,) = times[0]["ratios"]
    time_spreads = {one: [Spread(**summary["seconds"][one]) for summary in times] for one in pair.names}
    ratios = [Spread(**summary["ratios"][ratio]) for summary in times]
    memory_spreads = {one: [Spread(**summary["extra_over_result"][one]) for summary in memory] for one in pair.names}
    least = [summary["goal"] and summary["goal"]["least_ratio"] for summary in times]
    print_table(
        "seconds, 2 CPU workers, a fresh interpreter per sample: median [quartiles]",
        ["case", *pair.names, ratio, "goal", "met"],
        [
            [
                summary["case"],
                *(time_spreads[one][row].text(3) for one in pair.names),
                ratios[row].text(),
                "" if least[row] is None else f"≥ {least[row]:g}",
                "" if least[row] is None else goal_text(ratios[row].median >= least[row]),
            ]
            for row, summary in enumerate(times)
        ],
        caption=f"A ratio above 1 means that {pair.ext} is faster.",
    )
    print_table(
        "peak extra memory of the main process over the size of the result: median [quartiles]",
        ["case", *pair.names, "goal", "met"],
        [
            [
                summary["case"],
                *(memory_spreads[one][row].text() for one in pair.names),
                f"< {MEMORY_GOAL}",
                goal_text(memory_spreads[pair.ext][row].median < MEMORY_GOAL),
            ]
            for row, summary in enumerate(memory)
        ],
    )


def goal_text(is_met: bool) -> str:
    """Returns whether a goal is met."""
    return "yes" if is_met else "NO"


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default="ddp_spawn", help="Lightning's strategy to compare with, by name")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[10, 100, 400], help="MB of changed weights, for the case 'bring back'"
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds per case")
    parser.add_argument("--ray", action="store_true", help="compare ddp_ray_ext with Ray Train, on a separate cluster")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # argument of the new interpreters
    against.add_arguments(parser)
    arguments = parse(parser, "two rounds, up to 100 MB", rounds=2, sizes=[10, 100])
    if arguments.rounds < 1:
        parser.error("--rounds must be positive")
    if any(size < 1 or size % TENSOR_MB for size in arguments.sizes):
        parser.error(f"--sizes must be multiples of {TENSOR_MB}")
    if arguments.ray and arguments.against:
        parser.error("--against does not measure workers on Ray. Omit --ray.")
    if arguments.ray and not spawn_ray.is_available():
        parser.error("--ray requires Ray: pip install 'ray[train]'")
    if arguments.peer == EXT:
        parser.error(f"--peer {EXT} would compare {EXT} with itself")
    return arguments


def main() -> None:
    """Measures, prints the tables, writes the JSON file, and draws the plot."""
    arguments = parse_arguments()
    if arguments.measure:
        take_local_sample(arguments.measure)
        return
    cases = [Case("start"), *(Case("bring back", size) for size in arguments.sizes)]
    if not arguments.ray:
        cases[1:1] = [Case("large data")]
        cases += [Case("predictions", PREDICTIONS_MB), Case("script")]
    if arguments.against:
        part = Part("benchmarks.spawn:rows", arguments.rounds, {"cases": [asdict(case) for case in cases]})
        against.compare("spawn", arguments, [part])
        return
    with spawn_ray.cluster() if arguments.ray else nullcontext({}) as environment:
        pair = Pair(arguments.peer)
        if arguments.ray:
            pair = Pair(*spawn_ray.NAMES, TIME_GOALS_ON_RAY, environment)
        for name in pair.names:
            take_sample(Case("start"), name, pair.environment)
        summaries = [summary for case in cases for summary in measure(case, pair, arguments.rounds)]
    file_name = "spawn_ray" if arguments.ray else "spawn"
    present(summaries, pair)
    settings = {"peer": pair.peer, "rounds": arguments.rounds, "sizes": arguments.sizes}
    draw_plot(write_json(arguments.output, file_name, {"settings": settings, "results": summaries}))


if __name__ == "__main__":
    main()
