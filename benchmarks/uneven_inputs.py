"""Cost of ``uneven_inputs`` while all ranks have data: milliseconds per training step, compared with stock.

    python -m benchmarks.uneven_inputs
    python -m benchmarks.uneven_inputs --hidden 32 --rounds 21

The ranks, the net, and the method are those of :mod:`benchmarks.step_time`. Contenders: stock ``ddp`` and ``ddp_ext``
with a loader that has a length, with and without ``uneven_inputs="join"``. The same contenders are also measured with a
stream of unknown length, for which ranks exchange in each step whether they have a batch.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders import (
    Case,
    Length,
    silence_lightning,
    train_in_rounds,
    train_over,
    train_with_lightning,
)
from benchmarks.rank_launcher import run_ranks
from benchmarks.report import Spread, of_slowest_rank, paired_ratio, parse, print_table, write_json
from lightning_strategies_ext import DDPStrategy

PLAIN, PLAIN_STREAM = "ddp_ext", "ddp_ext, stream"
PAIRS = (
    ("ddp", PLAIN),
    ("ddp, stream", PLAIN_STREAM),
    (PLAIN_STREAM, PLAIN),
    ("join", PLAIN),
    ("join, stream", PLAIN_STREAM),
)


def contenders() -> dict[str, Callable[[Case, Length], tuple[float, Tensor]]]:
    """Returns the contenders: name → training."""
    join = partial(DDPStrategy, uneven_inputs="join")
    return {
        "ddp": partial(train_over, "gloo", partial(train_with_lightning, "ddp")),
        "ddp, stream": partial(train_over, "gloo", partial(train_with_lightning, "ddp", is_streamed=True)),
        PLAIN: partial(train_over, "shm", partial(train_with_lightning, "ddp_ext")),
        PLAIN_STREAM: partial(train_over, "shm", partial(train_with_lightning, "ddp_ext", is_streamed=True)),
        "join": partial(train_over, "shm", partial(train_with_lightning, join)),
        "join, stream": partial(train_over, "shm", partial(train_with_lightning, join, is_streamed=True)),
    }


def measure(cases: list[Case], rounds: int, length: Length) -> list[dict[str, list[float]]]:
    """Measures all contenders, round by round, case by case. Runs on every rank; returns milliseconds by name."""
    silence_lightning()
    results = []
    for case in cases:
        results.append(train_in_rounds(contenders(), case, length, rounds, reference=PLAIN))
        if dist.get_rank() == 0:
            print(f"measured {case.label}", file=sys.stderr, flush=True)
    return results


def main() -> None:
    """Measures, prints the tables, and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[32, 1024], help="width of the hidden layers")
    parser.add_argument("--rounds", type=int, default=11, help="rounds per case")
    parser.add_argument("--steps", type=int, default=150, help="timed batches per round")
    arguments = parse(parser, "three rounds of 20 steps", rounds=3, steps=20)
    cases = [Case(hidden) for hidden in arguments.hidden]
    per_rank = run_ranks(measure, cases, arguments.rounds, Length(warmup=8, steps=arguments.steps))
    merged = [of_slowest_rank(ranks) for ranks in zip(*per_rank, strict=True)]
    names = list(merged[0])
    ratios = [{f"{above} / {below}": paired_ratio(ms[above], ms[below]) for above, below in PAIRS} for ms in merged]
    print_table(
        "ms per training step, 2 CPU ranks: median [quartiles]",
        ["case", *names],
        [[case.label, *(Spread.of(ms[name]).text() for name in names)] for case, ms in zip(cases, merged, strict=True)],
    )
    print_table(
        "Ratio of times within a round: median over rounds [quartiles]",
        ["case", *ratios[0]],
        [[case.label, *(ratio.text() for ratio in own.values())] for case, own in zip(cases, ratios, strict=True)],
    )
    results: list[dict[str, Any]] = [
        {
            "case": case.label,
            "ms_per_step": {name: vars(Spread.of(ms[name])) for name in names},
            "ratios": {name: vars(ratio) for name, ratio in own.items()},
            "rounds_ms": ms,
        }
        for case, ms, own in zip(cases, merged, ratios, strict=True)
    ]
    settings = {"rounds": arguments.rounds, "steps": arguments.steps}
    write_json(arguments.output, "uneven_inputs", {"settings": settings, "results": results})


if __name__ == "__main__":
    main()
