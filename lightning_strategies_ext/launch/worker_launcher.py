"""The launchers: of scripts that run once more for each device, and of workers, for the Trainer and for Fabric.

They refuse what is known to be impossible while there is still one process, so that the user sees one error and there
is nothing to clean up.
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

from lightning_strategies_ext._lightning import launching, trainer_signals
from lightning_strategies_ext.exceptions import ResultsError, WorkerDiedError
from lightning_strategies_ext.launch import script_launcher
from lightning_strategies_ext.launch.processes.pool import GRACE_S, TaskOutcome
from lightning_strategies_ext.launch.processes.worker_interface import WorkerStarter
from lightning_strategies_ext.launch.processes.worker_process import ProcessStarter, WorkerStartMethod
from lightning_strategies_ext.launch.strategy_protocols import LaunchableStrategy, StageStrategy, announcing_failures
from lightning_strategies_ext.launch.tasks.stage_task import StageTask
from lightning_strategies_ext.launch.worker_group import WorkerGroup, raise_with_report

log = logging.getLogger(__name__)


class ScriptLauncher(launching.SubprocessScriptLauncher):
    """Runs the user's script once more for each further device of this host (``start_method="popen"``).

    Args:
        strategy: Its ``check_before_launch(trainer)`` raises to refuse a run.
    """

    def __init__(self, strategy: LaunchableStrategy) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Starts the processes if they are not there yet, and runs ``function`` in this one."""
        strategy = self._strategy
        strategy.check_before_launch(trainer)
        with script_launcher.running_script_processes(self, lambda: strategy.has_joined), announcing_failures(strategy):
            return function(*args, **kwargs)


class FabricScriptLauncher(launching.FabricSubprocessScriptLauncher):
    """The same for Fabric.

    Args:
        strategy: Its ``has_joined`` says whether the ranks have met.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Starts the processes if they are not there yet, and runs ``function`` in this one."""
        strategy = self._strategy
        with script_launcher.running_script_processes(self, lambda: strategy.has_joined):
            return function(*args, **kwargs)


class WorkerLauncher(launching.Launcher):
    """Runs the Trainer's stages in worker processes and brings everything back to this one.

    The workers stay for the next stage. They end with this object, with the interpreter, and after a failure.

    Args:
        strategy: The strategy; its ``check_before_launch(trainer)`` raises to refuse a run.
        starter: What starts the workers.

    Attributes:
        workers: The workers.
    """

    def __init__(self, strategy: StageStrategy, starter: WorkerStarter) -> None:
        self._strategy = strategy
        self.workers = WorkerGroup(strategy, starter)

    @property
    def is_interactive_compatible(self) -> bool:
        """True: it works in a notebook."""
        return True

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers, in order of ranks."""
        return self.workers.pids

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Runs ``function`` in each worker.

        Args:
            function: A stage of ``trainer``, or any function if there is none.
            *args: Its positional arguments.
            trainer: The Trainer whose state should come back; None runs ``function`` as ``DDPSpawnStrategy.spawn``
                does.
            **kwargs: Its keyword arguments.

        Returns:
            What the function returned in the first worker; of ``trainer.predict`` the predictions of all workers.

        Raises:
            WorkerRaisedError: If a worker raised; an exception that all workers raise alike is raised unchanged.
            WorkerDiedError: If a worker died.
            ResultsError: If ``fit`` has run and what came of it could not be brought back; says where it is saved.
            TypeError: If something that the workers need cannot be pickled.
            ValueError: If the processes are there already, started by torchrun or the like.
            RuntimeError: If workers cannot be started from here.
        """
        if trainer is None:
            return self.workers.call(function, args, kwargs)
        self.workers.check_can_start()
        self._strategy.check_before_launch(trainer)
        with self.workers.in_use(), self._strategy.wrap_stage(trainer):
            value = self._run(StageTask(trainer, function, args, kwargs))
        self.workers.close_unless_kept()
        if hasattr(self._strategy, "post_dispatch"):
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
                trainer_signals.note_sigterm(trainer)
            raise_with_report(error, trainer.default_root_dir)
        self.workers.restore_rng(outcome)
        return value

    def _collect_results(self, task: StageTask, outcome: TaskOutcome) -> Any:
        trainer = task.trainer
        try:
            value = None
            if 0 in outcome.has_results:
                if outcome.error is None:
                    value = task.pull_results(self.workers.pool, outcome.has_results)
                else:
                    task.pull_results(self.workers.pool, {0}, timeout_s=GRACE_S)
            elif isinstance(outcome.error, KeyboardInterrupt):
                log.warning("Rank 0 did not stop in time, it is killed: the state of this stage is lost.")
        except BaseException as error:
            can_be_saved = trainer.state.fn == TrainerFn.FITTING and isinstance(error, Exception)
            where = (
                self._save_checkpoint_in_worker(trainer)
                if can_be_saved and not isinstance(error, WorkerDiedError)
                else None
            )
            self.close()
            if outcome.error is not None:
                log.warning("The state of the stage that failed %s: %s", where or "is lost", error)
                raise outcome.error from outcome.error.__cause__
            if where is None:
                raise
            message = f"`fit` has run, but not all that came of it could be brought back: {error}\nThe state of rank 0"
            raise ResultsError(f"{message} {where}.") from error
        return value

    def _save_checkpoint_in_worker(self, trainer: Any) -> str:
        name = f"not-brought-back-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.ckpt"
        path = os.path.join(trainer.default_root_dir, name)
        problem = self.workers.pool.save_state(0, path)
        if problem is not None:
            return f"is lost, since it could not be saved either ({problem})"
        return f"is saved in {path}, for `fit(ckpt_path=...)` and `load_from_checkpoint(...)`"

    def kill(self, signum: int) -> None:
        """Sends a signal to the workers."""
        self.workers.signal(signum)

    def close(self) -> None:
        """Ends the workers; the next launch starts new ones."""
        self.workers.close()


