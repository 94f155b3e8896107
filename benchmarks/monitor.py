"""What ``CommunicationMonitor`` costs: milliseconds per training step with and without it, and what it says of them.

    python -m benchmarks.monitor
    python -m benchmarks.monitor --hidden 32 --rounds 41

The ranks, the net and the way of measuring are those of :mod:`benchmarks.step_time`. Contenders: ``ddp_ext``, the same
with a monitor, and the same with a callback that has the monitor's hooks and does nothing in them, which is what
Lightning takes for calling any such callback. Nothing is drawn: that comes after the last step.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders import Case, Length, silence_lightning, train_in_turn, train_over, train_with_lightning
from benchmarks.ranks import run_ranks
from benchmarks.report import (
    DEFAULT_OUTPUT,
    Panel,
    Spread,
    draw,
    of_slowest_rank,
    paired_ratio,
    print_goals,
    print_table,
    rotated,
    write_json,
)
from lightning_strategies_ext import CommunicationMonitor

PLAIN, HOOKS, MONITORED = "ddp_ext", "empty callback", "monitor"
PAIRS = ((MONITORED, PLAIN), (HOOKS, PLAIN), (MONITORED, HOOKS))
#: Of a monitor by default, as of the Trainer.
EVERY_N_STEPS = 50
#: The ratio of a step with a monitor to one without is to be at most this.
AT_MOST = 1.02


class EmptyCallback(pl.Callback):
    """Has the hooks that Lightning calls in each step, whatever a callback does in them."""


def contenders(directory: str) -> dict[str, Callable[[Case, Length], tuple[float, Tensor]]]:
    """What takes part: name → a training."""
    callbacks: dict[str, Callable[[], list[pl.Callback]]] = {
        PLAIN: list,
        HOOKS: lambda: [EmptyCallback()],
        MONITORED: lambda: [CommunicationMonitor(EVERY_N_STEPS, directory=directory, picture=False)],
    }
    return {
        name: partial(train_over, "shm", partial(train_with_lightning, "ddp_ext", callbacks=make))
        for name, make in callbacks.items()
    }


def measure(cases: list[Case], rounds: int, length: Length, directory: str) -> list[dict[str, list[float]]]:
    """Runs on every rank: all contenders, round by round, case by case; milliseconds by name."""
    silence_lightning()
    results = []
    taking_part = contenders(directory)
    for case in cases:
        ms: dict[str, list[float]] = {name: [] for name in taking_part}
        for round_index in range(rounds):
            in_order = {name: taking_part[name] for name in rotated(list(taking_part), round_index)}
            for name, sample in train_in_turn(in_order, case, length, reference=PLAIN).items():
                ms[name].append(sample)
        if dist.get_rank() == 0:
            print(f"measured {case.label}", file=sys.stderr, flush=True)
        results.append(ms)
    return results


def summarize(case: Case, ms: dict[str, list[float]]) -> dict[str, Any]:
    """What was measured of one case."""
    return {
        "case": case.label,
        "hidden": case.hidden,
        "ms_per_step": {name: vars(Spread.of(samples)) for name, samples in ms.items()},
        "ratios": {f"{above}/{below}": vars(paired_ratio(ms[above], ms[below])) for above, below in PAIRS},
        "rounds_ms_per_step": {name: [round(sample, 4) for sample in samples] for name, samples in ms.items()},
    }


def present(summaries: list[dict[str, Any]], directory: Path) -> list[dict[str, Any]]:
    """Prints the tables and draws the plot; returns what was to be reached beside what was."""
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
    draw(
        *(directory, "monitor", "Training step with and without a CommunicationMonitor, 2 CPU ranks"),
        [
            Panel("ms per step", labels, times, is_logarithmic=True),
            Panel("ratio of times", labels, factors, line_at=AT_MOST, line_label="2 % more"),
        ],
    )
    return goals


def main() -> None:
    """Measures, then prints, writes and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[32, 1024], help="widths of the hidden layers")
    parser.add_argument("--rounds", type=int, default=24, help="rounds per case; 6 give every order once")
    parser.add_argument("--steps", type=int, default=200, help="timed batches per round, made whole windows")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="directory of the JSON and the plot")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.steps < 1:
        parser.error("--rounds and --steps must be positive")
    cases = [Case(hidden) for hidden in arguments.hidden]
    # What a monitor does once is over with its first window: it connects to the store, and observes the first steps.
    length = Length(warmup=EVERY_N_STEPS + 10, steps=-(-arguments.steps // EVERY_N_STEPS) * EVERY_N_STEPS)
    with tempfile.TemporaryDirectory() as directory:
        per_rank = run_ranks(measure, cases, arguments.rounds, length, directory)
    merged = [of_slowest_rank(ranks) for ranks in zip(*per_rank, strict=True)]
    summaries = [summarize(case, ms) for case, ms in zip(cases, merged, strict=True)]
    goals = present(summaries, arguments.output)
    settings = {
        "rounds": arguments.rounds,
        "warmup": length.warmup,
        "steps": length.steps,
        "every_n_steps": EVERY_N_STEPS,
    }
    write_json(arguments.output, "monitor", {"settings": settings, "goals": goals, "results": summaries})


if __name__ == "__main__":
    main()
