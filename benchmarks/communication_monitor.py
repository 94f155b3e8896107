"""Cost of ``CommunicationMonitor``: milliseconds per training step with and without it, and the values that it reports.

    python -m benchmarks.communication_monitor
    python -m benchmarks.communication_monitor --hidden 32 --rounds 41

The ranks, the net, and the method are those of :mod:`benchmarks.step_time`. Contenders: ``ddp_ext``, ``ddp_ext`` with a
monitor, and ``ddp_ext`` with a callback that has the monitor's hooks and does nothing in them. The last contender shows
the cost of calling a callback. Plots are not included, because the monitor draws them after the last step.

On a busy host, the times of steps of two ranks vary by more than the difference to be measured. A second table
therefore measures one rank, which waits for no peer. It has the lower quartile of single steps for each kind of work
that the monitor does in a step, and the mean of the kinds, weighted by their frequencies. The thread that transfers
windows to rank 0 is not included.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders import Case, Length, silence_lightning, train_in_rounds, train_over, train_with_lightning
from benchmarks.plots import draw_plot
from benchmarks.rank_launcher import run_ranks
from benchmarks.report import (
    DEFAULT_OUTPUT,
    Spread,
    of_slowest_rank,
    paired_ratio,
    print_goals,
    print_table,
    rotated,
    write_json,
)
from lightning_strategies_ext import CommunicationMonitor
from lightning_strategies_ext.monitoring.step_recorder import StepRecorder

PLAIN, HOOKS, MONITORED = "ddp_ext", "empty callback", "monitor"
PAIRS = ((MONITORED, PLAIN), (HOOKS, PLAIN), (MONITORED, HOOKS))
#: Default interval of a monitor, and of the Trainer's logging.
EVERY_N_STEPS = 50
#: Goal: largest ratio of a step with a monitor to a step without.
AT_MOST = 1.02


class Ends(pl.Callback):
    """Records the end of each step, in nanoseconds."""

    def __init__(self) -> None:
        self.at: list[int] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        """Reads the clock."""
        self.at.append(time.perf_counter_ns())


class EmptyCallback(pl.Callback):
    """Callback with empty hooks for each step."""


def callbacks_in(directory: str) -> dict[str, Callable[[], list[pl.Callback]]]:
    """Returns the contenders: name → function that creates the callbacks."""
    return {
        PLAIN: list,
        HOOKS: lambda: [EmptyCallback()],
        MONITORED: lambda: [CommunicationMonitor(EVERY_N_STEPS, dirpath=directory, plot=False)],
    }


def contenders(directory: str) -> dict[str, Callable[[Case, Length], tuple[float, Tensor]]]:
    """Returns the contenders: name → training."""
    return {
        name: partial(train_over, "shm", partial(train_with_lightning, "ddp_ext", callbacks=make))
        for name, make in callbacks_in(directory).items()
    }


def observed(num_steps: int) -> list[int]:
    """Returns the steps that a monitor observes."""
    switched: list[bool] = []

    def fail(error: Exception) -> None:
        raise error

    monitor = CommunicationMonitor()
    recorder = StepRecorder(
        *(0, "", EVERY_N_STEPS, monitor.observed_steps, 0, switched.append),
        *(None, None, None, lambda windows: None, fail),
    )
    found = []
    for step in range(num_steps):
        recorder.on_fetch_start(step)
        found += [step] * switched[-1]
    return found


def measure_steps(cases: list[Case], rounds: int, length: Length, directory: str) -> list[dict[str, float]]:
    """Measures the additional microseconds of steps of each kind over steps without a callback, on one rank."""
    silence_lightning()
    steps = np.arange(length.total)
    is_observed = np.isin(steps, observed(length.total))
    kinds = {
        "observed": is_observed & (steps % EVERY_N_STEPS > 0),
        "closes a window": steps % EVERY_N_STEPS == 0,
        "counted": ~is_observed & (steps % EVERY_N_STEPS > 0),
    }
    results = []
    for case in cases:
        us: dict[str, list[Any]] = {name: [] for name in callbacks_in(directory)}
        for round_index in range(rounds):
            for name in rotated(list(us), round_index):
                ends = Ends()
                make = callbacks_in(directory)[name]
                gc.collect()
                train_with_lightning("ddp_ext", case, length, callbacks=lambda make=make, ends=ends: [*make(), ends])
                us[name].append(np.diff(ends.at) / 1e3)  # from the second step on

        def quartile(name: str, mask: Any = None, us: dict[str, list[Any]] = us) -> float:
            own = [each[length.warmup - 1 :] for each in us[name]]
            if mask is not None:
                own = [each[mask[length.warmup :]] for each in own]
            return float(np.percentile(np.concatenate(own), 25))

        plain = quartile(PLAIN)
        longer = {kind: quartile(MONITORED, mask) - plain for kind, mask in kinds.items()}
        shares = {kind: float(mask[length.warmup :].mean()) for kind, mask in kinds.items()}
        mean = sum(longer[kind] * shares[kind] for kind in kinds)
        results.append({PLAIN: plain, HOOKS: quartile(HOOKS) - plain, **longer, "mean": mean, "share": mean / plain})
        print(f"measured steps of {case.label}", file=sys.stderr, flush=True)
    return results


def measure(cases: list[Case], rounds: int, length: Length, directory: str) -> list[dict[str, list[float]]]:
    """Measures all contenders, round by round, case by case. Runs on every rank; returns milliseconds by name."""
    silence_lightning()
    results = []
    taking_part = contenders(directory)
    for case in cases:
        results.append(train_in_rounds(taking_part, case, length, rounds, reference=PLAIN))
        if dist.get_rank() == 0:
            print(f"measured {case.label}", file=sys.stderr, flush=True)
    return results


def summarize(case: Case, ms: dict[str, list[float]]) -> dict[str, Any]:
    """Summarizes the measurements of one case."""
    return {
        "case": case.label,
        "hidden": case.hidden,
        "ms_per_step": {name: vars(Spread.of(samples)) for name, samples in ms.items()},
        "ratios": {f"{above}/{below}": vars(paired_ratio(ms[above], ms[below])) for above, below in PAIRS},
        "rounds_ms_per_step": {name: [round(sample, 4) for sample in samples] for name, samples in ms.items()},
    }


def present(summaries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prints the tables; returns the goals with the reached values."""
    labels = [summary["case"] for summary in summaries]
    names, ratios = list(summaries[0]["ms_per_step"]), list(summaries[0]["ratios"])
    times = {name: [Spread(**summary["ms_per_step"][name]) for summary in summaries] for name in names}
    factors = {ratio: [Spread(**summary["ratios"][ratio]) for summary in summaries] for ratio in ratios}
    for title, columns, digits in (
        ("ms per training step, 2 CPU ranks: median [quartiles]", times, 3),
        ("Ratio of times within a round: median over rounds [quartiles]", factors, 3),
    ):
        rows = [[label, *(columns[name][row].text(digits) for name in columns)] for row, label in enumerate(labels)]
        print_table(title, ["case", *columns], rows)
    goals = [
        {
            "goal": f"{MONITORED}/{PLAIN}",
            "case": label,
            "wanted": f"at most {AT_MOST}",
            "reached": spread.median,
            "is_met": spread.median <= AT_MOST,
        }
        for label, spread in zip(labels, factors[f"{MONITORED}/{PLAIN}"], strict=True)
    ]
    print_goals(goals)
    return goals


