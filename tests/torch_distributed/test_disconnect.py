"""A rank lets go of the others, whether they live or not, and of nobody else."""

import os
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_strategies_ext.peers import Peer, meet_peers
from lightning_strategies_ext.torch_distributed import process_group
from lightning_strategies_ext.torch_distributed.disconnect import disconnect
from tests.support.ranks import outcomes_of_ranks, run_ranks

pytestmark = pytest.mark.processes

#: The timeout of the group.
FOREVER_S = 60
#: Only a rank that waits for the timeout, or for a child, comes to that.
LIMIT_S = FOREVER_S / 2


def join() -> tuple[int, Peer]:
    rank = int(os.environ["LOCAL_RANK"])
    environment = LightningEnvironment()
    environment.set_global_rank(rank)
    environment.set_world_size(2)
    process_group.start(environment, "gloo", torch.device("cpu"), timedelta(seconds=FOREVER_S))
    return rank, meet_peers(process_group.default_store(), rank, 2)[1 - rank]


def fails_once_it_is_cut_off(other: Peer) -> float:
    threading.Timer(0.5, disconnect, [[other]]).start()
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(3))
    return time.monotonic() - start


def wait_for_one_that_is_killed() -> float:
    rank, other = join()
    if rank == 1:
        if os.fork() == 0:  # like a worker of a data loader, which holds all that is open
            while other.is_running():
                time.sleep(0.05)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    while other.is_running():
        time.sleep(0.01)
    return fails_once_it_is_cut_off(other)


def test_a_dead_ones_connections_are_cut_though_a_child_of_its_own_holds_them():
    survivor, _ = outcomes_of_ranks(wait_for_one_that_is_killed)
    assert survivor.value is not None, survivor
    assert 0.4 < survivor.value < LIMIT_S


def cut_off_and_see_what_is_left() -> list[bytes]:
    rank, other = join()
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    dist.barrier()
    if rank == 0:
        assert fails_once_it_is_cut_off(other) < LIMIT_S
    mine.sendall(b"still here")
    store = process_group.default_store()
    store.set(f"done {rank}", "too")
    seen = [accepted.recv(10), store.get(f"done {1 - rank}")]
    store.set(f"seen {rank}", "")
    store.get("seen 1")  # the store is in rank 0's process
    return seen


def test_connections_of_others_and_the_stores_stay():
    assert run_ranks(cut_off_and_see_what_is_left) == [[b"still here", b"too"]] * 2
