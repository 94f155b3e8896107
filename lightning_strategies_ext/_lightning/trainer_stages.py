"""What is private in how the Trainer runs a stage: its loops, its connectors, their checkpoints, its end."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.loops.loop import _Loop

# How the learning rate and batch size finders leave a trial (2.5 to 2.6): all ranks raise it, and go on after it.
from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExitException

from lightning_strategies_ext._lightning._replacing import replace_method

__all__ = [
    "TunerExitException",
    "before_fetch",
    "call_hooks",
    "connectors_of",
    "dump_checkpoint",
    "end_restart",
    "leave_evaluation",
    "loops_of",
    "restore_checkpoint",
    "start_training",
    "surround_fit",
    "tear_down",
]


def loops_of(trainer: Any) -> list[Any]:
    """The Trainer's loops, with the loops inside them: what holds the progress of a run.

    ``trainer.fit_loop`` and its siblings are public; that loops hold loops, and are of one class, is not (2.5 to 2.6).
    """
    found: list[Any] = []
    waiting: list[Any] = [trainer]
    while waiting:
        inner = [value for value in vars(waiting.pop()).values() if isinstance(value, _Loop) and value not in found]
        found += inner
        waiting += inner
    return found


def connectors_of(trainer: Any) -> tuple[Any, list[Any]]:
    """The connector that holds the logged metrics, and the Trainer's other connectors.

    ``trainer.callback_metrics``, ``logged_metrics`` and ``progress_bar_metrics`` are public to read and cannot be set
    (2.5 to 2.6).
    """
    metrics = trainer._logger_connector
    others = [value for value in vars(trainer).values() if ".trainer.connectors." in type(value).__module__]
    return metrics, [connector for connector in others if connector is not metrics]


def surround_fit(
    trainer: Any, run: Callable[[Callable[[], None]], None], before_epoch: Callable[[], None]
) -> Callable[[], None]:
    """Lets ``run`` decide how often ``fit`` runs its loop.

    ``FitLoop.run`` goes on from the progress that its loops have, and ``FitLoop.on_advance_start`` begins an epoch (2.5
    to 2.6).

    Args:
        trainer: The Trainer.
        run: Called with ``FitLoop.run``, in its place.
        before_epoch: Called before each epoch.

    Returns:
        A function that undoes it.
    """
    fit_loop = trainer.fit_loop
    on_advance_start = fit_loop.on_advance_start

    def on_advance_start_after() -> None:
        before_epoch()
        on_advance_start()

    fit_loop.run = partial(run, fit_loop.run)
    fit_loop.on_advance_start = on_advance_start_after

    def undo() -> None:
        for name in ("run", "on_advance_start"):
            vars(fit_loop).pop(name, None)

    return undo


def before_fetch(trainer: Any, then: Callable[[int], None]) -> Callable[[], None]:
    """Calls ``then`` whenever ``fit`` is about to ask for a training batch, with what :func:`step_of_loggers` gives.

    No hook comes between the end of a batch and that; ``_TrainingEpochLoop.on_run_start`` has the fetcher call
    ``_on_before_fetch``, for the profiler (2.5 to 2.6).

    Returns:
        A function that undoes it.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    on_before_fetch = epoch_loop._on_before_fetch

    def call_and_go_on() -> None:
        then(epoch_loop._batches_that_stepped)
        on_before_fetch()

    return replace_method(epoch_loop, "_on_before_fetch", call_and_go_on)


def call_hooks(callback: Any, names: Iterable[str], is_on: bool) -> None:
    """Lets Lightning call some hooks of a callback, as ever, or not.

    It takes three microseconds for each of a callback's hooks, also for those that do nothing, but not for what is no
    function: ``_call_callback_hooks`` asks ``callable(getattr(callback, name))`` (2.5 to 2.6).
    """
    for name in names:
        if is_on:
            vars(callback).pop(name, None)
        else:
            vars(callback)[name] = None


def dump_checkpoint(trainer: Any) -> dict[str, Any]:
    """The checkpoint that ``trainer.save_checkpoint`` would write; there is no public way to have it (2.5 to 2.6)."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return checkpoint


def restore_checkpoint(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """What ``fit(ckpt_path=...)`` does with a checkpoint, in the middle of a ``fit``.

    The connector reads from ``_loaded_checkpoint``, and otherwise only files (2.5 to 2.6). What has unfrozen parameters
    gives optimizers their groups at the beginning of ``fit``, and where that is restored, before their states.
    """
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = checkpoint
    connector.restore_datamodule()
    connector.restore_model()
    connector.restore_callbacks()
    for callback in trainer.callbacks:
        if isinstance(callback, BaseFinetuning):
            callback.on_fit_start(trainer, trainer.lightning_module)
    connector.restore_training_state()
    connector._loaded_checkpoint = {}


def start_training(trainer: Any) -> None:
    """Creates the training loaders and calls the ``on_train_start`` hooks, as ``FitLoop.run`` does first (2.5 to 2.6).

    ``FitLoop.run`` does it again, and has no public part that does it alone.
    """
    trainer.fit_loop.setup_data()
    trainer.fit_loop.on_run_start()


def leave_evaluation(trainer: Any) -> None:
    """Makes a Trainer that an exception has taken out of a validation within ``fit`` as it is outside of one.

    What the validation has logged so far is in ``val_loop._results`` (2.5 to 2.6).
    """
    trainer.fit_loop.epoch_loop.val_loop._results.reset()
    trainer.training = True


def end_restart(trainer: Any) -> None:
    """Says that all that came before the next training step was done, a validation that was due included.

    ``_TrainingEpochLoop.advance`` looks at the first step after a restart whether a validation is to be made up for
    (2.5 to 2.6), which a checkpoint does not say that was taken right before a step.
    """
    trainer.fit_loop.epoch_loop._restarting = False


def tear_down(trainer: Any) -> None:
    """What the Trainer does after an exception, in the process that it runs in: strategy, loops, signal handlers.

    There is no public way to end a stage from outside of it (2.5 to 2.6).
    """
    trainer._teardown()
