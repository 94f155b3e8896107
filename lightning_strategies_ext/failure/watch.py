"""The watch: whatever happens to one rank, every rank learns of it within a second or two, and ends.

Each rank has one, from when the ranks meet until its process ends. A thread looks a few times per second at the thread
that trains, says on the host's board what it sees (:mod:`.board`, :mod:`.signs`), and reads there what the others say;
the kernel wakes it when one of their processes ends. It never waits for anybody: not for a store, which goes with rank
0's process, nor for a lock that the training thread holds. Between hosts, signs travel by way of :mod:`.hosts`. What
ranks agree on and who has left a stage travels with them (:mod:`.ballots`).

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

from lightning_strategies_ext.connections import notice_loss_of
from lightning_strategies_ext.failure import detection, report
from lightning_strategies_ext.failure.activity import Activity
from lightning_strategies_ext.failure.ballots import Departed, Departures, add_departures, decide
from lightning_strategies_ext.failure.deaths import Deaths
from lightning_strategies_ext.failure.ending import at_end, end_process, end_within, fail_at_exit
from lightning_strategies_ext.failure.host_signs import INTERVAL_S, HostSigns
from lightning_strategies_ext.failure.hosts import Hosts
from lightning_strategies_ext.failure.meeting import wait_until_all_watch
from lightning_strategies_ext.failure.sight import Sight
from lightning_strategies_ext.failure.signs import Failure, Progress, Sign, State, first_failure
from lightning_strategies_ext.failure.termination import TerminationAgreement
from lightning_strategies_ext.failure.waiting import Waiting
from lightning_strategies_ext.peers import Peer, host_identity, meet_peers

log = logging.getLogger(__name__)

#: How long failing ranks may take to say so before connections are closed on the others, in seconds.
ANNOUNCE_S = 1.0
#: How long ranks then have to end by themselves, in seconds.
GRACE_S = 5.0
#: The same for one that is ended because it does not move.
SHORT_GRACE_S = 1.0
#: How long the interpreter's end may then take, in seconds: Horovod waits there for ranks that are gone.
END_S = 4.0
#: How much longer others wait before they kill one whose own watch would have ended it, in seconds.
MARGIN_S = 1.5
#: One that did not look for so long, in seconds, was stopped.
STOPPED_S = 3.0
#: How often ranks look while they agree on where to stop, in seconds.
AGREEING_S = 0.05
_POLL_S = 0.05
_numbers = count()


class Watch:
    """One rank's. All ranks create theirs together.

    Args:
        store: The store that all ranks share.
        rank: Global rank of this process.
        world_size: Number of ranks.
        progress: Of this rank.
        wake: Lets collectives fail that this rank is in with some peers, if it can.
        exit_code_of: Tells the exit code of a process that this one has started, by its pid; None if it does not know.

    Raises:
        RankFailedError: If another fails, or does not come, before all ranks watch.

    Attributes:
        store: See above.
        failure: What has failed first, as far as this rank knows.
        on_failure: Called by the watch's thread once it knows that another rank has failed.
        on_departures: Called by it, once others have left the stage that this rank is in, with what is known of them
            and how many seconds after the last time.
        is_raised: Whether the script got an exception that says what has failed.
        directory: Where there is a directory of failures, or will be.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        progress: Progress,
        wake: Callable[[Sequence[Peer]], None],
        exit_code_of: Callable[[int], int | None],
    ) -> None:
        self.store = store
        self.failure: Failure | None = None
        self.on_failure: Callable[[], None] = _do_nothing
        self.on_departures: Callable[[Departures, float], None] = _do_nothing
        self.is_raised = False
        self._rank = rank
        self._agreement: TerminationAgreement | None = None
        self._wake = wake
        self._patience_s: float | None = None
        self._number = next(_numbers)
        notice_loss_of(store)
        self._peers = meet_peers(
            dist.PrefixStore(f"lightning_strategies_ext/peers/{self._number}", store), rank, world_size
        )
        host = host_identity()
        self._here = {peer.rank: peer for peer in self._peers.values() if peer.host == host}
        self._pids_here = [peer.pid for peer in self._here.values()]
        board = dist.PrefixStore(f"lightning_strategies_ext/board/{self._number}/{host}", store)
        self._own = HostSigns(board, rank, self._here, progress, lambda: "between two stages")
        self._waiting = Waiting()
        is_alone = len(self._here) == len(self._peers)
        self._hosts = None if is_alone else Hosts(store, self._peers, rank, self._number, self._waiting)
        self.directory = os.getcwd()
        self._noticed_at: float | None = None
        self._woke_at: float | None = None
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._pid = os.getpid()
        others = {rank: peer for rank, peer in self._here.items() if peer.pid != os.getpid()}
        self._deaths = Deaths(others, self._waiting)
        self._sight = Sight(rank, self._peers, self._here, self._own, self._hosts, self._deaths, exit_code_of)
        self._thread = threading.Thread(target=self._run, name="lightning-strategies-ext watch", daemon=True)
        self._thread.start()
        self._at_end = at_end(self._end)
        meeting = dist.PrefixStore(f"lightning_strategies_ext/meeting/{self._number}", store)
        wait_until_all_watch(meeting, world_size, rank == min(self._peers), lambda: self.failure)

    @classmethod
    def of_process(cls, store: dist.Store, *args: Any) -> "Watch":
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
            self._own.activity = Activity(threading.current_thread())
            self._patience_s = patience_s
            self.failure = self._noticed_at = self._woke_at = None
            self.is_raised = False
            self._own.stage += 1
            self.on_failure = self.on_departures = _do_nothing
            self._own.where = lambda: "the setup of a stage"
            if self._hosts is not None:
                self._hosts.forget()
            self._say("running")

    def describe(self, where: Callable[[], str], directory: str | None = None) -> None:
        """Lets the watch find out, when it wants to know, what this rank is at.

        Args:
            where: Gives stage and step, for people.
            directory: Where to write what there is to say of a failure; the working directory if None.
        """
        self._own.where, self.directory = where, directory or os.getcwd()
        self._say(self._own.state)

    def agree(self, *, is_requested: bool) -> TerminationAgreement:
        """Begins this rank's part in an agreement on a SIGTERM; called by all ranks together, in a stage.

        Args:
            is_requested: Whether they know already that they have to stop.
        """
        with self._lock:
            stage, last = self._own.stage, self._own.ballot
            number = (stage, last.number[1] + 1) if last is not None and last.number[0] == stage else (stage, 0)
            self._agreement = TerminationAgreement(number, is_requested=is_requested, wake=self._waiting.wake)
            self._say(self._own.state)
            return self._agreement

    def depart(self, num_begun: int, *, has_failed: bool = False) -> None:
        """Says that this rank takes part in no more collectives of its stage.

        Args:
            num_begun: How many it has begun.
            has_failed: Whether it ends it with an exception.
        """
        with self._lock:
            self._own.departed = Departed(self._own.stage, num_begun, has_failed)
            self._say(self._own.state)

    def departures(self) -> Departures | None:
        """Which ranks are known to have left the stage that this one is in."""
        with self._lock:
            return _departures(self._sight.signs(), self._own.stage)

    def who_stays(self) -> tuple[set[int], set[int]]:
        """Of the other ranks that this one can hear of, those that have not left the stage that it has left.

        Returns:
            Those that may still do so, and those that have failed in it, or whose processes have ended.
        """
        if self._closed.is_set() or self._own.departed is None:
            return set(), set()
        with self._lock:
            return self._sight.who_stays(self._own.departed.stage)

    def is_first_that_can_tell(self, failure: Failure) -> bool:
        """Whether this is rank 0, or the first that has not failed where those that have cannot tell."""
        return self._rank == min(self._peers.keys() - _mute(failure) or failure.ranks)

    def leave_stage(self) -> None:
        """Says that this rank is done with its stage."""
        if self._own.state == "running":
            self._say("left")
        self._own.where = lambda: "between two stages"
        self.on_failure = self.on_departures = _do_nothing

    def announce(self, exception: BaseException) -> None:
        """Says that this rank has failed and will end by itself; returns at once."""
        failure = self._described(exception)
        report.show_at_exit(exception, failure, self._rank, self.directory, lambda: self._ends_with(failure))

    def announce_uncaught(self, exception: BaseException) -> None:
        """Says that this rank's script ends with an exception between two stages: others may wait in the next one."""
        if self._skip_to_next_stage():  # it tells the user, too: the others may have nothing more to wait for
            report.show_at_exit(exception, self._described(exception), self._rank, self.directory)

    def _ends_with(self, failure: Failure) -> bool:
        """Says that this rank's script ends: others may have gone on to the next stage. Whether it tells the user."""
        is_speaker = self._is_speaker(failure)
        with self._lock:
            self._own.stage = max([self._own.stage + 1, *(sign.stage for sign in self._sight.signs().values())])
            self._say("failed")
        return is_speaker

    def _described(self, exception: BaseException) -> Failure:
        return self._fail(lambda: report.failure_of(exception, self._rank, self._own.where_now()))

    def announce_end(self) -> None:
        """Says that this rank's script has come to its end, if others wait in a stage that it will not come to."""
        with self._lock:
            signs = self._sight.signs().items()
            waiting = [rank for rank, sign in signs if sign.state == "running" and sign.stage > self._own.stage]
        if waiting and self._skip_to_next_stage():
            report.show_block(self._fail(lambda: detection.end_of_script(self._rank, waiting)))

    def _skip_to_next_stage(self) -> bool:
        with self._lock:
            is_between = self._own.state == "left"
            self._own.stage += is_between
            return is_between

    def reason(self, timeout_s: float) -> Failure | None:
        """What has failed first; waits so long at most to be told of something."""
        deadline = time.monotonic() + timeout_s
        while self.failure is None and time.monotonic() < deadline and not self._closed.is_set():
            time.sleep(_POLL_S)
        return self.failure

    @property
    def was_woken(self) -> bool:
        """Whether another rank's failure, or its own silence, is why this rank's collectives fail."""
        failure = self.failure
        return failure is not None and not (failure.is_said and failure.by == self._rank)

    def wake_this_rank(self) -> None:
        """Lets the collective fail that this rank is in, if its backend can; returns at once."""
        self._let_go([peer for rank, peer in self._peers.items() if rank != self._rank])

    def _let_go(self, others: Sequence[Peer]) -> None:
        # Horovod's way to do so waits for the others, who may not answer.
        threading.Thread(target=self._wake, args=(others,), name="watch wakes", daemon=True).start()

    def reconciliate(self, trace: str) -> None:
        """Says that this rank has failed, and ends the ranks of this host that do not end by themselves.

        Returns after at most :data:`ANNOUNCE_S` + :data:`GRACE_S` + :data:`MARGIN_S` seconds, at once when the others
        have failed too.

        Args:
            trace: Of this rank's failure.
        """
        self._fail(lambda: report.failure_from_trace(trace, self._rank, self._own.where_now()))
        if not self._wait_for_others(ANNOUNCE_S):
            self._let_go(self._unreconciled())
            self._kill(self._sight.silent_here([peer.rank for peer in self._unreconciled()]))
            self._wait_for_others(GRACE_S + MARGIN_S)
        self._kill(self._unreconciled())

    def _of_this_job(self, failure: Failure) -> Failure:
        return replace(failure, job=self._peers[0].pid)

    def _fail(self, described: Callable[[], Failure]) -> Failure:
        self.is_raised = True
        with self._lock:  # so that its own thread does not take the failure for another rank's
            failure = self.failure = self.failure or self._of_this_job(described())
            self._say("failed")
        return failure

    def end(self) -> None:
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
            self._own.close()

    def _end(self) -> None:
        if self._own.state != "failed":
            self._say("ended")
        if self.failure is not None:
            if not self.failure.is_said:
                with self._lock:
                    self._kill_silent(self.failure)
            # Without an exception, it came to the end of its last stage before it learned of the failure.
            if not self.is_raised and self._rank == min(self._peers):
                report.show_block(self.failure)
            if not self.is_raised or self.failure.is_loss:
                fail_at_exit()  # at once: what waits for the store would hold up the interpreter's end
        self.close()
        if self.failure is not None:
            end_within(END_S)

    # --- what the thread does ---

    def _run(self) -> None:
        before = time.monotonic()
        while not self._closed.is_set():
            try:
                is_urgent = self._agreement is not None and self._agreement.is_urgent
                self._waiting.wait(AGREEING_S if is_urgent else INTERVAL_S)
                now = time.monotonic()
                before, elapsed_s = now, now - before
                # Of the time in which this process was stopped, nothing is counted.
                if elapsed_s > STOPPED_S and self._hosts is not None:
                    self._hosts.forget()
                self._look(min(elapsed_s, 2 * INTERVAL_S))
            except Exception:  # nobody would notice that this thread has ended
                log.exception("the watch of rank %d could not look, and goes on", self._rank)

    def _look(self, elapsed_s: float) -> None:
        with self._lock:
            self._own.look(elapsed_s)
            self._say(self._own.state)
            signs = self._sight.look(elapsed_s)
            if self.failure is None:
                # What failed in an earlier stage, and was caught on all ranks, is over.
                now = {rank: sign for rank, sign in signs.items() if sign.stage >= self._own.stage}
                failure = first_failure(now) or self._sight.failure(signs, self._patience_s)
                self.failure = failure and self._of_this_job(failure)
                if self.failure is not None and self.failure.by == self._rank and self._own.state == "left":
                    path = report.write(self.directory, self.failure, self._rank, report.message(self.failure))
                    report.show_block(self.failure, f"Where each rank was: {path}" if path is not None else "")
                    self._kill_silent(self.failure)
            self._agree(signs, elapsed_s)
            if self._hosts is not None:
                self._hosts.tell(self._own.read(), self.failure)
            failure, must_end = self.failure, self._own.state == "running"
            # Between two stages, or in a last hook, it is in nobody's way, unless the others have waited for it.
            must_end |= failure is not None and failure.is_stuck and self._rank in failure.ranks
        if failure is not None and must_end:
            self._end_this_rank(failure)

    def _agree(self, signs: Mapping[int, Sign], elapsed_s: float) -> None:
        """Takes what others say of where to stop and of who has left, and passes it on."""
        own, agreement = self._own, self._agreement
        before = own.decision, own.departures
        if self._rank != min(self._peers):
            decisions = [sign.decision for sign in signs.values() if sign.decision is not None]
            own.decision = max(decisions, key=lambda one: (one.number, one.last_step is not None), default=None)
        elif len(signs) == len(self._peers):
            own.decision = decide({rank: sign.ballot for rank, sign in signs.items()}, own.decision)
        own.departures = _departures(signs, own.stage)
        if before != (own.decision, own.departures):
            self._say(own.state)  # first: who knows which step is the last may be gone right after it
        if agreement is not None:
            agreement.hear(own.decision)
            if agreement.ballot() != own.ballot:
                self._say(own.state)
        if own.departures is not None:
            self.on_departures(own.departures, elapsed_s)

    def _end_this_rank(self, failure: Failure) -> None:
        now = time.monotonic()
        if self._noticed_at is None:
            self._noticed_at = now
            self.on_failure()
        # One that raises may do so on all ranks at once, and the script may go on from there.
        if self._woke_at is None:
            if not failure.is_said or now - self._noticed_at > ANNOUNCE_S:
                self._woke_at = now
                self.wake_this_rank()
        elif now - self._woke_at > (SHORT_GRACE_S if self._rank in failure.ranks else GRACE_S):
            reason = f"rank {self._rank} ended because {report.cause(failure)}"
            path = report.write(self.directory, failure, self._rank, f"{reason}\n{self._own.activity.stack()}")
            report.say(f"{reason}. It did not end by itself" + (f"; where it was stands in {path}." if path else "."))
            self._kill_silent(failure)
            end_process()

    def _is_speaker(self, failure: Failure) -> bool:
        """Whether this rank tells the user what has failed: rank 0, or the first that can where that cannot."""
        mute = _mute(failure)
        with self._lock:
            signs, stage = self._sight.signs(), self._own.stage
        mute |= {rank for rank, sign in signs.items() if sign.state in ("left", "ended")}
        mute |= {rank for rank, sign in signs.items() if sign.state == "running" and sign.stage > stage}
        # Those at their end of the stage in good order: a launcher may end them as soon as this one has ended.
        departures = _departures(signs, stage)
        mute |= set() if departures is None else set(departures.ranks)
        return all(self._rank <= rank for rank in (self._peers.keys() - mute or failure.ranks))

    # --- board, processes ---

    def _say(self, state: State) -> None:
        with self._lock:
            self._own.state = state
            if self._agreement is not None:
                self._own.ballot = self._agreement.ballot()
            self._own.say(self.failure)

    def _kill_silent(self, failure: Failure) -> None:
        """Ends the ranks of this host that others wait for in vain, and whose own watch cannot: stopped ones, say."""
        for peer in self._sight.silent_here(failure.ranks):
            peer.kill(self._pids_here)

    def _kill(self, peers: Sequence[Peer]) -> None:
        # A launcher that sees one of its ranks killed ends this one, too, before it would say what has failed.
        if peers and self.failure is not None and self._is_speaker(self.failure):
            report.show_block(self.failure)
        for peer in peers:
            report.say(f"rank {peer.rank} (pid {peer.pid}) does not end by itself: rank {self._rank} kills it.")
            peer.kill(self._pids_here)

    def _wait_for_others(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._unreconciled():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _unreconciled(self) -> list[Peer]:
        with self._lock:
            done = detection.have_ended(self._sight.signs(), self._own.stage)
        return [
            peer for rank, peer in self._here.items() if rank != self._rank and rank not in done and peer.is_running()
        ]


_of_process: Watch | None = None


def of_process() -> Watch | None:
    """The watch of this process, if it has met others."""
    return _of_process


def failure_known() -> Failure | None:
    """What has failed first, as far as this process knows."""
    return None if _of_process is None else _of_process.failure


def _mute(failure: Failure) -> set[int]:
    """The ranks that have failed, if they did not say so. Where that leaves none, they wait for each other, and can."""
    return set() if failure.is_said else set(failure.ranks)


def _departures(signs: Mapping[int, Sign], stage: int) -> Departures | None:
    known = [sign.departures for sign in signs.values()]
    return add_departures(known, {rank: sign.departed for rank, sign in signs.items()}, stage)


def _do_nothing(*_: object) -> None:
    """The call that nobody wants."""
