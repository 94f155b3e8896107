"""What launchers and workers ask of a strategy, the Trainer's or Fabric's."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from lightning.fabric.plugins import CheckpointIO

if TYPE_CHECKING:
    from lightning_strategies_ext.launch.tasks.stage_task import WorkerContext


@contextmanager
def announcing_failures(strategy: Any) -> Generator[None, None, None]:
    """Says to the other ranks if what is done in it fails, and raises what the user should see.

    Args:
        strategy: Its ``explain_exception`` and ``announce_failure`` do both.
    """
    try:
        yield
    except BaseException as exception:
        # Before the callbacks' `on_exception`, which may save a checkpoint, with a barrier, and take long.
        explained = strategy.explain_exception(exception)
        strategy.announce_failure(explained)
        if explained is exception:
            raise
        raise explained from exception


class StrategyWithWorkers(Protocol):
    """A strategy that has workers."""

    cluster_environment: Any  # a ClusterEnvironment; None until the Trainer or Fabric has chosen one

    @property
    def num_processes(self) -> int:
        """Ranks on this host."""

    @property
    def num_nodes(self) -> int:
        """Hosts."""


class LaunchableStrategy(StrategyWithWorkers, Protocol):
    """A strategy of the Trainer's."""

    optimizers: list[Any]
    lr_scheduler_configs: list[Any]
    checkpoint_io: CheckpointIO

    @property
    def has_joined(self) -> bool:
        """Whether this process has met the other ranks."""

    def check_before_launch(self, trainer: Any) -> None:
        """Refuses, before processes start, a run that cannot work."""

    def announce_failure(self, exception: BaseException) -> None:
        """Says to the other ranks that this one has failed."""

    def explain_exception(self, exception: BaseException) -> BaseException:
        """The exception that the user should see."""


class StageStrategy(LaunchableStrategy, Protocol):
    """A strategy of the Trainer's whose stages run in workers."""

    def wrap_stage(self, trainer: Any) -> AbstractContextManager[None]:
        """What the main process does around a stage."""


class InWorkerStrategy(LaunchableStrategy, Protocol):
    """A strategy of the Trainer's, as a worker has it."""

    def enter_worker(self, context: "WorkerContext") -> None:
        """Called first, with what is known only there."""

    def setup_distributed(self) -> None:
        """Joins the process group."""

    def end_stage(self) -> None:
        """Called when all of a stage is over."""

    def request_interrupt(self) -> None:
        """Lets all ranks stop before the same step, as after Ctrl-C."""
