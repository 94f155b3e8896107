"""Failure monitor: when one rank fails, all ranks exit (:class:`.ExitAllRanks`).

An exception and the exit of a process are detected within two seconds, the loss of a host after about eight seconds,
and a hang after the hang timeout.

Each rank has one monitor, from when the ranks connect until the process exits. Its thread samples the training thread
four times per second, publishes the rank's status in the status table of the host (:mod:`.local_status`), and reads the
statuses of the other ranks there; statuses of other hosts arrive over peer links (:mod:`.remote_status`). A pidfd wakes
the thread when a process of this host exits. The thread uses no store: a store disappears with the process that serves
it, which may be rank 0's. Votes, decisions, and stage exits are part of the statuses.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch.distributed as dist

from lightning_strategies_ext._system.connections import enable_store_keepalive
from lightning_strategies_ext._system.peers import Peer, exchange_peers
from lightning_strategies_ext._system.selector_loop import SelectorLoop
from lightning_strategies_ext.exceptions import RankFailedError
from lightning_strategies_ext.failure import failure_detector, failure_report
from lightning_strategies_ext.failure.failure_detector import HeartbeatAges, LoneBarrierDetector, Observation
from lightning_strategies_ext.failure.local_status import LocalStatus
from lightning_strategies_ext.failure.monitor_thread import ExitTracker, MonitorThread
from lightning_strategies_ext.failure.policies import ExitAllRanks
from lightning_strategies_ext.failure.process_exit import exit_within, register_exit_handler
from lightning_strategies_ext.failure.rank_status import (
    CollectiveProgress,
    Failure,
    RankState,
    StageExit,
    StageExits,
    merge_stage_exits,
)
from lightning_strategies_ext.failure.remote_status import RemoteStatus
from lightning_strategies_ext.failure.stop_agreement import StopAgreement, decide_last_step, newest_decision
from lightning_strategies_ext.failure.thread_activity import ThreadActivity

#: Maximum duration of the interpreter's exit, in seconds. Horovod waits there for ranks that have already exited.
EXIT_TIMEOUT_S = 4.0
#: Seconds that a rank waits at the start for the failure monitors of the other ranks.
STARTUP_TIMEOUT_S = 60.0
#: Requests per second that all ranks together send to the store during the startup barrier.
REQUESTS_PER_S = 2000
_POLL_S = 0.05
_STARTUP_POLL_S = 0.002
_numbers = count()


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
        on_failure: Callable that the monitor thread calls when it detects a failure in the stage of this rank.
        on_stage_exits: Callable that the monitor thread calls while other ranks have exited the stage of this rank,
            with their stage exits and the seconds since the last call.
        was_raised: Whether the script received an exception that names the failure.
        policy: What happens after a failure.
        start_exchange_log: See :meth:`.LocalStatus.start_exchange_log`.
        call_site: See :meth:`.LocalStatus.call_site`.
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
        self.on_failure: Callable[[], None] = _do_nothing
        self.on_stage_exits: Callable[[StageExits, float], None] = _do_nothing
        self.was_raised = False
        self.rank = rank
        self.progress = progress
        self._agreement: StopAgreement | None = None
        self._get_exit_code = get_exit_code
        self._hang_timeout_s: float | None = None
        self._heartbeat_ages = HeartbeatAges()
        self._lone_barrier = LoneBarrierDetector()
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._pid = os.getpid()
        number = next(_numbers)
        enable_store_keepalive(store)
        of_monitor = dist.PrefixStore(f"lightning_strategies_ext/failure_monitor/{number}", store)
        self._peers = exchange_peers(dist.PrefixStore("peers", of_monitor), rank, world_size)
        self._local_status = LocalStatus(of_monitor, rank, self._peers, progress, _between_stages)
        self.start_exchange_log, self.call_site = self._local_status.start_exchange_log, self._local_status.call_site
        self.policy = ExitAllRanks(self._local_status, self.observe, abort_collectives)
        self._loop = SelectorLoop()
        self._remote_status = RemoteStatus(store, self._peers, rank, number, self._loop)
        self._exit_tracker = ExitTracker(self._local_status.peers, self._loop)
        self._thread = MonitorThread(rank, self._loop, self._check)
        self._thread.start()
        self._at_end = register_exit_handler(self._on_exit)
        self._wait_for_all_monitors(of_monitor)

    def _wait_for_all_monitors(self, store: dist.Store) -> None:
        """Waits until the failure monitors of all ranks run: the startup barrier.

        Otherwise a rank could fail, or its host be lost, while other ranks still read from the store what their
        monitors need; they would wait for the timeout of the store, half an hour.
        """
        deadline, num_ranks = time.monotonic() + STARTUP_TIMEOUT_S, len(self._peers)
        # Rank 0 leaves the barrier last, because its process may serve the store.
        for key, until in ("running", num_ranks), ("passed", num_ranks if self.rank == min(self._peers) else 0):
            found = store.add(key, 1)
            while found < until:
                if self.failure is not None:
                    raise RankFailedError(failure_report.full_report(self.failure))
                if time.monotonic() > deadline:
                    raise RankFailedError(
                        f"Only {found} of {until} ranks passed the startup barrier within {STARTUP_TIMEOUT_S:g} s."
                        " Check the output of the other ranks, and whether their hosts are reachable."
                    )
                time.sleep(max(_STARTUP_POLL_S, num_ranks / REQUESTS_PER_S))
                found = store.add(key, 0)

    @classmethod
    def get_or_create(cls, store: dist.Store, *args: Any) -> "FailureMonitor":
        """Returns the monitor of this process; creates one, from all arguments, for a new store. Collective."""
        global _of_process
        if _of_process is None or _of_process.store is not store or _of_process._pid != os.getpid():
            if _of_process is not None:
                _of_process.close()
            _of_process = cls(store, *args)
        return _of_process

    # --- called by the training thread ---

    def begin_stage(self, hang_timeout_s: float | None) -> None:
        """Publishes that this rank begins a stage, in which hangs are detected if there is a timeout. Collective."""
        own = self._local_status.own
        with self._lock:
            self._local_status.activity = ThreadActivity(threading.current_thread())
            self._local_status.step_source, self._local_status.exchange_log = lambda: "the setup of a stage", None
            self._hang_timeout_s = hang_timeout_s
            self.was_raised = False
            self.on_failure = self.on_stage_exits = _do_nothing
            own.failure, own.stage = None, own.stage + 1
            self.policy.begin_stage()
            self._remote_status.reset_timeouts()
            self.publish("running")

    def set_step_source(self, where: Callable[[], str], report_dir: str | None = None) -> None:
        """Sets a callable that returns stage and step as text, and the directory of the failure report.

        The directory is the working directory if ``report_dir`` is None.
        """
        self._local_status.step_source, self.policy.report_dir = where, report_dir or os.getcwd()
        self.publish()

    def start_stop_agreement(self, *, is_requested: bool) -> StopAgreement:
        """Starts an agreement on the last step of the stage, see :class:`.StopAgreement`. Collective."""
        with self._lock:
            stage, vote = self._local_status.own.stage, self._local_status.own.stop_vote
            number = vote.agreement_id[1] + 1 if vote is not None and vote.agreement_id[0] == stage else 0
            self._agreement = StopAgreement((stage, number), is_requested=is_requested, notify=self._loop.wake)
            self.publish()
            return self._agreement

    def announce_stage_exit(self, *, has_failed: bool) -> None:
        """Publishes that this rank has finished its stage or failed in it: it takes part in no more collectives."""
        with self._lock:
            own = self._local_status.own
            own.stage_exit = StageExit(own.stage, self.progress.num_started(), has_failed)
            self.publish()

    def ranks_in_stage(self) -> tuple[set[int], set[int]]:
        """Returns the peers that may still exit the stage that this rank has exited, and those that have failed in it.

        See :func:`.ranks_in_stage`. After :meth:`close`, no peers are known.
        """
        return (set(), set()) if self._closed.is_set() else failure_detector.ranks_in_stage(self.observe())

    def finish_stage(self) -> None:
        """Publishes that this rank has finished its stage."""
        if self._local_status.own.state == "running":
            self.publish("finished")
        self._local_status.step_source = _between_stages
        self.on_failure = self.on_stage_exits = _do_nothing

    def announce_failure(self, exception: BaseException) -> None:
        """Publishes that this rank has failed and will exit by itself; returns at once."""
        self._announce_exception(exception, self._announce_script_failure)

    def announce_uncaught(self, exception: BaseException) -> None:
        """Publishes that this rank's script raised between two stages: other ranks may wait in the next stage."""
        if self._skip_to_next_stage():  # this rank reports it too: other ranks may have finished
            self._announce_exception(exception, lambda failure: True)

    def announce_script_end(self) -> None:
        """Publishes that this rank's script has ended, if other ranks wait in a stage that it will not reach."""
        failure = failure_detector.diagnose_script_end(self.observe())
        if failure is not None and self._skip_to_next_stage():
            failure_report.print_report(self._fail(lambda: failure))

    def _announce_exception(self, exception: BaseException, is_reporter: Callable[[Failure], bool]) -> None:
        where = self._local_status.current_step_text
        failure = self._fail(lambda: failure_report.failure_from_exception(exception, self.rank, where()))
        directory = self.policy.report_dir
        failure_report.report_at_exit(exception, failure, self.rank, directory, lambda: is_reporter(failure))

    def _announce_script_failure(self, failure: Failure) -> bool:
        """Publishes that this rank's script ends, and returns whether this rank prints the report."""
        observed, own = self.observe(), self._local_status.own
        is_reporter = failure_detector.is_reporter(observed, failure)
        with self._lock:
            # Ranks that are already in the next stage would ignore a failure in an earlier one.
            own.stage = max(own.stage + 1, *(status.stage for status in observed.statuses.values()))
            self.publish("failed")
        return is_reporter

    def _skip_to_next_stage(self) -> bool:
        with self._lock:
            is_between = self._local_status.own.state == "finished"
            self._local_status.own.stage += is_between
            return is_between

    @property
    def failure(self) -> Failure | None:
        """First failure that this rank knows of, or None."""
        return self._local_status.own.failure

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
        return failure is not None and not (failure.is_self_reported and failure.reported_by == self.rank)

    def fail_and_kill_local_peers(self, trace: str) -> None:
        """Publishes that this rank has failed, with a traceback, and kills ranks of this host that do not exit.

        For the duration, see :meth:`.ExitAllRanks.terminate_local_peers`.
        """
        where = self._local_status.current_step_text
        failure = self._fail(lambda: failure_report.failure_from_traceback(trace, self.rank, where()))
        self.policy.terminate_local_peers(failure)

    def _fail(self, describe: Callable[[], Failure]) -> Failure:
        self.was_raised = True
        # Without the lock, which the monitor thread needs: the description runs the user's `__str__`, which may block.
        failure = self.failure or replace(describe(), job_id=self._peers[0].pid)
        with self._lock:  # so that the monitor thread does not attribute the failure to another rank
            self._local_status.own.failure = failure = self.failure or failure
            self.publish("failed")
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
        self._remote_status.close()
        self._loop.close()
        self._exit_tracker.close()
        with self._lock:
            self._local_status.close()

    def _on_exit(self) -> None:
        if self._local_status.own.state != "failed":
            self.publish("exited")
        if self.failure is not None:
            self.policy.prepare_exit(self.failure, was_raised=self.was_raised)
        self.close()
        if self.failure is not None:
            exit_within(EXIT_TIMEOUT_S)

    # --- called by the monitor thread ---

    def _check(self, elapsed_s: float, was_suspended: bool) -> bool:
        own = self._local_status.own
        if was_suspended:
            self._remote_status.reset_timeouts()
        with self._lock:
            self._local_status.sample_training_thread(elapsed_s)
            self.publish()
            observed = self.observe()
            self._heartbeat_ages.update(observed.statuses, elapsed_s)
            if own.failure is None:
                log = self._local_status.exchange_log
                own.failure = failure_detector.detect_failure(observed, self._hang_timeout_s, self._get_exit_code, log)
                if own.failure is not None and own.failure.reported_by == self.rank and own.state == "finished":
                    self.policy.report_after_stage(own.failure)
            self._update_agreements(observed, elapsed_s)
            if self._lone_barrier.is_found(observed, self._local_status.activity, elapsed_s):
                self.policy.abort_own_collectives()
            self._remote_status.publish(self._local_status.read(), own.failure)
            # Between two stages, or in a last hook, this rank blocks no other rank, unless it is the hung rank.
            failure, must_exit = own.failure, own.state == "running"
            must_exit |= failure is not None and failure.kind == "hang" and self.rank in failure.ranks
        if failure is not None and must_exit:
            self.policy.exit_this_rank(failure, self.on_failure)
        return self._agreement is not None and self._agreement.needs_decision

    def _update_agreements(self, observed: Observation, elapsed_s: float) -> None:
        """Receives votes, decisions, and stage exits from the statuses, and publishes those that are new."""
        own, agreement, statuses = self._local_status.own, self._agreement, observed.statuses
        before = own.stop_decision, own.stage_exits
        if self.rank != min(self._peers):
            own.stop_decision = newest_decision(status.stop_decision for status in statuses.values())
        elif len(statuses) == len(self._peers):
            votes = {rank: status.stop_vote for rank, status in statuses.items()}
            own.stop_decision = decide_last_step(votes, own.stop_decision)
        own.stage_exits = merge_stage_exits(statuses.values(), own.stage)
        if before != (own.stop_decision, own.stage_exits):
            self.publish()  # first: a rank that receives the decision may exit right after the last step
        if agreement is not None:
            agreement.receive(own.stop_decision)
            if agreement.vote() != own.stop_vote:
                self.publish()
        if own.stage_exits is not None:
            self.on_stage_exits(own.stage_exits, elapsed_s)

    # --- called by both threads ---

    def observe(self) -> Observation:
        """Returns what this rank knows of all ranks."""
        with self._lock:
            exited_ranks = self._exit_tracker.exited_ranks()  # first, see `add_remote`
            statuses, ages_s = self._local_status.read(), self._heartbeat_ages.age_s
            return self._remote_status.add_remote(Observation(self.rank, self._peers, statuses, ages_s, exited_ranks))

    def publish(self, state: RankState | None = None) -> None:
        """Publishes the status of this rank, with a new state if there is one."""
        with self._lock:
            if state is not None:
                self._local_status.own.state = state
            if self._agreement is not None:
                self._local_status.own.stop_vote = self._agreement.vote()
            self._local_status.publish()


_of_process: FailureMonitor | None = None


def current_monitor() -> FailureMonitor | None:
    """Returns the failure monitor of this process, or None if it has none."""
    return _of_process


def known_failure() -> Failure | None:
    """Returns the first failure that this process knows of, or None."""
    return None if _of_process is None else _of_process.failure


def lone_call_text() -> str:
    """Returns sentences with the user's call in this process, if only this rank has called it; empty if not."""
    return "" if (own := _of_process) is None else failure_report.describe_lone_call(own.observe(), own.call_site())


def announce_uncaught(exception: BaseException) -> BaseException:
    """Announces an exception of the script between two stages; within a stage, the strategy announces exceptions."""
    if _of_process is not None and not isinstance(exception, KeyboardInterrupt):  # every rank receives an interrupt
        _of_process.announce_uncaught(exception)
    return exception


def _do_nothing(*_: object) -> None:
    """The default of callbacks."""


def _between_stages() -> str:
    return "between two stages"
