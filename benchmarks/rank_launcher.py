"""Starts the ranks of a benchmark on this host, once, and collects what each returns.

A rank is a process with the environment variables that torchrun would give it, one torch thread, and a default process
group, at first of gloo or, with a GPU per rank, of NCCL. Strategies measured in it find the group and use it, so what
they run over is what the rank has joined last (:func:`join`).
"""

import gc
import json
import multiprocessing
import os
import random
import socket
import subprocess
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
import torch.distributed as dist

#: Where the ranks meet, for every group they make.
_store: dist.Store | None = None
_num_groups = 0


def run_ranks(function: Callable[..., Any], *args: Any, world_size: int = 2, backend: str = "gloo") -> list[Any]:
    """Runs ``function(*args)`` on every rank of one process group.

    Args:
        function: Importable by name; its arguments and result travel as pickles of builtin types.
        *args: Of the function, the same on all ranks.
        world_size: Number of ranks.
        backend: Of the group; with "nccl" each rank has the GPU with its number.

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
        context.Process(target=rank_main, args=(function, args, rank, world_size, port, pipes[rank][1], backend))
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
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    port: int,
    sender: Connection,
    backend: str = "gloo",
) -> None:
    """What a rank's process runs: joins the group, calls the function, sends what it returned or raised."""
    os.environ.update(
        LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    try:
        open_store(rank, world_size, port)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        join(backend, rank, world_size)
        # What the imports left behind is no garbage: collections during a measurement need not walk through it.
        gc.collect()
        gc.freeze()
        value, error = function(*args), None
        dist.destroy_process_group()
    except Exception:
        value, error = None, traceback.format_exc()
    sender.send((value, error))


def open_store(rank: int, world_size: int, port: int) -> None:
    """Connects this rank to the store over which it joins groups; that of rank 0 is the server."""
    global _store
    _store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)


def join(backend: str, rank: int | None = None, world_size: int | None = None) -> None:
    """Sees to it that the default process group has this backend; all ranks call it together, in the same order.

    A group with another backend is left for a new one. Strategies are made anew after that.

    Args:
        backend: Such as "gloo" or "shm".
        rank: Of this process; as in the group before, if None.
        world_size: Number of ranks; as before, if None.
    """
    global _num_groups
    assert _store is not None
    if dist.is_initialized():
        if dist.get_backend() == backend:
            return
        rank, world_size = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
    assert rank is not None
    assert world_size is not None
    # Under a name of its own, since a group must not find what the one before has left in the store.
    store = dist.PrefixStore(f"group{_num_groups}", _store)
    _num_groups += 1
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=device)
    dist.barrier()


def send_to_all(key: str, value: Any, timeout: timedelta) -> Any:
    """Sends a value of rank 0 to all ranks through the store: a rank that waits for it does not use its core.

    Args:
        key: Unique key of the value.
        value: The value on rank 0, as JSON can hold it.
        timeout: How long the other ranks wait.

    Returns:
        The value of rank 0.
    """
    assert _store is not None
    if dist.get_rank() == 0:
        _store.set(key, json.dumps(value))
    _store.wait([key], timeout)
    return json.loads(_store.get(key))


def collect_on_first(key: str, value: Any, timeout: timedelta) -> list[Any]:
    """Collects a value of every rank on rank 0 through the store.

    Args:
        key: Unique key of the values.
        value: The value of this rank, as JSON can hold it.
        timeout: How long rank 0 waits.

    Returns:
        The values in rank order on rank 0, an empty list elsewhere.
    """
    assert _store is not None
    _store.set(f"{key}/{dist.get_rank()}", json.dumps(value))
    if dist.get_rank():
        return []
    keys = [f"{key}/{rank}" for rank in range(dist.get_world_size())]
    _store.wait(keys, timeout)
    return [json.loads(_store.get(one)) for one in keys]


def end_tree(process: "subprocess.Popen[Any]") -> None:
    """Kills a process and its descendants, and waits for its end."""
    if process.poll() is None:
        own = psutil.Process(process.pid)
        for one in [*own.children(recursive=True), own]:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue
    process.wait()


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nobody listens on now, and that the system gives to no connection meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)  # below what it gives to connections
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
