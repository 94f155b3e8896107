"""Private names with which the Trainer runs a stage: loops, connectors, checkpoints, teardown."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch.callbacks import BaseFinetuning, LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.loops.loop import _Loop

# Exception by which learning rate and batch size finders end a trial on all ranks, which then continue (2.5 to 2.6).
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExitException
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr

from lightning_strategies_ext._lightning._patching import replace_method

#: Attributes that callbacks change during ``fit`` and that their states lack or do not restore (2.5 to 2.6). Classes
#: are given by name, because not all releases have all of them.
_UNSAVED = {
    "SpikeDetection": ("last_val", "running_mean", "bad_batches"),
    "WeightAveraging": ("_latest_update_epoch",),
}

#: Exceptions that end the stage on all ranks and are not failures.
STOPS = (SIGTERMException, TunerExitException)

__all__ = [
    "STOPS",
    "TunerExitException",
    "apply_settings",
    "batch_progress_of",
    "before_train_end",
    "wrap_before_fetch",
    "set_hooks_enabled",
    "connectors_of",
    "dump_checkpoint",
    "dump_commit",
    "finish_restart",
    "found_by_trials",
    "leave_evaluation",
    "loops_of",
    "restore_checkpoint",
    "settings_of",
    "skip_trials",
    "start_training",
    "wrap_fit_loop",
    "tear_down",
]


def loops_of(trainer: Any) -> list[Any]:
    """Returns the Trainer's loops, including nested ones, which contain the progress of a run.

    ``trainer.fit_loop`` and its siblings are public; their nested loops and common class are not (2.5 to 2.6).
    """
    found: list[Any] = []
    waiting: list[Any] = [trainer]
    while waiting:
        inner = [value for value in vars(waiting.pop()).values() if isinstance(value, _Loop) and value not in found]
        found += inner
        waiting += inner
    return found


def batch_progress_of(trainer: Any) -> Any:
    """Returns an object whose ``ready`` is the number of batches that the training epoch has begun (2.5 to 2.6)."""
    return trainer.fit_loop.epoch_loop.batch_progress.current


def before_train_end(trainer: Any, check: Callable[[], None]) -> Callable[[], None]:
    """Calls ``check`` before the hooks ``on_train_end``, of which ``FitLoop.on_run_end`` calls all (2.5 to 2.6).

    Returns:
        A function that reverts the change.
    """
    on_run_end = trainer.fit_loop.on_run_end

    def check_and_call() -> Any:
        check()
        return on_run_end()

    return replace_method(trainer.fit_loop, "on_run_end", check_and_call)


def connectors_of(trainer: Any) -> tuple[Any, list[Any]]:
    """Returns the connector with the logged metrics, and a list of the Trainer's other connectors.

    ``trainer.callback_metrics``, ``logged_metrics`` and ``progress_bar_metrics`` have no public setters (2.5 to 2.6).
    """
    metrics = trainer._logger_connector
    others = [value for value in vars(trainer).values() if ".trainer.connectors." in type(value).__module__]
    return metrics, [connector for connector in others if connector is not metrics]


def wrap_fit_loop(
    trainer: Any,
    run: Callable[[Callable[[], None]], None],
    run_trial: Callable[[Callable[[], None]], None],
    before_epoch: Callable[[], None],
) -> Callable[[], None]:
    """Makes ``run`` decide how often ``fit`` runs its loop.

    ``FitLoop.run`` continues from the progress of its loops, ``FitLoop.on_advance_start`` begins an epoch, and
    ``Trainer._run_stage`` runs the loop once. The learning rate finder runs it as well, in a hook (2.5 to 2.6).

    Args:
        trainer: The Trainer.
        run: Function that is called instead of ``FitLoop.run``, with ``FitLoop.run`` as its argument.
        run_trial: Function that is called in the same way if a callback calls ``FitLoop.run``.
        before_epoch: Function that is called before each epoch.

    Returns:
        A function that reverts the change.
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
    """Disables the learning rate finders among some callbacks.

    ``on_fit_start`` calls ``lr_find``, which saves a checkpoint, trains, and restores it (2.5 to 2.6).

    Returns:
        A function that reverts the change.
    """
    undos: list[Callable[[], None]] = []
    for callback in callbacks:
        if isinstance(callback, LearningRateFinder):
            undos.append(replace_method(callback, "lr_find", lambda trainer, module: None))

    def undo() -> None:
        while undos:
            undos.pop()()

    return undo


