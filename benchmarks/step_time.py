"""Milliseconds per training step: Lightning's stock `ddp`, `ddp_ext`, and a hand-written torch DDP loop.

    python -m benchmarks.step_time
    python -m benchmarks.step_time --hidden 32 --rounds 21
    python -m benchmarks.step_time --quick
    python -m benchmarks.step_time --accelerator gpu
    python -m benchmarks.step_time --against HEAD~1    # two revisions in turns: see benchmarks/against.py

Two CPU ranks on this host, one torch thread each, a 64-h-h-10 MLP, 32 samples per rank and batch, SGD, data in memory.
Per width three cases: plain; one metric averaged over ranks per step (``self.log(..., sync_dist=True)``, in the
hand-written loop one all-reduce); four batches per optimizer step (in the hand-written loop ``no_sync`` on the first
three). Two more cases at the first width: with BatchNorm, whose buffers are broadcast, and with 500 small parameters.
The stock strategy runs over gloo; ``ddp_ext`` and the hand-written loop are measured over gloo and over ``shm``. "No
exchange" is Lightning on one device in each rank: the cost of a step without an exchange. "Raw torch, one rank" is the
hand-written loop with each rank in a separate process group of ``shm``.

With ``--accelerator gpu``, there are two ranks with a GPU each, over NCCL, and the program synchronizes with the GPUs
before it reads the clock. With one GPU there is one rank, which exchanges nothing and has no broadcast; the output
reports this.

Method: the ranks start once. In them, the contenders alternate, one short training each per round, in an order that
changes from round to round. Before a contender with another backend than the previous contender, the ranks leave their
process group and join another; this is not timed. A step is one batch, and its time includes all work of the loop
between two batches. The slower rank counts, because a job is as slow as its slowest rank. Ratios are computed within a
round. The program fails if the trained weights of contenders that exchange gradients differ.

Interpretation: a step of 2 ms consists mostly of latencies, of Python and of round trips. The ratio at h=32 shows the
cost of a loop, and is not visible with a model whose step takes 100 ms. On a host with as many ranks as cores, every
other process affects the results.
"""

import argparse
import ctypes
import gc
import operator
import sys
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import against
from benchmarks.contenders import (
    Case,
    Length,
    Training,
    check_same_weights,
    silence_lightning,
    train_alone,
    train_alternately,
    train_by_hand,
    train_by_hand_in_one_rank,
    train_over,
    train_with_lightning,
)
from benchmarks.plots import draw_plot
from benchmarks.rank_launcher import run_ranks
from benchmarks.report import (
    Spread,
    of_slowest_rank,
    paired_ratio,
    parse,
    print_goals,
    print_table,
    rotated,
    write_json,
)
from benchmarks.turns import Part, Row

EXT = "ddp_ext"
EXT_OVER_GLOO = "ddp_ext, gloo"
BY_HAND = "raw torch"
BY_HAND_OVER_SHM = "raw torch, shm"
BY_HAND_ONE_RANK = "raw torch, one rank"
ALONE = "no exchange"
ACCUMULATE = 4
#: Number of hidden layers of the net with 500 parameters.
NUM_HIDDEN = 249
#: Goals: ratio, case, and smallest accepted ratio.
LEAST = (
    (f"ddp/{EXT}", "h=32 plain", 3.1),
    (f"ddp/{EXT}", "h=32 metric", 3.2),
    (f"ddp/{EXT}", "h=32 accumulate 4", 2.8),
    (f"ddp/{EXT}", "h=32 BatchNorm", 2.8),
    (f"ddp/{EXT}", "h=1024 plain", 2.4),
)
#: Goals: ratio, case, and largest accepted ratio.
MOST = (
    (f"{EXT}/{ALONE}", "h=32 plain", 1.3),
    (f"{EXT}/{ALONE}", "h=32 metric", 1.2),
    (f"{EXT}/{ALONE}", "h=1024 plain", 1.25),
    (f"{BY_HAND_OVER_SHM}/{BY_HAND_ONE_RANK}", "h=32 plain", 1.15),
    (f"{BY_HAND_OVER_SHM}/{BY_HAND_ONE_RANK}", "h=1024 plain", 1.15),
)


