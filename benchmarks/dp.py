"""Milliseconds per training step of ``dp_ext`` with one and two replicas, over the plain loop on one device.

    python -m benchmarks.dp
    python -m benchmarks.dp --hidden 32 --rounds 40
    python -m benchmarks.dp --quick

One process, whole batches of 64 samples, SGD, data in memory. Cases: a 64-h-h-10 MLP per width, one width with a metric
logged in every step, and the small convolutional net of ``examples/digits.py``. The plain loop is Lightning's Trainer
with ``strategy="auto", devices=1``. Further contenders on the CPU: one replica; two sequential replicas, which is the
default there; two concurrent replicas (``DataParallelStrategy(sequential=False)``). On GPUs, if there are any: one
replica and, with two GPUs, two replicas and a hand-written loop around ``torch.nn.DataParallel``. The program lists
what this machine cannot measure below the tables.

Method: the contenders alternate, one short training each per round, in an order that changes from round to round. A
step is one batch. Its time includes all work of the loop between two batches. On GPUs, the program synchronizes with
the GPUs before it reads the clock. Ratios are computed within a round. The program fails if the trained weights of the
contenders differ. torch has its default number of threads. Each Python thread that computes has as many threads, so
with two replicas, there are more threads than cores, and other processes on the host have a larger effect.

Interpretation: a ratio is the time of a contender over the time of the plain loop, so smaller is better. Two replicas
on one CPU share the cores that the plain loop uses alone, and read the weights twice, so they can hardly be faster than
the plain loop. The MLP at h=32 computes almost nothing, and shows the cost of replicating, splitting, and gathering. On
GPUs, a step must compute for longer than this to benefit from the second GPU. With a metric and one replica, ``dp_ext``
can be faster than the plain loop, because Lightning's ``self.log`` copies each value to the device that it is on, and
``dp_ext`` does not.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
    train_alternately,
    train_in_rounds,
    train_with_lightning,
)
from benchmarks.plots import draw_plot
from benchmarks.report import Spread, paired_ratio, parse, print_table, write_json
from lightning_strategies_ext.pytorch.dp import DataParallelStrategy

EXT = "dp_ext"
SINGLE = "single device"
BATCH_SIZE = 64
#: Width of the MLP that also logs a metric, and number of channels of the convolutional net.
HIDDEN_WITH_METRIC, CHANNELS = 256, 32


@dataclass(frozen=True)
class Arena:
    """Contenders that train on the same kind of device.

    Attributes:
        name: The kind of device.
        contenders: Name → training.
    """

    name: str
    contenders: dict[str, Callable[[Case, Length], tuple[float, Tensor]]]


def arenas() -> list[Arena]:
    """Returns the arenas that this machine can measure."""
    on_cpu = partial(train_with_lightning, accelerator="cpu")
    found = [
        Arena(
            "CPU",
            {
                SINGLE: partial(on_cpu, "auto", devices=1),
                f"{EXT} 1": partial(on_cpu, EXT, devices=1),
                f"{EXT} 2 in turn": partial(on_cpu, EXT, devices=2),
                f"{EXT} 2 at once": partial(on_cpu, partial(DataParallelStrategy, sequential=False), devices=2),
            },
        )
    ]
    if torch.cuda.is_available():
        on_gpu = partial(train_with_lightning, accelerator="gpu")
        contenders = {SINGLE: partial(on_gpu, "auto", devices=1), f"{EXT} 1": partial(on_gpu, EXT, devices=1)}
        if torch.cuda.device_count() > 1:
            contenders[f"{EXT} 2"] = partial(on_gpu, EXT, devices=2)
            contenders["DataParallel 2"] = train_data_parallel_by_hand
        found.append(Arena("GPU", contenders))
    return found


def missing_measurements() -> list[str]:
    """Returns what this machine cannot measure, and the reason."""
    if not torch.cuda.is_available():
        return ["Not measured: replicas on GPUs, because torch detects no GPU."]
    if torch.cuda.device_count() == 1:
        return ["Not measured: two replicas on GPUs, and torch.nn.DataParallel, because this machine has one GPU."]
    return []


def train_data_parallel_by_hand(case: Case, length: Length) -> tuple[float, Tensor]:
    """Trains on two GPUs with torch only.

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
    # A first training per case is not counted, because torch initializes resources in it.
    train_alternately(arena.contenders, case, Length(warmup=1, steps=1), reference=SINGLE)
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


