"""Agreement on a SIGTERM: whichever rank receives it, all ranks stop before the same step, and no step waits for it.

Lightning asks rank 0 by a blocking broadcast before every training step, which costs a round trip per step (and a host
synchronisation on a GPU, Lightning issue 21487) and does not see a signal on another rank (issue 20806). Here the
training thread only notes which step it starts. Another thread tells the other ranks of it: the watch's
(:mod:`.failure_monitor`)
or, where ranks may change, one that asks a store (:mod:`.store_agreement`). Once any rank has asked to stop:

1. each rank says the last step that it has started, and from then on its training thread asks before it starts another;
2. when all have said it, the highest of these steps is the last: ranks that are behind catch up to it, so that no rank
   is left alone in a collective, and all stop before the next.

What it does not promise: that a rank whose peer has died stops at a common step. It stops on its own after
:data:`DECISION_TIMEOUT_S`.
"""

import logging
import os
import threading
from collections.abc import Callable

from lightning_strategies_ext.failure.ballots import AgreementId, StepIndex, StopDecision, StopVote

log = logging.getLogger(__name__)

#: How long a rank that knows of a request waits for the last step of the others, in seconds.
DECISION_TIMEOUT_S = 30.0


class StopAgreement:
    """One rank's part in the agreement, for one stage of the Trainer. All ranks of a group create theirs together.

    Args:
        number: Tells it from others of the same ranks.
        is_requested: Whether the ranks know already that they have to stop, before the first step; the same on all.
        notify: Lets what this rank has to say be said at once; None for a rank that has nobody to agree with.
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
        """Whether this rank knows of a request and has not been told to stop: it came after the stage's last step."""
        return self._requested and not self._has_stopped

    @property
    def has_common_step(self) -> bool:
        """Whether all ranks were told the same step, and this one does not stop for want of an answer."""
        return self._wake is None or self._last_step is not None

    def request(self) -> None:
        """Asks all ranks to stop. Safe in a signal handler: takes no lock and waits for nobody."""
        self._requested = True
        if self._wake is not None:
            self._wake()

    def must_stop_before_train_step(self) -> bool:
        """Notes that this rank is about to start a training step; True if it has to stop instead."""
        return self._must_stop_before((self._step[0] + 1, 0))

    def must_stop_before_evaluation_step(self) -> bool:
        """Notes that this rank is about to start a validation, test or predict step; True if it has to stop."""
        return self._must_stop_before((self._step[0], self._step[1] + 1))

    def close(self) -> None:
        """Ends this rank's part. Harmless when called again."""
        self._is_closed = True
        self._decided.set()

    def abandon(self) -> None:
        """Ends this rank's part where some of the others may be gone.

        Nothing is agreed on from then on: this rank goes on, to where it learns why.
        """
        self._is_closed = self._is_abandoned = True
        self._decided.set()

    # --- for the thread that speaks with the others ---

    @property
    def needs_decision(self) -> bool:
        """Whether training waits to be told which step is the last, or will."""
        return self._requested and not self._decided.is_set()

    @property
    def is_decided(self) -> bool:
        """Whether there is nothing more to hear."""
        return self._decided.is_set()

    def vote(self) -> StopVote:
        """What this rank says to the others."""
        is_over = self._is_closed
        return StopVote(self._number, self._requested, self._step if self._agreeing or is_over else None, is_over)

    def receive(self, decision: StopDecision | None) -> None:
        """Takes what the others say.

        Args:
            decision: The newest, of this agreement or of another; None if nobody has been asked to stop.
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
        """Lets this rank stop alone if it has been asked to: nobody says any more what the others do."""
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
            said = "Process %d stops alone: the other ranks did not answer in %s s."
            log.warning(said, os.getpid(), DECISION_TIMEOUT_S)
            return True
        if self._last_step is None and self._is_abandoned:
            self._step = step
            return False
        if self._last_step is None or step > self._last_step:
            return True
        self._step = step
        return False
