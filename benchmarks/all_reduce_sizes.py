"""All-reduces from 4 B to 256 MB over gloo, ``shm`` and Horovod, for 2, 4, and 8 ranks, with copies in memory.

A part of ``python -m benchmarks.collectives``: float32, sum, in place (``torch.distributed.all_reduce``;
``hvd.allreduce_`` under ``mpirun``, if this Horovod has MPI), CPU ranks of this host, one torch thread each.

Method: gloo, ``shm``, and the copy alternate in the same processes, round by round, in a changing order; a ratio is
computed within a round. In a round, each contender runs a block of consecutive calls that all ranks start together: the
number of calls that take about 20 ms, or one. Large messages have fewer rounds. The slowest rank counts. The copy is
torch's ``copy_`` on one thread, from one tensor to another, while the other ranks copy too. Horovod is measured in
separate ranks, with the settings of ``horovod_ext``, so there are no ratios with Horovod.

Bus bandwidth (busbw in NVIDIA's nccl-tests) is 2(n-1)/n times the bytes of the message over the time of a call: the
bytes that each rank must send if no rank sends more than another. It is comparable with the limit of the hardware, here
the bytes that a rank copies per second.
"""

import gc
import sys
import time
from collections.abc import Callable
from functools import partial
from math import floor, log10
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.plots import draw_plot
from benchmarks.rank_launcher import run_ranks
from benchmarks.report import (
    Spread,
    of_slowest_rank,
    paired_ratio,
    print_goals,
    print_table,
    rotated,
    write_json,
)
from benchmarks.turns import Row

#: Message sizes in bytes.
SIZES = {
    "4 B": 4,
    "64 B": 64,
    "1 kB": 2**10,
    "16 kB": 2**14,
    "256 kB": 2**18,
    "1 MB": 2**20,
    "4 MB": 2**22,
    "16 MB": 2**24,
    "64 MB": 2**26,
    "256 MB": 2**28,
}
GLOO, SHM, HOROVOD, COPY = "gloo", "shm", "Horovod, MPI", "copy"
OVER_GLOO, OF_COPY = f"{GLOO}/{SHM}", f"{SHM} bus/{COPY}"
#: Duration of a block of calls, and of the rounds of one size unless these are fewer than the minimum, in seconds.
BLOCK_S = 0.02
ROUNDS_S = 1.5
#: Number of calls before a block, because ranks were idle before.
WARMUP_CALLS = 10
FEWEST_ROUNDS = 3
#: Goals for two ranks: ratio, size, and smallest accepted ratio.
GOALS_OF_TWO = ((OVER_GLOO, "4 B", 5.0), (OVER_GLOO, "4 MB", 8.0), (OF_COPY, "64 MB", 0.5))
#: Goal for more ranks, at every size: smallest accepted ratio to gloo.
GOAL_OF_MORE = 1.0

#: Function that reduces a tensor in place, or copies it.
Call = Callable[[Tensor], Any]


