"""Milliseconds per training step of ``dp_ext`` with one and two replicas, over the plain loop on one device.

    python -m benchmarks.dp
    python -m benchmarks.dp --hidden 32 --rounds 40
    python -m benchmarks.dp --quick

One process, whole batches of 64 samples, SGD, data in memory. Cases: a 64-h-h-10 MLP per width, one width with a
metric logged in every step, and the small convolutional net of ``examples/digits.py``. The plain loop is Lightning's
Trainer with ``strategy="auto", devices=1``. Beside it on the CPU: one replica; two that take turns, as they do by
default there; two at once (``DataParallelStrategy(sequential=False)``). On GPUs, if there are any: one replica and, if
there are two GPUs, two replicas and a hand-written loop around ``torch.nn.DataParallel``. What this machine cannot
measure is said below the tables.

How it is measured: the contenders take turns, one short training each per round, in an order that changes from round
to round. A step is one batch, and its time includes all that the loop does between two batches; GPUs are waited for
when the clock is read. Ratios are taken within a round. All contenders must arrive at the same weights, else the
program fails. torch has the threads that it takes by default; each Python thread that computes has as many to itself,
so with two replicas there are more of them than cores, and other processes on the host show all the more.

How to read it: a ratio is a contender's time over the plain loop's, so smaller is better and 1 is the plain loop. Two
replicas on one CPU share the cores that the plain loop has to itself, and two halves of a batch read the weights twice:
they can hardly be faster than 1. The MLP at h=32 computes almost nothing and says what making replicas, splitting and
gathering cost. On GPUs a step must compute for longer than that before the second one is worth it. With a metric
``dp_ext`` can be below 1 with one replica: Lightning's ``self.log`` moves each value to where it already is, and ours
does not.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import DataParallel, functional
from torch.nn.utils import parameters_to_vector

from benchmarks.contenders import (
    LEARNING_RATE,
    Batches,
    Case,
    Length,
    make_net,
    silence_lightning,
    time_of_completion,
    train_in_rounds,
    train_in_turn,
    train_with_lightning,
)
from benchmarks.report import Panel, Spread, draw, paired_ratio, parse, print_table, write_json
from lightning_strategies_ext.pytorch.dp import DataParallelStrategy

OURS = "dp_ext"
SINGLE = "single device"
BATCH_SIZE = 64
#: Width of the MLP that also logs a metric, and channels of the convolutional net.
HIDDEN_WITH_METRIC, CHANNELS = 256, 32


@dataclass(frozen=True)
class Arena:
    """Contenders that train on the same kind of device.

    Attributes:
        name: The kind of device.
        contenders: Name → what trains.
    """

    name: str
    contenders: dict[str, Callable[[Case, Length], tuple[float, Tensor]]]


def arenas() -> list[Arena]:
    """What this machine can measure."""
    on_cpu = partial(train_with_lightning, accelerator="cpu")
    found = [
        Arena(
            "CPU",
            {
                SINGLE: partial(on_cpu, "auto", devices=1),
                f"{OURS} 1": partial(on_cpu, OURS, devices=1),
                f"{OURS} 2 in turn": partial(on_cpu, OURS, devices=2),
                f"{OURS} 2 at once": partial(on_cpu, partial(DataParallelStrategy, sequential=False), devices=2),
            },
        )
    ]
    if torch.cuda.is_available():
        on_gpu = partial(train_with_lightning, accelerator="gpu")
        contenders = {SINGLE: partial(on_gpu, "auto", devices=1), f"{OURS} 1": partial(on_gpu, OURS, devices=1)}
        if torch.cuda.device_count() > 1:
            contenders[f"{OURS} 2"] = partial(on_gpu, OURS, devices=2)
            contenders["DataParallel 2"] = train_data_parallel_by_hand
        found.append(Arena("GPU", contenders))
    return found


def what_is_missing() -> list[str]:
    """What this machine cannot measure, and why."""
    if not torch.cuda.is_available():
        return ["Not measured: anything on GPUs, since torch finds none here."]
    if torch.cuda.device_count() == 1:
        return ["Not measured: two replicas on GPUs, and torch.nn.DataParallel, since there is one GPU here."]
    return []


def train_data_parallel_by_hand(case: Case, length: Length) -> tuple[float, Tensor]:
    """Trains on two GPUs with nothing but torch.

    Returns:
        Milliseconds per step, and the trained weights as one vector.
    """
    root_device = torch.device("cuda", 0)
    batches = Batches(case, length)
    model = DataParallel(make_net(case).to(root_device), device_ids=[0, 1])
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    started_at = 0.0
    for index, (features, labels) in enumerate(batches):
        loss = functional.cross_entropy(model(features.to(root_device)), labels.to(root_device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if case.logs_metric:
            loss.detach().clone()
        if index == length.warmup - 1:
            started_at = time_of_completion()
    ms_per_step = (time_of_completion() - started_at) * 1e3 / length.steps
    return ms_per_step, parameters_to_vector(model.parameters()).detach().cpu()


def measure(arena: Arena, case: Case, rounds: int, length: Length) -> dict[str, Any]:
    """Measures a case round by round."""
    # What torch sets up once for a case must not count for whoever is first.
    train_in_turn(arena.contenders, case, Length(warmup=1, steps=1), reference=SINGLE)
    ms = train_in_rounds(arena.contenders, case, length, rounds, reference=SINGLE)
    print(f"measured {case.label} on the {arena.name}", file=sys.stderr, flush=True)
    return {
        "arena": arena.name,
        "case": case.label,
        "hidden": case.hidden,
        "logs_metric": case.logs_metric,
        "is_convolutional": case.is_convolutional,
        "ms_per_step": {name: vars(Spread.of(samples)) for name, samples in ms.items()},
        "ratios": {
            f"{name}/{SINGLE}": vars(paired_ratio(samples, ms[SINGLE]))
            for name, samples in ms.items()
            if name != SINGLE
        },
        "rounds_ms_per_step": {name: [round(sample, 4) for sample in samples] for name, samples in ms.items()},
    }


def present(summaries: list[dict[str, Any]], directory: Path) -> None:
    """Prints a table per kind of device and draws the plot."""
    panels = []
    for arena in dict.fromkeys(summary["arena"] for summary in summaries):
        here = [summary for summary in summaries if summary["arena"] == arena]
        labels = [summary["case"] for summary in here]
        times, ratios = (
            {name: [Spread(**summary[kind][name]) for summary in here] for name in here[0][kind]}
            for kind in ("ms_per_step", "ratios")
        )
        panels += [
            Panel(f"{arena}: ms per step", labels, times, is_logarithmic=True),
            Panel(
                f"{arena}: time over the single device's",
                labels,
                ratios,
                line_at=1,
                line_label=SINGLE,
                colors=("tab:orange", "tab:green", "tab:red"),  # as in the panel beside it
            ),
        ]
        # Two tables: one with all columns would be wider than a terminal.
        columns = {"ms per training step": times, "time over the single device's": ratios}
        for title, spreads in columns.items():
            print_table(
                f"{title}, {arena}, one process, batches of {BATCH_SIZE}: median [quartiles]",
                ["case", *spreads],
                [[label, *(spreads[name][row].text() for name in spreads)] for row, label in enumerate(labels)],
                caption=f"Smaller is better. {devices_in_words()}",
            )
    for line in [*what_is_missing(), *what_was_disturbed(summaries)]:
        print(line)
    draw(directory, "dp", "dp_ext: a training step with replicas in one process", panels)


def what_was_disturbed(summaries: list[dict[str, Any]]) -> list[str]:
    """The cases whose ratios say nothing: the reference itself did not take the same time in each round.

    OpenMP's threads wait for each other by spinning. Where another process takes a core from one of them, a step takes
    many times as long, and less so in two replicas: with more threads than cores, OpenMP hardly spins.
    """
    lines = []
    for summary in summaries:
        spread = Spread(**summary["ms_per_step"][SINGLE])
        if spread.median > 2 * spread.minimum or spread.upper_quartile > 1.5 * spread.lower_quartile:
            lines.append(
                f"Not to be used: {summary['case']} on the {summary['arena']}. The {SINGLE} took"
                f" {spread.minimum:.2f} to {spread.maximum:.2f} ms: others compute on this host."
            )
    return lines


def devices_in_words() -> str:
    """What computes here."""
    return ", ".join([f"torch has {torch.get_num_threads()} CPU threads", *gpu_names()]) + "."


def gpu_names() -> list[str]:
    """The GPUs of this machine."""
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[32, 256, 1024], help="widths of the hidden layers")
    parser.add_argument("--rounds", type=int, default=24, help="rounds per case; 8 give every order once")
    parser.add_argument("--steps", type=int, default=48, help="timed batches per round")
    arguments = parse(parser, "four rounds of 20 steps", rounds=4, steps=20)
    if arguments.rounds < 1 or arguments.steps < 1:
        parser.error("--rounds and --steps must be positive")
    return arguments


def main() -> None:
    """Measures, then prints, writes and draws."""
    arguments = parse_arguments()
    silence_lightning()
    # With TF32 a GPU's convolutions depend on the number of samples, and the weights of two replicas could not be
    # compared with those of one.
    torch.backends.cudnn.allow_tf32 = False
    length = Length(warmup=8, steps=arguments.steps)
    cases = [
        *(Case(hidden, batch_size=BATCH_SIZE) for hidden in arguments.hidden),
        Case(HIDDEN_WITH_METRIC, logs_metric=True, batch_size=BATCH_SIZE),
        Case(CHANNELS, is_convolutional=True, batch_size=BATCH_SIZE),
    ]
    summaries = [measure(arena, case, arguments.rounds, length) for arena in arenas() for case in cases]
    present(summaries, arguments.output)
    settings = {
        "rounds": arguments.rounds,
        "warmup": length.warmup,
        "steps": length.steps,
        "batch_size": BATCH_SIZE,
        "torch_threads": torch.get_num_threads(),
        "gpus": gpu_names(),
    }
    doubts = {"not_measured": what_is_missing(), "not_to_be_used": what_was_disturbed(summaries)}
    write_json(arguments.output, "dp", {"settings": settings, **doubts, "results": summaries})


if __name__ == "__main__":
    main()
