"""The watch: whatever happens to one rank, every rank learns of it within a second or two, and ends.

Each rank has one, from when the ranks meet until its process ends. A thread looks a few times per second at the thread
that trains, says on the host's board what it sees (:mod:`.status_table`, :mod:`.rank_status`), and reads there what
the others say;
the kernel wakes it when one of their processes ends. It never waits for anybody: not for a store, which goes with rank
0's process, nor for a lock that the training thread holds. Between hosts, signs travel by way of
:mod:`.remote_status`. What ranks agree on and who has left a stage travels with them (:mod:`.ballots`).

Once something has failed, the watch of each rank cuts the collective off that its rank may be in, so that the training
thread gets an error and can end in good order. A rank that does not end within :data:`GRACE_S`, because it sleeps or
computes, is ended by its own watch; one that is stopped, or whose interpreter is held, is killed by another's.
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

from lightning_strategies_ext._system.connections import enable_store_keepalive
from lightning_strategies_ext._system.peers import Peer, exchange_peers, host_identity
from lightning_strategies_ext._system.selector_loop import SelectorLoop
from lightning_strategies_ext.failure import detection, failure_report
from lightning_strategies_ext.failure.ballots import StageExit, StageExits, decide_last_step, merge_stage_exits
from lightning_strategies_ext.failure.exit_tracker import ExitTracker
from lightning_strategies_ext.failure.failure_detector import FailureDetector
from lightning_strategies_ext.failure.local_status import HEARTBEAT_INTERVAL_S, LocalStatus
from lightning_strategies_ext.failure.meeting import wait_for_all_monitors
from lightning_strategies_ext.failure.process_exit import exit_now, exit_within, fail_at_exit, register_exit_handler
from lightning_strategies_ext.failure.rank_status import (
    CollectiveProgress,
    Failure,
    RankState,
    RankStatus,
    first_failure,
)
from lightning_strategies_ext.failure.remote_status import RemoteStatus
from lightning_strategies_ext.failure.stop_agreement import StopAgreement
from lightning_strategies_ext.failure.thread_activity import ThreadActivity

log = logging.getLogger(__name__)

#: How long failing ranks may take to say so before connections are closed on the others, in seconds.
ANNOUNCE_S = 1.0
#: How long ranks then have to end by themselves, in seconds.
GRACE_S = 5.0
#: The same for one that is ended because it does not move.
HANG_GRACE_S = 1.0
#: How long the interpreter's end may then take, in seconds: Horovod waits there for ranks that are gone.
EXIT_TIMEOUT_S = 4.0
#: How much longer others wait before they kill one whose own watch would have ended it, in seconds.
KILL_MARGIN_S = 1.5
#: One that did not look for so long, in seconds, was stopped.
SUSPENDED_AFTER_S = 3.0
#: How often ranks look while they agree on where to stop, in seconds.
AGREEMENT_POLL_S = 0.05
_POLL_S = 0.05
_numbers = count()


class FailureMonitor:
    """One rank's. All ranks create theirs together.

    Args:
        store: The store that all ranks share.
        rank: Global rank of this process.
        world_size: Number of ranks.
        progress: Of this rank.
        abort_collectives: Lets collectives fail that this rank is in with some peers, if it can.
        get_exit_code: Tells the exit code of a process that this one has started, by its pid; None if it does not know.

    Raises:
        RankFailedError: If another fails, or does not come, before all ranks watch.

    Attributes:
        store: See above.
        failure: What has failed first, as far as this rank knows.
        on_failure: Called by the watch's thread once it knows that another rank has failed.
        on_stage_exits: Called by it, once others have left the stage that this rank is in, with what is known of them
            and how many seconds after the last time.
        was_raised: Whether the script got an exception that says what has failed.
        report_dir: Where there is a directory of failures, or will be.
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
        self._wake = abort_collectives
        self._patience_s: float | None = None
        self._number = next(_numbers)
        enable_store_keepalive(store)
        self._peers = exchange_peers(
            dist.PrefixStore(f"lightning_strategies_ext/peers/{self._number}", store), rank, world_size
        )
        host = host_identity()
        self._local_peers = {peer.rank: peer for peer in self._peers.values() if peer.host == host}
        self._pids_here = [peer.pid for peer in self._local_peers.values()]
        board = dist.PrefixStore(f"lightning_strategies_ext/board/{self._number}/{host}", store)
        self._local_status = LocalStatus(board, rank, self._local_peers, progress, lambda: "between two stages")
        self._waiting = SelectorLoop()
        is_alone = len(self._local_peers) == len(self._peers)
        self._hosts = None if is_alone else RemoteStatus(store, self._peers, rank, self._number, self._waiting)
        self.report_dir = os.getcwd()
        self._noticed_at: float | None = None
        self._aborted_at: float | None = None
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._pid = os.getpid()
        others = {rank: peer for rank, peer in self._local_peers.items() if peer.pid != os.getpid()}
        self._deaths = ExitTracker(others, self._waiting)
        self._detector = FailureDetector(
            rank, self._peers, self._local_peers, self._local_status, self._hosts, self._deaths, get_exit_code
        )
        self._thread = threading.Thread(target=self._run, name="lightning-strategies-ext failure monitor", daemon=True)
        self._thread.start()
        self._at_end = register_exit_handler(self._on_exit)
        meeting = dist.PrefixStore(f"lightning_strategies_ext/meeting/{self._number}", store)
        wait_for_all_monitors(meeting, world_size, rank == min(self._peers), lambda: self.failure)

    @classmethod
    def get_or_create(cls, store: dist.Store, *args: Any) -> "FailureMonitor":
        """The watch of this process: the one that it has, unless the ranks have met anew; called by all together.

        Args:
            store: The store that all ranks share.
            *args: The other arguments of a watch.
        """
        global _of_process
        if _of_process is None or _of_process.store is not store or _of_process._pid != os.getpid():
            if _of_process is not None:
                _of_process.close()
            _of_process = cls(store, *args)
        return _of_process

    # --- what the rank says ---

    def begin_stage(self, patience_s: float | None) -> None:
        """Says that this rank begins a stage; called by all ranks together.

        Args:
            patience_s: For how long ranks may wait in a collective for one that does not move, in seconds; None for
                ever.
        """
        with self._lock:
            self._local_status.activity = ThreadActivity(threading.current_thread())
            self._patience_s = patience_s
            self.failure = self._noticed_at = self._aborted_at = None
            self.was_raised = False
            self._local_status.stage += 1
            self.on_failure = self.on_stage_exits = _do_nothing
            self._local_status.step_source = lambda: "the setup of a stage"
            if self._hosts is not None:
                self._hosts.reset_timeouts()
            self._publish("running")

    def set_step_source(self, where: Callable[[], str], report_dir: str | None = None) -> None:
        """Lets the watch find out, when it wants to know, what this rank is at.

        Args:
            where: Gives stage and step, for people.
            report_dir: Where to write what there is to say of a failure; the working directory if None.
        """
        self._local_status.step_source, self.report_dir = where, report_dir or os.getcwd()
        self._publish(self._local_status.state)

    def start_stop_agreement(self, *, is_requested: bool) -> StopAgreement:
        """Begins this rank's part in an agreement on a SIGTERM; called by all ranks together, in a stage.

        Args:
            is_requested: Whether they know already that they have to stop.
        """
        with self._lock:
            stage, last = self._local_status.stage, self._local_status.stop_vote
            number = (
                (stage, last.agreement_id[1] + 1) if last is not None and last.agreement_id[0] == stage else (stage, 0)
            )
            self._agreement = StopAgreement(number, is_requested=is_requested, notify=self._waiting.wake)
            self._publish(self._local_status.state)
            return self._agreement

    def announce_stage_exit(self, num_started: int, *, has_failed: bool = False) -> None:
        """Says that this rank takes part in no more collectives of its stage.

        Args:
            num_started: How many it has begun.
            has_failed: Whether it ends it with an exception.
        """
        with self._lock:
            self._local_status.stage_exit = StageExit(self._local_status.stage, num_started, has_failed)
            self._publish(self._local_status.state)

    def stage_exits(self) -> StageExits | None:
        """Which ranks are known to have left the stage that this one is in."""
        with self._lock:
            return _merged_stage_exits(self._detector.statuses(), self._local_status.stage)

    def ranks_in_stage(self) -> tuple[set[int], set[int]]:
        """Of the other ranks that this one can hear of, those that have not left the stage that it has left.

        Returns:
            Those that may still do so, and those that have failed in it, or whose processes have ended.
        """
        if self._closed.is_set() or self._local_status.stage_exit is None:
            return set(), set()
        with self._lock:
            return self._detector.ranks_in_stage(self._local_status.stage_exit.stage)

    def is_first_surviving_reporter(self, failure: Failure) -> bool:
        """Whether this is rank 0, or the first that has not failed where those that have cannot tell."""
        return self._rank == min(self._peers.keys() - _unable_to_report(failure) or failure.ranks)

    def finish_stage(self) -> None:
        """Says that this rank is done with its stage."""
        if self._local_status.state == "running":
            self._publish("finished")
        self._local_status.step_source = lambda: "between two stages"
        self.on_failure = self.on_stage_exits = _do_nothing

    def announce_failure(self, exception: BaseException) -> None:
        """Says that this rank has failed and will end by itself; returns at once."""
        failure = self._record_failure(exception)
        failure_report.report_at_exit(
            exception, failure, self._rank, self.report_dir, lambda: self._announce_script_failure(failure)
        )

    def announce_uncaught(self, exception: BaseException) -> None:
        """Says that this rank's script ends with an exception between two stages: others may wait in the next one."""
        if self._skip_to_next_stage():  # it tells the user, too: the others may have nothing more to wait for
            failure_report.report_at_exit(exception, self._record_failure(exception), self._rank, self.report_dir)

    def _announce_script_failure(self, failure: Failure) -> bool:
        """Says that this rank's script ends: others may have gone on to the next stage. Whether it tells the user."""
        is_speaker = self._is_reporter(failure)
        with self._lock:
            self._local_status.stage = max(
                [self._local_status.stage + 1, *(sign.stage for sign in self._detector.statuses().values())]
            )
            self._publish("failed")
        return is_speaker

    def _record_failure(self, exception: BaseException) -> Failure:
        return self._fail(
            lambda: failure_report.failure_from_exception(exception, self._rank, self._local_status.current_step_text())
        )

    def announce_script_end(self) -> None:
        """Says that this rank's script has come to its end, if others wait in a stage that it will not come to."""
        with self._lock:
            signs = self._detector.statuses().items()
            waiting = [
                rank for rank, sign in signs if sign.state == "running" and sign.stage > self._local_status.stage
            ]
        if waiting and self._skip_to_next_stage():
            failure_report.print_report(self._fail(lambda: detection.diagnose_script_end(self._rank, waiting)))

    def _skip_to_next_stage(self) -> bool:
        with self._lock:
            is_between = self._local_status.state == "finished"
            self._local_status.stage += is_between
            return is_between

    def wait_for_failure(self, timeout_s: float) -> Failure | None:
        """What has failed first; waits so long at most to be told of something."""
        deadline = time.monotonic() + timeout_s
        while self.failure is None and time.monotonic() < deadline and not self._closed.is_set():
            time.sleep(_POLL_S)
        return self.failure

    @property
    def was_aborted(self) -> bool:
        """Whether another rank's failure, or its own silence, is why this rank's collectives fail."""
        failure = self.failure
        return failure is not None and not (failure.is_self_reported and failure.reported_by == self._rank)

    def abort_own_collectives(self) -> None:
        """Lets the collective fail that this rank is in, if its backend can; returns at once."""
        self._abort_collectives_with([peer for rank, peer in self._peers.items() if rank != self._rank])

    def _abort_collectives_with(self, others: Sequence[Peer]) -> None:
        # Horovod's way to do so waits for the others, who may not answer.
        threading.Thread(target=self._wake, args=(others,), name="watch wakes", daemon=True).start()

    def fail_and_kill_local_peers(self, trace: str) -> None:
        """Says that this rank has failed, and ends the ranks of this host that do not end by themselves.

        Returns after at most :data:`ANNOUNCE_S` + :data:`GRACE_S` + :data:`MARGIN_S` seconds, at once when the others
        have failed too.

        Args:
            trace: Of this rank's failure.
        """
        where = self._local_status.current_step_text
        self._fail(lambda: failure_report.failure_from_traceback(trace, self._rank, where()))
        if not self._wait_for_others(ANNOUNCE_S):
            self._abort_collectives_with(self._running_local_peers())
            self._kill(self._detector.unresponsive_local_peers([peer.rank for peer in self._running_local_peers()]))
            self._wait_for_others(GRACE_S + KILL_MARGIN_S)
        self._kill(self._running_local_peers())

    def _of_this_job(self, failure: Failure) -> Failure:
        return replace(failure, job_id=self._peers[0].pid)

    def _fail(self, described: Callable[[], Failure]) -> Failure:
        self.was_raised = True
        with self._lock:  # so that its own thread does not take the failure for another rank's
            failure = self.failure = self.failure or self._of_this_job(described())
            self._publish("failed")
        return failure

    def run_exit_handler(self) -> None:
        """Does what is to be done at this process's end, if that has not been done: before what may take long then."""
        self._at_end()

    def close(self) -> None:
        """Ends this rank's part without a word."""
        self._at_end.cancel()
        # A forked process has neither the thread nor a say.
        if os.getpid() != self._pid or self._closed.is_set():
            return
        self._closed.set()
        self._waiting.wake()  # for a last look: this rank may have failed since
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self._hosts is not None:
            self._hosts.close()
        self._waiting.close()
        self._deaths.close()
        with self._lock:
            self._local_status.close()

    def _on_exit(self) -> None:
        if self._local_status.state != "failed":
            self._publish("exited")
        if self.failure is not None:
            if not self.failure.is_self_reported:
                with self._lock:
                    self._kill_unresponsive(self.failure)
            # Without an exception, it came to the end of its last stage before it learned of the failure.
            if not self.was_raised and self._rank == min(self._peers):
                failure_report.print_report(self.failure)
            if not self.was_raised or self.failure.is_host_loss:
                fail_at_exit()  # at once: what waits for the store would hold up the interpreter's end
        self.close()
        if self.failure is not None:
            exit_within(EXIT_TIMEOUT_S)

    # --- what the thread does ---

    def _run(self) -> None:
        before = time.monotonic()
        while not self._closed.is_set():
            try:
                is_urgent = self._agreement is not None and self._agreement.needs_decision
                self._waiting.wait(AGREEMENT_POLL_S if is_urgent else HEARTBEAT_INTERVAL_S)
                now = time.monotonic()
                before, elapsed_s = now, now - before
                # Of the time in which this process was stopped, nothing is counted.
                if elapsed_s > SUSPENDED_AFTER_S and self._hosts is not None:
                    self._hosts.reset_timeouts()
                self._check(min(elapsed_s, 2 * HEARTBEAT_INTERVAL_S))
            except Exception:  # nobody would notice that this thread has ended
                log.exception("the watch of rank %d could not look, and goes on", self._rank)

    def _check(self, elapsed_s: float) -> None:
        with self._lock:
            self._local_status.sample_training_thread(elapsed_s)
            self._publish(self._local_status.state)
            signs = self._detector.update(elapsed_s)
            if self.failure is None:
                # What failed in an earlier stage, and was caught on all ranks, is over.
                now = {rank: sign for rank, sign in signs.items() if sign.stage >= self._local_status.stage}
                failure = first_failure(now) or self._detector.detect(signs, self._patience_s)
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
            self._update_agreements(signs, elapsed_s)
            if self._hosts is not None:
                self._hosts.publish(self._local_status.read(), self.failure)
            failure, must_end = self.failure, self._local_status.state == "running"
            # Between two stages, or in a last hook, it is in nobody's way, unless the others have waited for it.
            must_end |= failure is not None and failure.is_hang and self._rank in failure.ranks
        if failure is not None and must_end:
            self._exit_this_rank(failure)

    def _update_agreements(self, signs: Mapping[int, RankStatus], elapsed_s: float) -> None:
        """Takes what others say of where to stop and of who has left, and passes it on."""
        own, agreement = self._local_status, self._agreement
        before = own.stop_decision, own.stage_exits
        if self._rank != min(self._peers):
            decisions = [sign.stop_decision for sign in signs.values() if sign.stop_decision is not None]
            own.stop_decision = max(
                decisions, key=lambda one: (one.agreement_id, one.last_step is not None), default=None
            )
        elif len(signs) == len(self._peers):
            own.stop_decision = decide_last_step(
                {rank: sign.stop_vote for rank, sign in signs.items()}, own.stop_decision
            )
        own.stage_exits = _merged_stage_exits(signs, own.stage)
        if before != (own.stop_decision, own.stage_exits):
            self._publish(own.state)  # first: who knows which step is the last may be gone right after it
        if agreement is not None:
            agreement.receive(own.stop_decision)
            if agreement.vote() != own.stop_vote:
                self._publish(own.state)
        if own.stage_exits is not None:
            self.on_stage_exits(own.stage_exits, elapsed_s)

    def _exit_this_rank(self, failure: Failure) -> None:
        now = time.monotonic()
        if self._noticed_at is None:
            self._noticed_at = now
            self.on_failure()
        # One that raises may do so on all ranks at once, and the script may go on from there.
        if self._aborted_at is None:
            if not failure.is_self_reported or now - self._noticed_at > ANNOUNCE_S:
                self._aborted_at = now
                self.abort_own_collectives()
        elif now - self._aborted_at > (HANG_GRACE_S if self._rank in failure.ranks else GRACE_S):
            reason = f"rank {self._rank} ended because {failure_report.one_line_cause(failure)}"
            path = failure_report.write_report(
                self.report_dir, failure, self._rank, f"{reason}\n{self._local_status.activity.stack()}"
            )
            failure_report.print_line(
                f"{reason}. It did not end by itself" + (f"; where it was stands in {path}." if path else ".")
            )
            self._kill_unresponsive(failure)
            exit_now()

    def _is_reporter(self, failure: Failure) -> bool:
        """Whether this rank tells the user what has failed: rank 0, or the first that can where that cannot."""
        mute = _unable_to_report(failure)
        with self._lock:
            signs, stage = self._detector.statuses(), self._local_status.stage
        mute |= {rank for rank, sign in signs.items() if sign.state in ("finished", "exited")}
        mute |= {rank for rank, sign in signs.items() if sign.state == "running" and sign.stage > stage}
        # Those at their end of the stage in good order: a launcher may end them as soon as this one has ended.
        departures = _merged_stage_exits(signs, stage)
        mute |= set() if departures is None else set(departures.ranks)
        return all(self._rank <= rank for rank in (self._peers.keys() - mute or failure.ranks))

    # --- board, processes ---

    def _publish(self, state: RankState) -> None:
        with self._lock:
            self._local_status.state = state
            if self._agreement is not None:
                self._local_status.stop_vote = self._agreement.vote()
            self._local_status.publish(self.failure)

    def _kill_unresponsive(self, failure: Failure) -> None:
        """Ends the ranks of this host that others wait for in vain, and whose own watch cannot: stopped ones, say."""
        for peer in self._detector.unresponsive_local_peers(failure.ranks):
            peer.kill(self._pids_here)

    def _kill(self, peers: Sequence[Peer]) -> None:
        # A launcher that sees one of its ranks killed ends this one, too, before it would say what has failed.
        if peers and self.failure is not None and self._is_reporter(self.failure):
            failure_report.print_report(self.failure)
        for peer in peers:
            failure_report.print_line(
                f"rank {peer.rank} (pid {peer.pid}) does not end by itself: rank {self._rank} kills it."
            )
            peer.kill(self._pids_here)

    def _wait_for_others(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._running_local_peers():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _running_local_peers(self) -> list[Peer]:
        with self._lock:
            done = detection.ranks_done_with_stage(self._detector.statuses(), self._local_status.stage)
        return [
            peer
            for rank, peer in self._local_peers.items()
            if rank != self._rank and rank not in done and peer.is_running()
        ]


_of_process: FailureMonitor | None = None


def current_monitor() -> FailureMonitor | None:
    """The watch of this process, if it has met others."""
    return _of_process


def known_failure() -> Failure | None:
    """What has failed first, as far as this process knows."""
    return None if _of_process is None else _of_process.failure


def _unable_to_report(failure: Failure) -> set[int]:
    """The ranks that have failed, if they did not say so. Where that leaves none, they wait for each other, and can."""
    return set() if failure.is_self_reported else set(failure.ranks)


def _merged_stage_exits(signs: Mapping[int, RankStatus], stage: int) -> StageExits | None:
    known = [sign.stage_exits for sign in signs.values()]
    return merge_stage_exits(known, {rank: sign.stage_exit for rank, sign in signs.items()}, stage)


def _do_nothing(*_: object) -> None:
    """The call that nobody wants."""
