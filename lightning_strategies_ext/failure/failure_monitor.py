"""Failure monitor: when one rank fails, all ranks exit.

An exception and the exit of a process are detected within two seconds, the loss of a host after about eight seconds,
and a hang after the hang timeout.

Each rank has one monitor, from when the ranks connect until the process exits. Its thread samples the training thread
four times per second, publishes the rank's status in the status table of the host (:mod:`.local_status`,
:mod:`.status_table`), and reads the statuses of the other ranks there; statuses of other hosts arrive over peer links
(:mod:`.remote_status`). A pidfd wakes the thread when a process of this host exits. The thread uses no store: a store
disappears with the process that serves it, which may be rank 0's. Votes, decisions, and stage exits are part of the
statuses.

After a failure, the monitor of each rank aborts pending collectives, so that the training thread receives an error and
the script can exit by itself. A rank that has not exited after :data:`GRACE_S`, because it sleeps or computes, is
terminated by its own monitor. An unresponsive rank, which is stopped or whose GIL is held, is killed by the monitor of
another rank.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from lightning_strategies_ext._system.connections import enable_store_keepalive
from lightning_strategies_ext._system.peers import Peer, exchange_peers, host_identity
from lightning_strategies_ext._system.selector_loop import SelectorLoop
from lightning_strategies_ext.exceptions import RankFailedError
from lightning_strategies_ext.failure import failure_report
from lightning_strategies_ext.failure.exit_tracker import ExitTracker
from lightning_strategies_ext.failure.failure_detector import (
    HEARTBEAT_TIMEOUT_S,
    HeartbeatAges,
    Observation,
    detect_failure,
    diagnose_script_end,
    ranks_done_with_stage,
)
from lightning_strategies_ext.failure.local_status import HEARTBEAT_INTERVAL_S, LocalStatus
from lightning_strategies_ext.failure.process_exit import exit_now, exit_within, fail_at_exit, register_exit_handler
from lightning_strategies_ext.failure.rank_status import (
    CollectiveProgress,
    Failure,
    RankState,
    RankStatus,
    StageExit,
    StageExits,
    merge_stage_exits,
)
from lightning_strategies_ext.failure.remote_status import RemoteStatus
from lightning_strategies_ext.failure.stop_agreement import StopAgreement, decide_last_step
from lightning_strategies_ext.failure.thread_activity import ThreadActivity

log = logging.getLogger(__name__)

#: Seconds that the monitor waits for other ranks to raise the same exception before it aborts this rank's collectives.
ANNOUNCE_S = 1.0
#: Seconds that a rank has to exit by itself after its collectives were aborted.
GRACE_S = 5.0
#: Seconds that a hung rank has to exit by itself.
HANG_GRACE_S = 1.0
#: Maximum duration of the interpreter's exit, in seconds. Horovod waits there for ranks that have already exited.
EXIT_TIMEOUT_S = 4.0
#: Seconds after which a rank kills a peer that the peer's own monitor should have terminated.
KILL_MARGIN_S = 1.5
#: A process whose monitor thread did not run for this many seconds was suspended.
SUSPENDED_AFTER_S = 3.0
#: Seconds between two checks while the ranks agree on the last step.
AGREEMENT_POLL_S = 0.05
#: Seconds that a rank waits at the start for the failure monitors of the other ranks.
STARTUP_TIMEOUT_S = 60.0
#: Requests per second that all ranks together send to the store during the startup barrier.
REQUESTS_PER_S = 2000
_POLL_S = 0.05
_STARTUP_POLL_S = 0.002
_numbers = count()


class MonitorThread(threading.Thread):
    """The thread of a monitor: waits for events, and checks the ranks several times per second.

    Args:
        rank: Global rank of this process.
        loop: Selector loop of this thread. An event may cause a check at once.
        check: Callable that receives the seconds since the last check, without time in which this process was
            suspended, and whether it was suspended. An exception is logged, and the thread continues.
        is_urgent: Callable that returns whether ranks wait for a stop decision, so that the thread checks more often.
    """

    def __init__(
        self,
        rank: int,
        loop: SelectorLoop,
        check: Callable[[float, bool], None],
        is_urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(name="lightning-strategies-ext failure monitor", daemon=True)
        self._rank = rank
        self._loop = loop
        self._check = check
        self._is_urgent = is_urgent
        self._stopped = threading.Event()

    @override
    def run(self) -> None:
        """Checks until :meth:`stop`, and once after it."""
        before, is_last = time.monotonic(), False
        while not is_last:
            try:
                self._loop.wait(AGREEMENT_POLL_S if self._is_urgent() else HEARTBEAT_INTERVAL_S)
                is_last = self._stopped.is_set()  # before the check, so that a check follows
                now = time.monotonic()
                before, elapsed_s = now, now - before
                self._check(min(elapsed_s, 2 * HEARTBEAT_INTERVAL_S), elapsed_s > SUSPENDED_AFTER_S)
            except Exception:  # otherwise the thread would exit unnoticed
                log.exception("The failure monitor of rank %d raised an exception; it continues.", self._rank)

    def stop(self) -> None:
        """Stops the thread after a last check, and waits for it."""
        self._stopped.set()
        self._loop.wake()
        if threading.current_thread() is not self:
            self.join()


class FailureMonitor:
    """The failure monitor of one rank. Collective: all ranks create their monitors together.

    Args:
        store: Store that all ranks share.
        rank: Global rank of this process.
        world_size: Number of ranks.
        progress: Progress of this rank's collectives.
        abort_collectives: Callable that makes this rank's pending collectives with the given peers raise, if the
            backend can.
        get_exit_code: Callable that returns the exit code of a process that this process has started, by its pid; None
            if the exit code is unknown.

    Raises:
        RankFailedError: If another rank fails, or does not reach the startup barrier in time.

    Attributes:
        store: Store that all ranks share.
        failure: First failure that this rank knows of, or None.
        on_failure: Callable that the monitor thread calls when it detects a failure.
        on_stage_exits: Callable that the monitor thread calls while other ranks have exited the stage of this rank,
            with their stage exits and the seconds since the last call.
        was_raised: Whether the script received an exception that names the failure.
        report_dir: Directory in which the failure report is written, in its subdirectory `failures`.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        progress: CollectiveProgress,
        abort_collectives: Callable[[Sequence[Peer]], None],
        get_exit_code: Callable[[int], int | None],
    ) -> None:
        self.store = store
        self.failure: Failure | None = None
        self.on_failure: Callable[[], None] = _do_nothing
        self.on_stage_exits: Callable[[StageExits, float], None] = _do_nothing
        self.was_raised = False
        self._rank = rank
        self._agreement: StopAgreement | None = None
        self._abort = abort_collectives
        self._hang_timeout_s: float | None = None
        self._number = next(_numbers)
        enable_store_keepalive(store)
        self._peers = exchange_peers(
            dist.PrefixStore(f"lightning_strategies_ext/peers/{self._number}", store), rank, world_size
        )
        host = host_identity()
        self._local_peers = {peer.rank: peer for peer in self._peers.values() if peer.host == host}
        self._local_pids = [peer.pid for peer in self._local_peers.values()]
        of_host = dist.PrefixStore(f"lightning_strategies_ext/status_table/{self._number}/{host}", store)
        self._local_status = LocalStatus(of_host, rank, self._local_peers, progress, lambda: "between two stages")
        self._loop = SelectorLoop()
        is_alone = len(self._local_peers) == len(self._peers)
        self._remote_status = None if is_alone else RemoteStatus(store, self._peers, rank, self._number, self._loop)
        self.report_dir = os.getcwd()
        self._detected_at: float | None = None
        self._aborted_at: float | None = None
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._pid = os.getpid()
        others = {rank: peer for rank, peer in self._local_peers.items() if peer.pid != os.getpid()}
        self._exit_tracker = ExitTracker(others, self._loop)
        self._get_exit_code = get_exit_code
        self._heartbeat_ages = HeartbeatAges()
        self._thread = MonitorThread(rank, self._loop, self._check, self._is_decision_needed)
        self._thread.start()
        self._at_end = register_exit_handler(self._on_exit)
        barrier = dist.PrefixStore(f"lightning_strategies_ext/startup_barrier/{self._number}", store)
        wait_for_all_monitors(barrier, world_size, rank == min(self._peers), lambda: self.failure)

    @classmethod
    def get_or_create(cls, store: dist.Store, *args: Any) -> "FailureMonitor":
        """Returns the monitor of this process, or creates one if the ranks share a new store. Collective.

        Args:
            store: Store that all ranks share.
            *args: Other arguments of the constructor.
        """
        global _of_process
        if _of_process is None or _of_process.store is not store or _of_process._pid != os.getpid():
            if _of_process is not None:
                _of_process.close()
            _of_process = cls(store, *args)
        return _of_process

    # --- called by the training thread ---

    def begin_stage(self, hang_timeout_s: float | None) -> None:
        """Publishes that this rank begins a stage. Collective: all ranks call it.

        Args:
            hang_timeout_s: Seconds that ranks wait in a collective for an inactive rank; None for no limit.
        """
        with self._lock:
            self._local_status.activity = ThreadActivity(threading.current_thread())
            self._hang_timeout_s = hang_timeout_s
            self.failure = self._detected_at = self._aborted_at = None
            self.was_raised = False
            self._local_status.stage += 1
            self.on_failure = self.on_stage_exits = _do_nothing
            self._local_status.step_source = lambda: "the setup of a stage"
            if self._remote_status is not None:
                self._remote_status.reset_timeouts()
            self._publish("running")

    def set_step_source(self, where: Callable[[], str], report_dir: str | None = None) -> None:
        """Sets what the monitor reports as the position of this rank, and where it writes failure reports.

        Args:
            where: Callable that returns stage and step as text.
            report_dir: Directory of the failure report; the working directory if None.
        """
        self._local_status.step_source, self.report_dir = where, report_dir or os.getcwd()
        self._publish(self._local_status.state)

    def start_stop_agreement(self, *, is_requested: bool) -> StopAgreement:
        """Starts an agreement on the last step of the stage. Collective: all ranks call it.

        Args:
            is_requested: Whether the ranks know already that they have to stop.
        """
        with self._lock:
            stage, last = self._local_status.stage, self._local_status.stop_vote
            number = (
                (stage, last.agreement_id[1] + 1) if last is not None and last.agreement_id[0] == stage else (stage, 0)
            )
            self._agreement = StopAgreement(number, is_requested=is_requested, notify=self._loop.wake)
            self._publish(self._local_status.state)
            return self._agreement

    def announce_stage_exit(self, num_started: int, *, has_failed: bool = False) -> None:
        """Publishes that this rank takes part in no more collectives of its stage.

        Args:
            num_started: Number of collectives that this rank has started.
            has_failed: Whether the stage ends with an exception on this rank.
        """
        with self._lock:
            self._local_status.stage_exit = StageExit(self._local_status.stage, num_started, has_failed)
            self._publish(self._local_status.state)

    def stage_exits(self) -> StageExits | None:
        """Returns the ranks that have exited the stage of this rank, or None if no rank has."""
        with self._lock:
            return _merged_stage_exits(self._statuses(), self._local_status.stage)

    def ranks_in_stage(self) -> tuple[set[int], set[int]]:
        """Returns the peers that have not exited the stage that this rank has exited.

        Returns:
            The ranks that may still exit the stage, and the ranks that failed in it or whose processes have exited.
        """
        if self._closed.is_set() or self._local_status.stage_exit is None:
            return set(), set()
        stage, failed, staying = self._local_status.stage_exit.stage, set[int](), set[int]()
        with self._lock:
            # Before the statuses are read: a rank may publish its stage exit and then exit its process.
            exited = {rank for rank, peer in self._local_peers.items() if not peer.is_running()}
            statuses = self._statuses()
            known, closed = {*statuses, *self._local_peers}, set[int]()
            if self._remote_status is not None:
                exited |= self._remote_status.disconnected_ranks()
                known |= self._remote_status.unknown_ranks()  # a stage may be shorter than the interval of statuses
                closed = self._remote_status.closed_ranks()
        for rank in known - {self._rank}:
            status = statuses.get(rank, RankStatus(rank))
            if status.stage_exit is not None and status.stage_exit.stage >= stage:
                failed |= {rank} if status.stage_exit.has_failed and status.stage_exit.stage == stage else set()
            elif status.state in ("failed", "exited") or rank in exited:
                failed.add(rank)
            elif status.stage <= stage:
                staying.add(rank)
        return staying - closed, failed

    def is_first_surviving_reporter(self, failure: Failure) -> bool:
        """Whether this rank is the lowest of the ranks that can report the failure."""
        return self._rank == min(self._peers.keys() - _unable_to_report(failure) or failure.ranks)

    def finish_stage(self) -> None:
        """Publishes that this rank has finished its stage."""
        if self._local_status.state == "running":
            self._publish("finished")
        self._local_status.step_source = lambda: "between two stages"
        self.on_failure = self.on_stage_exits = _do_nothing

    def announce_failure(self, exception: BaseException) -> None:
        """Publishes that this rank has failed and will exit by itself; returns at once."""
        failure = self._record_failure(exception)
        failure_report.report_at_exit(
            exception, failure, self._rank, self.report_dir, lambda: self._announce_script_failure(failure)
        )

    def announce_uncaught(self, exception: BaseException) -> None:
        """Publishes that this rank's script raised between two stages: other ranks may wait in the next stage."""
        if self._skip_to_next_stage():  # this rank reports it too: other ranks may have finished
            failure_report.report_at_exit(exception, self._record_failure(exception), self._rank, self.report_dir)

    def _announce_script_failure(self, failure: Failure) -> bool:
        """Publishes that this rank's script ends, and returns whether this rank prints the report."""
        is_reporter = self._is_reporter(failure)
        with self._lock:
            # Ranks that are already in the next stage would ignore a failure in an earlier one.
            self._local_status.stage = max(
                [self._local_status.stage + 1, *(status.stage for status in self._statuses().values())]
            )
            self._publish("failed")
        return is_reporter

    def _record_failure(self, exception: BaseException) -> Failure:
        return self._fail(
            lambda: failure_report.failure_from_exception(exception, self._rank, self._local_status.current_step_text())
        )

    def announce_script_end(self) -> None:
        """Publishes that this rank's script has ended, if other ranks wait in a stage that it will not reach."""
        with self._lock:
            statuses = self._statuses().items()
            waiting = [
                rank
                for rank, status in statuses
                if status.state == "running" and status.stage > self._local_status.stage
            ]
        if waiting and self._skip_to_next_stage():
            failure_report.print_report(self._fail(lambda: diagnose_script_end(self._rank, waiting)))

    def _skip_to_next_stage(self) -> bool:
        with self._lock:
            is_between = self._local_status.state == "finished"
            self._local_status.stage += is_between
            return is_between

    def wait_for_failure(self, timeout_s: float) -> Failure | None:
        """Returns the first failure; waits up to ``timeout_s`` seconds for one."""
        deadline = time.monotonic() + timeout_s
        while self.failure is None and time.monotonic() < deadline and not self._closed.is_set():
            time.sleep(_POLL_S)
        return self.failure

    @property
    def was_aborted(self) -> bool:
        """Whether this rank's collectives fail because of another rank, or because this rank was found hung."""
        failure = self.failure
        return failure is not None and not (failure.is_self_reported and failure.reported_by == self._rank)

    def abort_own_collectives(self) -> None:
        """Makes this rank's pending collectives raise, if the backend can; returns at once."""
        self._abort_collectives_with([peer for rank, peer in self._peers.items() if rank != self._rank])

    def _abort_collectives_with(self, others: Sequence[Peer]) -> None:
        # In a thread, because Horovod's shutdown waits for the other ranks, which may not respond.
        name = "lightning-strategies-ext abort"
        threading.Thread(target=self._abort, args=(others,), name=name, daemon=True).start()

    def fail_and_kill_local_peers(self, trace: str) -> None:
        """Publishes that this rank has failed, and kills ranks of this host that do not exit by themselves.

        Returns at once if the other ranks have failed too, else after at most :data:`ANNOUNCE_S` + :data:`GRACE_S` +
        :data:`KILL_MARGIN_S` seconds.

        Args:
            trace: Traceback of this rank's failure.
        """
        where = self._local_status.current_step_text
        self._fail(lambda: failure_report.failure_from_traceback(trace, self._rank, where()))
        if not self._wait_for_others(ANNOUNCE_S):
            self._abort_collectives_with(self._running_local_peers())
            self._kill(self._unresponsive(self._running_local_peers()))
            self._wait_for_others(GRACE_S + KILL_MARGIN_S)
        self._kill(self._running_local_peers())

    def _of_this_job(self, failure: Failure) -> Failure:
        return replace(failure, job_id=self._peers[0].pid)

    def _fail(self, described: Callable[[], Failure]) -> Failure:
        self.was_raised = True
        # Without the lock, which the monitor thread needs: the description runs the user's `__str__`, which may block.
        own = None if self.failure is not None else self._of_this_job(described())
        with self._lock:  # so that the monitor thread does not attribute the failure to another rank
            failure = self.failure = self.failure or own
            assert failure is not None
            self._publish("failed")
        return failure

    def run_exit_handler(self) -> None:
        """Runs the exit handler now, before exit handlers that may take long. A second run is a no-op."""
        self._at_end()

    def close(self) -> None:
        """Stops the thread; publishes nothing. A second call is a no-op."""
        self._at_end.cancel()
        # A forked process has no monitor thread.
        if os.getpid() != self._pid or self._closed.is_set():
            return
        self._closed.set()
        self._thread.stop()  # after a last check: this rank may have failed since
        if self._remote_status is not None:
            self._remote_status.close()
        self._loop.close()
        self._exit_tracker.close()
        with self._lock:
            self._local_status.close()

    def _on_exit(self) -> None:
        if self._local_status.state != "failed":
            self._publish("exited")
        if self.failure is not None:
            if not self.failure.is_self_reported:
                with self._lock:
                    self._kill_unresponsive(self.failure)
            # If the script received no exception, this rank had finished its last stage before it detected the failure.
            if not self.was_raised and self._rank == min(self._peers):
                failure_report.print_report(self.failure)
            if not self.was_raised or self.failure.is_host_loss:
                fail_at_exit()  # now: a thread that waits for the store would delay the exit of the interpreter
        self.close()
        if self.failure is not None:
            exit_within(EXIT_TIMEOUT_S)

    # --- called by the monitor thread ---

    def _is_decision_needed(self) -> bool:
        return self._agreement is not None and self._agreement.needs_decision

    def _check(self, elapsed_s: float, was_suspended: bool) -> None:
        if was_suspended and self._remote_status is not None:
            self._remote_status.reset_timeouts()
        with self._lock:
            self._local_status.sample_training_thread(elapsed_s)
            self._publish(self._local_status.state)
            statuses = self._statuses()
            self._heartbeat_ages.update(statuses, elapsed_s)
            if self.failure is None:
                failure = detect_failure(
                    self._observation(statuses), self._local_status.stage, self._hang_timeout_s, self._get_exit_code
                )
                self.failure = failure and self._of_this_job(failure)
                if (
                    self.failure is not None
                    and self.failure.reported_by == self._rank
                    and self._local_status.state == "finished"
                ):
                    path = failure_report.write_report(
                        self.report_dir, self.failure, self._rank, failure_report.full_report(self.failure)
                    )
                    where = f"Where each rank was: {path}" if path is not None else ""
                    failure_report.print_report(self.failure, where)
                    self._kill_unresponsive(self.failure)
            self._update_agreements(statuses, elapsed_s)
            if self._remote_status is not None:
                self._remote_status.publish(self._local_status.read(), self.failure)
            failure, must_end = self.failure, self._local_status.state == "running"
            # Between two stages, or in a last hook, this rank blocks no other rank, unless it is the hung rank.
            must_end |= failure is not None and failure.is_hang and self._rank in failure.ranks
        if failure is not None and must_end:
            self._exit_this_rank(failure)

    def _observation(self, statuses: Mapping[int, RankStatus]) -> Observation:
        exited, lost, remote = self._exit_tracker.exited_ranks(), list[int](), self._remote_status
        if remote is not None:
            exited, lost = exited | remote.disconnected_ranks(), remote.lost_ranks()
        return Observation(self._rank, self._peers, statuses, self._heartbeat_ages.age_s, exited, lost)

    def _update_agreements(self, statuses: Mapping[int, RankStatus], elapsed_s: float) -> None:
        """Receives votes, decisions, and stage exits from the statuses, and publishes those that are new."""
        own, agreement = self._local_status, self._agreement
        before = own.stop_decision, own.stage_exits
        if self._rank != min(self._peers):
            decisions = [status.stop_decision for status in statuses.values() if status.stop_decision is not None]
            own.stop_decision = max(
                decisions, key=lambda one: (one.agreement_id, one.last_step is not None), default=None
            )
        elif len(statuses) == len(self._peers):
            own.stop_decision = decide_last_step(
                {rank: status.stop_vote for rank, status in statuses.items()}, own.stop_decision
            )
        own.stage_exits = _merged_stage_exits(statuses, own.stage)
        if before != (own.stop_decision, own.stage_exits):
            self._publish(own.state)  # first: a rank that receives the decision may exit right after the last step
        if agreement is not None:
            agreement.receive(own.stop_decision)
            if agreement.vote() != own.stop_vote:
                self._publish(own.state)
        if own.stage_exits is not None:
            self.on_stage_exits(own.stage_exits, elapsed_s)

    def _exit_this_rank(self, failure: Failure) -> None:
        now = time.monotonic()
        if self._detected_at is None:
            self._detected_at = now
            self.on_failure()
        # It waits before the abort: all ranks may raise the same exception, and the script may catch it and continue.
        if self._aborted_at is None:
            if not failure.is_self_reported or now - self._detected_at > ANNOUNCE_S:
                self._aborted_at = now
                self.abort_own_collectives()
        elif now - self._aborted_at > (HANG_GRACE_S if self._rank in failure.ranks else GRACE_S):
            reason = f"rank {self._rank} was terminated because {failure_report.one_line_cause(failure)}"
            path = failure_report.write_report(
                self.report_dir, failure, self._rank, f"{reason}\n{self._local_status.activity.stack()}"
            )
            failure_report.print_line(
                f"{reason}. It did not exit by itself" + (f"; its stack is in {path}." if path else ".")
            )
            self._kill_unresponsive(failure)
            exit_now()

    def _is_reporter(self, failure: Failure) -> bool:
        """Whether this rank prints the report: the lowest rank that can."""
        unable = _unable_to_report(failure)
        with self._lock:
            statuses, stage = self._statuses(), self._local_status.stage
        unable |= {rank for rank, status in statuses.items() if status.state in ("finished", "exited")}
        unable |= {rank for rank, status in statuses.items() if status.state == "running" and status.stage > stage}
        # A launcher may terminate ranks that have exited the stage as soon as this rank exits.
        exits = _merged_stage_exits(statuses, stage)
        unable |= set() if exits is None else set(exits.ranks)
        return all(self._rank <= rank for rank in (self._peers.keys() - unable or failure.ranks))

    # --- status, processes ---

    def _statuses(self) -> dict[int, RankStatus]:
        """Returns the newest status of each rank, by rank; without ranks whose status is unknown."""
        return {**({} if self._remote_status is None else self._remote_status.statuses), **self._local_status.read()}

    def _publish(self, state: RankState) -> None:
        with self._lock:
            self._local_status.state = state
            if self._agreement is not None:
                self._local_status.stop_vote = self._agreement.vote()
            self._local_status.publish(self.failure)

    def _kill_unresponsive(self, failure: Failure) -> None:
        """Kills the failed ranks of this host whose own monitors cannot terminate them, such as suspended ones."""
        failed = [peer for rank, peer in self._local_peers.items() if rank in failure.ranks and rank != self._rank]
        for peer in self._unresponsive(failed):
            peer.kill(self._local_pids)

    def _unresponsive(self, peers: Sequence[Peer]) -> list[Peer]:
        """Returns the peers without heartbeats, which cannot exit by themselves."""
        return [peer for peer in peers if self._heartbeat_ages.age_s.get(peer.rank, 0) >= HEARTBEAT_TIMEOUT_S]

    def _kill(self, peers: Sequence[Peer]) -> None:
        # Before the kill: a launcher that detects a killed rank terminates this rank too.
        if peers and self.failure is not None and self._is_reporter(self.failure):
            failure_report.print_report(self.failure)
        for peer in peers:
            failure_report.print_line(
                f"rank {peer.rank} (pid {peer.pid}) does not exit by itself; rank {self._rank} kills it."
            )
            peer.kill(self._local_pids)

    def _wait_for_others(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._running_local_peers():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _running_local_peers(self) -> list[Peer]:
        with self._lock:
            done = ranks_done_with_stage(self._statuses(), self._local_status.stage)
        return [
            peer
            for rank, peer in self._local_peers.items()
            if rank != self._rank and rank not in done and peer.is_running()
        ]


_of_process: FailureMonitor | None = None


def current_monitor() -> FailureMonitor | None:
    """Returns the failure monitor of this process, or None if it has none."""
    return _of_process


def known_failure() -> Failure | None:
    """Returns the first failure that this process knows of, or None."""
    return None if _of_process is None else _of_process.failure


def announce_uncaught(exception: BaseException) -> BaseException:
    """Announces an exception of the script between two stages; within a stage, the strategy announces exceptions."""
    if _of_process is not None and not isinstance(exception, KeyboardInterrupt):  # every rank receives an interrupt
        _of_process.announce_uncaught(exception)
    return exception


def _unable_to_report(failure: Failure) -> set[int]:
    """Returns the failed ranks if they did not report the failure themselves: these cannot print the report."""
    return set() if failure.is_self_reported else set(failure.ranks)


def _merged_stage_exits(statuses: Mapping[int, RankStatus], stage: int) -> StageExits | None:
    known = [status.stage_exits for status in statuses.values()]
    return merge_stage_exits(known, {rank: status.stage_exit for rank, status in statuses.items()}, stage)


def _do_nothing(*_: object) -> None:
    """The default of callbacks."""


def wait_for_all_monitors(
    store: dist.Store, num_ranks: int, is_first: bool, get_failure: Callable[[], Failure | None]
) -> None:
    """Waits until the failure monitors of all ranks run: the startup barrier. Collective: all ranks call it.

    Otherwise a rank could fail, or its host be lost, while other ranks still read from the store what their monitors
    need; they would wait for the timeout of the store, half an hour.

    Args:
        store: Store that the ranks share, for this barrier alone.
        num_ranks: Number of ranks.
        is_first: Whether this is rank 0, which leaves the barrier last, because its process may serve the store.
        get_failure: Callable that returns the first failure that this rank's monitor knows of, or None.

    Raises:
        RankFailedError: If a rank does not reach the barrier in time, or has failed.
    """
    deadline = time.monotonic() + STARTUP_TIMEOUT_S
    for key, until in ("running", num_ranks), ("passed", num_ranks if is_first else 0):
        found = store.add(key, 1)
        while found < until:
            if (failure := get_failure()) is not None:
                raise RankFailedError(failure_report.full_report(failure))
            if time.monotonic() > deadline:
                raise RankFailedError(
                    f"Only {found} of {until} ranks passed the startup barrier within {STARTUP_TIMEOUT_S:g} s. Check"
                    " the output of the other ranks, and whether their hosts are reachable."
                )
            time.sleep(max(_STARTUP_POLL_S, num_ranks / REQUESTS_PER_S))
            found = store.add(key, 0)
