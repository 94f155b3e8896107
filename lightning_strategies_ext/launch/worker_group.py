"""Worker group: the workers of one strategy, started when they are first needed and replaced when they are unusable.

A group keeps the pool of its workers (:mod:`.pool`) from one task to the next. The pool runs each task, and stops all
workers together after Ctrl-C.
"""

import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from copy import copy
from typing import Any, NoReturn

from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_strategies_ext import host_store, rank_variables
from lightning_strategies_ext._lightning import trainer_stages
from lightning_strategies_ext.failure import failure_report
from lightning_strategies_ext.launch.processes.elastic_pool import run_elastic
from lightning_strategies_ext.launch.processes.pool import TaskOutcome, WorkerPool, wait_until_closed
from lightning_strategies_ext.launch.processes.process_settings import ProcessSettings, RngState, is_interactive
from lightning_strategies_ext.launch.processes.worker_interface import WorkerStarter
from lightning_strategies_ext.launch.processes.worker_main import is_importing_main
from lightning_strategies_ext.launch.strategy_protocols import StrategyWithWorkers
from lightning_strategies_ext.launch.tasks.stage_task import FunctionTask, StageTask
from lightning_strategies_ext.launch.transport.channel import UnreadableTaskError
from lightning_strategies_ext.launch.transport.memory_files import MemoryFileCache
from lightning_strategies_ext.launch.transport.pickling import Pickled

log = logging.getLogger(__name__)

_choosing = threading.Lock()
_all: "weakref.WeakSet[WorkerGroup]" = weakref.WeakSet()


