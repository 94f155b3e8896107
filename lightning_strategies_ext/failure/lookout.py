"""Host loss monitor of elastic training: detects that a host does not respond, so that other hosts can continue.

A process that exits closes its connections, which its peers detect at once. A host without power or network closes no
connection, and a collective waits for the timeout of its engine: 30 seconds over Horovod's gloo. So rank 0 has a peer
link to each other rank (:mod:`.peer_links`), on which the kernel sends keepalives. Without elastic training, the
failure monitor detects a lost host (:mod:`.failure_monitor`).

Limitation: on systems other than Linux, the timeout of the engine applies.
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

#: Seconds after which the thread checks without an event.
_LOOK_S = 10.0


class Lookout:
    """Monitors the hosts of one world. Collective: all ranks create it together.

    Args:
        store: Store that the ranks share, for this object alone.
        peers: All ranks.
        rank: Global rank of this process.
        on_host_loss: Callable that the thread calls once after a loss; it aborts this rank's collectives.
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
        """Stops the thread; it calls nothing afterwards. A second call is a no-op.

        Args:
            agreed: Whether the other ranks do the same; otherwise they treat this rank as lost.
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
                    log.warning("rank %d: the host %s does not respond", self._rank, host)
                self._on_lost()
                self._links.abort()  # the linked ranks do the same
                return
            self._loop.wait(_LOOK_S)
