"""Failure monitor of elastic training: what a rank does after a failure so that the other ranks can continue.

Without elastic training, all ranks exit (:mod:`.failure_monitor`). In elastic training, the collectives of a rank that
waits for a lost rank must fail, and the ranks that are left form a new world:

- A process that exits closes its connections, which gloo, shm, and Horovod detect. NCCL does not: a pidfd reports the
  exit (:mod:`.exit_tracker`), and the monitor aborts this rank's collectives.
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
from collections.abc import Callable, Mapping

import torch.distributed as dist

from lightning_strategies_ext._system.peers import Peer, host_identity
from lightning_strategies_ext._system.selector_loop import SelectorLoop
from lightning_strategies_ext.failure import failure_report
from lightning_strategies_ext.failure.exit_tracker import ExitTracker
from lightning_strategies_ext.failure.failure_detector import (
    HEARTBEAT_TIMEOUT_S,
    HeartbeatAges,
    Observation,
    diagnose_hang,
)
from lightning_strategies_ext.failure.failure_monitor import MonitorThread
from lightning_strategies_ext.failure.local_status import LocalStatus
from lightning_strategies_ext.failure.peer_links import CoordinatorEndpoint, PeerLinks
from lightning_strategies_ext.failure.process_exit import exit_now
from lightning_strategies_ext.failure.rank_status import CollectiveProgress, Failure, RankStatus

log = logging.getLogger(__name__)

#: Seconds that the same ranks must remain hung before they are killed: the exit of another rank may release them.
CONFIRMATION_S = 1.0


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
        self.leave_world(agreed=True)
        loop, host = SelectorLoop(), host_identity()
        links = None
        if link_store is not None and len({peer.host for peer in peers.values()}) > 1:
            links = PeerLinks(loop, lambda rank, message: False)
            linked_ranks = peers.keys() - {min(peers)}
            coordinator = CoordinatorEndpoint(link_store, "coordinator", peers, rank, linked_ranks, links)
            if rank in linked_ranks:
                coordinator.connect()
        self._stop()
        self._loop.close()
        self._loop, self._links = loop, links
        self._rank, self._peers, self._abort_collectives = rank, peers, abort_collectives
        if tracks_exits:
            others = {peer.rank: peer for peer in peers.values() if peer.host == host and peer.pid != os.getpid()}
            self._exit_tracker = ExitTracker(others, loop)
        self._start()

    def leave_world(self, *, agreed: bool) -> None:
        """Stops monitoring the ranks of the world, except for hangs. A second call is a no-op.

        Args:
            agreed: Whether the other ranks leave too. If False, the peer links are closed without a goodbye, and the
                other ranks treat this rank as lost.
        """
        self._abort_collectives = None
        if self._links is not None or self._exit_tracker is not None:
            self._stop()
            self._close_world(agreed=agreed)
            self._start()

    def _close_world(self, *, agreed: bool) -> None:
        if self._links is not None:
            self._links.close() if agreed else self._links.abort()
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

        The detection continues after this rank has left the world: other ranks may hang then.

        Args:
            store: Store that the ranks share, for this world alone.
            rank: Global rank of this process.
            peers: All ranks.
            progress: Progress of this rank's collectives.
            hang_timeout_s: Hang timeout, in seconds.
            step_source: Callable that returns stage and step as text.
        """
        self.stop_hang_detection()
        host = host_identity()
        local_peers = {peer.rank: peer for peer in peers.values() if peer.host == host}
        if len(local_peers) == 1:
            return
        status = LocalStatus(dist.PrefixStore(f"hang/{host}", store), rank, local_peers, progress, step_source)
        self._stop()
        self._rank, is_single_host = rank, len(local_peers) == len(peers)
        self._hang_policy = KillHungRanks(status, rank, local_peers, hang_timeout_s, is_single_host=is_single_host)
        self._start()

    def mark_finished(self) -> None:
        """Publishes that this rank has left the world."""
        if self._hang_policy is not None:
            self._hang_policy.mark_finished()

    def stop_hang_detection(self) -> None:
        """Stops hang detection. A second call is a no-op."""
        if self._hang_policy is None or os.getpid() != self._pid:
            return
        self._stop()
        self._hang_policy.close()
        self._hang_policy = None
        self._start()

    def _start(self) -> None:
        if self._exit_tracker is not None or self._links is not None or self._hang_policy is not None:
            self._thread = MonitorThread(self._rank, self._loop, self._check)
            self._thread.start()

    def _stop(self) -> None:
        if self._thread is not None:
            self._thread.stop()
        self._thread = None

    def _on_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        self._abort_collectives = None
        self._stop()
        self._close_world(agreed=True)
        if self._hang_policy is not None:
            self._hang_policy.close()

    # --- called by the monitor thread ---

    def _check(self, elapsed_s: float, _: bool) -> None:
        abort = self._abort_collectives  # once: the training thread may set it to None
        if abort is not None and self._has_lost_rank():
            self._abort_collectives = None
            abort()
            if self._links is not None:
                self._links.abort()  # the linked ranks detect it and abort their collectives too
        if self._hang_policy is not None:
            self._hang_policy.check(elapsed_s)

    def _has_lost_rank(self) -> bool:
        if self._exit_tracker is not None and self._exit_tracker.exited_ranks():
            return True
        if self._links is None:
            return False
        for host in sorted({self._peers[rank].host_name for rank in self._links.unreachable}):
            log.warning("rank %d: the host %s does not respond", self._rank, host)
        return bool(self._links.unreachable or self._links.disconnected)


