"""Parts of a training step: microseconds per part, with DDP's reducer and without it.

    python -m benchmarks.step_parts
    python -m benchmarks.step_parts --hidden 32 --rounds 24

The ranks, the nets, and the method are those of :mod:`benchmarks.step_time`, over ``shm``. A part is a
difference of times within one round:

- computation: Lightning on one device in each rank, which exchanges nothing.
- hooks: the additional time of a step whose all-reduces of gradients return immediately and change nothing. With the
  reducer, this is DDP's forward pass, its copies, and its futures. With the direct exchange, it is the hooks in
  autograd and the copies of small gradients.
- all-reduces: the additional time of a step with these all-reduces. It includes waiting for the slower rank.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders import (
    Case,
    Length,
    Training,
    silence_lightning,
    train_alone,
    train_in_rounds,
    train_over,
    train_with_lightning,
)
from benchmarks.rank_launcher import run_ranks
from benchmarks.report import Spread, of_slowest_rank, parse, print_table, write_json
from benchmarks.step_time import ALONE, NUM_HIDDEN
from lightning_strategies_ext import DDPStrategy
from lightning_strategies_ext.identities import FIELDS, GRADIENTS
from lightning_strategies_ext.shm.native import AllReduceCall, NativeAllReduce

#: Engine → the bucket size that selects it.
ENGINES = {"direct": None, "reducer": 25}


@contextmanager
def without_all_reduces() -> Iterator[None]:
    """Makes each native all-reduce of gradients return immediately, without a change of its tensor."""
    begin = NativeAllReduce.begin

    def begin_others(self: NativeAllReduce, call: AllReduceCall) -> bool:
        is_of_gradients = call.identity & FIELDS[0] == GRADIENTS
        return is_of_gradients or begin(self, call)

    NativeAllReduce.begin = begin_others  # type: ignore[method-assign]
    try:
        yield
    finally:
        NativeAllReduce.begin = begin  # type: ignore[method-assign]


def train(engine: str, case: Case, length: Length) -> tuple[float, Tensor]:
    """Trains with ``ddp_ext``, whose gradients an engine exchanges."""
    return train_with_lightning(partial(DDPStrategy, bucket_cap_mb=ENGINES[engine]), case, length)


def train_without_all_reduces(engine: str, case: Case, length: Length) -> tuple[float, None]:
    """Trains as :func:`train` does; the weights of the ranks differ."""
    with without_all_reduces():
        return train(engine, case, length)[0], None


def contenders() -> dict[str, Training]:
    """Returns the contenders: name → training."""
    found: dict[str, Training] = {ALONE: partial(train_over, "shm", train_alone)}
    for engine in ENGINES:
        found[engine] = partial(train_over, "shm", partial(train, engine))
        found[f"{engine}, no all-reduces"] = partial(train_over, "shm", partial(train_without_all_reduces, engine))
    return found


def measure(cases: list[Case], rounds: int, length: Length) -> list[dict[str, list[float]]]:
    """Measures all contenders, round by round, case by case. Runs on every rank; returns milliseconds by name."""
    silence_lightning()
    results = []
    for case in cases:
        results.append(train_in_rounds(contenders(), case, length, rounds, reference="direct"))
        if dist.get_rank() == 0:
            print(f"measured {case.label}", flush=True)
    return results


def parts_of(ms: dict[str, list[float]]) -> dict[str, Spread]:
    """Returns the microseconds per part of a step, by engine and part."""
    parts = {"computation": Spread.of([1e3 * sample for sample in ms[ALONE]])}
    for engine in ENGINES:
        pairs = {"hooks": (f"{engine}, no all-reduces", ALONE), "all-reduces": (engine, f"{engine}, no all-reduces")}
        for part, (longer, shorter) in pairs.items():
            differences = [1e3 * (a - b) for a, b in zip(ms[longer], ms[shorter], strict=True)]
            parts[f"{engine}: {part}"] = Spread.of(differences)
    return parts


def main() -> None:
    """Measures, prints the table, and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[32, 1024], help="widths of the hidden layers")
    parser.add_argument("--rounds", type=int, default=20, help="rounds per case; 10 rounds contain every order once")
    parser.add_argument("--steps", type=int, default=100, help="timed batches per round")
    arguments = parse(parser, "three rounds of 20 steps", rounds=3, steps=20)
    cases = [case for hidden in arguments.hidden for case in (Case(hidden), Case(hidden, logs_metric=True))]
    cases.append(Case(arguments.hidden[0], num_hidden=NUM_HIDDEN))
    length = Length(warmup=8, steps=arguments.steps)
    per_rank = run_ranks(measure, cases, arguments.rounds, length)
    merged = [of_slowest_rank(ranks) for ranks in zip(*per_rank, strict=True)]
    parts = [parts_of(ms) for ms in merged]
    print_table(
        "Microseconds per part of a training step, 2 CPU ranks: median [quartiles]",
        ["case", *parts[0]],
        [[case.label, *(spread.text(0) for spread in own.values())] for case, own in zip(cases, parts, strict=True)],
    )
    results: list[dict[str, Any]] = [
        {"case": case.label, "microseconds": {name: vars(spread) for name, spread in own.items()}, "rounds_ms": ms}
        for case, own, ms in zip(cases, parts, merged, strict=True)
    ]
    settings = {"rounds": arguments.rounds, "warmup": length.warmup, "steps": length.steps}
    write_json(arguments.output, "step_parts", {"settings": settings, "results": results})


if __name__ == "__main__":
    main()
