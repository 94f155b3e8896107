"""Failure monitor of elastic training: what a rank does after a failure so that the other ranks can continue.

Without elastic training, all ranks exit (:mod:`.failure_monitor`). In elastic training, the collectives of a rank that
waits for a lost rank must fail, and the ranks that are left form a new world:

- A process that exits closes its connections, which gloo, shm, and Horovod detect. NCCL does not: a pidfd reports the
  exit (:class:`.ExitTracker`), and the monitor aborts this rank's collectives.
- A host without power or network closes no connection, and a collective waits for the timeout of its engine: 30 seconds
  over Horovod's gloo. So rank 0 has a peer link to each other rank (:mod:`.peer_links`), on which the kernel sends
  keepalives. Limitation: on systems other than Linux, the timeout of the engine applies.
- A hung rank closes no connection either. The monitor of another rank of its host kills it. Limitations: a rank that is
  alone on its host is not killed, and neither is a rank that hangs between two worlds. If all ranks of one of several
  hosts hang, none is killed, because all may wait for another host.
"""

import atexit
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist

from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext._system.selector_loop import SelectorLoop
from lightning_strategies_ext.failure.local_status import LocalStatus, local_peers
from lightning_strategies_ext.failure.monitor_thread import ExitTracker, MonitorThread
from lightning_strategies_ext.failure.peer_links import CoordinatorEndpoint, PeerLinks
from lightning_strategies_ext.failure.policies import KillHungRanks
from lightning_strategies_ext.failure.rank_status import CollectiveProgress

log = logging.getLogger(__name__)


class ElasticMonitor:
    """The failure monitor of a process in elastic training, for one world after another.

    The training thread calls the methods. The monitor thread is stopped while they replace links, tracker, or policy.
    """

    def __init__(self) -> None:
        self._rank = 0
        self._peers: Mapping[int, Peer] = {}
        self._abort_collectives: Callable[[], None] | None = None
        self._loop = SelectorLoop()
        self._exit_tracker: ExitTracker | None = None
        self._links: PeerLinks | None = None
        self._hang_policy: KillHungRanks | None = None
        self._thread: MonitorThread | None = None
        self._pid = os.getpid()
        atexit.register(self._on_exit)

    def enter_world(
        self,
        rank: int,
        peers: Mapping[int, Peer],
        abort_collectives: Callable[[], None],
        *,
        tracks_exits: bool = False,
        link_store: dist.Store | None = None,
    ) -> None:
        """Monitors the ranks of a world. Collective: all ranks of the world call it.

        Args:
            rank: Global rank of this process.
            peers: All ranks.
            abort_collectives: Callable that the monitor thread calls once after the loss of a rank.
            tracks_exits: Whether the exit of a process of this host is a loss.
            link_store: Store that the ranks share, for this world alone, if the loss of a host is to be detected.
        """
        self.leave_world(is_coordinated=True)
        loop, links = SelectorLoop(), None
        if link_store is not None and len({peer.host for peer in peers.values()}) > 1:
            links = PeerLinks(loop, lambda rank, message: False)
            linked_ranks = peers.keys() - {min(peers)}
            coordinator = CoordinatorEndpoint(link_store, "coordinator", peers, rank, linked_ranks, links)
            if rank in linked_ranks:
                coordinator.connect()
        with self._stopped_thread():
            self._loop.close()
            self._loop, self._links = loop, links
            self._rank, self._peers, self._abort_collectives = rank, peers, abort_collectives
            if tracks_exits:
                self._exit_tracker = ExitTracker(local_peers(peers, rank), loop)

    def leave_world(self, *, is_coordinated: bool) -> None:
        """Stops monitoring the ranks of the world, except for hangs. A second call is a no-op.

        Args:
            is_coordinated: Whether all ranks leave together. If not, the peer links are closed without a goodbye, and
                the other ranks treat this rank as lost.
        """
        self._abort_collectives = None
        if self._links is not None or self._exit_tracker is not None:
            with self._stopped_thread():
                self._close_world(is_coordinated=is_coordinated)

    def _close_world(self, *, is_coordinated: bool) -> None:
        if self._links is not None:
            self._links.close() if is_coordinated else self._links.abort()
        self._loop.close()
        if self._exit_tracker is not None:
            self._exit_tracker.close()
        self._loop, self._links, self._exit_tracker = SelectorLoop(), None, None

    def start_hang_detection(
        self,
        store: dist.Store,
        rank: int,
        peers: Mapping[int, Peer],
        progress: CollectiveProgress,
        hang_timeout_s: float,
        step_source: Callable[[], str],
    ) -> None:
        """Kills hung ranks of this host, until :meth:`stop_hang_detection`. Collective: all ranks of the world call it.

        The detection continues after this rank has left the world: other ranks may hang then. The store is for this
        world alone; ``step_source`` returns stage and step as text.
        """
        self.stop_hang_detection()
        if len(local_peers(peers, rank)) > 1:
            status = LocalStatus(store, rank, peers, progress, step_source)
            with self._stopped_thread():
                self._rank = rank
                self._hang_policy = KillHungRanks(status, hang_timeout_s, len(peers))

    def mark_finished(self) -> None:
        """Publishes that this rank has left the world."""
        if self._hang_policy is not None:
            self._hang_policy.mark_finished()

    def stop_hang_detection(self) -> None:
        """Stops hang detection. A second call is a no-op."""
        if self._hang_policy is not None:
            with self._stopped_thread():
                self._close_hang_policy()

    def _close_hang_policy(self) -> None:
        if self._hang_policy is not None:
            self._hang_policy.close()
        self._hang_policy = None

    @contextmanager
    def _stopped_thread(self) -> Iterator[None]:
        """Stops the monitor thread, and starts it again if it has something to monitor."""
        if self._thread is not None:
            self._thread.stop()
        self._thread = None
        yield
        if self._exit_tracker is not None or self._links is not None or self._hang_policy is not None:
            self._thread = MonitorThread(self._rank, self._loop, self._check)
            self._thread.start()

    def _on_exit(self) -> None:
        if os.getpid() == self._pid:
            self._abort_collectives = None
            with self._stopped_thread():
                self._close_world(is_coordinated=True)
                self._close_hang_policy()

    # --- called by the monitor thread ---

    def _check(self, elapsed_s: float, _: bool) -> bool:
        abort = self._abort_collectives  # once: the training thread may set it to None
        if abort is not None and self._has_lost_rank():
            self._abort_collectives = None
            abort()
            if self._links is not None:
                self._links.abort()  # the linked ranks detect it and abort their collectives too
        if self._hang_policy is not None:
            self._hang_policy.check(elapsed_s)
        return False

    def _has_lost_rank(self) -> bool:
        if self._exit_tracker is not None and self._exit_tracker.exited_ranks():
            return True
        if self._links is None:
            return False
        for host in sorted({self._peers[rank].host_name for rank in self._links.unreachable}):
            log.warning("rank %d: the host %s does not respond", self._rank, host)
        return bool(self._links.unreachable or self._links.disconnected)


_of_process: ElasticMonitor | None = None


def elastic_monitor() -> ElasticMonitor:
    """Returns the elastic monitor of this process."""
    global _of_process
    if _of_process is None or _of_process._pid != os.getpid():
        _of_process = ElasticMonitor()
    return _of_process
