"""The vigil: one that others wait for in vain is killed, so that the others can go on without it.

Where all ranks end together, the watch sees to that (:mod:`.failure_monitor`). In a ``fit`` whose ranks may change,
the others are told of a rank's end by the kernel, and there is nothing else to do than to bring it about.
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

#: For how long more the same ranks must be stuck, in seconds: those that one has just let go by its end wake up.
CONFIRMATION_S = 1.0


class Vigil:
    """One rank's part in it. All ranks of a host create theirs together; a thread looks a few times per second.

    It goes on when this rank has left the others, until :meth:`close`: they may be waited for then.

    Args:
        store: Shared by the ranks, for this alone.
        peers: The ranks of this host.
        rank: Of this process.
        progress: Of this rank.
        hang_timeout_s: For how long ranks may wait in a collective for one that does not move, in seconds.
        where: Gives stage and step, for people.
        is_single_host: Whether there are no ranks on other hosts, for which all of this one may wait.
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
        """Says that this rank is done with what the ranks do together."""
        self._own.state = "finished"

    def close(self) -> None:
        """Ends this rank's part. A second call does no harm."""
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
            except Exception:  # nobody would notice that this thread has ended
                log.exception("the vigil of rank %d could not look, and goes on", self._rank)
            before = now

    def _look(self, elapsed_s: float) -> Failure | None:
        """Who is to be ended, if this rank is the one to do it."""
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
            ranks = ()  # they wait for one that has left or ended, and will be told; or for one on another host
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
        if self._rank in failure.ranks:  # they wait for each other, as they would again
            exit_now()
        self._suspects = ()  # or all of it is said again before the kernel has ended them
