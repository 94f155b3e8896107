"""One stage of the Trainer (``fit``, ``validate``, ``test``, ``predict``) as a task for workers.

The main process sends the Trainer with all objects that it refers to. A worker runs the stage on its copy. The
first worker captures a baseline before the stage (:mod:`.baseline`) and sends what has changed after it (:mod:`.diff`).
The main process applies the changes to the user's objects (:mod:`.apply`). Predictions are pulled from all workers.
"""

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import profiler
from torch.autograd import profiler as autograd_profiler
from torch.nn import Module
from torch.utils.data import DataLoader, Dataset, Sampler
from typing_extensions import override

from lightning_strategies_ext._lightning import trainer_data, trainer_stages
from lightning_strategies_ext.launch.processes.elastic_pool import RestartPolicy
from lightning_strategies_ext.launch.processes.pool import WorkerPool
from lightning_strategies_ext.launch.processes.worker_main import TaskFailedError, WorkerSession, WorkerTask
from lightning_strategies_ext.launch.protocol import FunctionResult
from lightning_strategies_ext.launch.strategy_protocols import (
    InWorkerStrategy,
    StageStrategy,
    WorkerContext,
    announcing_failures,
)
from lightning_strategies_ext.launch.tasks.apply import apply
from lightning_strategies_ext.launch.tasks.baseline import StageBaseline
from lightning_strategies_ext.launch.tasks.diff import diff
from lightning_strategies_ext.launch.tasks.module_tree import make_private
from lightning_strategies_ext.launch.tasks.object_changes import identity_preserved
from lightning_strategies_ext.launch.tasks.predictions import RankPredictions, merge_predictions, outputs_in
from lightning_strategies_ext.launch.tasks.unpicklable import Pickler, find_unpicklable, unpicklable_error
from lightning_strategies_ext.launch.transport.channel import ReceivedMessage
from lightning_strategies_ext.launch.transport.memory_files import ReceivedBuffers
from lightning_strategies_ext.launch.transport.pickling import Pickled, SharedObjects, dump, walk

log = logging.getLogger(__name__)

# Loaders and data stay in the worker that created them: the main process has its own. A running profiler is useless
# in another process, although it can be pickled.
_UNSENDABLE_TYPES = (DataLoader, Dataset, Sampler, CombinedLoader, profiler.profile, autograd_profiler.profile)


class StageTask(WorkerTask):
    """A stage of the Trainer: the function that it passes to its launcher, with arguments."""

    def __init__(self, trainer: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.trainer = trainer
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.shared = _shared_objects(trainer, [args, kwargs])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "shared": replace(self.shared, in_message={}, never=())}

    def pickled(self, pickler: Pickler = None) -> Pickled:
        """Pickles the task, and records the objects that the workers receive.

        Raises:
            TypeError: If a part of the task cannot be pickled; the message names the part.
        """
        sent: dict[int, Any] = {}
        try:
            pickled = dump(self, received_objects=sent, pickler=pickler)
        except Exception as error:
            raise unpicklable_error(*find_unpicklable(self, error, pickler)) from error
        self._record(sent)
        return pickled

    @property
    def restart_policy(self) -> RestartPolicy | None:
        """Restart policy of an elastic stage; None if all workers have to finish the stage."""
        is_fitting = self.trainer.state.fn == TrainerFn.FITTING
        strategy: StageStrategy = self.trainer.strategy
        return strategy.restart_policy if is_fitting else None

    def record_inherited(self) -> None:
        """Records the objects that forked workers inherit."""
        self._record(identity_preserved(*walk(self)))

    def _record(self, in_message: dict[int, Any]) -> None:
        # The task is in its own message. The cycle would hold all objects until the next garbage collection.
        in_message.pop(next((number for number, obj in in_message.items() if obj is self), -1), None)
        self.shared = replace(self.shared, in_message=in_message)

    # --- in a worker ---

    @override
    def run(self, session: WorkerSession, message: ReceivedMessage) -> Iterator[Any]:
        trainer = self.trainer
        make_private(trainer.lightning_module)
        received = ReceivedBuffers(message.files)
        baseline = None
        is_elastic = self.restart_policy is not None
        if session.rank == 0 or is_elastic:  # any worker may be rank 0 at the end
            in_message = self.shared.in_message or identity_preserved(message.received_objects)
            shared = replace(self.shared, in_message=in_message, never=_UNSENDABLE_TYPES)
            baseline = StageBaseline(trainer, shared, received)
        session.save = partial(_save, trainer)  # for a `SaveState`, if the results of the stage cannot be pulled
        context = WorkerContext(
            session.is_continuation, received, session.channel, session.is_joining, session.rank_info
        )
        strategy: InWorkerStrategy = trainer.strategy
        os.environ["LOCAL_RANK"] = str(session.local_rank)
        session.on_interrupt = strategy.request_interrupt
        strategy.enter_worker(context)
        try:
            value = self.function(*self.args, **self.kwargs)
            session.on_interrupt = None
            strategy.end_stage()
        except BaseException as exception:
            session.on_interrupt = lambda: None  # the results are still to be sent
            exception = strategy.explain_exception(exception)
            strategy.announce_failure(exception)
            results = None if baseline is None else self._results(baseline, None)
            raise TaskFailedError(partial(_end_failed_stage, trainer), results) from exception
        predictions = None
        if trainer.state.fn == TrainerFn.PREDICTING and value is not None:
            predictions = RankPredictions.from_trainer(trainer, value)
            if trainer.num_nodes > 1 and session.rank_info is None:  # each host has its own main process
                value, predictions = predictions.gathered(trainer.world_size), None
            else:
                value = None
        if baseline is None or (is_elastic and trainer.global_rank != 0):
            return iter(()) if predictions is None else predictions.results()
        return self._results(baseline, value, predictions)

    def _results(
        self, baseline: StageBaseline, value: Any, predictions: RankPredictions | None = None
    ) -> Iterator[Any]:
        yield from diff(self.trainer, baseline, value)
        if predictions is not None:
            yield from predictions.results()

    # --- in the main process ---

    def pull_results(self, pool: WorkerPool, has_results: set[int], timeout_s: float | None = None) -> Any:
        """Pulls the results of all workers into the main process's objects, and returns the stage's return value.

        Args:
            pool: Pool of the workers.
            has_results: Local ranks that have results.
            timeout_s: Maximum time that rank 0 may take for each result, in seconds.
        """
        results = pool.pull(0, timeout_s)
        value = apply(results, self.trainer, self.shared)  # leaves the predictions of rank 0 in `results`
        sources = [results if rank == 0 else pool.pull(rank) for rank in sorted(has_results)]
        # For a worker without predictions, `next` reads the reply that ends the results.
        plans = [plan for plan in (next(source, None) for source in sources) if plan is not None]
        return merge_predictions(plans, [outputs_in(source) for source in sources]) if plans else value


