"""Monitor thread: checks the ranks several times per second, and at once when a process of this host has exited."""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from typing_extensions import override

from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext._system.selector_loop import SelectorLoop
from lightning_strategies_ext.failure.local_status import HEARTBEAT_INTERVAL_S

log = logging.getLogger(__name__)

#: A process whose monitor thread did not run for this many seconds was suspended.
SUSPENDED_AFTER_S = 3.0
#: Seconds between two checks while the ranks agree on the last step.
AGREEMENT_POLL_S = 0.05


class MonitorThread(threading.Thread):
    """The thread of a monitor: waits for events, and checks the ranks several times per second.

    Args:
        rank: Global rank of this process.
        loop: Selector loop of this thread. An event may cause a check at once.
        check: Callable that receives the seconds since the last check, without time in which this process was
            suspended, and whether it was suspended. It returns whether ranks wait for a stop decision, so that the
            thread checks more often. An exception is logged, and the thread continues.
    """

    def __init__(self, rank: int, loop: SelectorLoop, check: Callable[[float, bool], bool]) -> None:
        super().__init__(name="lightning-strategies-ext failure monitor", daemon=True)
        self._rank = rank
        self._loop = loop
        self._check = check
        self._stopped = threading.Event()

    @override
    def run(self) -> None:
        """Checks until :meth:`stop`, and once after it."""
        before, is_last, is_urgent = time.monotonic(), False, False
        while not is_last:
            try:
                self._loop.wait(AGREEMENT_POLL_S if is_urgent else HEARTBEAT_INTERVAL_S)
                is_last = self._stopped.is_set()  # before the check, so that a check follows
                now = time.monotonic()
                before, elapsed_s = now, now - before
                is_urgent = self._check(min(elapsed_s, 2 * HEARTBEAT_INTERVAL_S), elapsed_s > SUSPENDED_AFTER_S)
            except Exception:  # otherwise the thread would exit unnoticed
                log.exception("The failure monitor of rank %d raised an exception; it continues.", self._rank)

    def stop(self) -> None:
        """Stops the thread after a last check, and waits for it."""
        self._stopped.set()
        self._loop.wake()
        if threading.current_thread() is not self:
            self.join()


class ExitTracker:
    """Detects the exits of other processes of this host, which the kernel reports at once, through a pidfd.

    An exit wakes the thread of the selector loop. On systems without pidfds, the processes are polled.
    """

    def __init__(self, peers: Mapping[int, Peer], loop: SelectorLoop) -> None:
        self._peers = peers = {rank: peer for rank, peer in peers.items() if peer.pid != os.getpid()}
        self._loop = loop
        self._exited: set[int] = set()
        self._pidfds: dict[int, int] = {}
        if hasattr(os, "pidfd_open"):
            for rank, peer in peers.items():
                with suppress(OSError):  # the process has exited
                    self._pidfds[os.pidfd_open(peer.pid)] = rank
        for descriptor in self._pidfds:
            loop.add(descriptor, partial(self._on_exit, descriptor))
        # The pid of a process that exited before its pidfd was opened may belong to another process.
        self._polled = peers.keys() - {rank for rank in self._pidfds.values() if peers[rank].is_running()}

    def exited_ranks(self) -> set[int]:
        """Returns the ranks of all processes that have exited."""
        self._exited |= {rank for rank in self._polled if not self._peers[rank].is_running()}
        return set(self._exited)

    def close(self) -> None:
        """Closes the pidfds, after the selector loop has been closed."""
        for descriptor in self._pidfds:
            os.close(descriptor)

    def _on_exit(self, descriptor: int) -> bool:
        self._loop.remove(descriptor)
        self._exited.add(self._pidfds[descriptor])
        return True
