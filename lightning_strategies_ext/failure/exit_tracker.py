"""Deaths: the kernel says at once when a process of this host ends, however it does."""

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext._system.selector_loop import SelectorLoop


class ExitTracker:
    """Notices that processes of this host end.

    Where the system has no descriptors of processes, they are asked for each time.

    Args:
        peers: The processes, by rank.
        waiting: Of the thread that asks.
    """

    def __init__(self, peers: Mapping[int, Peer], waiting: SelectorLoop) -> None:
        self._peers = peers
        self._waiting = waiting
        self._gone: set[int] = set()
        self._pidfds: dict[int, int] = {}
        if hasattr(os, "pidfd_open"):
            for rank, peer in peers.items():
                with suppress(OSError):  # it has ended already
                    self._pidfds[os.pidfd_open(peer.pid)] = rank
        for descriptor in self._pidfds:
            waiting.add(descriptor, partial(self._on_exit, descriptor))
        # The number of one that has ended before its descriptor was there may be another process's by now.
        self._polled = peers.keys() - {rank for rank in self._pidfds.values() if peers[rank].is_running()}

    def exited_ranks(self) -> set[int]:
        """The ranks of all processes that have ended."""
        self._gone |= {rank for rank in self._polled if not self._peers[rank].is_running()}
        return set(self._gone)

    def close(self) -> None:
        """Closes its descriptors, when nobody waits any more."""
        for descriptor in self._pidfds:
            os.close(descriptor)

    def _on_exit(self, descriptor: int) -> bool:
        self._waiting.remove(descriptor)
        self._gone.add(self._pidfds[descriptor])
        return True
