"""The Trainer's launchers: scripts run once more for each device, or a pool of workers.

Both refuse what is known to be impossible while there is still one process, so that the user sees one error and there
is nothing to clean up.
"""

import logging
import os
import socket
import sys
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_strategies_ext import _lightning
from lightning_strategies_ext.launch.channel import Packed
from lightning_strategies_ext.launch.pool import GRACE_S, Outcome, WorkerPool, WorkerStartMethod
from lightning_strategies_ext.launch.stage import CallJob, StageJob, pickled_or_explained
from lightning_strategies_ext.launch.worker import Conditions, RngState, is_importing_main

log = logging.getLogger(__name__)


class ScriptLauncher(_lightning.SubprocessScriptLauncher):
    """Runs the user's script once more for each further device of this host (``start_method="popen"``).

    Args:
        strategy: Its ``check_before_launch(trainer)`` raises to refuse a run.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._check = strategy.check_before_launch
        self._note_failure = strategy.note_failure

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Starts the processes if they are not there yet, and runs ``function`` in this one."""
        self._check(trainer)
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except BaseException as exception:
            # Before the callbacks' `on_exception`, which may save a checkpoint, with a barrier, and take long.
            self._note_failure(exception)
            raise


class WorkerLauncher(_lightning.Launcher):
    """Runs the Trainer's stages in a pool of worker processes and brings everything back to this one.

    The workers stay for the next stage. They end with this object, with the interpreter, and after a failure.

    Args:
        strategy: The strategy; its ``check_before_launch(trainer)`` raises to refuse a run.
        start_method: How workers are started, see :class:`.WorkerPool`.
    """

    def __init__(self, strategy: Any, start_method: WorkerStartMethod) -> None:
        self._strategy = strategy
        self._start_method: WorkerStartMethod = start_method
        self._pool: WorkerPool | None = None
        self._rendezvous: dict[str, str] = {}
        self._rng: list[RngState] = []
        self._has_run = False
        self._trained_module: Any = None

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether it works in a notebook: only a forked worker knows what was defined there."""
        return self._start_method == "fork"

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers, in order of local ranks."""
        return [] if self._pool is None else self._pool.pids

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
            WorkerRaisedError: If a worker raised.
            WorkerDiedError: If a worker died.
            TypeError: If something that the workers need cannot be pickled.
            ValueError: If the processes are there already, started by torchrun or the like.
            RuntimeError: If workers cannot be started from here.
        """
        self._check_can_launch()
        if trainer is None:
            return self.call(function, args, kwargs)
        self._strategy.check_before_launch(trainer)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        goes_on = is_fitting and trainer.lightning_module is self._trained_module
        job = StageJob(trainer, function, args, kwargs)
        with _without_optimizers(self._strategy, keep=goes_on):
            outcome = self._run(job)
        pool = self._pool
        assert pool is not None
        try:
            value = None
            if 0 in outcome.has_results:
                if outcome.error is None:
                    value = job.bring_back(pool, outcome.has_results)
                else:
                    job.bring_back(pool, {0}, timeout_s=GRACE_S)
                if is_fitting:
                    self._trained_module = trainer.lightning_module
            elif isinstance(outcome.error, KeyboardInterrupt):
                log.warning("Rank 0 did not stop in time, it is killed: the state of this stage is lost.")
        except BaseException as error:
            self.close()
            raise (outcome.error or error) from (outcome.error and error)
        if outcome.error is not None:
            self.close()
            if isinstance(outcome.error, SIGTERMException):
                _lightning.note_sigterm(trainer)
            raise outcome.error
        self._keep_rng(outcome)
        if hasattr(self._strategy, "post_dispatch"):
            self._strategy.post_dispatch(trainer)
        return value

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any, return_result: bool = True) -> Any:
        """Runs any function in each worker, with the process group joined, and returns the first worker's value."""
        self._check_can_launch()
        outcome = self._run(CallJob(self._strategy, function, args, kwargs, return_result))
        pool = self._pool
        assert pool is not None
        if outcome.error is not None:
            self.close()
            raise outcome.error
        value = None
        for value in pool.pull(0):  # noqa: B007
            pass
        self._rng = outcome.rng
        return value

    def kill(self, signum: int) -> None:
        """Sends a signal to the workers."""
        if self._pool is not None:
            self._pool.signal(signum)

    def close(self) -> None:
        """Ends the workers; the next launch starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _check_can_launch(self) -> None:
        if is_importing_main():
            raise RuntimeError(
                "The script starts training while a worker process imports it. Put what the script does under"
                ' `if __name__ == "__main__":`, and keep only definitions outside of it.'
            )
        environment = self._strategy.cluster_environment
        num_processes = self._strategy.num_processes
        if environment is not None and environment.creates_processes_externally and num_processes > 1:
            raise ValueError(
                f"`start_method={self._start_method!r}` would start {num_processes} workers in each of the"
                f" processes that were started for {type(environment).__name__} already. Use"
                " `strategy='ddp_ext'`, or start the script once."
            )
        if self._start_method == "fork" and torch.cuda.is_initialized():
            raise RuntimeError(
                "`start_method='fork'`: this process has used a GPU already, and its forks could not. Restart the"
                " notebook or script and leave the GPU alone until training starts, or use"
                " `strategy='ddp_spawn_ext'` in a script."
            )

    def _run(self, job: StageJob | CallJob) -> Outcome:
        inherits = False
        packed = None
        try:
            packed = Packed(pickled_or_explained(job))
        except TypeError:
            if self._start_method != "fork":
                raise
            inherits = True
        try:
            pool = self._usable_pool(job if inherits else None)
            now = RngState.now()
            goes_on = bool(self._rng) and self._rng[0].is_same(now)
            variables = {**os.environ, **self._rendezvous}
            conditions = [
                Conditions(os.getcwd(), variables, self._rng[rank] if goes_on else now)
                for rank in range(self._strategy.num_processes)
            ]
            outcome = pool.run(packed, conditions, continues=self._has_run)
        finally:
            if packed is not None:
                packed.close()
        self._has_run = True
        return outcome

    def _usable_pool(self, inherited: StageJob | CallJob | None) -> WorkerPool:
        # A forked worker knows what was defined when it was forked, and in a notebook more is defined all the time.
        must_be_new = inherited is not None or hasattr(sys, "ps1")
        if self._pool is not None and (must_be_new or not self._pool.is_usable):
            self.close()
        if self._pool is None:
            self._rendezvous = _rendezvous(self._strategy)
            passed_through = (_lightning.TunerExitException, SIGTERMException, KeyboardInterrupt)
            self._pool = WorkerPool(self._strategy.num_processes, self._start_method, passed_through, inherited)
            weakref.finalize(self, self._pool.close)
        return self._pool

    def _keep_rng(self, outcome: Outcome) -> None:
        self._rng = outcome.rng
        self._rng[0].apply()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pool": None, "_rng": [], "_trained_module": None}


def _rendezvous(strategy: Any) -> dict[str, str]:
    """Environment variables by which the workers find each other, the same for all of them.

    On one host the port is always a new one: workers stay, and ``MASTER_PORT`` may be that of another Trainer's.
    """
    environment = strategy.cluster_environment
    if strategy.num_nodes > 1 or not isinstance(environment, LightningEnvironment):
        return {"MASTER_ADDR": environment.main_address, "MASTER_PORT": str(environment.main_port)}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


@contextmanager
def _without_optimizers(strategy: Any, keep: bool) -> Generator[None, None, None]:
    """Keeps the optimizers of an earlier ``fit`` from being sent where they are not needed: they are large."""
    optimizers, schedulers = strategy.optimizers, strategy.lr_scheduler_configs
    if not keep:
        strategy.optimizers, strategy.lr_scheduler_configs = [], []
    try:
        yield
    finally:
        strategy.optimizers, strategy.lr_scheduler_configs = optimizers, schedulers