class FabricWorkerLauncher(launching.FabricMultiProcessingLauncher):
    """Runs a function of Fabric's in worker processes and returns the first one's value.

    Args:
        strategy: The strategy.
        start_method: How workers are started, see :class:`.ProcessStarter`.

    Attributes:
        workers: The workers, which stay for the next launch.
    """

    def __init__(self, strategy: Any, start_method: WorkerStartMethod) -> None:
        super().__init__(strategy, start_method)
        self.workers = WorkerGroup(strategy, ProcessStarter(start_method))

    @property
    def is_interactive_compatible(self) -> bool:
        """True: it works in a notebook."""
        return True

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs ``function`` in each worker.

        Args:
            function: The function, which joins the process group itself.
            *args: Its positional arguments.
            **kwargs: Its keyword arguments.

        Returns:
            What it returned in the first worker, with tensors on the CPU.

        Raises:
            WorkerRaisedError: If a worker raised; an exception that all workers raise alike is raised unchanged.
            WorkerDiedError: If a worker died.
            TypeError: If something that the workers need cannot be pickled.
        """
        return self.workers.call(function, args, kwargs, joins_process_group=False)


@contextmanager
def _without_optimizers(strategy: LaunchableStrategy) -> Generator[None, None, None]:
    """Keeps the optimizers of an earlier ``fit`` from being sent: ``fit`` asks the module for them each time."""
    optimizers, schedulers = strategy.optimizers, strategy.lr_scheduler_configs
    strategy.optimizers, strategy.lr_scheduler_configs = [], []
    try:
        yield
    finally:
        strategy.optimizers, strategy.lr_scheduler_configs = optimizers, schedulers


@contextmanager
def _deferred_interrupt(outcome: TaskOutcome) -> Generator[threading.Event, None, None]:
    """Notes a Ctrl-C instead of raising; a second one raises at once, and so does one after that which ended the stage.

    Where the user handles it, nothing changes.
    """
    is_interrupted = threading.Event()

    def note(signum: int, frame: Any) -> None:
        if is_interrupted.is_set():
            raise KeyboardInterrupt
        is_interrupted.set()
        log.warning("Ctrl-C: the results of this stage are still coming in. Press it once more to lose them.")

    usual = signal.getsignal(signal.SIGINT)
    in_charge = (
        threading.current_thread() is threading.main_thread()
        and usual == signal.default_int_handler
        and not isinstance(outcome.error, KeyboardInterrupt)
    )
    if in_charge:
        signal.signal(signal.SIGINT, note)
    try:
        yield is_interrupted
    finally:
        if in_charge:
            signal.signal(signal.SIGINT, usual)