def main() -> None:
    """Measures, prints the tables, writes the JSON file, and draws the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[32, 1024], help="widths of the hidden layers")
    parser.add_argument("--rounds", type=int, default=24, help="rounds per case; 6 rounds contain every order once")
    parser.add_argument("--steps", type=int, default=200, help="timed batches per round, rounded up to whole windows")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="directory of the JSON and the plot")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.steps < 1:
        parser.error("--rounds and --steps must be positive")
    cases = [Case(hidden) for hidden in arguments.hidden]
    # A monitor does its work at the start in its first window: it connects to the store, and observes the first steps.
    length = Length(warmup=EVERY_N_STEPS + 10, steps=-(-arguments.steps // EVERY_N_STEPS) * EVERY_N_STEPS)
    with tempfile.TemporaryDirectory() as directory:
        [steps] = run_ranks(measure_steps, cases, arguments.rounds, length, directory, world_size=1)
        per_rank = run_ranks(measure, cases, arguments.rounds, length, directory)
    merged = [of_slowest_rank(ranks) for ranks in zip(*per_rank, strict=True)]
    summaries = [summarize(case, ms) for case, ms in zip(cases, merged, strict=True)]
    print_table(
        "One rank: us of an empty step, additional us of other steps (lower quartiles), and their mean",
        ["case", *list(steps[0])[:-1], "of a step"],
        [
            [case.label, *(f"{value:.1f}" for value in list(own.values())[:-1]), f"{own['share']:.2%}"]
            for case, own in zip(cases, steps, strict=True)
        ],
    )
    goals = present(summaries)
    settings = {
        "rounds": arguments.rounds,
        "warmup": length.warmup,
        "steps": length.steps,
        "every_n_steps": EVERY_N_STEPS,
    }
    payload = {"settings": settings, "goals": goals, "steps_us": steps, "results": summaries}
    draw_plot(write_json(arguments.output, "monitor", payload))


if __name__ == "__main__":
    main()
