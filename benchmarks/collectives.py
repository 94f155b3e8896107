"""Microseconds per collective: strategy methods of ``ddp_ext`` and of a stock strategy, and all-reduces by size.

    python -m benchmarks.collectives
    python -m benchmarks.collectives --part operations --rounds 36 --calls 200
    python -m benchmarks.collectives --part sizes
    python -m benchmarks.collectives --quick
    python -m benchmarks.collectives --against HEAD~1    # two revisions in turns: see benchmarks/against.py

All-reduces by size are measured by :mod:`benchmarks.all_reduce_sizes`, whose docstring describes the method. The
following describes the strategy methods.

There are two CPU ranks on this host. Contenders are the stock strategy over gloo, and ``ddp_ext`` over gloo and over
``shm``. All contenders run in the same two processes. Per operation, they alternate, round by round. In a round, each
contender runs a block of calls, and the ratio is computed within the round. The slower rank counts. Before a contender
with another backend than the previous contender, the ranks leave their process group and join another. This, and the
next ten calls, are not timed.

Between two calls, each rank computes briefly (``--gap-us``, subtracted from the result), as programs do. With
consecutive calls, gloo's threads would never sleep, and ranks would run in phase, so that a few microseconds of Python
in one contender would appear as a hundred.

A broadcast has rank 0 and rank 1 as source in alternation. A constant source would run ahead of the other rank, and the
block would measure the number of calls in flight, not the time of a call.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from benchmarks import against, all_reduce_sizes
from benchmarks.contenders import silence_lightning
from benchmarks.plots import draw_plot
from benchmarks.rank_launcher import join, run_ranks
from benchmarks.report import (
    Spread,
    of_slowest_rank,
    paired_ratio,
    parse,
    print_table,
    rotated,
    write_json,
)
from benchmarks.turns import Part, Row

EXT = "ddp_ext"
EXT_OVER_GLOO = "ddp_ext, gloo"
WARMUP_CALLS = 10
MEGABYTE_OF_FLOATS = 2**20 // 4
SMALL_DICT = {"monitor": "val_loss", "best": 0.25, "epoch": 3, "stopped": False}
LARGE_OBJECT = {"state": bytes(100_000)}

#: Function that calls an operation once, with the strategy, the tensor of the operation, and the source rank.
Call = Callable[[Any, torch.Tensor, int], Any]

#: Operation → (number of floats it works on, one call).
OPERATIONS: dict[str, tuple[int, Call]] = {
    "reduce (mean), scalar": (1, lambda strategy, tensor, _: strategy.reduce(tensor, reduce_op="mean")),
    "reduce (mean), 1 MB": (
        MEGABYTE_OF_FLOATS,
        lambda strategy, tensor, _: strategy.reduce(tensor, reduce_op="mean"),
    ),
    "barrier": (0, lambda strategy, _, __: strategy.barrier()),
    "broadcast, bool": (0, lambda strategy, _, src: strategy.broadcast(True, src)),
    "broadcast, small dict": (0, lambda strategy, _, src: strategy.broadcast(SMALL_DICT, src)),
    "broadcast, 100 kB object": (0, lambda strategy, _, src: strategy.broadcast(LARGE_OBJECT, src)),
    "all_gather, scalar": (1, lambda strategy, tensor, _: strategy.all_gather(tensor)),
    "all_gather, 1 MB": (MEGABYTE_OF_FLOATS, lambda strategy, tensor, _: strategy.all_gather(tensor)),
    "reduce_boolean_decision": (0, lambda strategy, _, __: strategy.reduce_boolean_decision(True)),
}


def make_strategy(name: str, backend: str) -> Any:
    """Returns a strategy in the state in which a Trainer calls its collectives, over a group with this backend."""
    join(backend)
    trainer = pl.Trainer(accelerator="cpu", devices=dist.get_world_size(), strategy=name, logger=False)
    trainer.strategy.setup_environment()
    return trainer.strategy


def measure(peer: str, rounds: int, calls: int, gap_us: float) -> dict[str, dict[str, list[float]]]:
    """Measures all contenders, operation by operation, round by round. Runs on every rank.

    Returns:
        Operation → contender → microseconds per call, one value per round.
    """
    silence_lightning()
    contenders = {peer: (peer, "gloo"), EXT_OVER_GLOO: (EXT, "gloo"), EXT: (EXT, "shm")}
    results = {}
    for operation, (num_floats, call) in OPERATIONS.items():
        # Ones, because repeated means do not change them.
        tensors = {name: torch.ones(num_floats) for name in contenders}
        values = {name: call(make_strategy(*contender), tensors[name], 0) for name, contender in contenders.items()}
        check_same_result(operation, values)
        us: dict[str, list[float]] = {name: [] for name in contenders}
        for round_index in range(rounds):
            for name in rotated(list(contenders), round_index):
                strategy = make_strategy(*contenders[name])
                gc.collect()
                time_block(strategy, call, tensors[name], WARMUP_CALLS, gap_us)
                us[name].append(time_block(strategy, call, tensors[name], calls, gap_us))
        if dist.get_rank() == 0:
            print(f"measured {operation}", file=sys.stderr, flush=True)
        results[operation] = us
    return results


def rows(calls: int, gap_us: float) -> dict[str, Row]:
    """Returns the rows of ``--against``: the methods of ``ddp_ext`` over gloo and over ``shm``."""
    silence_lightning()

    def measure(row: str, operation: str, backend: str) -> dict[str, float]:
        num_floats, call = OPERATIONS[operation]
        strategy, tensor = make_strategy(EXT, backend), torch.ones(num_floats)
        gc.collect()
        time_block(strategy, call, tensor, WARMUP_CALLS, gap_us)
        return {f"{row}, us": time_block(strategy, call, tensor, calls, gap_us)}

    names = {f"{operation}: {backend}": (operation, backend) for operation in OPERATIONS for backend in ("shm", "gloo")}
    return {row: Row(partial(measure, row, *of_row), ["DDPStrategy"]) for row, of_row in names.items()}


def time_block(strategy: Any, call: Call, tensor: torch.Tensor, calls: int, gap_us: float) -> float:
    """Returns the microseconds per call without the gaps, over a block of calls that all ranks start together."""
    world_size = dist.get_world_size()
    dist.barrier()
    started_at = time.perf_counter()
    for index in range(calls):
        call(strategy, tensor, index % world_size)
        gap_ends_at = time.perf_counter() + gap_us * 1e-6
        while time.perf_counter() < gap_ends_at:
            pass
    return (time.perf_counter() - started_at) * 1e6 / calls - gap_us


def check_same_result(operation: str, values: dict[str, Any]) -> None:
    """Checks that the contenders have returned the same value.

    Args:
        operation: Name of the operation.
        values: Value that the strategy of each contender has returned.

    Raises:
        RuntimeError: If the strategies return different values.
    """
    first, *others = [value.tolist() if isinstance(value, torch.Tensor) else value for value in values.values()]
    if any(other != first for other in others):
        raise RuntimeError(f"{operation}: {', '.join(values)} return different values.")


def summarize(operation: str, peer: str, per_rank: list[dict[str, dict[str, list[float]]]]) -> dict[str, Any]:
    """Merges the measurements of one operation; the slower rank of a round counts."""
    us = of_slowest_rank([rank[operation] for rank in per_rank])
    return {
        "operation": operation,
        "us_per_call": {name: vars(Spread.of(samples)) for name, samples in us.items()},
        "ratios": {
            f"{peer}/{name}": vars(paired_ratio(us[peer], samples)) for name, samples in us.items() if name != peer
        },
        "rounds_us_per_call": {name: [round(sample, 2) for sample in samples] for name, samples in us.items()},
    }


def present(summaries: list[dict[str, Any]]) -> None:
    """Prints the table."""
    names, ratios = list(summaries[0]["us_per_call"]), list(summaries[0]["ratios"])
    rows = [
        [
            summary["operation"],
            *(Spread(**summary["us_per_call"][name]).text(0) for name in names),
            *(Spread(**summary["ratios"][ratio]).text() for ratio in ratios),
        ]
        for summary in summaries
    ]
    print_table(
        "microseconds per call, 2 CPU ranks: median [quartiles]",
        ["operation", *names, *ratios],
        rows,
        caption=f"A ratio above 1 means that {EXT} is faster.",
    )


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default="ddp", help="Lightning's strategy to compare with, by name")
    parser.add_argument("--part", choices=("operations", "sizes", "all"), default="all", help="what to measure")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="numbers of ranks, for part sizes")
    parser.add_argument("--rounds", type=int, default=18, help="rounds per operation or size; fewer for large messages")
    parser.add_argument("--calls", type=int, default=100, help="calls per round and contender, for part operations")
    parser.add_argument("--gap-us", type=float, default=100, help="computation between calls, for part operations")
    against.add_arguments(parser)
    arguments = parse(parser, "three rounds of 20 calls", rounds=3, calls=20)
    if arguments.rounds < 1 or arguments.calls < 1:
        parser.error("--rounds and --calls must be positive")
    if min(arguments.ranks) < 2:
        parser.error("--ranks must be at least 2: one rank has no peer to reduce with")
    if arguments.peer == EXT:
        parser.error(f"--peer {EXT} would compare {EXT} with itself")
    return arguments


def compare_operations(arguments: argparse.Namespace) -> None:
    """Measures the strategy methods."""
    per_rank = run_ranks(measure, arguments.peer, arguments.rounds, arguments.calls, arguments.gap_us)
    summaries = [summarize(operation, arguments.peer, per_rank) for operation in OPERATIONS]
    settings = {name: getattr(arguments, name) for name in ("peer", "rounds", "calls", "gap_us")}
    present(summaries)
    draw_plot(write_json(arguments.output, "collectives", {"settings": settings, "results": summaries}))


def main() -> None:
    """Measures, prints the tables, writes the JSON file, and draws the plot."""
    arguments = parse_arguments()
    if arguments.against:
        settings = {"calls": arguments.calls, "gap_us": arguments.gap_us}
        operations = Part("benchmarks.collectives:rows", arguments.rounds, settings, num_ranks=2)
        sizes = [Part("benchmarks.all_reduce_sizes:rows", arguments.rounds, num_ranks=num) for num in arguments.ranks]
        parts = {"operations": [operations], "sizes": sizes, "all": [operations, *sizes]}
        against.compare("collectives", arguments, parts[arguments.part])
        return
    if arguments.part != "sizes":
        compare_operations(arguments)
    if arguments.part != "operations":
        all_reduce_sizes.run(arguments.ranks, arguments.rounds, arguments.output)


if __name__ == "__main__":
    main()
