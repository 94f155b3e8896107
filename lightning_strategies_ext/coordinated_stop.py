"""Coordinated stop: all ranks of a stage stop, or requeue the job, before the same step.

Signal handlers and early stops request it. A stop agreement (:mod:`.failure.stop_agreement`) finds the step, and all
ranks then apply the decision before that step.
"""

from collections.abc import Callable
from typing import Any, Protocol

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_strategies_ext.failure.process_exit import skip_freeing_at_exit
from lightning_strategies_ext.failure.stop_agreement import EarlyStopProtocol, StopAgreement


class StopAgreementFactory(Protocol):
    """Callable that creates a stop agreement. Collective: all ranks call it together."""

    def __call__(self, *, is_requested: bool) -> StopAgreement:
        """Returns the agreement; ``is_requested`` is whether the ranks know already that they have to stop."""


class CoordinatedStop:
    """One rank's part in the stop agreements of a stage.

    Args:
        previous: Coordinated stop of the previous stage. A SIGTERM that came after its last step applies to this stage.

    Attributes:
        early_stop: Part for ``trainer.should_stop``; None if the ranks do not agree on it.
        must_requeue: Whether all ranks have agreed to requeue the job, and have not done so yet.
        was_requested: Whether a SIGTERM came after the last step of the stage.
    """

    def __init__(self, previous: "CoordinatedStop | None" = None) -> None:
        self.early_stop: EarlyStopProtocol | None = None
        self.was_requested: bool = previous is not None and previous.was_requested
        self.must_requeue: bool = previous is not None and previous.must_requeue
        self._agreement: StopAgreement | None = None
        self._create_agreement: StopAgreementFactory = StopAgreement
        self._confirm_sigterm: Callable[[], None] | None = None
        self._release_sigterm: Callable[[], None] | None = None if previous is None else previous._release_sigterm
        self._requeue: Callable[[], None] | None = None if previous is None else previous._requeue
        self._is_accumulating: Callable[[], bool] | None = None if previous is None else previous._is_accumulating
        self._is_requeue_requested: bool = previous is not None and previous._is_requeue_requested
        self._is_interrupted = self._must_stop = self._is_agreed = False

    def start(
        self,
        create_agreement: StopAgreementFactory,
        confirm: Callable[[], None] | None = None,
        release: Callable[[], None] | None = None,
        requeue: Callable[[], None] | None = None,
        is_accumulating: Callable[[], bool] | None = None,
        *,
        is_requested: bool = False,
    ) -> None:
        """Starts the first agreement of the stage. Collective: all ranks call it.

        Args:
            create_agreement: Callable that creates an agreement.
            confirm: Callable that passes an agreed SIGTERM to the Trainer; None if :meth:`apply` is not called.
            release: Callable that restores the Trainer's own SIGTERM handler.
            requeue: Callable that saves a checkpoint and requeues the job, on all ranks together; None if
                :meth:`request_requeue` is not called.
            is_accumulating: Callable that returns whether the next training step continues an accumulation window,
                in which the job is not requeued; None if it never does.
            is_requested: Whether the ranks know already that they have to stop.
        """
        self._create_agreement = create_agreement
        self._confirm_sigterm, self._release_sigterm = confirm, release
        must_requeue = self._requeue is not None and (self._is_requeue_requested or self.must_requeue)
        self._requeue, self._is_accumulating, self.must_requeue = requeue, is_accumulating, False
        self._is_requeue_requested = requeue is not None and must_requeue
        self._must_stop = is_requested
        self._begin_agreement(is_requested=is_requested)

    def _begin_agreement(self, *, is_requested: bool) -> None:
        self.close()
        self._agreement = self._create_agreement(is_requested=is_requested)
        self._is_agreed = False
        if self.early_stop is not None:
            self.early_stop.step_record = self._agreement
        if self._may_continue and (self._is_requeue_requested or self._must_stop):
            self._agreement.request()

    # --- requests ---

    def request(self) -> None:
        """Requests that all ranks stop; for a signal handler."""
        self._must_stop = True
        if self._agreement is not None:
            self._agreement.request()

    def request_requeue(self) -> None:
        """Requests that all ranks save and requeue the job, and then continue; for a signal handler.

        Lightning saves in the signal handler, at the current position of each rank, and the ranks synchronize in a
        barrier. A rank that is one step ahead waits there for ranks that wait for it in the all-reduce of the step.
        Here the signal is a further reason for a stop agreement.
        """
        if self._requeue is not None and self._agreement is not None:
            self._is_requeue_requested = True
            self._agreement.request()

    def request_interrupt(self) -> None:
        """Requests that all ranks stop as after Ctrl-C; for a signal handler.

        Raises:
            KeyboardInterrupt: If no stage is running.
        """
        if self._agreement is None:
            raise KeyboardInterrupt
        self._is_interrupted = self._must_stop = True
        self._agreement.request()

    # --- before steps ---

    def before_train_step(self, any_rank: Callable[[bool], bool]) -> None:
        """Records that this rank starts a training step, or applies a decision, and requeues the job. Collective.

        Args:
            any_rank: Collective that returns whether the argument is True on any rank.

        Raises:
            KeyboardInterrupt: If the ranks have agreed on an interrupt.
            SIGTERMException: If the ranks have agreed on a SIGTERM.
        """
        if self._agreement is not None and self._agreement.must_stop_before_train_step():
            self.apply(any_rank)
        if self.must_requeue and (self._is_accumulating is None or not self._is_accumulating()):
            self.requeue()

    def before_evaluation_step(self, any_rank: Callable[[bool], bool]) -> None:
        """Like :meth:`before_train_step`, for a validation, test, or predict step."""
        if self._agreement is not None and self._agreement.must_stop_before_evaluation_step():
            self.apply(any_rank)
        if self.must_requeue:  # the accumulation window may end after SLURM's time limit
            self.requeue()

    def has_decision_before_train_step(self) -> bool:
        """Records that this rank starts a training step; returns True if it has to stop instead."""
        return self._agreement is not None and self._agreement.must_stop_before_train_step()

    def has_decision_before_evaluation_step(self) -> bool:
        """Records that this rank starts an evaluation step; returns True if it has to stop instead."""
        return self._agreement is not None and self._agreement.must_stop_before_evaluation_step()

    def must_end(self, any_rank: Callable[[bool], bool]) -> bool:
        """Returns whether the decision ends the whole stage (a signal), not only the training (`should_stop`).

        Collective: all ranks call it, after :meth:`has_decision_before_train_step` or the method for evaluation steps.

        Args:
            any_rank: Collective that returns whether the argument is True on any rank.
        """
        assert self._agreement is not None
        if not self._may_continue or not self._agreement.has_common_step:
            return True
        self.resolve(any_rank)
        return self._is_agreed

    def apply(self, any_rank: Callable[[bool], bool]) -> None:
        """Ends the stage; after a request to requeue only, sets :attr:`must_requeue` and continues. Collective.

        Args:
            any_rank: Collective that returns whether the argument is True on any rank.

        Raises:
            KeyboardInterrupt: If the ranks have agreed on an interrupt.
            SIGTERMException: If the ranks have agreed on a SIGTERM.
        """
        assert self._agreement is not None
        if self._may_continue and self._agreement.has_common_step:
            self.resolve(any_rank)
            if not self._is_agreed:
                return
            if self.must_requeue:
                self.requeue()
        skip_freeing_at_exit()
        if self._is_interrupted:
            raise KeyboardInterrupt
        assert self._confirm_sigterm is not None
        self._confirm_sigterm()
        raise SIGTERMException

    def resolve(self, any_rank: Callable[[bool], bool]) -> None:
        """Finds out what ranks have requested, and begins another agreement unless it was a SIGTERM or an interrupt.

        Collective: all ranks call it, at the point where the agreement stops them. Further calls are no-ops.
        """
        assert self._agreement is not None
        if self._is_agreed or not self._agreement.has_common_step:
            return
        if self.early_stop is not None:
            self.early_stop.resolve()
        if self._requeue is not None:
            is_requested, self._is_requeue_requested = self._is_requeue_requested, False
            self.must_requeue |= any_rank(is_requested)  # another signal may arrive meanwhile
        self._is_agreed = any_rank(self._must_stop)
        if not self._is_agreed:
            self._begin_agreement(is_requested=False)

    @property
    def _may_continue(self) -> bool:
        """Whether ranks may continue after a decision, because it may be for another reason than a SIGTERM."""
        return self._requeue is not None or self.early_stop is not None

    def requeue(self) -> None:
        """Saves a checkpoint and requeues the job. Collective: all ranks call it."""
        assert self._requeue is not None
        self._requeue()
        self.must_requeue = self._is_requeue_requested = False

    # --- end ---

    def finish(self) -> None:
        """Ends the agreement when the rank leaves the stage. A second call is a no-op."""
        if self._agreement is None:
            return
        self.close()
        # A request after the last step, for example while a checkpoint was saved, applies to the next stage.
        is_stop = self._must_stop or (self._requeue is None and self.early_stop is None)
        self.was_requested = self._agreement.is_pending and is_stop
        self._agreement = self.early_stop = None

    def close(self) -> None:
        """Closes the agreement of a stage that may have ended with an exception. A second call is a no-op."""
        if self._agreement is not None:
            self._agreement.close()

    def abandon(self) -> None:
        """Ends the agreement with other ranks, some of which may have exited. Any thread may call it."""
        if self._agreement is not None:
            self._agreement.abandon()

    def drop_agreement(self) -> None:
        """Drops an agreement that :meth:`abandon` has ended."""
        self._agreement = self.early_stop = None

    def release_sigterm(self) -> None:
        """Restores the Trainer's own SIGTERM handler. A second call is a no-op."""
        if self._release_sigterm is not None:
            self._release_sigterm()
        self._confirm_sigterm = self._release_sigterm = None

    def __reduce__(self) -> tuple[Any, ...]:
        # The rest belongs to this process, as in the stage context.
        return CoordinatedStop, (), {"was_requested": self.was_requested}