def _shared_objects(trainer: Any, arguments: Any) -> SharedObjects:
    """Returns the objects of a Trainer, and of the arguments of a stage, that the main process and the workers have."""
    module = trainer.lightning_module
    metrics, connectors = trainer_stages.connectors_of(trainer)
    found = [trainer, trainer.strategy, metrics, *connectors, *trainer_stages.loops_of(trainer), trainer.profiler]
    found += [*trainer.callbacks, *trainer.loggers, trainer.strategy.accelerator, trainer.precision_plugin]
    found += [*module.modules(), *module.parameters(), *module.buffers()]
    found += [trainer.datamodule, *_data_in([arguments, trainer_data.data_sources(trainer)])]
    return SharedObjects([obj for obj in found if obj is not None], _UNSENDABLE_TYPES)


def _data_in(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, CombinedLoader):
        value = value.flattened
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _data_in(item)
    elif isinstance(value, DataLoader):
        yield from (value, value.dataset, value.sampler)
    elif isinstance(value, LightningDataModule):
        yield value


def _save(trainer: Any, path: str) -> None:
    try:
        checkpoint = trainer_stages.dump_checkpoint(trainer)
    except Exception:  # of a user's hook, perhaps the one that made the transfer fail
        log.warning("Saving only the weights, because the full checkpoint failed:", exc_info=True)
        checkpoint = {"state_dict": trainer.lightning_module.state_dict()}
    trainer.strategy.checkpoint_io.save_checkpoint(checkpoint, path)


def _end_failed_stage(trainer: Any) -> None:
    for logger in trainer.loggers:
        _try(logger.finalize, "failed")
    _try(trainer_stages.tear_down, trainer)


def _try(function: Callable[..., Any], *args: Any) -> None:
    try:
        function(*args)
    except Exception:
        log.debug("The cleanup after a failed stage failed.", exc_info=True)


@dataclass(eq=False)
class FunctionTask(WorkerTask):
    """A function of the user as a task, see ``DDPSpawnStrategy.spawn``.

    Attributes:
        strategy: Strategy that joins the process group in each worker.
        function: The function.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.
        return_result: Whether the first worker sends its return value.
        joins_process_group: Whether workers join the process group first; Fabric's functions join it themselves.
    """

    restart_policy: ClassVar[None] = None

    strategy: Any
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    return_result: bool
    joins_process_group: bool

    def pickled(self, pickler: Pickler = None) -> Pickled:
        """Pickles the task; raises as :meth:`StageTask.pickled`."""
        try:
            return dump(self, pickler=pickler)
        except Exception as error:
            raise unpicklable_error("The function, an argument, or the strategy", error) from error

    def record_inherited(self) -> None:
        """Does nothing: only the function's value is sent back."""

    @override
    def run(self, session: WorkerSession, message: ReceivedMessage) -> Iterator[Any]:
        os.environ["LOCAL_RANK"] = str(session.local_rank)
        for argument in (*self.args, *self.kwargs.values()):
            if isinstance(argument, Module):
                make_private(argument)
        if self.joins_process_group:
            self.strategy.enter_worker(WorkerContext(session.is_continuation, rank_info=session.rank_info))
            self.strategy.setup_distributed()
        with announcing_failures(self.strategy):
            value = self.function(*self.args, **self.kwargs)
        if session.rank > 0 or not self.return_result:
            return iter(())
        return iter([FunctionResult(value)])
