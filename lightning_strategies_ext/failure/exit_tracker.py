"""Exit tracker: the kernel reports the exit of a process of this host at once, through a pidfd."""

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext._system.selector_loop import SelectorLoop


class ExitTracker:
    """Detects that processes of this host exit. Polls them on systems without pidfds.

    Args:
        peers: Processes to track, by rank.
        loop: Selector loop of the calling thread, which an exit wakes.
    """

    def __init__(self, peers: Mapping[int, Peer], loop: SelectorLoop) -> None:
        self._peers = peers
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
