"""Interfaces of strategies that launchers and workers use, for the Trainer and for Fabric."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from lightning.fabric.plugins import CheckpointIO

from lightning_strategies_ext.launch.processes.elastic_pool import RestartPolicy
from lightning_strategies_ext.launch.protocol import WorkerContext


@contextmanager
def announcing_failures(strategy: Any) -> Generator[None, None, None]:
    """Announces an exception of the context to the other ranks, and raises the exception that the user should see.

    Args:
        strategy: The strategy, of which ``explain_exception`` and ``announce_failure`` are called.
    """
    try:
        yield
    except BaseException as exception:
        # Before the callbacks' `on_exception`, which may take long, for example to save a checkpoint with a barrier.
        explained = strategy.explain_exception(exception)
        strategy.announce_failure(explained)
        if explained is exception:
            raise
        raise explained from exception


class StrategyWithRanks(Protocol):
    """A strategy that has ranks."""

    cluster_environment: Any  # a ClusterEnvironment; None until the Trainer or Fabric has chosen one

    @property
    def num_processes(self) -> int:
        """Number of ranks on this host."""

    @property
    def num_nodes(self) -> int:
        """Number of hosts."""


class StrategyWithWorkers(StrategyWithRanks, Protocol):
    """A strategy whose ranks are workers."""

    @property
    def keep_workers(self) -> bool:
        """Whether workers stay for the next stage."""

    @property
    def process_group_settings(self) -> tuple[Any, ...]:
        """Settings by which two strategies are equal if their ranks would have the same process group."""


class LaunchableStrategy(StrategyWithRanks, Protocol):
    """A strategy of the Trainer."""

    optimizers: list[Any]
    lr_scheduler_configs: list[Any]
    checkpoint_io: CheckpointIO

    @property
    def has_joined(self) -> bool:
        """Whether this process has connected to the other ranks."""

    def check_before_launch(self, trainer: Any) -> None:
        """Rejects a stage that cannot work, before processes start."""

    def announce_failure(self, exception: BaseException) -> None:
        """Notifies the other ranks that this rank has failed."""

    def explain_exception(self, exception: BaseException) -> BaseException:
        """Returns the exception that the user should see."""


class StageStrategy(LaunchableStrategy, StrategyWithWorkers, Protocol):
    """A strategy of the Trainer whose stages run in workers."""

    @property
    def restart_policy(self) -> RestartPolicy | None:
        """What may happen to the workers of ``fit`` before it fails; None if all workers have to finish it."""

    def wrap_stage(self, trainer: Any) -> AbstractContextManager[None]:
        """Returns the context in which the main process runs a stage."""

    def post_dispatch(self, trainer: Any) -> None:
        """Called in the main process after a stage, when its results have been applied."""


class InWorkerStrategy(LaunchableStrategy, Protocol):
    """A strategy of the Trainer in a worker."""

    def enter_worker(self, context: WorkerContext) -> None:
        """Receives the context of the worker. Called before all other methods."""

    def setup_distributed(self) -> None:
        """Joins the process group."""

    def end_stage(self) -> None:
        """Finishes a stage, after all of its hooks."""

    def request_interrupt(self) -> None:
        """Requests that all ranks stop before the same step, as after Ctrl-C."""
