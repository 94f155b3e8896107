"""Stop agreement: after a signal on any rank, all ranks stop before the same step, and no step waits for a message.

Lightning broadcasts rank 0's decision before every training step, which costs a round trip per step (and a host
synchronization on a GPU, Lightning issue 21487) and ignores a signal on another rank (issue 20806). Here the training
thread records only which step it starts. Another thread sends the votes: the failure monitor's
(:mod:`.failure_monitor`) or, in a world whose ranks may change, that of a :class:`StoreAgreement`. After any rank has
requested a stop:

1. Each rank votes with the last step that it has started. From then on its training thread waits for the decision
   before it starts another step.
2. When all ranks have voted, the highest of these steps is the last step. Ranks that are behind complete it, so that no
   rank waits alone in a collective, and all ranks stop before the next step.

Where training ends early (``trainer.should_stop``), ranks also stop at points between steps: the end of a training
step, of a validation, and of an epoch. A rank records them like steps.

Limitation: a rank whose peer has exited stops without an agreement after :data:`DECISION_TIMEOUT_S`.
"""

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Protocol

from torch.distributed import Store
from typing_extensions import override

from lightning_strategies_ext.failure.rank_status import AgreementId, StepIndex, StopDecision, StopVote

log = logging.getLogger(__name__)

#: Seconds that a rank waits for the votes of the other ranks after a request.
DECISION_TIMEOUT_S = 30.0
#: Seconds between two polls of a store by a rank. A poll is one small request, outside of the training thread; in
#: larger worlds ranks poll less often, so that the store serves at most about 1,000 requests per second.
POLL_INTERVAL_S = 0.2
POLLS_PER_SECOND_OF_STORE = 1000
#: Seconds that rank 0 waits at the end for the other ranks to read the decision from the store.
READ_TIMEOUT_S = 5.0
_READ_POLL_INTERVAL_S = 0.02
#: Seconds that the exit of a process waits for an abandoned thread, which may wait for an unavailable store.
THREAD_EXIT_TIMEOUT_S = 2.0
_REQUESTED = "requested"
#: Difference between the second numbers of two points between steps: more than a validation has steps, so that ranks
#: with different numbers of evaluation steps record the same points.
POINT = 10**9


