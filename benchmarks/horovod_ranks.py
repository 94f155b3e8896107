"""The ranks of :mod:`benchmarks.horovod`: how a launcher of Horovod's starts them, and what each of them does.

A rank has a gloo process group of torch's, for Lightning's stock `ddp`, beside what Horovod connects.
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
    train_in_rounds,
    train_in_turn,
    train_with_lightning,
)
from benchmarks.horovod_commands import BIN, start_of
from benchmarks.rank_launcher import collect, free_port, rank_main
from lightning_strategies_ext.horovod.launch_info import LaunchInfo

OURS = "horovod_ext"
BY_HAND = "raw Horovod"
BY_HAND_TUNED = "raw, our settings"
PEER = "ddp"
NUM_RANKS = 2


def run_ranks_under(launcher: str, function: Callable[..., Any], *args: Any, num_ranks: int = NUM_RANKS) -> list[Any]:
    """Runs ``function(*args)`` on ranks of ``horovodrun`` or ``mpirun``.

    Args:
        launcher: Which.
        function: Importable by name, and so are the types of its arguments.
        *args: Of the function, the same on all ranks.
        num_ranks: Number of ranks.

    Returns:
        In rank order, what the function returned.

    Raises:
        RuntimeError: If a rank failed; the others end too, since what they wait for fails.
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
        # A file that a rank has sent its result into is read like the other end of a pipe.
        per_rank = collect([Connection(os.open(file, os.O_RDONLY), writable=False) for file in results])
    if ended.returncode:
        raise RuntimeError(f"{launcher} ended with {ended.returncode}, after its ranks had sent their results.")
    return per_rank


def main() -> None:
    """Runs in each rank."""
    directory = Path(sys.argv[1])
    port, function, arguments = pickle.loads((directory / "arguments").read_bytes())
    launch = LaunchInfo.from_environment()
    assert launch is not None, "no launcher of Horovod's has started this process"
    # Else Lightning would ask mpi4py, where it is installed, for the ranks of `ddp`.
    os.environ.update(RANK=str(launch.rank), TORCHELASTIC_RUN_ID="benchmark")
    sender = Connection(os.open(directory / f"rank{launch.rank}", os.O_WRONLY), readable=False)
    rank_main(function, arguments, launch.rank, launch.size, port, sender)


def measure_others(cases: list[Case], rounds: int, length: Length) -> list[dict[str, Any]]:
    """Runs on every rank: `ddp` while there is no Horovod yet, then the hand-written loop, as Horovod starts by itself.

    Returns:
        Per case ``ms``: contender → one value per round.
    """
    silence_lightning()
    stock = partial(train_with_lightning, PEER)
    # Horovod's thread has the ranks talk to each other in every cycle, also while `ddp` trains. Horovod over MPI cannot
    # be shut down and started again, so this comes first and not in turn.
    alone = [
        [train_in_turn({PEER: stock}, case, length, reference=PEER)[PEER] for _ in range(rounds)] for case in cases
    ]
    import horovod.torch as hvd

    hvd.init()
    results = measure_in_turn({BY_HAND: train_by_hand}, cases, rounds, length)
    for case, result, ms in zip(cases, results, alone, strict=True):
        train_in_turn({BY_HAND: train_by_hand, PEER: stock}, case, Length(1, 3), reference=BY_HAND)
        result["ms"][PEER] = ms
    return results


def measure_ours(cases: list[Case], rounds: int, length: Length) -> list[dict[str, Any]]:
    """Runs on every rank: ours, and the hand-written loop with the settings that ours starts Horovod with.

    Returns:
        Per case: ``ms`` (contender → one value per round), and what one step of ours hands to Horovod (``calls`` and
        ``num_bytes``).
    """
    silence_lightning()
    train_with_lightning(OURS, cases[0], Length(1, 1))  # starts Horovod
    contenders = {OURS: partial(train_with_lightning, OURS), BY_HAND_TUNED: train_by_hand}
    results = measure_in_turn(contenders, cases, rounds, length)
    for case, result in zip(cases, results, strict=True):
        result.update(count_traffic(case))
    return results


def measure_in_turn(contenders: dict[str, Any], cases: list[Case], rounds: int, length: Length) -> list[dict[str, Any]]:
    """Per case ``ms``: contender → one value per round, in an order that changes from round to round."""
    results: list[dict[str, Any]] = []
    for case in cases:
        reference = next(iter(contenders))
        results.append({"ms": train_in_rounds(contenders, case, length, rounds, reference)})
    return results


def train_by_hand(case: Case, length: Length) -> tuple[float, Tensor]:
    """Trains with nothing but torch and Horovod, as Horovod's documentation shows it.

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
    """What ours hands to Horovod for its gradients, per batch: the number of calls and of bytes."""
    import horovod.torch as hvd

    length = Length(warmup=case.accumulate, steps=case.accumulate)
    num_bytes: list[int] = []
    calls = {"allreduce_async_": hvd.allreduce_async_, "grouped_allreduce_async_": hvd.grouped_allreduce_async_}

    def counting(call: str, tensors: Tensor | list[Tensor], **kwargs: Any) -> Any:
        if "gradient." in kwargs["name"]:
            num_bytes.append(sum(tensor.nbytes for tensor in ([tensors] if isinstance(tensors, Tensor) else tensors)))
        return calls[call](tensors, **kwargs)

    with mock.patch.multiple(hvd, **{call: partial(counting, call) for call in calls}):
        train_with_lightning(OURS, case, length)
    return {"calls": len(num_bytes) / length.total, "num_bytes": sum(num_bytes) / length.total}


if __name__ == "__main__":
    main()
