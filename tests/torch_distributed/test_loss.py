"""A rank that has ended is noticed by the kernel's word, whatever its backend says."""

import os
import pickle
import signal
import subprocess
import sys
import threading

from lightning_strategies_ext.peers import Peer
from lightning_strategies_ext.torch_distributed.loss import CutOffOnLoss

PEER = """
import os, pickle, time
from lightning_strategies_ext.peers import Peer

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
