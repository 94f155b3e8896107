"""Successive process groups in one process: released threads, connections, and stores."""

import multiprocessing
import os
import socket
import sys
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize

import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext._system.gpu_sync import is_aborted, mark_aborted
from lightning_strategies_ext.torch_distributed import process_group
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes


def join() -> DistributedDataParallel:
    process_group.join("gloo", dist.HashStore(), 0, 1, torch.device("cpu"), None)
    return DistributedDataParallel(nn.Linear(2, 2))


def num_threads() -> int:
    return psutil.Process().num_threads()


@pytest.mark.forked
def test_gloo_outlives_its_group_so_that_releasing_the_group_waits_for_no_thread():
    join()  # torch holds a reference to the group of the first model of a process (observed in 2.13)
    process_group.stop()
    process_group._stop_at_exit()
    before = num_threads()
    model = join()
    with_group = num_threads()
    assert with_group > before
    for _ in range(3):
        process_group.stop()
        del model
        assert num_threads() == with_group
        model = join()
        assert num_threads() == with_group, "gloo has outlived the next group, too"
    process_group.stop()
    del model
    process_group._stop_at_exit()
    assert num_threads() == before


@pytest.mark.forked
def test_exceptions_are_not_shown_with_the_rank_once_for_each_group():
    default_hook = sys.excepthook
    for _ in range(3):
        join()
        assert sys.excepthook is not default_hook
        process_group.stop()
        assert sys.excepthook is default_hook


def send_at_exit(sender: Connection) -> None:
    Finalize(None, lambda: sender.send(dist.is_initialized()), exitpriority=-1)
    join()


def test_a_process_that_multiprocessing_has_started_leaves_its_group_when_it_ends():
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("forkserver").Process(target=send_at_exit, args=(sender,))
    process.start()
    sender.close()
    assert receiver.recv() is False
    process.join(30)
    assert process.exitcode == 0


# --- the store ---


def join_twice() -> tuple[list[float], list[bool]]:
    """Reduces in a group of this package, and in a group that the user creates from the same variables."""
    environment, sums, listened = LightningEnvironment(), [], []
    environment.set_global_rank(environment.local_rank())
    environment.set_world_size(2)
    os.environ |= {"RANK": os.environ["LOCAL_RANK"], "WORLD_SIZE": "2"}
    for is_of_package in (True, False):
        if is_of_package:
            process_group.start(environment, None, torch.device("cpu"), None)
        else:
            dist.init_process_group("gloo")
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        sums.append(tensor.item())
        dist.barrier()
        port = int(os.environ["MASTER_PORT"])
        connections = psutil.Process().net_connections("tcp")
        listen = any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in connections)
        listened.append(listen)
        dist.destroy_process_group()
    return sums, listened


def test_rank_0_frees_the_port_after_the_rendezvous_and_users_can_make_groups_there():
    assert run_ranks(join_twice) == [([2.0] * 2, [False, True]), ([2.0] * 2, [False, False])]


def serve_while_the_port_is_taken() -> None:
    os.environ["LOCAL_RANK"] = "0"
    environment = LightningEnvironment()
    environment.set_world_size(2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
        with pytest.raises(dist.DistNetworkError, match="EADDRINUSE"):
            process_group.start(environment, "gloo", torch.device("cpu"), None)


def test_a_port_that_is_taken_is_an_error_that_names_it():
    run_ranks(serve_while_the_port_is_taken, world_size=1)


def abort_and_join_again() -> list[bool]:
    found = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        found.append(is_aborted())
        mark_aborted(dist.group.WORLD)
        found.append(is_aborted())
        process_group.stop()
        found.append(is_aborted())
    return found


@pytest.mark.processes
def test_an_abort_has_no_effect_once_the_group_is_left():
    assert run_ranks(abort_and_join_again, world_size=1) == [[False, True, False] * 2]