class KillHungRanks:
    """Policy after a hang: one of the ranks that wait kills the hung ranks of its host.

    Args:
        status: Statuses of the ranks of this host.
        rank: Global rank of this process.
        peers: Ranks of this host.
        hang_timeout_s: Hang timeout, in seconds.
        is_single_host: Whether all ranks are on this host. If False, all ranks of this host may wait for another host;
            then none is killed.
    """

    def __init__(
        self, status: LocalStatus, rank: int, peers: Mapping[int, Peer], hang_timeout_s: float, *, is_single_host: bool
    ) -> None:
        self._local_status = status
        self._rank = rank
        self._peers = peers
        self._hang_timeout_s = hang_timeout_s
        self._is_single_host = is_single_host
        self._heartbeat_ages = HeartbeatAges()
        self._suspects: tuple[int, ...] = ()
        self._suspected_for_s = 0.0
        status.state = "running"
        status.publish(None)

    def mark_finished(self) -> None:
        """Publishes, at the next check, that this rank has left the world."""
        self._local_status.state = "finished"

    def close(self) -> None:
        """Publishes that this rank has left the world, and closes the status table."""
        self.mark_finished()
        self._local_status.sample_training_thread(0.0)  # the collective that the last sample saw is over
        self._local_status.publish(None)
        self._local_status.close()

    def check(self, elapsed_s: float) -> None:
        """Publishes this rank's status and kills hung ranks, ``elapsed_s`` seconds after the last check."""
        self._local_status.sample_training_thread(elapsed_s)
        self._local_status.publish(None)
        statuses = self._local_status.read()
        self._heartbeat_ages.update(statuses, elapsed_s)
        if len(statuses) == len(self._peers) and (failure := self._confirmed_hang(statuses, elapsed_s)) is not None:
            self._kill(failure)

    def _confirmed_hang(self, statuses: Mapping[int, RankStatus], elapsed_s: float) -> Failure | None:
        """Returns the failure of ranks that this rank has to kill, or None."""
        alive = {rank: status for rank, status in statuses.items() if self._peers[rank].is_running()}
        observed = Observation(self._rank, self._peers, alive, self._heartbeat_ages.age_s)
        failure = diagnose_hang(observed, self._hang_timeout_s)
        ranks = () if failure is None else failure.ranks
        are_all_waiting = self._is_single_host and len(ranks) == len(self._peers)
        if not are_all_waiting and any(self._is_in_collective(statuses[rank]) for rank in ranks):
            ranks = ()  # they wait for a rank that has exited, as the kernel reports, or for a rank of another host
        self._suspected_for_s = self._suspected_for_s + elapsed_s if ranks == self._suspects else 0.0
        self._suspects = ranks
        is_confirmed = bool(ranks) and self._suspected_for_s >= CONFIRMATION_S
        # A rank without heartbeats has stopped its hang detection, or cannot kill another rank.
        monitoring = {rank for rank in alive if self._heartbeat_ages.age_s[rank] < HEARTBEAT_TIMEOUT_S}
        killers = monitoring - set(ranks) or monitoring
        return failure if is_confirmed and self._rank == min(killers) else None

    def _is_in_collective(self, status: RankStatus) -> bool:
        return status.in_collective_s > 0 and self._heartbeat_ages.age_s[status.rank] < self._hang_timeout_s

    def _kill(self, failure: Failure) -> None:
        failure_report.print_line(
            f"{failure_report.full_report(failure)}\nKilling {failure.ranks_text} so that the other ranks can continue."
        )
        local_pids = [peer.pid for peer in self._peers.values()]
        for rank in failure.ranks:
            if rank != self._rank:
                self._peers[rank].kill(local_pids)
        if self._rank in failure.ranks:  # all ranks wait for each other; the rest would hang again
            exit_now()
        self._suspects = ()  # otherwise the report would be repeated until the processes have exited


_of_process: ElasticMonitor | None = None


def elastic_monitor() -> ElasticMonitor:
    """Returns the elastic monitor of this process."""
    global _of_process
    if _of_process is None or _of_process._pid != os.getpid():
        _of_process = ElasticMonitor()
    return _of_process
