"""NCCL either ignores the exit of a peer or aborts the process. Here a pidfd reports the exit, and the rank continues.

Without elastic training, the failure monitor does this (:mod:`...failure.failure_monitor`); gloo and shm detect exits
themselves.
"""

import os
import threading
from collections.abc import Callable, Sequence

from lightning_strategies_ext._system.peers import Peer, host_identity
from lightning_strategies_ext._system.selector_loop import SelectorLoop
from lightning_strategies_ext.failure.exit_tracker import ExitTracker

#: Seconds between two polls on systems without pidfds.
_POLL_S = 1.0
#: Settings with which torch's NCCL watchdog does not abort this process after the exit of a peer, nor after a dump of
#: the flight recorder (read in torch 2.5 to 2.13). Values that the user has set are kept.
_GO_ON = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


def disable_nccl_watchdog_exit() -> None:
    """Makes NCCL process groups that this process joins afterwards survive the exit of other ranks."""
    for name, value in _GO_ON.items():
        os.environ.setdefault(name, value)


class CutOffOnLoss:
    """Calls a function once a process of this host has exited, from a thread that waits for exits.

    Args:
        peers: All ranks.
        on_exit: Callable that the thread calls once; it aborts the collectives of this rank.
    """

    def __init__(self, peers: Sequence[Peer], on_exit: Callable[[], None]) -> None:
        here = host_identity()
        others = {peer.rank: peer for peer in peers if peer.host == here and peer.pid != os.getpid()}
        self._on_exit = on_exit
        self._loop = SelectorLoop()
        self._exit_tracker = ExitTracker(others, self._loop)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning-strategies-ext loss", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the thread, which calls nothing afterwards. A second call is a no-op."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._loop.wake()
        self._thread.join()
        self._loop.close()
        self._exit_tracker.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._loop.wait(_POLL_S)
            if self._exit_tracker.exited_ranks() and not self._closed.is_set():
                self._on_exit()
                return
