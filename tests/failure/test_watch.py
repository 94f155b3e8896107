"""What a watch does at its end, beside what failures show of it from outside."""

import os

import torch.distributed as dist

from lightning_strategies_ext import peers
from lightning_strategies_ext.failure import watch
from lightning_strategies_ext.failure.signs import Progress
from lightning_strategies_ext.failure.watch import Watch
from tests.support.ranks import run_ranks


def fail_and_end_at_once() -> list[str]:
    rank = int(os.environ["LOCAL_RANK"])
    for module in (peers, watch):
        module.host_identity = lambda: f"host {rank}"  # each is alone on one
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, is_master=rank == 0)
    own = Watch(store, rank, 2, Progress(), lambda peers: None, lambda pid: None)
    own.begin_stage(None)
    store.set(f"{rank} is there", "")
    store.wait([f"{1 - rank} is there"])
    if rank == 1:
        own.announce(ValueError("no"))
        own.close()
        return []
    failure = own.reason(60.0)
    own.close()
    return [] if failure is None else [failure.headline]


def test_a_rank_that_is_alone_on_its_host_says_that_it_has_failed_before_it_ends():
    assert run_ranks(fail_and_end_at_once) == [["ValueError: no"], []]
