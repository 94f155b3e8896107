"""Stop agreement: after a signal on any rank, all ranks stop before the same step, and no step waits for a message.

Lightning broadcasts rank 0's decision before every training step, which costs a round trip per step (and a host
synchronization on a GPU, Lightning issue 21487) and ignores a signal on another rank (issue 20806). Here the training
thread records only which step it starts. Another thread sends the votes: the failure monitor's
(:mod:`.failure_monitor`) or, in a world whose ranks may change, a thread that polls a store
(:mod:`.store_agreement`). After any rank has requested a stop:

1. Each rank votes with the last step that it has started. From then on its training thread waits for the decision
   before it starts another step.
2. When all ranks have voted, the highest of these steps is the last step. Ranks that are behind complete it, so that no
   rank waits alone in a collective, and all ranks stop before the next step.

Limitation: a rank whose peer has exited stops without an agreement after :data:`DECISION_TIMEOUT_S`.
"""

import logging
import os
import threading
from collections.abc import Callable

from lightning_strategies_ext.failure.ballots import AgreementId, StepIndex, StopDecision, StopVote

log = logging.getLogger(__name__)

#: Seconds that a rank waits for the votes of the other ranks after a request.
DECISION_TIMEOUT_S = 30.0


class StopAgreement:
    """One rank's part in the agreement, for one stage of the Trainer. Collective: all ranks create it together.

    Args:
        number: Identifier of the agreement among those of the same ranks.
        is_requested: Whether the ranks know before the first step that they have to stop; the same on all ranks.
        notify: Callable that wakes the thread that sends this rank's vote; None for a rank without peers.
    """

    def __init__(
        self, number: AgreementId = (0, 0), *, is_requested: bool = False, notify: Callable[[], None] | None = None
    ) -> None:
        self._number = number
        self._wake = notify
        self._requested = self._agreeing = is_requested
        self._has_stopped = False
        self._step: StepIndex = (0, 0)
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

    def must_stop_before_train_step(self) -> bool:
        """Records that this rank starts a training step; returns True if it has to stop instead."""
        return self._must_stop_before((self._step[0] + 1, 0))

    def must_stop_before_evaluation_step(self) -> bool:
        """Records that this rank starts a validation, test, or predict step; returns True if it has to stop instead."""
        return self._must_stop_before((self._step[0], self._step[1] + 1))

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

    @property
    def is_decided(self) -> bool:
        """Whether no further decision is expected."""
        return self._decided.is_set()

    def vote(self) -> StopVote:
        """Returns this rank's vote."""
        is_over = self._is_closed
        return StopVote(self._number, self._requested, self._step if self._agreeing or is_over else None, is_over)

    def receive(self, decision: StopDecision | None) -> None:
        """Receives the newest decision.

        Args:
            decision: Decision of this agreement or of another one; None if no rank has requested a stop.
        """
        if decision is not None and decision.agreement_id != self._number:
            decision = None
        if not self._is_closed and (decision is not None or self._requested):
            self._requested = True
            with self._lock:
                self._agreeing = True
        if decision is not None and decision.last_step is not None and not self._decided.is_set():
            self._last_step = decision.last_step
            self._decided.set()

    def decide_alone(self) -> None:
        """Lets this rank stop without an agreement if a stop was requested: the other ranks cannot vote any more."""
        self._agreeing |= self._requested
        self._decided.set()

    def _must_stop_before(self, step: StepIndex) -> bool:
        self._has_stopped = self._is_after_last(step)
        return self._has_stopped

    def _is_after_last(self, step: StepIndex) -> bool:
        if self._wake is None:
            self._step = step
            return self._requested
        with self._lock:
            if not self._agreeing:
                self._step = step
                return False
        if not self._decided.wait(DECISION_TIMEOUT_S):
            text = "Process %d stops without an agreement: the other ranks did not vote within %s s."
            log.warning(text, os.getpid(), DECISION_TIMEOUT_S)
            return True
        if self._last_step is None and self._is_abandoned:
            self._step = step
            return False
        if self._last_step is None or step > self._last_step:
            return True
        self._step = step
        return False