def contenders_on(accelerator: str, peer: str) -> dict[str, Training]:
    """Returns the contenders: name → training."""
    if accelerator == "gpu":
        device = torch.device("cuda", torch.cuda.current_device())
        return {
            peer: partial(train_with_lightning, peer, accelerator="gpu"),
            EXT: partial(train_with_lightning, EXT, accelerator="gpu"),
            BY_HAND: partial(train_by_hand, device=device),
        }
    return {
        peer: partial(train_over, "gloo", partial(train_with_lightning, peer)),
        EXT: partial(train_over, "shm", partial(train_with_lightning, EXT)),
        EXT_OVER_GLOO: partial(train_over, "gloo", partial(train_with_lightning, EXT)),
        BY_HAND: partial(train_over, "gloo", train_by_hand),
        BY_HAND_OVER_SHM: partial(train_over, "shm", train_by_hand),
        BY_HAND_ONE_RANK: partial(train_over, "shm", train_by_hand_in_one_rank),
        ALONE: partial(train_over, "gloo", train_alone),
    }


def measure(cases: list[Case], accelerator: str, peer: str, rounds: int, length: Length) -> list[dict[str, Any]]:
    """Measures all contenders, round by round, case by case. Runs on every rank.

    Returns:
        Per case: ``ms`` (contender → one value per round), ``peak_mb`` (contender → by how much the memory of this rank
        grew in a training, in MB, one value per round), and after each round the memory in MB (``rss_mb``) and the
        number of threads (``threads``) of this rank.
    """
    silence_lightning()
    contenders = contenders_on(accelerator, peer)
    process = psutil.Process()
    results = []
    for case in cases:
        ms: dict[str, list[float]] = {name: [] for name in contenders}
        peak_mb: dict[str, list[float]] = {name: [] for name in contenders}
        rss_mb, threads = [], []
        for round_index in range(rounds):
            order = rotated(list(contenders), round_index)
            in_order = {name: partial(with_peak, contenders[name], peak_mb[name]) for name in order}
            for name, sample in train_alternately(in_order, case, length, reference=BY_HAND).items():
                ms[name].append(sample)
            rss_mb.append(round(process.memory_info().rss / 2**20, 1))
            threads.append(process.num_threads())
        if dist.get_rank() == 0:
            print(f"measured {case.label}", file=sys.stderr, flush=True)
        results.append({"ms": ms, "peak_mb": peak_mb, "rss_mb": rss_mb, "threads": threads})
    return results


