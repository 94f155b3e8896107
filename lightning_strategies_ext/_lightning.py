"""Every private name of Lightning's that this package touches, one named function or alias each.

Each says why it is needed and in which Lightning versions it was read. ``tests/test_lightning_private*.py`` fails when
one of them is gone, so that a new Lightning release shows here first and nowhere else.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from inspect import getclosurevars
from typing import Any

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.strategies.launchers.multiprocessing import (
    _MultiProcessingLauncher as FabricMultiProcessingLauncher,
)
from lightning.fabric.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as FabricSubprocessScriptLauncher,
)
from lightning.fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin

# What each process that the script launchers start does with OpenMP's threads (2.5 to 2.6).
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as set_num_threads_if_needed
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only

# The states of all generators of random numbers, which torch, numpy and Python have no common name for (2.5 to 2.6).
from lightning.fabric.utilities.seed import _collect_rng_states as random_states
from lightning.fabric.utilities.seed import _set_rng_states as set_random_states
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies.launchers.launcher import _Launcher as Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from lightning.pytorch.trainer.states import TrainerFn

# How the learning rate and batch size finders leave a trial (2.5 to 2.6): all ranks raise it, and go on after it.
from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExitException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torchmetrics import Metric

# The launcher classes (2.5 to 2.6): the Trainer asks `isinstance(launcher, _SubprocessScriptLauncher)` on Ctrl-C, and
# Fabric asks for its `_MultiProcessingLauncher`, so ours must be of those classes. In the Trainer, ours must not be a
# `_MultiProcessingLauncher`: the prediction loop refuses to return predictions then. `_Launcher` is the abstract base.
__all__ = [
    "BackwardSyncControl",
    "FabricMultiProcessingLauncher",
    "FabricSubprocessScriptLauncher",
    "Launcher",
    "SubprocessScriptLauncher",
    "TunerExitException",
    "add_sums_of_logging",
    "after_setup_data",
    "before_fetch",
    "call_children_scripts",
    "call_hooks",
    "checkpoint_io_of",
    "connectors_of",
    "data_fetcher_of",
    "data_of",
    "dump_checkpoint",
    "end_restart",
    "forget_data",
    "forget_training_data",
    "intercept_requeueing",
    "intercept_sigterm",
    "is_accumulating",
    "is_bound_to_stage",
    "layer_sync",
    "leave_evaluation",
    "loader_states",
    "logged_per_epoch",
    "loops_of",
    "merging_of_logging",
    "merging_of_metric",
    "move_optimizers",
    "note_sigterm",
    "position_of_logging",
    "random_states",
    "release_sigterm",
    "restore_checkpoint",
    "set_checkpoint_io",
    "set_data_fetcher",
    "set_device",
    "set_layer_sync",
    "set_num_threads_if_needed",
    "set_position_of_logging",
    "set_random_states",
    "skip_needless_moves",
    "states_of_loaders",
    "step_of_loggers",
    "surround_fit",
    "take_redirection",
    "tear_down",
    "trainer_of",
]


def set_device(module: torch.nn.Module, device: torch.device) -> None:
    """Sets what the property ``device`` of LightningModules and the like returns.

    The property has no setter, and ``module.to(device)`` would move the parameters too (2.5 to 2.6).
    """
    if isinstance(module, _DeviceDtypeModuleMixin):
        module._device = device


def take_redirection(module: torch.nn.Module) -> str | None:
    """The method that Fabric wants called in place of ``forward``, or None; ``forward`` is itself again then.

    For ``fabric_module.training_step(...)`` and methods given to ``mark_forward_method``, Fabric sets ``forward`` of
    the user's module to a function that calls the method of that module (2.5 to 2.6: ``_FabricModule.
    _redirection_through_forward``). A replica must call its own, so the name is read from the function's closure.
    """
    forward = vars(module).get("forward")
    if getattr(forward, "__qualname__", "") != "_FabricModule._redirection_through_forward.<locals>.wrapped_forward":
        return None
    found = getclosurevars(forward).nonlocals  # type: ignore[arg-type]
    module.forward = found["original_forward"]
    return str(found["method_name"])


def move_optimizers(optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> None:
    """Moves the state of optimizers to ``device``.

    Lightning has no public function for it; a state dict round trip would copy more (2.5 to 2.6).
    """
    _optimizers_to_device(list(optimizers), device)


def layer_sync(strategy: Any) -> Any:
    """The LayerSync plugin that ``Trainer(sync_batchnorm=True)`` sets on a strategy, or None.

    The Trainer's connector writes it to this attribute and there is no public way to read it (2.5 to 2.6).
    """
    return strategy._layer_sync


def set_layer_sync(strategy: Any, layer_sync: Any) -> None:
    """Sets what :func:`layer_sync` reads."""
    strategy._layer_sync = layer_sync


def call_children_scripts(launcher: Any) -> None:
    """Starts the script once more for each further device; ``launcher.procs`` has the processes then (2.5 to 2.6).

    ``launch`` of both script launchers calls it, and an observer after it, which kills all ranks when one fails.
    """
    launcher._call_children_scripts()


def checkpoint_io_of(strategy: Any, default: Callable[[], Any]) -> Any:
    """How a strategy writes checkpoints; as ``default`` does if the user has named no other way.

    A writer that hands checkpoints on to another, as ``AsyncCheckpointIO`` does, gets it as that other one; its setter
    keeps one that the user has given. Lightning's strategies do the same with Lightning's own writer, and its
    connectors ask for the attribute, which is None until then. The class has no public name either (2.5 to 2.6).
    """
    if strategy._checkpoint_io is None:
        strategy._checkpoint_io = default()
    elif isinstance(strategy._checkpoint_io, _WrappingCheckpointIO):
        strategy._checkpoint_io.checkpoint_io = default()
    return strategy._checkpoint_io


def set_checkpoint_io(strategy: Any, checkpoint_io: Any) -> None:
    """Sets how a strategy writes checkpoints; see :func:`checkpoint_io_of`."""
    strategy._checkpoint_io = checkpoint_io


def say_rank(rank: int) -> None:
    """Tells Lightning which rank this is, for what only rank 0 prints or writes."""
    for decorator in (fabric_rank_zero_only, rank_zero_only):
        decorator.rank = rank  # type: ignore[attr-defined]


def trainer_of(module: Any) -> Any:
    """The Trainer that a LightningModule is attached to, or None.

    The public property ``LightningModule.trainer`` raises when there is none, which is what a teardown after an early
    exception meets (2.5 to 2.6).
    """
    return module._trainer


class _ResultMetricInPlace(_ResultMetric):
    def to(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_tensor and not kwargs and args == (self.value.device,):
            return self
        return super().to(*args, **kwargs)


class _ResultCollectionInPlace(_ResultCollection):
    #: What an earlier process has added up, for metrics that this one has not made yet.
    found: dict[str, dict[str, Any]] | None = None

    def __setitem__(self, key: str, metric: Any) -> None:
        metric.__class__ = _ResultMetricInPlace
        super().__setitem__(key, metric)
        for name, state in (self.found or {}).get(key, {}).items():
            setattr(metric, name, state)

    def reset(self, *args: Any, **kwargs: Any) -> None:
        self.found = None
        super().reset(*args, **kwargs)


def skip_needless_moves(trainer: Any) -> None:
    """Spares each ``self.log`` call a walk through the logged value's attributes that moves it to where it already is.

    ``_ResultCollection.log`` calls ``to(value.device)`` on the stored metric every time (2.5 to 2.6), which takes 0.2
    to 0.4 ms of Python per logged value and step, longer than a small all-reduce. Only this Trainer's collections
    change; what they hold and return does not.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    for loop in (epoch_loop, epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        loop._results.__class__ = _ResultCollectionInPlace


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

    connector._sigterm_notifier_fn = lambda signum, frame: on_signal()
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

    ``fit_loop.epoch_loop.batch_progress`` has no public name (2.5 to 2.6).
    """
    num_batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return bool(trainer.lightning_module.automatic_optimization and num_batches % trainer.accumulate_grad_batches)


def release_sigterm(trainer: Any) -> None:
    """Undoes :func:`intercept_sigterm` and :func:`intercept_requeueing`; harmless when there is nothing to undo."""
    for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
        vars(trainer._signal_connector).pop(name, None)
    for name in ("advance", "_broadcast_sigterm_tensor"):
        vars(trainer.fit_loop.epoch_loop).pop(name, None)


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


def data_of(trainer: Any) -> list[Any]:
    """What the Trainer's loops take their loaders from: the user's loaders, LightningModule and datamodule.

    ``_data_source`` is where the Trainer attaches them, in the process that runs the stage (2.5 to 2.6).
    """
    loops = [trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop]
    loops += [trainer.validate_loop, trainer.test_loop, trainer.predict_loop]
    return [loop._data_source.instance for loop in loops]


def connectors_of(trainer: Any) -> tuple[Any, list[Any]]:
    """The connector that holds the logged metrics, and the Trainer's other connectors.

    ``trainer.callback_metrics``, ``logged_metrics`` and ``progress_bar_metrics`` are public to read and cannot be set
    (2.5 to 2.6).
    """
    metrics = trainer._logger_connector
    others = [value for value in vars(trainer).values() if ".trainer.connectors." in type(value).__module__]
    return metrics, [connector for connector in others if connector is not metrics]


def after_setup_data(trainer: Any, then: Callable[[], None]) -> Callable[[], None]:
    """Calls ``then`` whenever ``fit`` has made its training loaders.

    ``FitLoop.setup_data`` makes them, before the first epoch and where they are to be reloaded (2.5 to 2.6).

    Returns:
        A function that undoes it.
    """
    fit_loop = trainer.fit_loop
    setup_data = fit_loop.setup_data

    def setup_data_and_then() -> None:
        setup_data()
        then()

    fit_loop.setup_data = setup_data_and_then

    def undo() -> None:
        if vars(fit_loop).get("setup_data") is setup_data_and_then:
            del fit_loop.setup_data

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

    epoch_loop._on_before_fetch = call_and_go_on

    def undo() -> None:
        if vars(epoch_loop).get("_on_before_fetch") is call_and_go_on:
            del epoch_loop._on_before_fetch

    return undo


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


def step_of_loggers(trainer: Any) -> int:
    """The step under which ``self.log`` hands values to loggers now, ``_batches_that_stepped`` (2.5 to 2.6)."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def data_fetcher_of(trainer: Any) -> Any:
    """What ``fit`` takes its batches from, ``FitLoop._data_fetcher``; None before there is one (2.5 to 2.6)."""
    return trainer.fit_loop._data_fetcher


def set_data_fetcher(trainer: Any, fetcher: Any, num_batches: float) -> None:
    """Lets ``fit`` take its batches from something else, so many per epoch.

    ``FitLoop._data_fetcher`` is iterated over, and asked for ``done``, ``fetched`` and what Lightning's own has.
    ``FitLoop.max_batches`` and ``Trainer.val_check_batch`` are what ``setup_data`` makes of its length (2.5 to 2.6).
    """
    fit_loop = trainer.fit_loop
    fit_loop._data_fetcher = fetcher
    fit_loop.max_batches = num_batches if num_batches == float("inf") else int(num_batches)
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch not in (None, float("inf")):
        is_counted = fit_loop.max_batches < float("inf")
        trainer.val_check_batch = (
            max(1, int(fit_loop.max_batches * trainer.val_check_interval)) if is_counted else float("inf")
        )


def logged_per_epoch(trainer: Any) -> list[Any]:
    """The metrics in which ``fit`` adds up what is logged with ``on_epoch=True``, ``_results`` (2.5 to 2.6)."""
    return [metric for metric in trainer.fit_loop.epoch_loop._results.values() if metric.meta.on_epoch]


def sums_of_logging(trainer: Any) -> tuple[Any, dict[str, dict[str, Any]]]:
    """What ``self.log`` has added up in this epoch, by the keys of ``_results``, and its position (2.5 to 2.6)."""
    results = trainer.fit_loop.epoch_loop._results
    return position_of_logging(trainer), {
        key: dict(metric.metric_state)
        for key, metric in results.items()
        if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset
    }


def set_sums_of_logging(trainer: Any, sums: tuple[Any, dict[str, dict[str, Any]]]) -> None:
    """Lets ``self.log`` go on from what :func:`sums_of_logging` has read in another process."""
    position, found = sums
    trainer.fit_loop.epoch_loop._results.found = found
    set_position_of_logging(trainer, position)


def add_sums_of_logging(trainer: Any, sums: tuple[Any, dict[str, dict[str, Any]]]) -> None:
    """The same of some values, also where this process has them already; the others stay as they are."""
    position, found = sums
    results = trainer.fit_loop.epoch_loop._results
    for key in found.keys() & results.keys():
        for name, state in found[key].items():
            setattr(results[key], name, state.to(results[key].device))
    set_sums_of_logging(trainer, (position, {**(getattr(results, "found", None) or {}), **found}))


def merging_of_logging(trainer: Any) -> dict[str, str]:
    """How ``self.log`` makes one of what ranks have added up, by the keys of ``_results``, where it does (2.5 to 2.6).

    That is "sum" (for means, too), "max" or "min", as ``meta`` has it.
    """
    return {
        key: "max" if metric.meta.is_max_reduction else "min" if metric.meta.is_min_reduction else "sum"
        for key, metric in trainer.fit_loop.epoch_loop._results.items()
        if metric.meta.sync.should and not metric.meta.sync.rank_zero_only
    }


def merging_of_metric(metric: Metric) -> dict[str, Any]:
    """How a metric makes one of what processes have, by state; ``_reductions`` tells it (torchmetrics 1.0 to 1.9)."""
    return dict(metric._reductions)


def position_of_logging(trainer: Any) -> tuple[Any, Any]:
    """Where in the epoch ``self.log`` is: it begins an epoch's sums anew at the first batch (2.5 to 2.6)."""
    connector = trainer._logger_connector
    return connector._first_loop_iter, connector._current_fx


def set_position_of_logging(trainer: Any, position: tuple[Any, Any]) -> None:
    """Sets what :func:`position_of_logging` reads."""
    connector = trainer._logger_connector
    connector._first_loop_iter, connector._current_fx = position


def dump_checkpoint(trainer: Any) -> dict[str, Any]:
    """The checkpoint that ``trainer.save_checkpoint`` would write; there is no public way to have it (2.5 to 2.6)."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return checkpoint


def restore_checkpoint(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """What ``fit(ckpt_path=...)`` does with a checkpoint, in the middle of a ``fit``.

    The connector reads from ``_loaded_checkpoint``, and otherwise only files (2.5 to 2.6).
    """
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = checkpoint
    connector.restore_datamodule()
    connector.restore_model()
    connector.restore_callbacks()
    connector.restore_training_state()
    connector._loaded_checkpoint = {}


def leave_evaluation(trainer: Any) -> None:
    """Makes a Trainer that an exception has taken out of a validation within ``fit`` as it is outside of one.

    What the validation has logged so far is in ``val_loop._results`` (2.5 to 2.6).
    """
    trainer.fit_loop.epoch_loop.val_loop._results.reset()
    trainer.training = True


def loader_states(trainer: Any) -> list[dict[str, Any]]:
    """The states that ``fit`` is about to give to the training loaders that it makes.

    It does so, from ``_combined_loader_states_to_load``, when it has asked them for their length (2.5 to 2.6).
    """
    states: list[dict[str, Any]] = trainer.fit_loop._combined_loader_states_to_load
    return states if trainer.fit_loop.restarting else []


def states_of_loaders(trainer: Any) -> list[dict[str, Any]]:
    """Where the training loaders of ``fit`` are, of those that say it, as a checkpoint has it.

    ``FitLoop.on_save_checkpoint`` asks ``_combined_loader`` for it, which is where the stage ran (2.5 to 2.6).
    """
    loader = trainer.fit_loop._combined_loader
    return [] if loader is None else list(loader._state_dicts())


def forget_training_data(trainer: Any) -> None:
    """Lets ``fit`` make its training loaders anew, of ``_combined_loader`` and ``_data_fetcher`` (2.5 to 2.6)."""
    _forget_loaders(trainer.fit_loop)


def forget_data(trainer: Any) -> None:
    """Lets ``fit`` make its loaders anew, those of validation too, as :func:`forget_training_data`."""
    forget_training_data(trainer)
    _forget_loaders(trainer.fit_loop.epoch_loop.val_loop)


def _forget_loaders(loop: Any) -> None:
    if loop._data_fetcher is not None:
        loop._data_fetcher.teardown()
    loop._combined_loader = loop._data_fetcher = None


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


def is_bound_to_stage(value: Any) -> bool:
    """Whether a loop keeps this object for the stage that runs only: the accumulated results (2.5 to 2.6)."""
    return isinstance(value, _ResultCollection)
