"""Launchers of workers, for the Trainer and for Fabric.

Launchers check arguments and settings before they start processes, so that the user sees one error, and no process has
to be cleaned up.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_strategies_ext._lightning import launching, trainer_signals
from lightning_strategies_ext.exceptions import ResultTransferError, WorkerDiedError
from lightning_strategies_ext.launch.processes.pool import GRACE_S, TaskOutcome
from lightning_strategies_ext.launch.processes.worker_interface import WorkerStarter
from lightning_strategies_ext.launch.processes.worker_process import ProcessStarter, WorkerStartMethod
from lightning_strategies_ext.launch.strategy_protocols import LaunchableStrategy, StageStrategy
from lightning_strategies_ext.launch.tasks.stage_task import StageTask
from lightning_strategies_ext.launch.worker_group import WorkerGroup, raise_with_report

log = logging.getLogger(__name__)


class WorkerLauncher(launching.Launcher):
    """Runs the Trainer's stages in worker processes, and transfers the results to this process.

    The workers stay for the next stage. They exit with this object, with the interpreter, and after a failure.

    Attributes:
        workers: Group of the workers.
    """

    def __init__(self, strategy: StageStrategy, starter: WorkerStarter) -> None:
        self._strategy = strategy
        self.workers = WorkerGroup(strategy, starter)

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @property
    def pids(self) -> list[int]:
        """Process IDs of the running workers, in order of ranks."""
        return self.workers.pids

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Runs a stage of ``trainer`` in each worker and transfers the state of the Trainer to this process.

        Without a Trainer, runs any function like ``DDPSpawnStrategy.spawn``.

        Returns:
            The value of the function in the first worker; for ``trainer.predict`` the predictions of all workers.

        Raises:
            WorkerRaisedError: If a worker raised; the same exception of all workers is raised unchanged.
            WorkerDiedError: If a worker exited.
            ResultTransferError: If ``fit`` has finished, but its results could not be transferred. The message names
                the file in which they are saved.
            TypeError: If an object that the workers need cannot be pickled.
            ValueError: If another launcher, such as torchrun, has started the processes already.
            RuntimeError: If workers cannot be started from this process.
        """
        if trainer is None:
            return self.workers.call(function, args, kwargs)
        self.workers.check_can_start()
        self._strategy.check_before_launch(trainer)
        with self.workers.in_use(), self._strategy.wrap_stage(trainer):
            value = self._run(StageTask(trainer, function, args, kwargs))
        self.workers.close_unless_reused()
        self._strategy.post_dispatch(trainer)
        return value

    def _run(self, task: StageTask) -> Any:
        trainer = task.trainer
        with _without_optimizers(self._strategy):
            outcome = self.workers.run(task)
        with _deferred_interrupt(outcome) as is_interrupted:
            value = self._collect_results(task, outcome)
        error = outcome.error
        if error is None and is_interrupted.is_set():
            error = KeyboardInterrupt()
        if error is not None:
            self.close()
            if isinstance(error, SIGTERMException):
                trainer_signals.mark_sigterm_received(trainer)
            raise_with_report(error, trainer.default_root_dir)
        self.workers.restore_rng(outcome)
        return value

    def _collect_results(self, task: StageTask, outcome: TaskOutcome) -> Any:
        trainer = task.trainer
        try:
            if 0 in outcome.has_results:
                ranks, timeout_s = (outcome.has_results, None) if outcome.error is None else ({0}, GRACE_S)
                return task.pull_results(self.workers.pool, ranks, timeout_s)
            if isinstance(outcome.error, KeyboardInterrupt):
                log.warning("Rank 0 did not stop in time and is killed: the state of this stage is lost.")
            return None
        except BaseException as error:
            can_be_saved = trainer.state.fn == TrainerFn.FITTING and isinstance(error, Exception)
            can_be_saved = can_be_saved and not isinstance(error, WorkerDiedError)
            saved = self._save_checkpoint_in_worker(trainer) if can_be_saved else None
            self.close()
            if outcome.error is not None:
                message = "The results of the failed stage could not be transferred to the main process: %s\n%s"
                log.warning(message, error, saved or "The state of rank 0 is lost.")
                raise outcome.error from outcome.error.__cause__
            if saved is None:
                raise
            raise ResultTransferError(
                f"`fit` has finished, but its results could not be transferred to the main process: {error}\n{saved}"
            ) from error

    def _save_checkpoint_in_worker(self, trainer: Any) -> str:
        name = f"rank-0-state-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.ckpt"
        path = os.path.join(trainer.default_root_dir, name)
        problem = self.workers.pool.save_state(0, path)
        if problem is not None:
            return f"The state of rank 0 is lost, because saving it failed: {problem}"
        load = "`fit(ckpt_path=...)` or `load_from_checkpoint(...)`"
        return f"The state of rank 0 is saved in {path}. Load it with {load}."

    @override
    def kill(self, signum: int) -> None:
        self.workers.signal(signum)

    def close(self) -> None:
        """Shuts the workers down; the next launch starts new ones."""
        self.workers.close()


class FabricWorkerLauncher(launching.FabricMultiProcessingLauncher):
    """Runs a function of Fabric in worker processes, and returns the value of the first worker.

    The arguments ``start_method`` and ``preloaded`` are those of :class:`.ProcessStarter`.

    Attributes:
        workers: Group of the workers, which stay for the next launch.
    """

    def __init__(self, strategy: Any, start_method: WorkerStartMethod, preloaded: str) -> None:
        super().__init__(strategy, start_method)
        self.workers = WorkerGroup(strategy, ProcessStarter(start_method, preloaded))

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a function, which joins the process group itself, in each worker.

        Returns:
            The value of the function in the first worker, with tensors on the CPU.

        Raises:
            WorkerRaisedError: If a worker raised; the same exception of all workers is raised unchanged.
            WorkerDiedError: If a worker exited.
            TypeError: If an object that the workers need cannot be pickled.
        """
        return self.workers.call(function, args, kwargs, joins_process_group=False)


@contextmanager
def _without_optimizers(strategy: LaunchableStrategy) -> Generator[None, None, None]:
    """Keeps the optimizers of an earlier ``fit`` from being sent: the module creates new ones for each ``fit``."""
    optimizers, schedulers = strategy.optimizers, strategy.lr_scheduler_configs
    strategy.optimizers, strategy.lr_scheduler_configs = [], []
    try:
        yield
    finally:
        strategy.optimizers, strategy.lr_scheduler_configs = optimizers, schedulers


@contextmanager
def _deferred_interrupt(outcome: TaskOutcome) -> Generator[threading.Event, None, None]:
    """Records a Ctrl-C instead of raising. A second one raises, and so does the first one after an interrupted stage.

    A handler of the user stays in place.
    """
    is_interrupted = threading.Event()

    def record(signum: int, frame: Any) -> None:
        if is_interrupted.is_set():
            raise KeyboardInterrupt
        is_interrupted.set()
        log.warning("Interrupted: results of this stage are still being received. Press Ctrl-C again to discard them.")

    previous = signal.getsignal(signal.SIGINT)
    is_deferring = (
        threading.current_thread() is threading.main_thread()
        and previous == signal.default_int_handler
        and not isinstance(outcome.error, KeyboardInterrupt)
    )
    if is_deferring:
        signal.signal(signal.SIGINT, record)
    try:
        yield is_interrupted
    finally:
        if is_deferring:
            signal.signal(signal.SIGINT, previous)