def present(summaries: list[dict[str, Any]]) -> None:
    """Prints two tables per kind of device."""
    for arena in dict.fromkeys(summary["arena"] for summary in summaries):
        arena_summaries = [summary for summary in summaries if summary["arena"] == arena]
        labels = [summary["case"] for summary in arena_summaries]
        times, ratios = (
            {name: [Spread(**summary[kind][name]) for summary in arena_summaries] for name in arena_summaries[0][kind]}
            for kind in ("ms_per_step", "ratios")
        )
        # Two tables, because one table would be wider than a terminal.
        columns = {"ms per training step": times, "time over the single device's": ratios}
        for title, spreads in columns.items():
            print_table(
                f"{title}, {arena}, one process, batches of {BATCH_SIZE}: median [quartiles]",
                ["case", *spreads],
                [[label, *(spreads[name][row].text() for name in spreads)] for row, label in enumerate(labels)],
                caption=f"Smaller is better. {devices_text()}",
            )
    for line in [*missing_measurements(), *unreliable_measurements(summaries)]:
        print(line)


def unreliable_measurements(summaries: list[dict[str, Any]]) -> list[str]:
    """Returns messages about cases without valid ratios, because the times of the reference vary between rounds.

    OpenMP's threads wait for each other by spinning. If another process uses the core of a thread, a step takes many
    times as long. Two replicas are affected less: with more threads than cores, OpenMP hardly spins.
    """
    lines = []
    for summary in summaries:
        spread = Spread(**summary["ms_per_step"][SINGLE])
        if spread.median > 2 * spread.minimum or spread.upper_quartile > 1.5 * spread.lower_quartile:
            lines.append(
                f"Not valid: {summary['case']} on the {summary['arena']}. The {SINGLE} took"
                f" {spread.minimum:.2f} to {spread.maximum:.2f} ms: other processes compute on this host."
            )
    return lines


def devices_text() -> str:
    """Describes the devices of this machine."""
    return ", ".join([f"torch has {torch.get_num_threads()} CPU threads", *gpu_names()]) + "."


def gpu_names() -> list[str]:
    """Returns the GPUs of this machine."""
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[32, 256, 1024], help="widths of the hidden layers")
    parser.add_argument("--rounds", type=int, default=24, help="rounds per case; 8 rounds contain every order once")
    parser.add_argument("--steps", type=int, default=48, help="timed batches per round")
    arguments = parse(parser, "four rounds of 20 steps", rounds=4, steps=20)
    if arguments.rounds < 1 or arguments.steps < 1:
        parser.error("--rounds and --steps must be positive")
    return arguments


def main() -> None:
    """Measures, prints the tables, writes the JSON file, and draws the plot."""
    arguments = parse_arguments()
    silence_lightning()
    # With TF32, the convolutions of a GPU depend on the number of samples, and the weights of two replicas could not be
    # compared with those of one.
    torch.backends.cudnn.allow_tf32 = False
    length = Length(warmup=8, steps=arguments.steps)
    cases = [
        *(Case(hidden, batch_size=BATCH_SIZE) for hidden in arguments.hidden),
        Case(HIDDEN_WITH_METRIC, logs_metric=True, batch_size=BATCH_SIZE),
        Case(CHANNELS, is_convolutional=True, batch_size=BATCH_SIZE),
    ]
    summaries = [measure(arena, case, arguments.rounds, length) for arena in arenas() for case in cases]
    present(summaries)
    settings = {
        "rounds": arguments.rounds,
        "warmup": length.warmup,
        "steps": length.steps,
        "batch_size": BATCH_SIZE,
        "torch_threads": torch.get_num_threads(),
        "gpus": gpu_names(),
    }
    problems = {"not_measured": missing_measurements(), "not_to_be_used": unreliable_measurements(summaries)}
    draw_plot(write_json(arguments.output, "dp", {"settings": settings, **problems, "results": summaries}))


if __name__ == "__main__":
    main()