class StopAgreement:
    """One rank's part in the agreement, for one stage of the Trainer. Collective: all ranks create it together.

    Args:
        number: Identifier of the agreement among those of the same ranks.
        is_requested: Whether the ranks know before the first step that they have to stop; the same on all ranks.
        notify: Callable that wakes the thread that sends this rank's vote; None for a rank without peers.

    Attributes:
        position: Last step or point that this rank has started or passed: the number of training steps, and a number
            that increases with evaluation steps and points. Only the training thread writes it.
        point: Difference between the second numbers of two points.
        is_agreeing: Whether this rank has voted, and starts no step before the decision.
    """

    point = POINT

    def __init__(
        self, number: AgreementId = (0, 0), *, is_requested: bool = False, notify: Callable[[], None] | None = None
    ) -> None:
        self._number = number
        self._wake = notify
        self._requested = self.is_agreeing = is_requested
        self._has_stopped = False
        self.position: StepIndex = (0, 0)
        self._last_step: StepIndex | None = None
        self._lock = threading.Lock()
        self._decided = threading.Event()
        self._is_closed = self._is_abandoned = False
        if is_requested:
            self._decided.set()

    # --- for the training thread ---

    @property
    def is_pending(self) -> bool:
        """Whether this rank knows of a request that has no effect yet: it came after the stage's last step."""
        return self._requested and not self._has_stopped

    @property
    def has_common_step(self) -> bool:
        """Whether the ranks have agreed on a last step; False if this rank stops because votes are missing."""
        return self._wake is None or self._last_step is not None

    def request(self) -> None:
        """Requests that all ranks stop. Safe in a signal handler: it takes no lock and does not block."""
        self._requested = True
        if self._wake is not None:
            self._wake()

    def request_here(self) -> None:
        """Requests that all ranks stop; this rank starts no step before the decision. Not for a signal handler."""
        with self._lock:
            self.is_agreeing = True
        self.request()

    def must_stop_at_point(self, *, is_recorded: bool = False) -> bool:
        """Records that this rank passes a point between steps; returns True if it has to stop at the point instead.

        Args:
            is_recorded: Whether the training loop has recorded the point in :attr:`position`. A decision to stop at the
                point is then still possible, because the loop asks after it has recorded the point.
        """
        train, within = self.position
        return self._must_stop_before((train, within if is_recorded else (within // POINT + 1) * POINT))

    def must_stop_before_train_step(self) -> bool:
        """Records that this rank starts a training step; returns True if it has to stop instead."""
        return self._must_stop_before((self.position[0] + 1, 0))

    def must_stop_before_evaluation_step(self) -> bool:
        """Records that this rank starts a validation, test, or predict step; returns True if it has to stop instead."""
        return self._must_stop_before((self.position[0], self.position[1] + 1))

    def close(self) -> None:
        """Ends this rank's part. A second call is a no-op."""
        self._is_closed = True
        self._decided.set()

    def abandon(self) -> None:
        """Ends this rank's part after a failure of another rank.

        The ranks agree on nothing from then on: this rank continues until it receives the error of a collective.
        """
        self._is_closed = self._is_abandoned = True
        self._decided.set()

    # --- for the thread that exchanges votes ---

    @property
    def needs_decision(self) -> bool:
        """Whether the training thread waits for the decision, or will."""
        return self._requested and not self._decided.is_set()

    def vote(self) -> StopVote:
        """Returns this rank's vote."""
        is_over = self._is_closed
        return StopVote(self._number, self._requested, self.position if self.is_agreeing or is_over else None, is_over)

    def receive(self, decision: StopDecision | None) -> None:
        """Receives the newest decision, which may be of another agreement; None if no rank has requested a stop."""
        if decision is not None and decision.agreement_id != self._number:
            decision = None
        if not self._is_closed and (decision is not None or self._requested):
            self._requested = True
            with self._lock:
                self.is_agreeing = True
        if decision is not None and decision.last_step is not None and not self._decided.is_set():
            self._last_step = decision.last_step
            self._decided.set()

    def _must_stop_before(self, step: StepIndex) -> bool:
        self._has_stopped = self._is_after_last(step)
        return self._has_stopped

    def _is_after_last(self, step: StepIndex) -> bool:
        if self._wake is None:
            self.position = step
            return self._requested
        with self._lock:
            if not self.is_agreeing:
                self.position = step
                return False
        if not self._decided.wait(DECISION_TIMEOUT_S):
            text = "Process %d stops without an agreement: the other ranks did not vote within %s s."
            log.warning(text, os.getpid(), DECISION_TIMEOUT_S)
            return True
        if self._last_step is None and self._is_abandoned:
            self.position = step
            return False
        if self._last_step is None or step > self._last_step:
            return True
        self.position = step
        return False


class EarlyStopProtocol(Protocol):
    """Part that makes all ranks stop where ``trainer.should_stop`` is set on one.

    Attributes:
        step_record: The current agreement.
    """

    step_record: StopAgreement | None

    def resolve(self) -> None:
        """Finds out whether a rank has requested it. Collective: all ranks call it at the point of a decision."""


def newest_decision(decisions: Iterable[StopDecision | None]) -> StopDecision | None:
    """Returns the newest decision that ranks know of, or None."""
    known = [decision for decision in decisions if decision is not None]
    return max(known, key=lambda decision: (decision.agreement_id, decision.last_step is not None), default=None)


def decide_last_step(votes: Mapping[int, StopVote | None], before: StopDecision | None) -> StopDecision | None:
    """Decides the first agreement that some rank takes part in; None if no rank has requested a stop.

    Args:
        votes: Votes by rank; None for a rank that has not voted.
        before: Previous decision. It stands, because some ranks may have acted on it.
    """
    begun = [vote for vote in votes.values() if vote is not None]
    number = min((vote.agreement_id for vote in begun if not vote.is_closed), default=None)
    if before is not None and before.agreement_id == number and before.last_step is not None:
        return before
    current_votes = [vote for vote in begun if vote.agreement_id == number]
    if number is None or not any(vote.is_requested for vote in current_votes):
        return None
    have_all_begun = len(begun) == len(votes) and all(vote.agreement_id >= number for vote in begun)
    steps = [vote.last_started_step for vote in current_votes if vote.last_started_step is not None]
    return StopDecision(number, max(steps) if have_all_begun and len(steps) == len(current_votes) else None)


class StoreAgreement(StopAgreement):
    """A stop agreement that sends votes over a store from a thread of its own.

    Args:
        store: Store, or part of a store, that only the ranks of this agreement use, and only for it.
        rank: Rank of this process.
        world_size: Number of ranks.
        is_requested: Whether the ranks know before the first step that they have to stop; the same on all ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int, *, is_requested: bool = False) -> None:
        super().__init__(is_requested=is_requested, notify=lambda: None)
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._interval_s = max(POLL_INTERVAL_S, world_size / POLLS_PER_SECOND_OF_STORE)
        self._has_sent_request = self._has_sent_step = self._has_read = False
        self._thread = threading.Thread(target=self._run, name="lightning-strategies-ext store", daemon=True)
        self._thread.start()

    @override
    def close(self) -> None:
        """Ends this rank's part, and stops the thread. A second call is a no-op.

        After a request, rank 0, whose process usually serves the store, first waits until the other ranks have read the
        decision.
        """
        is_first_call = not self._is_closed
        super().close()
        self._thread.join()
        if is_first_call and self._rank == 0 and self._has_read:
            deadline = time.monotonic() + READ_TIMEOUT_S
            with suppress(RuntimeError):  # the store is on another host and unavailable
                while not self._store.check(self._keys("read")) and time.monotonic() < deadline:
                    time.sleep(_READ_POLL_INTERVAL_S)

    @override
    def abandon(self) -> None:
        """Ends this rank's part after a failure of another rank, and abandons the thread. A second call is a no-op."""
        if not self._is_abandoned:
            atexit.register(self._thread.join, THREAD_EXIT_TIMEOUT_S)
        super().abandon()

    def _run(self) -> None:
        try:
            while not self._decided.wait(self._interval_s):
                self._poll()
        except Exception as error:  # the store has exited with rank 0: the other ranks cannot vote any more
            log.debug("rank %d stops polling for a stop: %s", self._rank, error)
            self.is_agreeing |= self._requested
            self._decided.set()

    def _poll(self) -> None:
        if self._requested and not self._has_sent_request:
            self._has_sent_request = True
            self._store.set(_REQUESTED, "")
        if self._requested or self._store.check([_REQUESTED]):
            self.receive(StopDecision(self._number))
        step = self.vote().last_started_step
        if step is None:
            return
        if not self._has_sent_step:
            self._has_sent_step = True
            self._store.set(f"step/{self._rank}", json.dumps(step))
        # Polled, not waited for: a wait would block the store's connection, which the training thread shares.
        if self._store.check(self._keys("step")):
            train, evaluation = max(json.loads(self._store.get(key)) for key in self._keys("step"))
            self._store.set(f"read/{self._rank}", "")
            self._has_read = True
            self.receive(StopDecision(self._number, (train, evaluation)))

    def _keys(self, name: str) -> list[str]:
        return [f"{name}/{rank}" for rank in range(self._world_size)]