def measure_torch(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Measures the backends of torch, and the copy; see :func:`measure`. Runs on every rank."""
    groups = {GLOO: dist.group.WORLD, SHM: dist.new_group(backend="shm")}
    reductions: dict[str, Call] = {name: partial(dist.all_reduce, group=group) for name, group in groups.items()}
    # The copies of all sizes have one destination, as the reductions of all sizes have one tensor.
    target = torch.zeros(max(SIZES.values()) // 4)
    return measure({**reductions, COPY: lambda tensor: target[: tensor.numel()].copy_(tensor)}, rounds)


def measure_horovod(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Measures Horovod; see :func:`measure`. Runs on every rank of ``mpirun``."""
    from lightning_strategies_ext.horovod.runtime import set_defaults_for_cpus_over_mpi

    set_defaults_for_cpus_over_mpi()
    import horovod.torch as hvd

    hvd.init()

    def reduce(tensor: Tensor) -> None:
        # One name per size: Horovod's ranks negotiate each new name.
        hvd.allreduce_(tensor, op=hvd.Sum, name=f"{tensor.nbytes}")

    results = measure({HOROVOD: reduce}, rounds)
    hvd.shutdown()
    return results


def rows() -> dict[str, Row]:
    """Returns the rows of ``--against``: all-reduces over ``shm``, and the smallest one over gloo as a control."""
    # Collective: all ranks create groups together, so they are created here and not in a turn.
    groups = {SHM: dist.new_group(backend="shm"), GLOO: dist.group.WORLD}
    num_ranks, num_calls = dist.get_world_size(), {}

    def measure(row: str, size: str, backend: str) -> dict[str, float]:
        tensor, call = torch.ones(SIZES[size] // 4), partial(dist.all_reduce, group=groups[backend])
        if row not in num_calls:
            num_calls[row] = calibrate(backend, call, tensor)[0]
        tensor.zero_()
        time_block(call, tensor, min(WARMUP_CALLS, num_calls[row]))
        return {f"{row}, us": time_block(call, tensor, num_calls[row]) * 1e6}

    chosen = [*((size, SHM) for size in SIZES), (next(iter(SIZES)), GLOO)]
    names = {f"{num_ranks} ranks, {size}: {backend}": (size, backend) for size, backend in chosen}
    return {row: Row(partial(measure, row, *of_row)) for row, of_row in names.items()}


def measure(contenders: dict[str, Call], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Measures the contenders in turns, size by size, round by round. The default group uses gloo.

    Returns:
        Size → contender → microseconds per call, one value per round.
    """
    # Written once, so that its pages are allocated.
    whole = torch.ones(max(SIZES.values()) // 4)
    results = {}
    for size, num_bytes in SIZES.items():
        tensor = whole[: num_bytes // 4]
        calls = {name: calibrate(name, call, tensor) for name, call in contenders.items()}
        round_s = sum(num_calls * call_s for num_calls, call_s in calls.values())
        num_rounds = min(rounds, max(FEWEST_ROUNDS, int(ROUNDS_S / round_s)))
        us: dict[str, list[float]] = {name: [] for name in contenders}
        gc.collect()
        for round_index in range(num_rounds):
            for name in rotated(list(contenders), round_index):
                us[name].append(time_block(contenders[name], tensor, calls[name][0]) * 1e6)
        results[size] = us
    return results


def calibrate(name: str, call: Call, tensor: Tensor) -> tuple[int, float]:
    """Warms up the contender, and checks the sum.

    Returns:
        Number of calls in a block, and seconds per call; the same on all ranks.

    Raises:
        RuntimeError: If the sum is wrong.
    """
    num_calls = 1
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor.fill_(rank + 1)
    call_s = time_block(call, tensor, num_calls)
    if name != COPY and not (tensor == world_size * (world_size + 1) / 2).all():
        raise RuntimeError(f"{name}: the sum of {tensor.nbytes} B over {world_size} ranks is wrong.")
    # Zeros, because repeated sums do not change them.
    tensor.zero_()
    while True:
        slowest = torch.tensor(call_s, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        call_s = slowest.item()
        if num_calls * call_s >= BLOCK_S:
            return max(1, round(BLOCK_S / call_s)), call_s
        num_calls *= 2
        call_s = time_block(call, tensor, num_calls)


def time_block(call: Call, tensor: Tensor, num_calls: int) -> float:
    """Returns the seconds per call, over a block of calls that all ranks start together."""
    dist.barrier()
    started_at = time.perf_counter()
    for _ in range(num_calls):
        call(tensor)
    return (time.perf_counter() - started_at) / num_calls


def has_mpi() -> bool:
    """Returns whether Horovod with MPI is installed; otherwise prints what is omitted."""
    from lightning_strategies_ext.horovod_build.installed import horovod_problem

    problem = horovod_problem()
    if problem is None:
        import horovod.torch as hvd

        if hvd.mpi_built():
            return True
        problem = "this Horovod was built without MPI"
    print(f"Horovod with MPI is omitted: {problem}", file=sys.stderr, flush=True)
    return False


def summarize(num_ranks: int, size: str, us: dict[str, list[float]]) -> dict[str, Any]:
    """Summarizes the measurements of one size, in which the slower rank of a round counts."""
    factors = {name: 1.0 if name == COPY else 2 * (num_ranks - 1) / num_ranks for name in us}
    gb_per_s = {
        name: [factors[name] * SIZES[size] / sample * 1e-3 for sample in samples] for name, samples in us.items()
    }
    return {
        "case": f"{num_ranks} ranks, {size}",
        "num_ranks": num_ranks,
        "size": size,
        "num_bytes": SIZES[size],
        "us_per_call": {name: vars(Spread.of(samples)) for name, samples in us.items()},
        "bus_gb_per_s": {name: vars(Spread.of(samples)) for name, samples in gb_per_s.items()},
        "ratios": {
            OVER_GLOO: vars(paired_ratio(us[GLOO], us[SHM])),
            OF_COPY: vars(paired_ratio(gb_per_s[SHM], gb_per_s[COPY])),
        },
        "rounds_us_per_call": {name: [round(sample, 2) for sample in samples] for name, samples in us.items()},
    }


def compare_with_goals(summaries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the goals with the reached values: per goal and case ``wanted``, ``reached``, and ``is_met``."""
    goals = []
    for summary in summaries:
        wanted = [(ratio, least) for ratio, size, least in GOALS_OF_TWO if size == summary["size"]]
        for ratio, least in wanted if summary["num_ranks"] == 2 else [(OVER_GLOO, GOAL_OF_MORE)]:
            reached = summary["ratios"][ratio]["median"]
            goals.append(
                {
                    "goal": ratio,
                    "case": summary["case"],
                    "wanted": f"at least {least:g}",
                    "reached": reached,
                    "is_met": reached >= least,
                }
            )
    return goals


def present(summaries: list[dict[str, Any]], goals: list[dict[str, Any]]) -> None:
    """Prints the tables."""
    names = list(summaries[0]["us_per_call"])
    print_table(
        "All-reduce by message size, microseconds per call: median [quartiles]",
        ["case", *names],
        [[one["case"], *(three_digits(Spread(**one["us_per_call"][name])) for name in names)] for one in summaries],
    )
    print_table(
        "All-reduce by message size, bus bandwidth, GB/s: median",
        ["case", *names],
        [[one["case"], *(f"{one['bus_gb_per_s'][name]['median']:.3g}" for name in names)] for one in summaries],
        caption=f"{COPY}: bytes copied per second by each rank.",
    )
    print_table(
        "Ratios within a round: median over rounds [quartiles]",
        ["case", OVER_GLOO, OF_COPY],
        [[one["case"], *(Spread(**ratio).text() for ratio in one["ratios"].values())] for one in summaries],
        caption=f"{OVER_GLOO}: ratio of times; above 1 means that {SHM} is faster. {OF_COPY}: bus bandwidth of {SHM}"
        " over the bandwidth of the copy.",
    )
    print_goals(goals)


def three_digits(spread: Spread) -> str:
    """Formats a spread with about three significant digits, because the numbers differ by a factor of a million."""
    return spread.text(max(0, 2 - floor(log10(spread.median))))


def run(numbers_of_ranks: list[int], rounds: int, directory: Path) -> None:
    """Measures, prints the tables, writes the JSON file, and draws the plot."""
    with_horovod = has_mpi()
    summaries = []
    for num_ranks in numbers_of_ranks:
        us = of_slowest_rank_by_size(run_ranks(measure_torch, rounds, world_size=num_ranks))
        if with_horovod:
            from benchmarks.horovod_ranks import run_ranks_under

            per_rank = run_ranks_under("mpirun", measure_horovod, rounds, num_ranks=num_ranks)
            for size, row in of_slowest_rank_by_size(per_rank).items():
                us[size].update(row)
        summaries += [summarize(num_ranks, size, us[size]) for size in SIZES]
        print(f"measured {num_ranks} ranks", file=sys.stderr, flush=True)
    goals = compare_with_goals(summaries)
    present(summaries, goals)
    settings = {"rounds": rounds, "block_s": BLOCK_S, "rounds_s": ROUNDS_S, "fewest_rounds": FEWEST_ROUNDS}
    draw_plot(write_json(directory, "message_sizes", {"settings": settings, "goals": goals, "results": summaries}))


def of_slowest_rank_by_size(per_rank: list[dict[str, dict[str, list[float]]]]) -> dict[str, dict[str, list[float]]]:
    """Merges the measurements of the ranks, size by size."""
    return {size: of_slowest_rank([rank[size] for rank in per_rank]) for size in SIZES}
