"""Hang monitor of elastic training: kills a hung rank so that the other ranks can continue.

Without elastic training, all ranks exit after a hang, see :mod:`.failure_monitor`. In elastic training, the kernel
reports the exit of a rank to the other ranks, so killing the rank suffices.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.failure import detection, failure_report
from lightning_strategies_ext.failure.local_status import HEARTBEAT_INTERVAL_S, LocalStatus
from lightning_strategies_ext.failure.process_exit import exit_now
from lightning_strategies_ext.failure.rank_status import CollectiveProgress, Failure, HeartbeatAges, RankStatus

log = logging.getLogger(__name__)

#: Seconds for which the same ranks must stay hung before they are killed: the exit of a rank may have released them.
CONFIRMATION_S = 1.0


class Vigil:
    """Monitors the ranks of one host. Collective among them: they create it together.

    The thread continues after this rank has finished, until :meth:`close`: other ranks may hang then.

    Args:
        store: Store that the ranks share, for this object alone.
        peers: Ranks of this host.
        rank: Global rank of this process.
        progress: Progress of this rank's collectives.
        hang_timeout_s: Hang timeout, in seconds.
        where: Callable that returns stage and step as text.
        is_single_host: Whether all ranks are on this host. Otherwise all ranks of this host may wait for another host.
    """

    def __init__(
        self,
        store: dist.Store,
        peers: Sequence[Peer],
        rank: int,
        progress: CollectiveProgress,
        hang_timeout_s: float,
        where: Callable[[], str],
        is_single_host: bool = True,
    ) -> None:
        self._are_all_here = is_single_host
        self._peers = {peer.rank: peer for peer in peers}
        self._rank = rank
        self._hang_timeout_s = hang_timeout_s
        self._own = LocalStatus(store, rank, self._peers, progress, where)
        self._own.state = "running"
        self._own.publish(None)
        self._heartbeat_ages = HeartbeatAges()
        self._suspects: tuple[int, ...] = ()
        self._suspected_for_s = 0.0
        self._pid = os.getpid()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning-strategies-ext vigil", daemon=True)
        self._thread.start()

    def mark_finished(self) -> None:
        """Publishes that this rank has finished."""
        self._own.state = "finished"

    def close(self) -> None:
        """Stops the thread. A second call is a no-op."""
        if os.getpid() != self._pid or self._closed.is_set():
            return
        self.mark_finished()
        self._closed.set()
        self._thread.join()
        self._own.publish(None)
        self._own.close()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(HEARTBEAT_INTERVAL_S):
            now = time.monotonic()
            try:
                failure = self._look(min(now - before, 2 * HEARTBEAT_INTERVAL_S))
                if failure is not None:
                    self._kill(failure)
            except Exception:  # otherwise the thread would exit unnoticed
                log.exception("The hang monitor of rank %d raised an exception; it continues.", self._rank)
            before = now

    def _look(self, elapsed_s: float) -> Failure | None:
        """Returns the failure of ranks that this rank has to kill, or None."""
        self._own.sample_training_thread(elapsed_s)
        self._own.publish(None)
        statuses = self._own.read()
        self._heartbeat_ages.update(statuses, elapsed_s)
        if len(statuses) < len(self._peers):
            return None
        alive = {rank: status for rank, status in statuses.items() if self._peers[rank].is_running()}
        failure = detection.diagnose_hang(
            alive, self._heartbeat_ages.age_s, self._hang_timeout_s, self._peers, self._rank
        )
        ranks = () if failure is None else failure.ranks
        do_all_wait = self._are_all_here and len(ranks) == len(self._peers)
        if not do_all_wait and any(self._is_in_collective(statuses[rank]) for rank in ranks):
            ranks = ()  # they wait for a rank that has exited, which the kernel reports, or for a rank of another host
        self._suspected_for_s = self._suspected_for_s + elapsed_s if ranks == self._suspects else 0.0
        self._suspects = ranks
        is_sure = bool(ranks) and self._suspected_for_s >= CONFIRMATION_S
        return failure if is_sure and self._rank == min(alive.keys() - set(ranks) or alive) else None

    def _is_in_collective(self, status: RankStatus) -> bool:
        return status.in_collective_s > 0 and self._heartbeat_ages.age_s[status.rank] < self._hang_timeout_s

    def _kill(self, failure: Failure) -> None:
        failure_report.print_line(
            f"{failure_report.full_report(failure)}\nKilling {failure.ranks_text} so that the other ranks can continue."
        )
        for rank in failure.ranks:
            if rank != self._rank:
                self._peers[rank].kill()
        if self._rank in failure.ranks:  # all ranks wait for each other, and would again
            exit_now()
        self._suspects = ()  # otherwise the report would be repeated before the kernel has killed them
