"""Ranks let go of those that wait for them, whoever else has their connections."""

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_strategies_ext.peers import meet_peers
from lightning_strategies_ext.torch_distributed.disconnect import disconnect
from tests.support.ranks import outcomes_of_ranks


def wait_for_one_that_a_child_outlives(killed: int, has_ended: Path) -> float:
    rank = int(os.environ["LOCAL_RANK"])
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    peers = meet_peers(dist.PrefixStore("peers", dist.distributed_c10d._get_default_store()), rank, 2)
    dist.all_reduce(torch.ones(1))
    if rank == killed:
        if os.fork() == 0:  # a worker of a loader, which looks for its parent every few seconds
            while not has_ended.exists():
                time.sleep(0.05)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    while peers[killed].is_running():
        time.sleep(0.05)
    threading.Timer(0.5, disconnect, [[peers[killed]]]).start()
    begin = time.monotonic()
    try:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1))
    finally:
        has_ended.touch()
    return time.monotonic() - begin


@pytest.mark.parametrize("killed", [0, 1])  # one of two ranks calls the other
def test_one_that_has_died_is_let_go_of_though_its_children_live(killed, tmp_path):
    outcomes = outcomes_of_ranks(wait_for_one_that_a_child_outlives, killed, tmp_path / "ended", world_size=2)
    assert outcomes[killed].exit_code == -signal.SIGKILL
    assert outcomes[1 - killed].error is None, outcomes[1 - killed]
    assert outcomes[1 - killed].value < 30