def with_peak(train: Training, peak_mb: list[float], case: Case, length: Length) -> tuple[float, Tensor | None]:
    """Trains, and appends by how much the memory of this process grew meanwhile, in MB.

    Returns:
        What the training returns.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # returns freed memory to the system
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak
    result = train(case, length)
    lines = Path("/proc/self/status").read_text().splitlines()
    [peak_kib] = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    peak_mb.append(round((peak_kib * 1024 - before) / 1e6, 1))
    return result


def rows(accelerator: str, cases: list[dict[str, Any]], length: dict[str, int]) -> dict[str, Row]:
    """Returns the rows of ``--against``: ``ddp_ext`` per case, and the hand-written loop over gloo as a control."""
    silence_lightning()
    contenders = contenders_on(accelerator, "ddp")
    weights: dict[Case, Tensor] = {}

    def measure(case: Case, name: str) -> dict[str, float]:
        gc.collect()
        dist.barrier()
        if case not in weights:
            _, reference = contenders[BY_HAND](case, Length(**length))
            assert reference is not None
            weights[case] = reference
        ms, vector = contenders[name](case, Length(**length))
        assert vector is not None
        check_same_weights(case, {name: vector, BY_HAND: weights[case]}, reference=BY_HAND)
        return {f"{case.label}: {name}, ms": ms}

    return {
        f"{case.label}: {name}": Row(partial(measure, case, name), ["DDPStrategy"] if name != BY_HAND else [])
        for case in (Case(**one) for one in cases)
        for name in (EXT, EXT_OVER_GLOO, BY_HAND)
        if name in contenders
    }


def summarize(case: Case, peer: str, per_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges the measurements of one case; the slower rank of a round counts."""
    ms = of_slowest_rank([rank["ms"] for rank in per_rank])
    peak_mb = of_slowest_rank([rank["peak_mb"] for rank in per_rank])
    pairs = [(peer, EXT), (peer, EXT_OVER_GLOO), (BY_HAND, EXT), (BY_HAND, BY_HAND_OVER_SHM), (EXT, ALONE)]
    pairs.append((BY_HAND_OVER_SHM, BY_HAND_ONE_RANK))
    pairs = [(above, below) for above, below in pairs if below in ms]
    return {
        "case": case.label,
        "hidden": case.hidden,
        "logs_metric": case.logs_metric,
        "accumulate": case.accumulate,
        "ms_per_step": {name: vars(Spread.of(samples)) for name, samples in ms.items()},
        "ratios": {f"{above}/{below}": vars(paired_ratio(ms[above], ms[below])) for above, below in pairs},
        "peak_mb": {name: Spread.of(samples).median for name, samples in peak_mb.items()},
        "rounds_ms_per_step": {name: [round(sample, 4) for sample in samples] for name, samples in ms.items()},
        "rounds_rank_0": {name: per_rank[0][name] for name in ("rss_mb", "threads")},
    }


def growth(summaries: list[dict[str, Any]]) -> str:
    """Compares later with earlier rounds in one line: time of ``ddp_ext``, and memory and threads of rank 0."""
    drifts, megabytes = [], []
    for summary in summaries:
        times, rss_mb = summary["rounds_ms_per_step"][EXT], summary["rounds_rank_0"]["rss_mb"]
        half = len(times) // 2
        if half:
            drifts.append(Spread.of(times[-half:]).median / Spread.of(times[:half]).median)
            megabytes.append((rss_mb[-1] - rss_mb[half]) / (len(rss_mb) - 1 - half or 1))
    threads = [summary["rounds_rank_0"]["threads"][-1] for summary in summaries]
    if not drifts:
        return "Growth over rounds: requires at least two rounds."
    return (
        f"Time of later rounds over earlier rounds, {EXT}, median of the cases: {Spread.of(drifts).text()}. Rank 0:"
        f" {Spread.of(megabytes).median:+.2f} MB per round, {threads[0]} threads after the first case and"
        f" {threads[-1]} after the last."
    )


