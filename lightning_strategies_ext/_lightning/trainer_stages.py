"""What is private in how the Trainer runs a stage: its loops, its connectors, their checkpoints, its end."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch.callbacks import BaseFinetuning, LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.loops.loop import _Loop

# How the learning rate and batch size finders leave a trial (2.5 to 2.6): all ranks raise it, and go on after it.
from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExitException
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr

from lightning_strategies_ext._lightning._replacing import replace_method

#: Attributes that callbacks change during ``fit`` and that their states lack, or fail to restore (2.5 to 2.6). Classes
#: are given by name, because not all releases have all of them.
_UNSAVED = {
    "SpikeDetection": ("last_val", "running_mean", "bad_batches"),
    "WeightAveraging": ("_latest_update_epoch",),
}

__all__ = [
    "TunerExitException",
    "apply_settings",
    "before_fetch",
    "call_hooks",
    "connectors_of",
    "dump_checkpoint",
    "dump_commit",
    "end_restart",
    "found_by_trials",
    "leave_evaluation",
    "loops_of",
    "restore_checkpoint",
    "settings_of",
    "skip_trials",
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
    trainer: Any,
    run: Callable[[Callable[[], None]], None],
    run_trial: Callable[[Callable[[], None]], None],
    before_epoch: Callable[[], None],
) -> Callable[[], None]:
    """Lets ``run`` decide how often ``fit`` runs its loop.

    ``FitLoop.run`` goes on from the progress that its loops have, ``FitLoop.on_advance_start`` begins an epoch, and
    ``Trainer._run_stage`` runs the loop once. The learning rate finder runs it as well, in a hook (2.5 to 2.6).

    Args:
        trainer: The Trainer.
        run: Called with ``FitLoop.run``, in its place.
        run_trial: Called with ``FitLoop.run``, in its place, where a callback runs it.
        before_epoch: Called before each epoch.

    Returns:
        A function that undoes it.
    """
    fit_loop = trainer.fit_loop
    on_advance_start, run_stage, train = fit_loop.on_advance_start, trainer._run_stage, fit_loop.run
    is_due = False

    def run_stage_after() -> Any:
        nonlocal is_due
        is_due = True
        return run_stage()

    def run_loop() -> None:
        nonlocal is_due
        chosen, is_due = (run if is_due else run_trial), False
        chosen(train)

    def on_advance_start_after() -> None:
        before_epoch()
        on_advance_start()

    undo_stage = replace_method(trainer, "_run_stage", run_stage_after)
    fit_loop.run = run_loop
    fit_loop.on_advance_start = on_advance_start_after

    def undo() -> None:
        undo_stage()
        for name in ("run", "on_advance_start"):
            vars(fit_loop).pop(name, None)

    return undo


def skip_trials(callbacks: Iterable[Any]) -> Callable[[], None]:
    """Lets the learning rate finders among some callbacks find nothing.

    ``on_fit_start`` calls ``lr_find``, which saves a checkpoint, trains, and restores it (2.5 to 2.6).

    Returns:
        A function that undoes it.
    """
    undos: list[Callable[[], None]] = []
    for callback in callbacks:
        if isinstance(callback, LearningRateFinder):
            undos.append(replace_method(callback, "lr_find", lambda trainer, module: None))

    def undo() -> None:
        while undos:
            undos.pop()()

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


def dump_commit(trainer: Any) -> dict[str, Any]:
    """Returns a checkpoint without the state of ``SpikeDetection``, which Lightning cannot load (2.5 to 2.6).

    :func:`settings_of` has that state.
    """
    checkpoint = dump_checkpoint(trainer)
    for callback in trainer.callbacks:
        if "SpikeDetection" in (kind.__name__ for kind in type(callback).__mro__):
            checkpoint["callbacks"].pop(callback.state_key, None)
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
        if isinstance(callback, StochasticWeightAveraging):
            _begin_averaging_again(trainer, callback)
    connector.restore_training_state()
    connector._loaded_checkpoint = {}


def _begin_averaging_again(trainer: Any, callback: StochasticWeightAveraging) -> None:
    """Makes the parts of `StochasticWeightAveraging` that are in no checkpoint those of the epoch that is restored.

    The first epoch that is averaged creates the scheduler and the counter, in ``on_train_epoch_start`` (2.5 to 2.6). A
    restored epoch that has begun does not call this hook.
    """
    callback.reset_momenta()
    callback.momenta = {}
    callback._initialized, callback._swa_scheduler, callback.n_averaged = False, None, None
    connector = trainer._checkpoint_connector
    connector.restore_loops()
    if callback._scheduler_state is not None:
        callback.on_train_epoch_start(trainer, trainer.lightning_module)


def settings_of(trainer: Any) -> dict[str, Any]:
    """What callbacks may change in the Trainer, its loops and themselves during ``fit``, and no checkpoint holds.

    ``GradientAccumulationScheduler`` and ``StochasticWeightAveraging`` change the Trainer (2.5 to 2.6).
    """
    fit_loop = trainer.fit_loop
    return {
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "max_epochs": fit_loop.max_epochs,
        "min_epochs": fit_loop.min_epochs,
        "max_steps": fit_loop.epoch_loop.max_steps,
        "min_steps": fit_loop.epoch_loop.min_steps,
        "limit_val_batches": trainer.limit_val_batches,
        "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
        "callbacks": [_unsaved_of(callback) for callback in trainer.callbacks],
    }


def _unsaved_of(callback: Any) -> dict[str, Any]:
    names = [name for kind in type(callback).__mro__ for name in _UNSAVED.get(kind.__name__, ())]
    return {name: copy.deepcopy(vars(callback)[name]) for name in names if name in vars(callback)}


def apply_settings(trainer: Any, settings: dict[str, Any]) -> None:
    """Makes settings those that :func:`settings_of` gave; backward passes are not skipped then (2.5 to 2.6)."""
    fit_loop = trainer.fit_loop
    owners = {
        **dict.fromkeys(("max_epochs", "min_epochs"), fit_loop),
        **dict.fromkeys(("max_steps", "min_steps"), fit_loop.epoch_loop),
    }
    for callback, unsaved in zip(trainer.callbacks, settings["callbacks"], strict=True):
        vars(callback).update(copy.deepcopy(unsaved))
    for name, value in settings.items():
        if name != "callbacks":
            setattr(owners.get(name, trainer), name, value)
    fit_loop._skip_backward = False


def found_by_trials(trainer: Any) -> dict[str, Any]:
    """Attributes of the module that the learning rate finders set, with their values.

    ``_attr_name`` names them; an empty name stands for the first of two (2.5 to 2.6).
    """
    found: dict[str, Any] = {}
    module = trainer.lightning_module
    for callback in trainer.callbacks:
        if isinstance(callback, LearningRateFinder) and callback._update_attr:
            names = (callback._attr_name,) if callback._attr_name else ("lr", "learning_rate")
            name = next((name for name in names if lightning_hasattr(module, name)), None)
            if name is not None:
                found[name] = lightning_getattr(module, name)
    return found


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
