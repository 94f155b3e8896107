"""Ranks of :mod:`benchmarks.horovod`: their start by a launcher of Horovod, and their measurements.

In addition to Horovod, a rank has a gloo process group of torch, for Lightning's stock `ddp`.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

from benchmarks.contenders import (
    LEARNING_RATE,
    Batches,
    Case,
    Length,
    make_net,
    silence_lightning,
    train_alternately,
    train_in_rounds,
    train_with_lightning,
)
from benchmarks.horovod_commands import BIN, start_of
from benchmarks.rank_launcher import collect, free_port, rank_main
from lightning_strategies_ext.horovod.launch_info import LaunchInfo

EXT = "horovod_ext"
BY_HAND = "raw Horovod"
BY_HAND_TUNED = "raw, our settings"
PEER = "ddp"
NUM_RANKS = 2


def run_ranks_under(launcher: str, function: Callable[..., Any], *args: Any, num_ranks: int = NUM_RANKS) -> list[Any]:
    """Runs ``function(*args)`` on ranks of ``horovodrun`` or ``mpirun``.

    Args:
        launcher: Name of the launcher.
        function: Function that is importable by name, as the types of its arguments.
        *args: Arguments of the function, the same on all ranks.
        num_ranks: Number of ranks.

    Returns:
        Results of the function, in rank order.

    Raises:
        RuntimeError: If a rank fails. The other ranks exit, too, because their collectives fail.
    """
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "arguments").write_bytes(pickle.dumps((free_port(), function, args)))
        results = [Path(directory, f"rank{rank}") for rank in range(num_ranks)]
        for file in results:
            file.touch()
        start = start_of(launcher, num_ranks, "/dev/shm")
        path = os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)])
        ended = subprocess.run(
            [*start, sys.executable, "-m", __name__, directory],
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        # The file with the results of a rank is read as the messages of a pipe are.
        per_rank = collect([Connection(os.open(file, os.O_RDONLY), writable=False) for file in results])
    if ended.returncode:
        raise RuntimeError(f"{launcher} exited with code {ended.returncode}, after its ranks had sent their results.")
    return per_rank


def main() -> None:
    """Calls the function, and sends its result. Runs in each rank."""
    directory = Path(sys.argv[1])
    port, function, arguments = pickle.loads((directory / "arguments").read_bytes())
    launch = LaunchInfo.from_environment()
    assert launch is not None, "no launcher of Horovod has started this process"
    # Otherwise Lightning would read the ranks of `ddp` from mpi4py, if it is installed.
    os.environ.update(RANK=str(launch.rank), TORCHELASTIC_RUN_ID="benchmark")
    sender = Connection(os.open(directory / f"rank{launch.rank}", os.O_WRONLY), readable=False)
    rank_main(function, arguments, launch.rank, launch.size, port, sender)


def measure_others(cases: list[Case], rounds: int, length: Length) -> list[dict[str, Any]]:
    """Measures `ddp` before Horovod starts, then the hand-written loop with Horovod's defaults. Runs on every rank.

    Returns:
        Per case ``ms``: contender → one value per round.
    """
    silence_lightning()
    stock = partial(train_with_lightning, PEER)
    # Horovod's thread communicates in each cycle, also while `ddp` trains. Horovod over MPI cannot be shut down and
    # started again, so `ddp` is measured first and not in turn.
    alone = [
        [train_alternately({PEER: stock}, case, length, reference=PEER)[PEER] for _ in range(rounds)] for case in cases
    ]
    import horovod.torch as hvd

    hvd.init()
    results = measure_alternately({BY_HAND: train_by_hand}, cases, rounds, length)
    for case, result, ms in zip(cases, results, alone, strict=True):
        train_alternately({BY_HAND: train_by_hand, PEER: stock}, case, Length(1, 3), reference=BY_HAND)
        result["ms"][PEER] = ms
    return results


def measure_ext(cases: list[Case], rounds: int, length: Length) -> list[dict[str, Any]]:
    """Measures `horovod_ext`, and the hand-written loop with its settings of Horovod. Runs on every rank.

    Returns:
        Per case: ``ms`` (contender → one value per round), and what one step passes to Horovod (``calls`` and
        ``num_bytes``).
    """
    silence_lightning()
    train_with_lightning(EXT, cases[0], Length(1, 1))  # starts Horovod
    contenders = {EXT: partial(train_with_lightning, EXT), BY_HAND_TUNED: train_by_hand}
    results = measure_alternately(contenders, cases, rounds, length)
    for case, result in zip(cases, results, strict=True):
        result.update(count_traffic(case))
    return results


def measure_alternately(
    contenders: dict[str, Any], cases: list[Case], rounds: int, length: Length
) -> list[dict[str, Any]]:
    """Returns per case ``ms``: contender → one value per round, in an order that changes from round to round."""
    results: list[dict[str, Any]] = []
    for case in cases:
        reference = next(iter(contenders))
        results.append({"ms": train_in_rounds(contenders, case, length, rounds, reference)})
    return results


def train_by_hand(case: Case, length: Length) -> tuple[float, Tensor]:
    """Trains with torch and Horovod only, as in Horovod's documentation.

    Returns:
        Milliseconds per step on this rank, and the trained weights as one vector.
    """
    import horovod.torch as hvd

    batches, model = Batches(case, length), make_net(case)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=case.accumulate,
    )
    started_at = 0.0
    for index, (features, labels) in enumerate(batches):
        if index % case.accumulate == 0:
            optimizer.zero_grad()
        loss = functional.cross_entropy(model(features), labels)
        (loss / case.accumulate).backward()
        if (index + 1) % case.accumulate == 0:
            optimizer.step()
        if index == length.warmup - 1:
            started_at = time.perf_counter()
    ms_per_step = (time.perf_counter() - started_at) * 1e3 / length.steps
    return ms_per_step, parameters_to_vector(model.parameters()).detach()


def count_traffic(case: Case) -> dict[str, float]:
    """Counts the calls of `horovod_ext` to Horovod for gradients, and their bytes, per batch."""
    import horovod.torch as hvd

    length = Length(warmup=case.accumulate, steps=case.accumulate)
    num_bytes: list[int] = []
    calls = {"allreduce_async_": hvd.allreduce_async_, "grouped_allreduce_async_": hvd.grouped_allreduce_async_}

    def counting(call: str, tensors: Tensor | list[Tensor], **kwargs: Any) -> Any:
        if "gradient." in kwargs["name"]:
            num_bytes.append(sum(tensor.nbytes for tensor in ([tensors] if isinstance(tensors, Tensor) else tensors)))
        return calls[call](tensors, **kwargs)

    with mock.patch.multiple(hvd, **{call: partial(counting, call) for call in calls}):
        train_with_lightning(EXT, case, length)
    return {"calls": len(num_bytes) / length.total, "num_bytes": sum(num_bytes) / length.total}


if __name__ == "__main__":
    main()