class WorkerGroup:
    """The workers of a strategy, for launchers of both front ends. The workers exit with this object at the latest."""

    def __init__(self, strategy: StrategyWithWorkers, starter: WorkerStarter) -> None:
        self._strategy = strategy
        self._starter = starter
        self._pool: WorkerPool | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._rendezvous_variables: dict[str, str] = {}
        self._rng: list[RngState] = []
        self._has_run = False
        self._is_in_use = False
        self._must_close = False  # the task may have changed the workers
        self._cache = MemoryFileCache()
        _all.add(self)

    @property
    def pids(self) -> list[int]:
        """Process IDs of the running workers, in order of ranks."""
        return [] if self._pool is None else self._pool.pids

    @property
    def pool(self) -> WorkerPool:
        """The pool that has run the last task."""
        assert self._pool is not None
        return self._pool

    def check_can_start(self) -> None:
        """Checks that workers can be started from this process.

        Raises:
            RuntimeError: In a worker that is importing the script, or in a process that cannot be forked.
            ValueError: If another launcher, such as torchrun, has started the processes already.
        """
        if is_importing_main():
            raise RuntimeError(
                "The script starts training while a worker process imports it. Put what the script does under"
                ' `if __name__ == "__main__":`, and keep only definitions outside of it.'
            )
        environment = self._strategy.cluster_environment
        num_processes = self._strategy.num_processes
        if environment is not None and environment.creates_processes_externally and num_processes > 1:
            raise ValueError(
                f"`{self._starter.name}` would start {num_processes} workers in each of the processes that have"
                f" already been started for {type(environment).__name__}. Use `strategy='ddp_ext'`, or start the script"
                f" only once. {rank_variables.inherited_text()}"
            )
        self._starter.check_can_start()

    @contextmanager
    def in_use(self) -> Generator[None, None, None]:
        """Keeps other strategies from taking over the workers, from before a task is sent until results are pulled."""
        self._is_in_use = True
        try:
            yield
        finally:
            self._is_in_use = False

    def run(self, task: StageTask | FunctionTask) -> TaskOutcome:
        """Runs a task in each worker; :attr:`pool` then has its results. Call it within :meth:`in_use`.

        Raises:
            TypeError: If an object that the workers need cannot be pickled.
        """
        pickled: Pickled | None = None
        try:
            pickled = task.pickled(self._starter.pickler)
        except TypeError:
            if not self._starter.forks:
                raise
            task.record_inherited()
        outcome = self._run(task, pickled)
        errors = outcome.error, getattr(outcome.error, "__cause__", None)
        if self._starter.forks and any(isinstance(error, UnreadableTaskError) for error in errors):
            self.close()
            task.record_inherited()
            outcome = self._run(task, None)
        self._has_run, self._must_close = True, task.restart_policy is not None
        return outcome

    def _run(self, task: StageTask | FunctionTask, pickled: Pickled | None) -> TaskOutcome:
        with _choosing:
            pool = self._usable_pool(task if pickled is None else None)
        sent_task = None if pickled is None else self._starter.pack(pickled, self._cache)
        try:
            settings = self._settings_of(pool)
            if task.restart_policy is None:
                return pool.run(sent_task, settings, is_continuation=self._has_run)
            assert sent_task is not None
            return run_elastic(pool, sent_task, settings, self._has_run, task.restart_policy)
        finally:
            if sent_task is not None:
                sent_task.close()

    def _settings_of(self, pool: WorkerPool) -> list[ProcessSettings]:
        now = RngState.now()
        is_rng_unchanged = bool(self._rng) and self._rng[0].is_same(now)
        num_threads = self._num_threads()
        # For libraries that read OMP_NUM_THREADS when they are loaded, and for processes that a worker starts.
        variables = {"OMP_NUM_THREADS": str(num_threads), **self._starter.environment(), **self._rendezvous_variables}
        return [
            self._starter.settings_class(
                os.getcwd(),
                _with_store({**variables, **worker.environment}),
                self._rng[worker.rank] if is_rng_unchanged else now,
                num_threads,
            )
            for worker in pool.workers
        ]

    def close_unless_reused(self) -> None:
        """Shuts the workers down after a task, unless the strategy keeps them."""
        if self._must_close or not self._strategy.keep_workers:
            self.close()

    def call(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        return_result: bool = True,
        joins_process_group: bool = True,
    ) -> Any:
        """Runs a :class:`.FunctionTask` in each worker and returns the value of the first worker.

        Raises:
            WorkerRaisedError: If a worker raised; the same exception of all workers is raised unchanged.
            WorkerDiedError: If a worker exited.
        """
        self.check_can_start()
        with self.in_use():
            outcome = self.run(FunctionTask(self._strategy, function, args, kwargs, return_result, joins_process_group))
            if outcome.error is not None:
                self.close()
                raise_with_report(outcome.error, os.getcwd())
            value = None
            for result in self.pool.pull(0):
                value = result.value
        self.close_unless_reused()
        return value

    def restore_rng(self, outcome: TaskOutcome) -> None:
        """Sets the random state of this process to that of rank 0. The next task continues with each rank's state."""
        outcome.rng[0].apply()
        self._rng = [] if self._must_close else outcome.rng

    def signal(self, signum: int) -> None:
        """Sends a signal to the running workers."""
        if self._pool is not None:
            self._pool.signal(signum)

    def close(self) -> None:
        """Shuts the workers down; the next task starts new ones."""
        self._cache.close()
        if self._pool is not None:
            self._pool.close()
            self._detach_pool()

    def _usable_pool(self, inherited_task: StageTask | FunctionTask | None) -> WorkerPool:
        # A forked worker has the definitions from when it was forked, and a notebook may have added others.
        must_be_new = inherited_task is not None or (self._starter.forks and is_interactive())
        if self._pool is not None and (must_be_new or not self._pool.is_usable()):
            self.close()
        if self._pool is None:
            # A forked worker has the globals from when it was forked, which may have changed since.
            pool = self._take_over_idle_pool(must_be_new or self._starter.forks)
            if pool is None:
                self._rendezvous_variables = _rendezvous_environment(self._strategy)
                reraised_types = (*trainer_stages.STOPS, KeyboardInterrupt)
                wait_until_closed()  # the new workers may need the resources of the closed pools
                starter = copy(self._starter)  # each pool has its own, because another strategy may take the pool over
                pool = WorkerPool(self._strategy.num_processes, starter, reraised_types, inherited_task)
            self._pool = pool
            self._finalizer = weakref.finalize(self, self._pool.close_in_background)
            self._finalizer.atexit = False  # the exit handler of the pools closes them
        return self._pool

    def _num_threads(self) -> int:
        """Returns the number of threads in which a worker computes."""
        value = os.environ.get("OMP_NUM_THREADS", "")
        num_threads = int(value) if value.isdecimal() else 0
        if self._starter.forks:
            if num_threads > 1 and not self._has_run:
                log.warning(
                    "OMP_NUM_THREADS=%s has no effect on forked workers, which compute in one thread each, because"
                    " OpenMP threads do not survive a fork. Use `strategy='ddp_spawn_ext'` for several threads.",
                    value,
                )
            return 1
        return num_threads or self._starter.num_cpus(self._strategy.num_processes)

    def _take_over_idle_pool(self, must_be_new: bool) -> WorkerPool | None:
        """Takes over usable workers of another, idle strategy of this process, and shuts down all other idle workers.

        A search over many Trainers therefore has the workers of one Trainer at a time. Forked workers are not taken
        over: they have the objects of the main process from when it was forked.
        """
        usable: WorkerPool | None = None
        for other in [other for other in _all if other is not self and not other._is_in_use]:
            pool = other._pool
            if (
                pool is not None
                and usable is None
                and not must_be_new
                and other._reuse_key == self._reuse_key
                and pool.is_usable()
            ):
                other._detach_pool()
                usable, self._rendezvous_variables = pool, other._rendezvous_variables
                self._cache, other._cache = other._cache, MemoryFileCache()  # the next Trainer may have the same data
            else:
                other.close()
        return usable

    @property
    def _reuse_key(self) -> tuple[Any, ...]:
        """Key by which two strategies are equal if their workers would have the same process group."""
        strategy = self._strategy
        environment = type(strategy.cluster_environment)
        return self._starter.reuse_key, strategy.num_processes, environment, strategy.process_group_settings

    def _detach_pool(self) -> None:
        self._pool = None
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pool": None, "_finalizer": None, "_rng": [], "_cache": MemoryFileCache()}


def _rendezvous_environment(strategy: StrategyWithWorkers) -> dict[str, str]:
    """Returns the environment variables by which the workers connect to each other, the same for all workers.

    Workers that this process starts on one host share a store with a new name, because workers persist, and the store
    of another Trainer may still be in use. ``MASTER_PORT`` is for process groups that the user creates.
    """
    environment = strategy.cluster_environment
    if strategy.num_nodes > 1 or not isinstance(environment, LightningEnvironment):
        address, port, name = environment.main_address, environment.main_port, ""
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address, port = probe.getsockname()
        name = host_store.new_name() if host_store.is_available() else ""
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port), rank_variables.STORE: name}


def _with_store(variables: dict[str, str]) -> dict[str, str]:
    """Completes the store variable with the worker's ``MASTER_PORT``, which may differ on Ray."""
    value = rank_variables.store_variable(variables[rank_variables.STORE], variables["MASTER_PORT"])
    return {**variables, rank_variables.STORE: value}


def raise_with_report(error: BaseException, directory: str) -> NoReturn:
    """Raises the error of a task.

    If no caller catches it, the first failure is printed in place of the long traceback, which is written to a failure
    report in the directory.
    """
    first = getattr(error, "first_failure", None) or getattr(error.__cause__, "first_failure", None)
    if first is not None:
        failure_report.report_at_exit(error, first, None, directory)
    raise error
