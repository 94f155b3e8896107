"""Deaths: the kernel says at once when a process of this host ends, however it does."""

import os
import selectors
from collections.abc import Mapping
from contextlib import suppress

from lightning_strategies_ext.peers import Peer


class Deaths:
    """Waits for processes of this host to end.

    Where the system has no descriptors of processes, they are asked for after each wait.

    Args:
        peers: The processes, by rank.
    """

    def __init__(self, peers: Mapping[int, Peer]) -> None:
        self._peers = peers
        self._gone: set[int] = set()
        self._awake, self._waker = os.pipe()
        self._pidfds: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._awake, selectors.EVENT_READ)
        if hasattr(os, "pidfd_open"):
            for rank, peer in peers.items():
                with suppress(OSError):  # it has ended already
                    self._pidfds[os.pidfd_open(peer.pid)] = rank
        for descriptor in self._pidfds:
            self._selector.register(descriptor, selectors.EVENT_READ)
        # The number of one that has ended before its descriptor was there may be another process's by now.
        self._asked_for = peers.keys() - {rank for rank in self._pidfds.values() if peers[rank].is_running()}

    def wait(self, seconds: float) -> set[int]:
        """Waits for another process to end, at most so long; gives the ranks of all that have."""
        for key, _ in self._selector.select(seconds):
            if key.fd in self._pidfds:
                self._selector.unregister(key.fd)
                self._gone.add(self._pidfds[key.fd])
        self._gone |= {rank for rank in self._asked_for if not self._peers[rank].is_running()}
        return set(self._gone)

    def wake(self) -> None:
        """Lets :meth:`wait` return."""
        os.write(self._waker, b".")

    def close(self) -> None:
        """Closes its descriptors; nobody may wait any more."""
        self._selector.close()
        for descriptor in (self._awake, self._waker, *self._pidfds):
            os.close(descriptor)