def compare_with_goals(summaries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the goals with the reached values: per goal and case ``wanted``, ``reached``, and ``is_met``."""
    ratios = {
        (ratio, summary["case"]): spread["median"]
        for summary in summaries
        for ratio, spread in summary["ratios"].items()
    }
    goals = [("at least", operator.ge, *goal) for goal in LEAST] + [("at most", operator.le, *goal) for goal in MOST]
    return [
        {
            "goal": ratio,
            "case": case,
            "wanted": f"{goal_text} {bound}",
            "reached": ratios[ratio, case],
            "is_met": is_within(ratios[ratio, case], bound),
        }
        for goal_text, is_within, ratio, case, bound in goals
        if (ratio, case) in ratios
    ]


def ranks_text(accelerator: str, world_size: int) -> str:
    """Describes the ranks, for titles."""
    if accelerator == "cpu":
        return f"{world_size} CPU ranks"
    name = torch.cuda.get_device_name(0)
    return f"{world_size} ranks on {name}" if world_size > 1 else f"1 rank, nothing exchanged, on {name}"


def present(summaries: list[dict[str, Any]], goals: list[dict[str, Any]], ranks: str) -> None:
    """Prints the tables."""
    names, ratios = list(summaries[0]["ms_per_step"]), list(summaries[0]["ratios"])
    labels = [summary["case"] for summary in summaries]
    times = {name: [Spread(**summary["ms_per_step"][name]) for summary in summaries] for name in names}
    factors = {ratio: [Spread(**summary["ratios"][ratio]) for summary in summaries] for ratio in ratios}
    print_table(
        f"ms per training step, {ranks}: median [quartiles]",
        ["case", *names],
        [[label, *(times[name][row].text() for name in names)] for row, label in enumerate(labels)],
        caption=growth(summaries),
    )
    print_table(
        "Ratio of times within a round: median over rounds [quartiles]",
        ["case", *ratios],
        [[label, *(factors[ratio][row].text() for ratio in ratios)] for row, label in enumerate(labels)],
        caption="A ratio above 1 means that the second contender is faster.",
    )
    print_table(
        "Largest growth of a rank's memory in a training, MB: median over rounds",
        ["case", *names],
        [
            [label, *(f"{summary['peak_mb'][name]:.1f}" for name in names)]
            for label, summary in zip(labels, summaries, strict=True)
        ],
    )
    if goals:
        print_goals(goals)


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="cpu", help="accelerator of the ranks")
    parser.add_argument("--peer", default="ddp", help="Lightning's strategy to compare with, by name")
    parser.add_argument("--hidden", type=int, nargs="+", default=[32, 256, 1024], help="widths of the hidden layers")
    parser.add_argument("--rounds", type=int, default=20, help="rounds per case; 12 rounds contain every order once")
    parser.add_argument("--steps", type=int, default=48, help="timed batches per round, made a multiple of 4")
    against.add_arguments(parser)
    arguments = parse(parser, "three rounds of 20 steps", rounds=3, steps=20)
    if arguments.rounds < 1 or arguments.steps < 1:
        parser.error("--rounds and --steps must be positive")
    if arguments.accelerator == "gpu" and not torch.cuda.is_available():
        parser.error("--accelerator gpu requires a GPU, but torch.cuda.is_available() is False")
    if arguments.peer == EXT:
        parser.error(f"--peer {EXT} would compare {EXT} with itself")
    return arguments


def main() -> None:
    """Measures, prints the tables, writes the JSON file, and draws the plot."""
    arguments = parse_arguments()
    # A multiple of the accumulation, so that the timed batches contain whole optimizer steps.
    length = Length(warmup=2 * ACCUMULATE, steps=-(-arguments.steps // ACCUMULATE) * ACCUMULATE)
    cases = [
        case
        for hidden in arguments.hidden
        for case in (Case(hidden), Case(hidden, logs_metric=True), Case(hidden, accumulate=ACCUMULATE))
    ]
    first = arguments.hidden[0]
    cases += [Case(first, has_batch_norm=True), Case(first, num_hidden=NUM_HIDDEN)]
    is_cpu = arguments.accelerator == "cpu"
    world_size = 2 if is_cpu else min(2, torch.cuda.device_count())
    backend = "gloo" if is_cpu else "nccl"
    if arguments.against:
        settings = {
            "accelerator": arguments.accelerator,
            "cases": [vars(case) for case in cases],
            "length": vars(length),
        }
        part = Part("benchmarks.step_time:rows", arguments.rounds, settings, world_size, backend)
        against.compare("step_time", arguments, [part])
        return
    per_rank = run_ranks(
        *(measure, cases, arguments.accelerator, arguments.peer, arguments.rounds, length),
        world_size=world_size,
        backend=backend,
    )
    summaries = [summarize(case, arguments.peer, list(ranks)) for case, *ranks in zip(cases, *per_rank, strict=True)]
    settings = {"peer": arguments.peer, "rounds": arguments.rounds, "warmup": length.warmup, "steps": length.steps}
    ranks, file_name = ranks_text(arguments.accelerator, world_size), "step_time" if is_cpu else "step_time_gpu"
    if not is_cpu:
        settings.update(ranks=ranks, world_size=world_size)
    goals = compare_with_goals(summaries) if is_cpu else []  # the goals are for gloo and shm
    present(summaries, goals, ranks)
    payload = {"settings": settings, "goals": goals, "growth": growth(summaries), "results": summaries}
    draw_plot(write_json(arguments.output, file_name, payload))


if __name__ == "__main__":
    main()
