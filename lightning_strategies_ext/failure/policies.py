"""Policies: what the monitor thread of a rank does after a failure. Without elastic training, all ranks exit."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.failure import failure_detector, failure_report
from lightning_strategies_ext.failure.failure_detector import HEARTBEAT_TIMEOUT_S, HeartbeatAges, Observation
from lightning_strategies_ext.failure.local_status import LocalStatus
from lightning_strategies_ext.failure.process_exit import exit_now, fail_at_exit
from lightning_strategies_ext.failure.rank_status import Failure, RankStatus

#: Seconds that the monitor waits for other ranks to raise the same exception before it aborts this rank's collectives.
ANNOUNCE_S = 1.0
#: Seconds that a rank has to exit by itself after its collectives were aborted.
GRACE_S = 5.0
#: Seconds that a hung rank has to exit by itself.
HANG_GRACE_S = 1.0
#: Seconds after which a rank kills a peer that the peer's own monitor should have terminated.
KILL_MARGIN_S = 1.5
#: Seconds that the same ranks must remain hung before they are killed: the exit of another rank may release them.
CONFIRMATION_S = 1.0
_POLL_S = 0.05


class ExitAllRanks:
    """Policy after a failure: all ranks exit.

    The monitor of each rank aborts pending collectives, so that the training thread receives an error and the script
    can exit by itself. A rank that has not exited after :data:`GRACE_S`, because it sleeps or computes, is terminated
    by its own monitor. An unresponsive rank, which is stopped or whose GIL is held, is killed by the monitor of another
    rank.

    Attributes:
        report_dir: Directory in which the failure report is written, in its subdirectory `failures`.
    """

    def __init__(
        self,
        local_status: LocalStatus,
        observe: Callable[[], Observation],
        abort_collectives: Callable[[Sequence[Peer]], None],
    ) -> None:
        self.report_dir = os.getcwd()
        self._rank = local_status.own.rank
        self._local_status = local_status
        self._observe = observe
        self._abort = abort_collectives
        self.begin_stage()

    def begin_stage(self) -> None:
        """Ends the reaction to a failure in an earlier stage, which all ranks caught."""
        self._detected_at: float | None = None
        self._aborted_at: float | None = None

    def exit_this_rank(self, failure: Failure, on_failure: Callable[[], None]) -> None:
        """Calls ``on_failure``, aborts the collectives of this rank, and later terminates it; a step at each check."""
        now = time.monotonic()
        if self._detected_at is None:
            self._detected_at = now
            on_failure()
        # It waits before the abort: all ranks may raise the same exception, and the script may catch it and continue.
        if self._aborted_at is None:
            if not failure.is_self_reported or now - self._detected_at > ANNOUNCE_S:
                self._aborted_at = now
                self.abort_own_collectives()
        elif now - self._aborted_at > (HANG_GRACE_S if self._rank in failure.unresponsive_ranks else GRACE_S):
            reason = f"rank {self._rank} was terminated because {failure_report.one_line_cause(failure)}"
            stack = self._local_status.activity.stack()
            path = failure_report.write_report(self.report_dir, failure, self._rank, f"{reason}\n{stack}")
            failure_report.print_line(
                f"{reason}. It did not exit by itself" + (f"; its stack is in {path}." if path else ".")
            )
            self.kill_unresponsive(failure)
            exit_now()

    def report_after_stage(self, failure: Failure) -> None:
        """Reports a failure of other ranks that this rank has detected after it finished its stage."""
        text = failure_report.full_report(failure)
        path = failure_report.write_report(self.report_dir, failure, self._rank, text)
        failure_report.print_report(failure, *([] if path is None else [f"Where each rank was: {path}"]))
        self.kill_unresponsive(failure)

    def kill_unresponsive(self, failure: Failure) -> None:
        """Kills the failed ranks of this host whose own monitors cannot terminate them, such as suspended ones."""
        failed = [peer for rank, peer in self._local_status.peers.items() if rank in failure.ranks]
        for peer in self._unresponsive(failed):
            _kill_rank(peer, self._local_status)

    def prepare_exit(self, failure: Failure, *, was_raised: bool) -> None:
        """Kills unresponsive ranks before the exit of this process; reports a failure that the script has not received.

        The script receives no exception if this rank had finished its last stage before it detected the failure.
        """
        if not failure.is_self_reported:
            self.kill_unresponsive(failure)
        if not was_raised and self._rank == min(self._observe().peers):
            failure_report.print_report(failure)
        if not was_raised or failure.kind == "host loss":
            fail_at_exit()  # now: a thread that waits for the store would delay the exit of the interpreter

    def terminate_local_peers(self, failure: Failure) -> None:
        """Kills ranks of this host that do not exit by themselves after a failure of this rank.

        Returns at once if the other ranks have failed too, else after at most :data:`ANNOUNCE_S` + :data:`GRACE_S` +
        :data:`KILL_MARGIN_S` seconds.
        """
        if not self._wait_for_local_peers(ANNOUNCE_S):
            peers = self._running_local_peers()
            self._abort_collectives_with(peers)
            self._kill(self._unresponsive(peers), failure)
            self._wait_for_local_peers(GRACE_S + KILL_MARGIN_S)
        self._kill(self._running_local_peers(), failure)

    def abort_own_collectives(self) -> None:
        """Makes this rank's pending collectives raise, if the backend can; returns at once."""
        self._abort_collectives_with([peer for rank, peer in self._observe().peers.items() if rank != self._rank])

    def _abort_collectives_with(self, others: Sequence[Peer]) -> None:
        # In a thread, because Horovod's shutdown waits for the other ranks, which may not respond.
        name = "lightning-strategies-ext abort"
        threading.Thread(target=self._abort, args=(others,), name=name, daemon=True).start()

    def _unresponsive(self, peers: Sequence[Peer]) -> list[Peer]:
        """Returns the peers without heartbeats, which cannot exit by themselves."""
        ages_s = self._observe().heartbeat_ages
        return [peer for peer in peers if peer.rank != self._rank and ages_s.get(peer.rank, 0) >= HEARTBEAT_TIMEOUT_S]

    def _kill(self, peers: Sequence[Peer], failure: Failure) -> None:
        # Before the kill: a launcher that detects a killed rank terminates this rank too.
        if peers and failure_detector.is_reporter(self._observe(), failure):
            failure_report.print_report(failure)
        for peer in peers:
            failure_report.print_line(
                f"rank {peer.rank} (pid {peer.pid}) does not exit by itself; rank {self._rank} kills it."
            )
            _kill_rank(peer, self._local_status)

    def _wait_for_local_peers(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._running_local_peers():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _running_local_peers(self) -> list[Peer]:
        done = failure_detector.ranks_done_with_stage(self._observe()) | {self._rank}
        return [peer for rank, peer in self._local_status.peers.items() if rank not in done and peer.is_running()]


class KillHungRanks:
    """Policy in elastic training after a hang: one of the ranks that wait kills the hung ranks of its host.

    If the world has ranks on other hosts, all ranks of this host may wait for another host; then none is killed.
    """

    def __init__(self, local_status: LocalStatus, hang_timeout_s: float, world_size: int) -> None:
        self._local_status = local_status
        self._rank, self._peers = local_status.own.rank, local_status.peers
        self._hang_timeout_s = hang_timeout_s
        self._world_size = world_size
        self._heartbeat_ages = HeartbeatAges()
        self._suspects: tuple[int, ...] = ()
        self._suspected_for_s = 0.0
        local_status.own.state = "running"
        local_status.publish()

    def mark_finished(self) -> None:
        """Publishes, at the next check, that this rank has left the world."""
        self._local_status.own.state = "finished"

    def close(self) -> None:
        """Publishes that this rank has left the world, and closes the status table."""
        self.mark_finished()
        self._local_status.sample_training_thread(0.0)  # the collective that the last sample saw is over
        self._local_status.publish()
        self._local_status.close()

    def check(self, elapsed_s: float) -> None:
        """Publishes this rank's status and kills hung ranks, ``elapsed_s`` seconds after the last check."""
        self._local_status.sample_training_thread(elapsed_s)
        self._local_status.publish()
        statuses = self._local_status.read()
        self._heartbeat_ages.update(statuses, elapsed_s)
        if len(statuses) == len(self._peers) and (failure := self._confirmed_hang(statuses, elapsed_s)) is not None:
            self._kill(failure)

    def _confirmed_hang(self, statuses: Mapping[int, RankStatus], elapsed_s: float) -> Failure | None:
        """Returns the failure of ranks that this rank has to kill, or None."""
        alive = {rank: status for rank, status in statuses.items() if self._peers[rank].is_running()}
        observed = Observation(self._rank, self._peers, alive, self._heartbeat_ages.age_s)
        failure = failure_detector.diagnose_hang(observed, self._hang_timeout_s)
        ranks = () if failure is None else failure.ranks
        are_all_waiting = len(ranks) == self._world_size
        if not are_all_waiting and any(self._is_in_collective(statuses[rank]) for rank in ranks):
            ranks = ()  # they wait for a rank that has exited, as the kernel reports, or for a rank of another host
        self._suspected_for_s = self._suspected_for_s + elapsed_s if ranks == self._suspects else 0.0
        self._suspects = ranks
        is_confirmed = bool(ranks) and self._suspected_for_s >= CONFIRMATION_S
        # A rank without heartbeats has stopped its hang detection, or cannot kill another rank.
        monitoring = {rank for rank in alive if self._heartbeat_ages.age_s[rank] < HEARTBEAT_TIMEOUT_S}
        candidates = monitoring - set(ranks) or monitoring
        return failure if is_confirmed and self._rank == min(candidates) else None

    def _is_in_collective(self, status: RankStatus) -> bool:
        return status.in_collective_s > 0 and self._heartbeat_ages.age_s[status.rank] < self._hang_timeout_s

    def _kill(self, failure: Failure) -> None:
        failure_report.print_line(
            f"{failure_report.full_report(failure)}\nKilling {failure.ranks_text} so that the other ranks can continue."
        )
        for rank in failure.ranks:
            if rank != self._rank:
                _kill_rank(self._peers[rank], self._local_status)
        if self._rank in failure.ranks:  # all ranks wait for each other; the rest would hang again
            exit_now()
        self._suspects = ()  # otherwise the report would be repeated until the processes have exited


def _kill_rank(peer: Peer, local_status: LocalStatus) -> None:
    """Kills a rank of this host with its DataLoader workers, but not the ranks that it has started."""
    peer.kill([each.pid for each in local_status.peers.values()])
