"""NCCL does not tell a rank that another one is gone, or ends the rank for it; the kernel tells, and the rank goes on.

Where all ranks end together, the watch does this (:mod:`...failure.failure_monitor`); gloo and shm notice by themselves.
"""

import os
import threading
from collections.abc import Callable, Sequence

from lightning_strategies_ext._system.peers import Peer, host_identity
from lightning_strategies_ext._system.selector_loop import SelectorLoop
from lightning_strategies_ext.failure.exit_tracker import ExitTracker

#: Where the system has no descriptors of processes, they are asked for so often, in seconds.
_POLL_S = 1.0
#: What keeps torch's own watchdog of NCCL from ending this process when another one is gone: it does not abort it then,
#: nor after it has written down what it knows. As torch 2.5 to 2.13 read them; a user's own values are kept.
_GO_ON = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


def disable_nccl_watchdog_exit() -> None:
    """Lets groups over NCCL that this process joins from here on outlive other ranks."""
    for name, value in _GO_ON.items():
        os.environ.setdefault(name, value)


class CutOffOnLoss:
    """Cuts this rank off from the others once one of this host has ended, by a thread that waits for that.

    Args:
        peers: All ranks.
        on_exit: Called by the thread, once.
    """

    def __init__(self, peers: Sequence[Peer], on_exit: Callable[[], None]) -> None:
        here = host_identity()
        others = {peer.rank: peer for peer in peers if peer.host == here and peer.pid != os.getpid()}
        self._cut_off = on_exit
        self._waiting = SelectorLoop()
        self._deaths = ExitTracker(others, self._waiting)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning-strategies-ext loss", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; nothing is cut off after it. A second call does no harm."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._waiting.wake()
        self._thread.join()
        self._waiting.close()
        self._deaths.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._waiting.wait(_POLL_S)
            if self._deaths.exited_ranks() and not self._closed.is_set():
                self._cut_off()
                return
