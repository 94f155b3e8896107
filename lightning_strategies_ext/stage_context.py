"""What ranks have together, from when they enter a stage of the Trainer until they leave it, as one object.

A strategy holds one. It gets a new one when it enters a stage (in elastic training, each time the ranks change), and
what an earlier stage has left in it is gone then: a failure, an interrupt, who reads which keys of the store.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import PrefixStore, Store

from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.collectives import Collectives, LocalCollectives
from lightning_strategies_ext.exceptions import RankFailedError, UnevenInputsError
from lightning_strategies_ext.failure import failure_report
from lightning_strategies_ext.failure.failure_monitor import FailureMonitor
from lightning_strategies_ext.failure.failure_report import is_collective_error, is_peer_loss
from lightning_strategies_ext.failure.process_exit import skip_freeing_at_exit
from lightning_strategies_ext.failure.rank_status import CollectiveProgress
from lightning_strategies_ext.failure.stage_exit import StageExitHandler
from lightning_strategies_ext.failure.stop_agreement import RequeueAgreement, StopAgreement, StoreAgreement

#: How long a rank whose collective has lost a peer waits to be told why, in seconds: by the ranks of its host, by those
#: of others.
LOCAL_REASON_TIMEOUT_S = 0.75
REMOTE_REASON_TIMEOUT_S = 2.0
_EXPLAINED = (RankFailedError, UnevenInputsError)


class StageContext:
    """One rank's part of it.

    Args:
        create_collectives: Makes the engine's collectives, when they are first asked for.
        rank: Global rank of this process.
        size: Number of ranks.
        store: The key-value store that all ranks share; None for a rank that has no others to talk to.
        previous: The world that this rank was in before: a SIGTERM that came too late for it is for this one.
        name: Tells it from others with the same store, the same on all ranks; None where all ranks have had as many.

    Attributes:
        rank: See above.
        size: See above.
        store: See above.
        local_collectives: What answers in place of the engine, if this rank has failed or is still to join the others.
        failure_monitor: Learns of the others' failures and tells them of this rank's; None if they go on, or there
            are none.
        gradient_exchange: Of gradients, where no DDP does it.
        uneven_inputs: Keeps ranks with different numbers of batches in step, if anything has to.
        evaluation: Restores the Trainer's loop of evaluation when the ranks leave the stage.
        was_stop_requested: Whether a SIGTERM came after the last step of the stage before.
    """

    def __init__(
        self,
        create_collectives: Callable[[], Collectives],
        rank: int = 0,
        size: int = 1,
        store: Store | None = None,
        *,
        previous: "StageContext | None" = None,
        name: str | None = None,
    ) -> None:
        self._engine = create_collectives
        self.rank = rank
        self.size = size
        self.store = store
        self._name = name
        self._collectives: Collectives | None = None
        self.local_collectives: LocalCollectives | None = None
        self.failure_monitor: FailureMonitor | None = None if previous is None else previous.failure_monitor
        self.gradient_exchange: Any = None
        self.uneven_inputs: Any = None
        self.evaluation: ExitStack | None = None
        self.was_stop_requested: bool = previous is not None and previous.was_stop_requested
        self._store_agreement: StoreAgreement | None = None
        self._departure: StageExitHandler | None = None
        self._termination: StopAgreement | None = None
        self._confirm_sigterm: Callable[[], None] | None = None
        self._release_sigterm: Callable[[], None] | None = None if previous is None else previous._release_sigterm
        self._requeueing: RequeueAgreement | None = None if previous is None else previous._requeueing
        self._is_interrupted = self._is_to_stop = False
        if previous is not None:
            previous._close()

    @property
    def collectives(self) -> Collectives:
        """Who answers: all ranks by way of the engine, or this one alone."""
        if self.local_collectives is not None:
            return self.local_collectives
        if self._collectives is None:
            self._collectives = self._engine()
        return self._collectives

    # --- entering ---

    def start_failure_monitor(
        self,
        wake: Callable[[Sequence[Peer]], None],
        progress: CollectiveProgress,
        hang_timeout_s: float | None,
        exit_code_of: Callable[[int], int | None],
    ) -> None:
        """Lets all ranks end when one fails. Called by all ranks together, with a store.

        Args:
            wake: See :class:`.FailureMonitor`.
            progress: Of this rank.
            hang_timeout_s: See :class:`.FailureMonitor`.
            exit_code_of: See :class:`.FailureMonitor`.
        """
        assert self.store is not None
        self.failure_monitor = FailureMonitor.get_or_create(
            self.store, self.rank, self.size, progress, wake, exit_code_of
        )
        self.failure_monitor.begin_stage(hang_timeout_s)
        self.failure_monitor.on_failure = self.stop_communicating

    def start_stop_agreement(
        self,
        confirm: Callable[[], None] | None = None,
        release: Callable[[], None] | None = None,
        requeue: Callable[[], None] | None = None,
        *,
        is_requested: bool = False,
    ) -> None:
        """Lets a SIGTERM on any rank stop all before the same step. Called by all ranks together.

        Args:
            confirm: Says to the Trainer that a SIGTERM was agreed on; None without one: nobody calls
                :meth:`apply_decision`.
            release: Gives the Trainer its own handling of it back.
            requeue: What all ranks do together after :meth:`request_requeue`; None if nobody calls it.
            is_requested: Whether the ranks know already that they have to stop.
        """
        self._confirm_sigterm, self._release_sigterm = confirm, release
        was_told = self._requeueing is not None and (self._requeueing.is_requested or self._requeueing.is_agreed)
        self._requeueing = None if requeue is None else RequeueAgreement(requeue, is_requested=was_told)
        self._is_to_stop = is_requested
        self._begin_agreement(is_requested=is_requested)

    def _begin_agreement(self, *, is_requested: bool) -> None:
        self._end_agreement()
        if self.store is None:
            self._termination = StopAgreement(is_requested=is_requested)
        elif self.failure_monitor is not None and self._name is None:
            self._termination = self.failure_monitor.start_stop_agreement(is_requested=is_requested)
        else:
            self._termination = StopAgreement(is_requested=is_requested, notify=_do_nothing)
            self._store_agreement = StoreAgreement(self._termination, self.store, self.rank, self.size)
        if self._requeueing is not None and (self._requeueing.is_requested or self._is_to_stop):
            self._termination.request()

    def handle_stage_exits(self, progress: CollectiveProgress, *, is_job: bool) -> None:
        """Lets this rank fail where it waits for one that has ended the stage. Called by all ranks together.

        Args:
            progress: Of this rank.
            is_job: Whether the job ends with the ranks' processes.
        """
        assert self.failure_monitor is not None
        if self._departure is not None:
            self._departure.close()
        self._departure = StageExitHandler(self.failure_monitor, self.rank, progress, ends_with_process=is_job)

    # --- between steps ---

    def request_stop(self) -> None:
        """Asks all ranks to stop; for a signal handler."""
        self._is_to_stop = True
        if self._termination is not None:
            self._termination.request()

    def request_requeue(self) -> None:
        """Asks all ranks to save and have the job queued again, and then to go on; for a signal handler."""
        if self._requeueing is not None and self._termination is not None:
            self._requeueing.is_requested = True
            self._termination.request()

    def request_interrupt(self) -> None:
        """Asks all ranks to stop as after Ctrl-C; for a signal handler.

        Raises:
            KeyboardInterrupt: If no stage runs that could agree on a step.
        """
        if self._termination is None:
            raise KeyboardInterrupt
        self._is_interrupted = self._is_to_stop = True
        self._termination.request()

    def has_decision_before_train_step(self) -> bool:
        """Notes that this rank is about to start a training step; True if :meth:`apply_decision` is next."""
        return self._termination is not None and self._termination.must_stop_before_train_step()

    def has_decision_before_evaluation_step(self) -> bool:
        """Notes that this rank is about to start a validation, test or predict step; True likewise."""
        return self._termination is not None and self._termination.must_stop_before_evaluation_step()

    def apply_decision(self, any_rank: Callable[[bool], bool]) -> None:
        """Ends the stage, unless ranks were asked for no more than to requeue: they :attr:`must_requeue` then.

        Args:
            any_rank: Whether any rank says yes; a collective.

        Raises:
            KeyboardInterrupt: If Ctrl-C was what they agreed on.
            SIGTERMException: If it was a SIGTERM.
        """
        assert self._termination is not None
        if self._requeueing is not None and self._termination.has_common_step:
            self._requeueing.agree(any_rank)
            if not any_rank(self._is_to_stop):
                self._begin_agreement(is_requested=False)
                return
            if self.must_requeue:
                self._requeueing.requeue()
        skip_freeing_at_exit()
        if self._is_interrupted:
            raise KeyboardInterrupt
        assert self._confirm_sigterm is not None
        self._confirm_sigterm()
        raise SIGTERMException

    @property
    def must_requeue(self) -> bool:
        """Whether all ranks know that any was asked to, by :meth:`request_requeue`, and have not done it."""
        return self._requeueing is not None and self._requeueing.is_agreed

    def requeue(self) -> None:
        """Does it. Called by all ranks together."""
        assert self._requeueing is not None
        self._requeueing.requeue()

    # --- the store ---

    def prefix_store(self, purpose: str, number: int) -> Store | None:
        """A part of the store for something that all ranks begin; None for a rank that is with no others.

        Args:
            purpose: What it is for.
            number: How many such parts this process has had before. A world that has a name has a store of its own, and
                one such part: a rank that is new has had fewer than the others.
        """
        if self.store is None or self.local_collectives is not None:
            return None
        part = number if self._name is None else self._name
        return PrefixStore(f"lightning_strategies_ext/{purpose}/{part}", self.store)

    # --- failure ---

    def mark_failed(self, exception: BaseException, rank: int, world_size: int) -> None:
        """Says to the others that this rank has failed, and lets it answer alone."""
        self.local_collectives = LocalCollectives(rank, world_size)
        if self.failure_monitor is not None and not isinstance(exception, KeyboardInterrupt):
            self.failure_monitor.announce_failure(exception)

    def explain_exception(self, exception: BaseException) -> BaseException:
        """The exception that the user should see: the given one, or one that it came from by way of a collective."""
        if isinstance(exception, _EXPLAINED) or not is_collective_error(exception):
            return exception
        error: Exception | None = None
        is_lost = is_peer_loss(exception)
        failure = (
            None
            if self.failure_monitor is None
            else self.failure_monitor.wait_for_failure(LOCAL_REASON_TIMEOUT_S if is_lost else 0.0)
        )
        reason = None if failure is not None or self._departure is None else self._departure.explain_collective_error()
        if reason is not None:
            error = UnevenInputsError(reason)
        elif self.failure_monitor is not None:
            failure = failure or self.failure_monitor.wait_for_failure(REMOTE_REASON_TIMEOUT_S if is_lost else 0.0)
            if failure is not None and self.failure_monitor.was_aborted:
                error = RankFailedError(failure_report.full_report(failure), failure.is_hang)
                self.failure_monitor.was_raised = True
        if error is None:
            return exception
        error.__cause__ = exception
        return error

    # --- leaving ---

    def leave(self, *, is_over: bool = True) -> None:
        """Ends what the ranks have together, but for what the next stage takes over. A second call does no harm.

        Args:
            is_over: Whether nobody waits for what is still to come of the stage.
        """
        if self.failure_monitor is not None and self.failure_monitor.was_aborted:
            self.abandon()
        if self._departure is not None:
            self._departure.announce_exit() if self.local_collectives is None else self._departure.close_after_failure()
        if self.failure_monitor is not None and is_over:
            self.failure_monitor.finish_stage()
        self._end_exchange()
        if self._termination is not None:
            self._end_agreement()
            # A request that came after the last step, while a checkpoint was saved, say, is for the next stage.
            is_stop = self._requeueing is None or self._is_to_stop
            self.was_stop_requested = self._termination.is_pending and is_stop
            self._termination = None

    def release_sigterm(self) -> None:
        """Gives the Trainer its own handling of a SIGTERM back. A second call does no harm."""
        if self._release_sigterm is not None:
            self._release_sigterm()
        self._confirm_sigterm = self._release_sigterm = None

    def stop_communicating(self) -> None:
        """Ends the talk with the others, some of whom may be gone, and the store with them; from any thread."""
        if self._departure is not None:
            self._departure.close()
        for part in (self._termination, self._store_agreement):
            if part is not None:
                part.abandon()

    def abandon(self) -> None:
        """Ends this rank's part without a word to the others, some of whom may be gone."""
        self.stop_communicating()
        self._termination = self._departure = self._store_agreement = None
        self._end_exchange()

    def _close(self) -> None:
        # What a stage that ended on its way has left open.
        if self._departure is not None:
            self._departure.close()
        self._end_agreement()

    def _end_agreement(self) -> None:
        if self._termination is not None:
            self._termination.close()
        if self._store_agreement is not None:
            self._store_agreement.close()
        self._store_agreement = None

    def _end_exchange(self) -> None:
        for part in (self.uneven_inputs, self.gradient_exchange, self.evaluation):
            if part is not None:
                part.close()
        self.gradient_exchange = self.uneven_inputs = self.evaluation = None


def _do_nothing() -> None:
    """Wakes nobody: the thread that asks a store looks by itself."""
