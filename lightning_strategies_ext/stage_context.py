"""Stage context: one rank's distributed state for one stage, from when the ranks enter the stage until they leave it.

A strategy holds one stage context. It creates another when it enters a stage, in elastic training when it enters a
world, so that a stage starts without the failure, the interrupt, and the keys in the store of an earlier stage.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from lightning_strategies_ext import identities
from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.collectives import Collectives, LocalCollectives
from lightning_strategies_ext.coordinated_stop import CoordinatedStop, StopAgreementFactory
from lightning_strategies_ext.exceptions import RankFailedError, UnevenInputsError
from lightning_strategies_ext.failure import failure_report
from lightning_strategies_ext.failure.exchange_log import ExchangeLog
from lightning_strategies_ext.failure.failure_monitor import FailureMonitor
from lightning_strategies_ext.failure.failure_report import is_collective_error, is_peer_loss
from lightning_strategies_ext.failure.process_exit import install_excepthook
from lightning_strategies_ext.failure.rank_status import CollectiveProgress
from lightning_strategies_ext.failure.stage_exit import StageExitHandler
from lightning_strategies_ext.failure.stop_agreement import StopAgreement, StoreAgreement
from lightning_strategies_ext.uneven.control import GradientExchange, UnevenInputs, UnevenInputsController
from lightning_strategies_ext.uneven.exact_evaluation import StepValues
from lightning_strategies_ext.uneven.shadowing import ShadowedSteps

#: Seconds that a rank whose collective has lost a peer waits for the reason: from its own host, and from other hosts.
LOCAL_REASON_TIMEOUT_S = 0.75
REMOTE_REASON_TIMEOUT_S = 2.0
_EXPLAINED = (RankFailedError, UnevenInputsError)


class ParameterTracker(Protocol):
    """Part of a gradient exchange that tracks the parameters whose gradients are exchanged."""

    def find_added(self, model: Any) -> Sequence[Tensor]:
        """Returns the parameters of a model that were added to it, or have replaced others."""

    def include_added(self, model: Any) -> None:
        """Exchanges the gradients of added parameters, too. Collective: all ranks call it."""


@dataclass(frozen=True)
class EngineGroup:
    """How a process enters and leaves the engine's group of all ranks.

    Attributes:
        join: Callable that joins the group unless this process has joined it, and returns the store of the ranks, or
            None for a single rank.
        leave: Callable that leaves the group of an earlier stage, which may be broken; None without such a group.
        abort: Callable that makes this rank's pending collectives with the given peers raise, if the backend can.
        progress: Progress of this rank's collectives.
    """

    join: Callable[[], Store | None]
    leave: Callable[[], None] | None
    abort: Callable[[Sequence[Peer]], None]
    progress: CollectiveProgress


class BatchProgress(Protocol):
    """Progress of the Trainer's training epoch."""

    ready: int


