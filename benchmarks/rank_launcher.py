"""Starts the ranks of a benchmark on this host, once, and collects their results.

A rank is a process with the environment variables of torchrun, one torch thread, and a default process group: first
of gloo or, with a GPU per rank, of NCCL. Measured strategies use the group that exists, so their backend is the backend
of the group that the rank has joined last (:func:`join`).
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

#: Store over which the ranks join each group.
_store: dist.Store | None = None
_num_groups = 0


def run_ranks(function: Callable[..., Any], *args: Any, world_size: int = 2, backend: str = "gloo") -> list[Any]:
    """Runs ``function(*args)`` on every rank of one process group.

    Args:
        function: Function that is importable by name; its arguments and results are pickled builtin types.
        *args: Arguments of the function, the same on all ranks.
        world_size: Number of ranks.
        backend: Backend of the group; with "nccl", each rank has the GPU with its number.

    Returns:
        Results of the function, in rank order.

    Raises:
        RuntimeError: If the function raises on a rank, or the rank exits; the other ranks are killed.
    """
    # Not forked: a rank inherits nothing from this process, as under torchrun.
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
    """Receives one message from every rank, until the first failure.

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
                value, error = None, "the process exited without a message"
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
    """Runs in the process of a rank: joins the group, calls the function, and sends its result or exception."""
    os.environ.update(
        LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    try:
        open_store(rank, world_size, port)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        join(backend, rank, world_size)
        # Objects of imported modules are excluded from garbage collections during a measurement.
        gc.collect()
        gc.freeze()
        value, error = function(*args), None
        dist.destroy_process_group()
    except Exception:
        value, error = None, traceback.format_exc()
    sender.send((value, error))


def open_store(rank: int, world_size: int, port: int) -> None:
    """Connects this rank to the store over which it joins groups. Rank 0 serves the store."""
    global _store
    _store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)


def join(backend: str, rank: int | None = None, world_size: int | None = None) -> None:
    """Joins a default process group with a backend. Collective: all ranks call it, in the same order.

    A group with another backend is replaced. Strategies must be created again afterwards.

    Args:
        backend: A backend such as "gloo" or "shm".
        rank: Rank of this process; the rank in the previous group if None.
        world_size: Number of ranks; as before if None.
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
    # A separate part of the store, because a group must not read entries of the previous group.
    store = dist.PrefixStore(f"group{_num_groups}", _store)
    _num_groups += 1
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=device)
    dist.barrier()


def send_to_all(key: str, value: Any, timeout: timedelta) -> Any:
    """Sends a value of rank 0 to all ranks through the store: a rank that waits for it does not use its core.

    Args:
        key: Unique key of the value.
        value: The value on rank 0, of types of JSON.
        timeout: Timeout of the other ranks.

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
        value: The value of this rank, of types of JSON.
        timeout: Timeout of rank 0.

    Returns:
        The values in rank order on rank 0; an empty list on other ranks.
    """
    assert _store is not None
    _store.set(f"{key}/{dist.get_rank()}", json.dumps(value))
    if dist.get_rank():
        return []
    keys = [f"{key}/{rank}" for rank in range(dist.get_world_size())]
    _store.wait(keys, timeout)
    return [json.loads(_store.get(one)) for one in keys]


def end_tree(process: "subprocess.Popen[Any]") -> None:
    """Kills a process and its descendants, and waits for its exit."""
    if process.poll() is None:
        own = psutil.Process(process.pid)
        for one in [*own.children(recursive=True), own]:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue
    process.wait()


def free_port() -> int:
    """Returns a free TCP port of 127.0.0.1, which the system does not assign to connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)  # below the range for connections
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
