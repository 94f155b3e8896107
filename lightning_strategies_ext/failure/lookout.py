"""The lookout: ranks that go on when one is lost are told when a host does not answer any more.

A process that ends closes its connections, and who waits at the other end of one knows at once. A host without power or
network closes none, and a collective waits there for as long as its engine does: 30 seconds over Horovod's gloo. So the
first rank has a line to each other one (:mod:`.peer_links`), for which its kernel asks at the other end. Where all
ranks end together, the watch notices a lost host (:mod:`.failure_monitor`).

On systems whose kernel does not ask so (others than Linux), the engine's time has to pass.
"""

import atexit
import logging
import threading
from collections.abc import Callable, Mapping

import torch.distributed as dist

from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext._system.selector_loop import SelectorLoop
from lightning_strategies_ext.failure.center import CoordinatorEndpoint
from lightning_strategies_ext.failure.peer_links import PeerLinks

log = logging.getLogger(__name__)

#: The thread is woken when something comes; it looks so often in any case, in seconds.
_LOOK_S = 10.0


class Lookout:
    """One rank's part in it. All ranks of a world create theirs together; a thread waits for what the kernel says.

    Args:
        store: Shared by the ranks, for this alone.
        peers: All ranks.
        rank: Of this process.
        on_host_loss: Called once, by the thread, when a rank is lost: cuts this one off from the others.
    """

    def __init__(
        self, store: dist.Store, peers: Mapping[int, Peer], rank: int, on_host_loss: Callable[[], None]
    ) -> None:
        self._peers = peers
        self._rank = rank
        self._on_lost = on_host_loss
        self._loop = SelectorLoop()
        self._links = PeerLinks(self._loop, lambda rank, words: False)
        callers = peers.keys() - {min(peers)}
        center = CoordinatorEndpoint(store, "center", peers, rank, callers, self._links)
        if rank in callers:
            center.connect()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning-strategies-ext lookout", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self, *, agreed: bool = True) -> None:
        """Ends this rank's part; nothing is called after it. A second call does no harm.

        Args:
            agreed: Whether the others do the same; otherwise it tells them that a rank is lost.
        """
        if self._closed.is_set():
            return
        atexit.unregister(self.close)
        self._closed.set()
        self._loop.wake()
        self._thread.join()
        self._links.close() if agreed else self._links.abort()
        self._loop.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            if self._links.unreachable or self._links.disconnected:
                for host in sorted({self._peers[rank].host_name for rank in self._links.unreachable}):
                    log.warning("rank %d: the host %s does not answer any more", self._rank, host)
                self._on_lost()
                self._links.abort()  # and those at the other ends do the same
                return
            self._loop.wait(_LOOK_S)