def wrap_before_fetch(trainer: Any, function: Callable[[int], None]) -> Callable[[], None]:
    """Calls ``function`` before ``fit`` requests a training batch, with the result of :func:`logger_step`.

    No hook is called between the end of a batch and this request; ``_TrainingEpochLoop.on_run_start`` makes the fetcher
    call ``_on_before_fetch``, for the profiler (2.5 to 2.6).

    Returns:
        A function that reverts the change.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    on_before_fetch = epoch_loop._on_before_fetch

    def call_both() -> None:
        function(epoch_loop._batches_that_stepped)
        on_before_fetch()

    return replace_method(epoch_loop, "_on_before_fetch", call_both)


def set_hooks_enabled(callback: Any, names: Iterable[str], is_on: bool) -> None:
    """Enables or disables some hooks of a callback.

    Each hook of a callback takes Lightning three microseconds, even if it is empty, unless the attribute is not a
    function: ``_call_callback_hooks`` checks ``callable(getattr(callback, name))`` (2.5 to 2.6).
    """
    for name in names:
        if is_on:
            vars(callback).pop(name, None)
        else:
            vars(callback)[name] = None


def dump_checkpoint(trainer: Any) -> dict[str, Any]:
    """Returns the checkpoint that ``trainer.save_checkpoint`` would write, without a file (2.5 to 2.6)."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return checkpoint


def dump_commit(trainer: Any) -> dict[str, Any]:
    """Returns a checkpoint without the state of ``SpikeDetection``, which Lightning cannot load (2.5 to 2.6).

    :func:`settings_of` contains that state.
    """
    checkpoint = dump_checkpoint(trainer)
    for callback in trainer.callbacks:
        if "SpikeDetection" in (kind.__name__ for kind in type(callback).__mro__):
            checkpoint["callbacks"].pop(callback.state_key, None)
    return checkpoint


def restore_checkpoint(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Restores a checkpoint as ``fit(ckpt_path=...)`` does, but during a ``fit``.

    The connector restores ``_loaded_checkpoint``, and otherwise reads only files (2.5 to 2.6). Callbacks that unfreeze
    parameters must restore the optimizers' parameter groups before the optimizers' states; they do so at the beginning
    of ``fit``.
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
    """Makes the state of ``StochasticWeightAveraging`` that no checkpoint contains fit the restored epoch.

    The first averaged epoch creates the scheduler and the counter, in ``on_train_epoch_start`` (2.5 to 2.6). An epoch
    that is restored after its beginning does not call this hook.
    """
    callback.reset_momenta()
    callback.momenta = {}
    callback._initialized, callback._swa_scheduler, callback.n_averaged = False, None, None
    connector = trainer._checkpoint_connector
    connector.restore_loops()
    if callback._scheduler_state is not None:
        callback.on_train_epoch_start(trainer, trainer.lightning_module)


def settings_of(trainer: Any) -> dict[str, Any]:
    """Returns attributes of Trainer, loops, and callbacks that callbacks may change and that no checkpoint contains.

    ``GradientAccumulationScheduler`` and ``StochasticWeightAveraging`` change the Trainer (2.5 to 2.6).
    """
    fit_loop = trainer.fit_loop
    return {
        "should_stop": trainer.should_stop,
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
    """Applies the result of :func:`settings_of`, and enables backward passes again (2.5 to 2.6)."""
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
    """Returns the attributes of the module that the learning rate finders set, with their values.

    ``_attr_name`` contains the name; if it is empty, the finder uses the first of two names that exists (2.5 to 2.6).
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
    """Creates the training DataLoaders and calls the ``on_train_start`` hooks, as ``FitLoop.run`` does (2.5 to 2.6).

    No public method does only this; ``FitLoop.run`` then repeats it.
    """
    trainer.fit_loop.setup_data()
    trainer.fit_loop.on_run_start()


def leave_evaluation(trainer: Any) -> None:
    """Ends a validation within ``fit`` that an exception has interrupted.

    ``val_loop._results`` contains the values that it has logged (2.5 to 2.6).
    """
    trainer.fit_loop.epoch_loop.val_loop._results.reset()
    trainer.training = True


def finish_restart(trainer: Any) -> None:
    """Marks everything before the next training step as done, including a validation that was due.

    At the first step after a restart, ``_TrainingEpochLoop.advance`` checks whether it must make up for a validation
    (2.5 to 2.6). A checkpoint from right before a step does not contain whether it was done.
    """
    trainer.fit_loop.epoch_loop._restarting = False


def tear_down(trainer: Any) -> None:
    """Tears down a stage in its process as the Trainer does after an exception: strategy, loops, signal handlers.

    No public method does this from outside of the stage (2.5 to 2.6).
    """
    trainer._teardown()
