"""What is left of process groups that one process has made, one after another."""

import multiprocessing
import sys
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext.torch_distributed import process_group

pytestmark = pytest.mark.processes


def join() -> DistributedDataParallel:
    process_group.join("gloo", dist.HashStore(), 0, 1, torch.device("cpu"), None)
    return DistributedDataParallel(nn.Linear(2, 2))


def num_threads() -> int:
    return psutil.Process().num_threads()


@pytest.mark.forked
def test_gloo_outlives_its_group_so_that_nobody_who_lets_go_of_that_waits_for_its_threads():
    join()  # torch keeps the group of the first model of a process (seen in 2.13)
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
    usual = sys.excepthook
    for _ in range(3):
        join()
        assert sys.excepthook is not usual
        process_group.stop()
        assert sys.excepthook is usual


def tell_at_the_end(sender: Connection) -> None:
    Finalize(None, lambda: sender.send(dist.is_initialized()), exitpriority=-1)
    join()


def test_a_process_that_multiprocessing_has_started_leaves_its_group_when_it_ends():
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("forkserver").Process(target=tell_at_the_end, args=(sender,))
    process.start()
    sender.close()
    assert receiver.recv() is False
    process.join(30)
    assert process.exitcode == 0
