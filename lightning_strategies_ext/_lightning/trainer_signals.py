"""What is private in how the Trainer handles SIGTERM, and the signal by which SLURM says that time is nearly over."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors.signal_connector import (
    log as lightning_log,  # only Lightning's loggers are shown
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_prefixed_message


def intercept_sigterm(
    trainer: Any, on_signal: Callable[[], None], before_train_step: Callable[[], None]
) -> Callable[[], None]:
    """Puts our SIGTERM agreement in the place of Lightning's.

    Three attributes are set on the Trainer's own objects, none on a class:

    * ``_signal_connector._sigterm_notifier_fn`` is Lightning's handler. From 2.5.3 it runs a broadcast inside the
      signal handler, and on every version it sets a flag that makes only the signalled rank stop.
    * ``fit_loop.epoch_loop._broadcast_sigterm_tensor`` (2.5.3 to 2.6; absent before) is a blocking broadcast and a
      host-device synchronisation per training step.
    * ``fit_loop.epoch_loop.advance`` (2.5 to 2.6) runs one training step. Its start is the only point where no batch
      has been drawn and every progress counter is complete, which is what a checkpoint needs.

    Args:
        trainer: The Trainer.
        on_signal: Called in the signal handler, in the main thread.
        before_train_step: Called before each training step; may raise to end the run.

    Returns:
        A function that says to the Trainer that a SIGTERM was agreed on (``trainer.received_sigterm`` becomes True).
    """
    connector, epoch_loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    release_sigterm(trainer)
    advance = epoch_loop.advance

    def advance_after_agreement(data_fetcher: Any) -> None:
        before_train_step()
        advance(data_fetcher)

    def handle_sigterm(signum: int, frame: Any) -> None:
        on_signal()  # first: a write to a stream that the signal has interrupted can raise an error
        # Lightning's message; no other message reports the signal.
        lightning_log.info(rank_prefixed_message(f"Received SIGTERM: {signum}", trainer.local_rank))

    connector._sigterm_notifier_fn = handle_sigterm
    epoch_loop.advance = advance_after_agreement
    if hasattr(epoch_loop, "_broadcast_sigterm_tensor"):
        epoch_loop._broadcast_sigterm_tensor = lambda: None

    return partial(note_sigterm, trainer)


def note_sigterm(trainer: Any) -> None:
    """Makes ``trainer.received_sigterm``, which is public to read, True (2.5 to 2.6)."""
    trainer._signal_connector.received_sigterm = True


def intercept_requeueing(trainer: Any, on_signal: Callable[[], None]) -> Callable[[], None] | None:
    """Puts our agreement in the place of what Lightning does when SLURM says that a job's time is nearly over.

    ``_signal_connector._slurm_sigusr_handler_fn`` (2.5 to 2.6) saves a checkpoint inside the signal handler, where its
    barrier meets whatever collective the other ranks are in, and asks SLURM to queue the job again. To be called after
    :func:`intercept_sigterm`.

    Args:
        trainer: The Trainer.
        on_signal: Called in the signal handler, in the main thread.

    Returns:
        What saves and asks, where all ranks are before the same step; None where Lightning would do neither.
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
    """A checkpoint that is saved inside it, within a validation of ``fit``, is one of the validation's first step.

    From one of a later step Lightning validates on as many batches as were left then, and logs the mean over these
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
    """Whether the batch before this one was not the last of its window of accumulation.

    In the last epoch of ``StochasticWeightAveraging``, which trains nothing, no batch is. Neither
    ``fit_loop.epoch_loop.batch_progress`` nor ``fit_loop._skip_backward`` has a public name (2.5 to 2.6).
    """
    if trainer.fit_loop._skip_backward:
        return True
    num_batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return bool(trainer.lightning_module.automatic_optimization and num_batches % trainer.accumulate_grad_batches)


def release_sigterm(trainer: Any) -> None:
    """Undoes :func:`intercept_sigterm` and :func:`intercept_requeueing`; harmless when there is nothing to undo."""
    for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
        vars(trainer._signal_connector).pop(name, None)
    for name in ("advance", "_broadcast_sigterm_tensor"):
        vars(trainer.fit_loop.epoch_loop).pop(name, None)
