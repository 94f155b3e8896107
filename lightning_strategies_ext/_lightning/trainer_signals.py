"""Private names with which the Trainer handles SIGTERM, and SLURM's signal before the end of a job's time."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors.signal_connector import (
    log as lightning_log,  # only loggers of Lightning are shown
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_prefixed_message


class StepRecord(Protocol):
    """Object in which the training loop records the ends of steps, without a call.

    Attributes:
        position: Number of training steps, and a number that increases by :attr:`point` with each end of a step.
        point: See :attr:`position`.
        is_agreeing: Whether the loop calls a function after the step.
    """

    position: tuple[int, int]
    point: int
    is_agreeing: bool


class StepRecordOwner(Protocol):
    """Owner of the current record."""

    @property
    def step_record(self) -> StepRecord | None:
        """The record; None if the ends of steps are not recorded."""

    def after_train_step(self) -> None:
        """Called after a training step, before a validation, if ``trainer.should_stop`` or the record requires it."""


def intercept_sigterm(
    trainer: Any,
    on_signal: Callable[[], None],
    before_train_step: Callable[[], None],
    owner: StepRecordOwner | None = None,
) -> Callable[[], None]:
    """Replaces Lightning's SIGTERM handling by this package's stop agreement.

    Three attributes are set on the Trainer's own objects, none on a class:

    * ``_signal_connector._sigterm_notifier_fn`` is Lightning's handler. From 2.5.3 it runs a broadcast inside the
      signal handler, and in every version it sets a flag that makes only the signaled rank stop.
    * ``fit_loop.epoch_loop._broadcast_sigterm_tensor`` (2.5.3 to 2.6; absent before) is a blocking broadcast and a
      host-device synchronization per training step.
    * ``fit_loop.epoch_loop.advance`` (2.5 to 2.6) runs one training step. Its start is the only point at which no batch
      has been fetched and every progress counter is complete, as a checkpoint requires.

    Args:
        trainer: The Trainer.
        on_signal: Function that is called in the signal handler, in the main thread.
        before_train_step: Function that is called before each training step; may raise to end the run.
        owner: Owner of the record of the ends of steps, if they are recorded.

    Returns:
        A function that sets ``trainer.received_sigterm`` to True, after the ranks have agreed to stop.
    """
    connector, epoch_loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    release_sigterm(trainer)
    advance = epoch_loop.advance

    def advance_after_agreement(data_fetcher: Any) -> None:
        before_train_step()
        advance(data_fetcher)
        # No function call, because this runs in every step.
        if owner is None or owner.step_record is None:
            return
        record = owner.step_record
        if not trainer.should_stop:
            train, within = record.position
            record.position = train, within + record.point  # first, so that a vote from here on contains it
        if trainer.should_stop or record.is_agreeing:
            owner.after_train_step()

    def handle_sigterm(signum: int, frame: Any) -> None:
        on_signal()  # first: a write to a stream that the signal has interrupted can raise an error
        # Lightning's message; no other message reports the signal.
        lightning_log.info(rank_prefixed_message(f"Received SIGTERM: {signum}", trainer.local_rank))

    connector._sigterm_notifier_fn = handle_sigterm
    epoch_loop.advance = advance_after_agreement
    if hasattr(epoch_loop, "_broadcast_sigterm_tensor"):
        epoch_loop._broadcast_sigterm_tensor = lambda: None

    return partial(mark_sigterm_received, trainer)


def mark_sigterm_received(trainer: Any) -> None:
    """Sets ``trainer.received_sigterm`` to True, which has no public setter (2.5 to 2.6)."""
    trainer._signal_connector.received_sigterm = True


def intercept_requeueing(trainer: Any, on_signal: Callable[[], None]) -> Callable[[], None] | None:
    """Replaces Lightning's handler of SLURM's signal before the end of a job's time by this package's stop agreement.

    ``_signal_connector._slurm_sigusr_handler_fn`` (2.5 to 2.6) saves a checkpoint inside the signal handler and makes
    SLURM requeue the job. Its barrier in the handler does not match a collective in which other ranks wait. Call this
    function after :func:`intercept_sigterm`.

    Args:
        trainer: The Trainer.
        on_signal: Function that is called in the signal handler, in the main thread.

    Returns:
        A function that saves the checkpoint and requeues the job, for a call on all ranks before the same step. None if
        Lightning would not requeue the job.
    """
    environment, connector = trainer.strategy.cluster_environment, trainer._signal_connector
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    connector._slurm_sigusr_handler_fn = lambda signum, frame: on_signal()

    def requeue() -> None:
        with _as_before_validation(trainer):
            type(connector)._slurm_sigusr_handler_fn(connector, environment.requeue_signal, None)

    return requeue


@contextmanager
def _as_before_validation(trainer: Any) -> Generator[None, None, None]:
    """Makes a checkpoint that is saved in this context, during a validation of ``fit``, continue at its first step.

    From a checkpoint of a later step, Lightning would validate only the remaining batches, and log the mean over these
    (2.5 to 2.6: ``fit_loop.epoch_loop.val_loop.batch_progress``).
    """
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    if trainer.state.fn != TrainerFn.FITTING or not trainer.validating:
        yield
        return
    before = progress.state_dict()
    num_done = progress.total.completed - progress.current.completed
    first = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    total = {name: num_done + number for name, number in first.items()}
    progress.load_state_dict({**before, "total": total, "current": first, "is_last_batch": False})
    try:
        yield
    finally:
        progress.load_state_dict(before)


def is_accumulating(trainer: Any) -> bool:
    """Whether the previous batch was not the last of its accumulation window.

    In the last epoch of ``StochasticWeightAveraging``, which does not train, always True.
    ``fit_loop.epoch_loop.batch_progress`` has no public name (2.5 to 2.6).
    """
    if trainer.fit_loop._skip_backward:  # `is_without_training`, without a call in each step
        return True
    num_batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return bool(trainer.lightning_module.automatic_optimization and num_batches % trainer.accumulate_grad_batches)


def is_without_training(trainer: Any) -> bool:
    """Whether this is the last epoch of ``StochasticWeightAveraging``, which sets ``_skip_backward`` (2.5 to 2.6)."""
    return bool(trainer.fit_loop._skip_backward)


def release_sigterm(trainer: Any) -> None:
    """Reverts :func:`intercept_sigterm` and :func:`intercept_requeueing`; a no-op if there is nothing to revert."""
    for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
        vars(trainer._signal_connector).pop(name, None)
    for name in ("advance", "_broadcast_sigterm_tensor"):
        vars(trainer.fit_loop.epoch_loop).pop(name, None)
