"""Starts the ranks of a benchmark on this host, once, and collects what each returns.

A rank is a process with the environment variables that torchrun would give it, one torch thread, and a gloo process
group that lives as long as the process. Strategies measured in it find the group and use it, so every contender runs
over the same connections.
"""

import gc
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(function: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    """Runs ``function(*args)`` on every rank of one process group.

    Args:
        function: Importable by name; its arguments and result travel as pickles of builtin types.
        *args: Of the function, the same on all ranks.
        world_size: Number of ranks.

    Returns:
        What it returned, in rank order.

    Raises:
        RuntimeError: If it raised on a rank or the rank died; the other ranks are ended.
    """
    # Not forked: a rank then holds nothing of this process, as when torchrun starts it.
    context = multiprocessing.get_context("spawn")
    port = free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    ranks = [
        context.Process(target=rank_main, args=(function, args, rank, world_size, port, pipes[rank][1]))
        for rank in range(world_size)
    ]
    try:
        for rank, (_, sender) in zip(ranks, pipes, strict=True):
            rank.start()
            sender.close()
        values = collect([receiver for receiver, _ in pipes])
        for rank in ranks:
            rank.join(10)
        return values
    finally:
        for rank in ranks:
            if rank.pid is not None:
                rank.kill()


def collect(receivers: list[Connection]) -> list[Any]:
    """Waits for one message from every rank; at the first failure, for no more.

    Raises:
        RuntimeError: If a rank failed.
    """
    values: dict[Connection, Any] = {}
    while len(values) < len(receivers):
        for receiver in multiprocessing.connection.wait([one for one in receivers if one not in values]):
            assert isinstance(receiver, Connection)
            try:
                value, error = receiver.recv()
            except EOFError:
                value, error = None, "it died without a word"
            if error is not None:
                raise RuntimeError(f"Rank {receivers.index(receiver)} failed: {error}")
            values[receiver] = value
    return [values[receiver] for receiver in receivers]


def rank_main(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, port: int, sender: Connection
) -> None:
    """What a rank's process runs: joins the group, calls the function, sends what it returned or raised."""
    os.environ.update(
        LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        # What the imports left behind is no garbage: collections during a measurement need not walk through it.
        gc.collect()
        gc.freeze()
        value, error = function(*args), None
        dist.destroy_process_group()
    except Exception:
        value, error = None, traceback.format_exc()
    sender.send((value, error))


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
