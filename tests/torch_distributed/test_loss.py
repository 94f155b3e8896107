"""A rank that has ended is noticed by the kernel's word, whatever its backend says."""

import os
import pickle
import signal
import subprocess
import sys
import threading

import pytest
import torch.distributed as dist

from lightning_strategies_ext._system.gpu_sync import is_aborted, mark_aborted
from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.torch_distributed import process_group
from lightning_strategies_ext.torch_distributed.loss import CutOffOnLoss
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes

PEER = """
import os, pickle, time
from lightning_strategies_ext._system.peers import Peer

os.write(1, pickle.dumps(Peer.this_process(1)))
os.close(1)
time.sleep(600)
"""


def test_the_end_of_another_process_cuts_this_rank_off_once():
    other = subprocess.Popen([sys.executable, "-c", PEER], stdout=subprocess.PIPE)
    assert other.stdout is not None
    peers = [Peer.this_process(0), pickle.loads(other.stdout.read())]
    cut_off, unused = threading.Event(), threading.Event()
    loss, closed = CutOffOnLoss(peers, cut_off.set), CutOffOnLoss(peers, unused.set)
    assert not cut_off.wait(0.2)
    closed.close()
    closed.close()
    os.kill(other.pid, signal.SIGKILL)
    assert cut_off.wait(60)
    other.wait()
    loss.close()
    assert not unused.is_set()


def cut_off_and_join_again() -> list[bool]:
    found = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        found.append(is_aborted())
        mark_aborted(dist.group.WORLD)
        found.append(is_aborted())
        process_group.stop()
        found.append(is_aborted())
    return found


def test_what_was_cut_off_is_over_once_the_group_is_left():
    assert run_ranks(cut_off_and_join_again, world_size=1) == [[False, True, False] * 2]