class StageContext:
    """One rank's distributed state for one stage.

    Args:
        create_collectives: Callable that creates the engine's collectives at their first use.
        rank: Global rank of this process.
        size: Number of ranks.
        store: Store that all ranks share; None for a rank without peers.
        previous: Context of the previous stage. A SIGTERM that came after its last step applies to this stage.
        name: Name that distinguishes this context from others with the same store, the same on all ranks; None if all
            ranks have created the same number of contexts.

    Attributes:
        rank: Global rank of this process.
        size: Number of ranks.
        store: Store that all ranks share, or None.
        local_collectives: Collectives in place of the engine's, for a rank that has failed or has not joined yet.
        failure_monitor: Failure monitor of this rank; None in elastic training and for a rank without peers.
        gradient_exchange: Gradient exchange of the stage, if ranks may contribute nothing to it or DDP does not run it.
        parameter_tracker: Part of the gradient exchange that follows added parameters; None outside ``fit``.
        uneven_inputs: Control of ranks with different numbers of batches, in ``fit``.
        shadowed_steps: Steps that ranks without another batch may shadow now: those of ``fit`` or of an evaluation.
        evaluation: Callbacks that restore the Trainer's loops when the rank leaves the stage.
        agreement: Callbacks that restore callbacks and loops, which decide like those of other ranks in ``fit``.
        coordinated_stop: This rank's part in stopping all ranks before the same step.
        compare_gradients: Function that compares the batch of a backward pass with those of the other ranks, if ranks
            compare their collectives; else None.
        exchange_log: Batches of the gradient exchanges, if ranks compare them after the exchange; else None.
        reached_parameters: A parameter, if the current backward pass has reached it; None if every pass exchanges.
        batch_progress: Object whose ``ready`` is the number of batches that the training epoch has begun; None if the
            ranks may differ in it, or outside ``fit``.
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
        self._create_collectives = create_collectives
        self.rank = rank
        self.size = size
        self.store = store
        self._name = name
        self._collectives: Collectives | None = None
        self.local_collectives: LocalCollectives | None = None
        self.failure_monitor: FailureMonitor | None = None if previous is None else previous.failure_monitor
        self.gradient_exchange: GradientExchange | None = None
        self.parameter_tracker: ParameterTracker | None = None
        self.uneven_inputs: UnevenInputsController | None = None
        self.shadowed_steps: ShadowedSteps | None = None
        self.evaluation: ExitStack | None = None
        self.agreement: ExitStack | None = None
        self.batch_progress: BatchProgress | None = None
        self.compare_gradients: Callable[[], None] | None = None
        self.exchange_log: ExchangeLog | None = None
        self.reached_parameters: deque[Tensor] | None = None
        self.coordinated_stop: CoordinatedStop = CoordinatedStop(
            None if previous is None else previous.coordinated_stop
        )
        self._stage_exit_handler: StageExitHandler | None = None
        identities.current.identity = 0  # an exception may have ended the last backward pass
        if previous is not None:
            previous._close()

    @property
    def collectives(self) -> Collectives:
        """The engine's collectives, or the local collectives of a rank without peers."""
        if self.local_collectives is not None:
            return self.local_collectives
        if self._collectives is None:
            self._collectives = self._create_collectives()
        return self._collectives

    # --- entering ---

    def start_failure_monitor(
        self,
        abort_collectives: Callable[[Sequence[Peer]], None],
        progress: CollectiveProgress,
        hang_timeout_s: float | None,
        get_exit_code: Callable[[int], int | None],
        explain_uncaught: Callable[[BaseException], BaseException],
    ) -> None:
        """Makes all ranks exit when one fails. Collective: all ranks call it. Requires a store.

        Args:
            abort_collectives: Callable that makes this rank's pending collectives with the given peers raise, if the
                backend can.
            progress: Progress of this rank's collectives.
            hang_timeout_s: Seconds that ranks wait in a collective for an inactive rank; None for no limit.
            get_exit_code: Callable that returns the exit code of a process that this process has started, by its pid;
                None if the exit code is unknown.
            explain_uncaught: Callable that announces an exception that the script does not catch, and returns the
                exception to show.
        """
        assert self.store is not None
        self.failure_monitor = FailureMonitor.get_or_create(
            self.store, self.rank, self.size, progress, abort_collectives, get_exit_code
        )
        self.failure_monitor.begin_stage(hang_timeout_s)
        self.failure_monitor.on_failure = self.stop_communicating
        install_excepthook(explain_uncaught)

    def is_group_intact(self) -> bool:
        """Returns whether ranks can use the group of an earlier stage. Collective: all ranks call it, in a stage.

        A failure that ends a stage breaks the group, and the script may catch the exception on all ranks.

        Raises:
            Exception: If the collective fails because another rank has failed in this stage.
        """
        try:
            self.collectives.reduce_boolean_decision(True)
        except Exception as exception:
            monitor = self.failure_monitor
            if not is_collective_error(exception) or (
                monitor is not None and monitor.wait_for_failure(REMOTE_REASON_TIMEOUT_S) is not None
            ):
                raise
            return False
        return True

    def stop_agreement_factory(self) -> StopAgreementFactory:
        """Returns the callable that creates the stop agreements of this stage, for :meth:`.CoordinatedStop.start`."""
        if self.store is None:
            return StopAgreement
        if self.failure_monitor is not None and self._name is None:
            return self.failure_monitor.start_stop_agreement
        store, numbers = self.store, count()

        def create(*, is_requested: bool) -> StopAgreement:
            part = PrefixStore(f"lightning_strategies_ext/agreement/{next(numbers)}", store)
            return StoreAgreement(part, self.rank, self.size, is_requested=is_requested)

        return create

    def handle_stage_exits(self, *, is_job: bool) -> None:
        """Aborts collectives in which this rank waits for a rank that has finished the stage. Collective.

        A no-op without a failure monitor.

        Args:
            is_job: Whether the job ends with the ranks' processes.
        """
        if self.failure_monitor is None:
            return
        if self._stage_exit_handler is not None:
            self._stage_exit_handler.close()
        self._stage_exit_handler = StageExitHandler(self.failure_monitor, ends_with_process=is_job)

    def start_uneven_inputs(
        self, mode: UnevenInputs, trainer: "pl.Trainer", values: StepValues, device: torch.device
    ) -> None:
        """Starts the handling of uneven inputs in ``fit``. Collective: all ranks call it.

        Args:
            mode: Reaction to uneven inputs.
            trainer: The Trainer.
            values: Logged values of the stage, which leave out the ranks that repeat a step.
            device: Device of the small tensors that ranks exchange for it.
        """
        values.is_shadowed = None
        if self.size == 1:
            return
        inputs = self.uneven_inputs = self.shadowed_steps = UnevenInputsController(
            mode, trainer, self.collectives, self.gradient_exchange, self.rank, self.size, device
        )
        if mode == "join":
            values.is_shadowed = lambda tensor: inputs.handles_reduce(tensor, None)

    # --- the store ---

    def prefix_store(self, purpose: str, number: int) -> Store | None:
        """Returns a part of the store for one purpose of all ranks; None for a rank without peers.

        Args:
            purpose: Prefix of the keys.
            number: Number of earlier parts for the purpose in this process. A context with a name ignores it: its store
                has one such part, because a new rank has had fewer than the other ranks.
        """
        if self.store is None or self.local_collectives is not None:
            return None
        part = number if self._name is None else self._name
        return PrefixStore(f"lightning_strategies_ext/{purpose}/{part}", self.store)

    # --- failure ---

    def mark_failed(self, exception: BaseException, rank: int, world_size: int) -> None:
        """Announces that this rank has failed; from now on its collectives are local."""
        self.local_collectives = LocalCollectives(rank, world_size)
        identities.current.identity = 0
        if self.failure_monitor is not None and not isinstance(exception, KeyboardInterrupt):
            self.failure_monitor.announce_failure(exception)

    def explain_exception(self, exception: BaseException) -> BaseException:
        """Returns the exception to show: the given one, or the failure of the rank that made a collective raise it."""
        if isinstance(exception, _EXPLAINED) or not is_collective_error(exception):
            return exception
        error: Exception | None = None
        is_lost = is_peer_loss(exception)
        failure = (
            None
            if self.failure_monitor is None
            else self.failure_monitor.wait_for_failure(LOCAL_REASON_TIMEOUT_S if is_lost else 0.0)
        )
        reason = (
            None
            if failure is not None or self._stage_exit_handler is None
            else self._stage_exit_handler.explain_collective_error(exception)
        )
        if reason is not None:
            error = UnevenInputsError(reason)
        elif self.failure_monitor is not None:
            failure = failure or self.failure_monitor.wait_for_failure(REMOTE_REASON_TIMEOUT_S if is_lost else 0.0)
            if failure is not None and self.failure_monitor.was_aborted:
                error = RankFailedError(failure_report.full_report(failure), failure.kind == "hang")
                self.failure_monitor.was_raised = True
        if error is None:
            if self.failure_monitor is not None:
                failure_report.advise_on_timeout(exception, self.failure_monitor.observe())
            return exception
        error.__cause__ = exception
        return error

    # --- leaving ---

    def leave(self, *, is_over: bool = True) -> None:
        """Leaves the stage. The next context takes over the failure monitor. A second call is a no-op.

        Args:
            is_over: Whether no other rank waits for this rank in the rest of the stage.
        """
        if self.failure_monitor is not None and self.failure_monitor.was_aborted:
            self.abandon()
        if self._stage_exit_handler is not None:
            self._stage_exit_handler.announce_exit(has_failed=self.local_collectives is not None)
        if self.failure_monitor is not None and is_over:
            self.failure_monitor.finish_stage()
        self._end_exchange()
        self.coordinated_stop.finish()

    def stop_communicating(self) -> None:
        """Ends agreements with other ranks, some of which may have exited. Any thread may call it."""
        if self._stage_exit_handler is not None:
            self._stage_exit_handler.close()
        self.coordinated_stop.abandon()

    def abandon(self) -> None:
        """Leaves the stage without announcing it, after a failure."""
        self.stop_communicating()
        self.coordinated_stop.drop_agreement()
        self._stage_exit_handler = None
        self._end_exchange()

    def _close(self) -> None:
        # A stage that ended with an exception may have left these open.
        if self._stage_exit_handler is not None:
            self._stage_exit_handler.close()
        self.end_agreement()
        self.coordinated_stop.close()

    def end_agreement(self) -> None:
        """Restores the callbacks and loops that decide like those of other ranks. A second call is a no-op."""
        if self.agreement is not None:
            self.agreement.close()
        self.agreement = None

    def _end_exchange(self) -> None:
        self.end_agreement()
        for part in (self.uneven_inputs, self.gradient_exchange, self.evaluation):
            if part is not None:
                part.close()
        self.gradient_exchange = self.parameter_tracker = self.uneven_inputs = self.evaluation = None
        self.shadowed_steps = None

    def __reduce__(self) -> tuple[Any, ...]:
        # The rest belongs to this process: a worker enters the stage itself.
        return StageContext, (self._create_collectives,), {"coordinated_stop": self.coordinated_stop}
