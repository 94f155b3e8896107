"""One stage of the Trainer (``fit``, ``validate``, ``test``, ``predict``) as a task for workers.

The main process sends the Trainer with all objects that it refers to. A worker runs the stage on its copy. Then the
main process pulls the results from the first worker: the module's tensors in chunks, which are copied into the user's
module, then the state of all other objects (:mod:`.trainer_state`). Predictions are pulled from all workers.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_strategies_ext._lightning import trainer_stages
from lightning_strategies_ext.launch.processes.elastic_pool import RestartPolicy
from lightning_strategies_ext.launch.processes.pool import WorkerPool
from lightning_strategies_ext.launch.processes.worker_main import TaskFailedError, WorkerState, WorkerTask
from lightning_strategies_ext.launch.protocol import WorkerRankInfo
from lightning_strategies_ext.launch.strategy_protocols import InWorkerStrategy, announcing_failures
from lightning_strategies_ext.launch.tasks.module_tree import make_private, tensors_of
from lightning_strategies_ext.launch.tasks.object_changes import identity_preserved
from lightning_strategies_ext.launch.tasks.predictions import RankPredictions, merge_predictions
from lightning_strategies_ext.launch.tasks.trainer_state import StageBaseline, TrainerSnapshot, shared_objects
from lightning_strategies_ext.launch.tasks.unpicklable import find_unpicklable
from lightning_strategies_ext.launch.transport.channel import ReceivedMessage, TaskChannel
from lightning_strategies_ext.launch.transport.memory_files import ReceivedBuffers
from lightning_strategies_ext.launch.transport.pickling import DumpFunction, Pickled, dump, walk

log = logging.getLogger(__name__)

#: Size of a chunk of the module's tensors in bytes, which is the memory that their transfer needs.
CHUNK_NUM_BYTES = 32 << 20
#: Class of torch's settings, which the error of pickling a compiled function names (torch 2.5 to 2.13).
_COMPILED_MARKER = "ConfigModuleInstance"


@dataclass
class WorkerContext:
    """Context of a strategy in a worker.

    Attributes:
        is_continuation: Whether this stage continues where an earlier stage of the same Trainer ended.
        received: Memory files of the received message, to find changed tensors; None if it had none, as after a fork.
        channel: Channel to the main process, for an elastic stage.
        is_joining: Whether the other ranks are in the middle of the stage.
        rank_info: Rank info of a worker that may be on another host than other workers.
    """

    is_continuation: bool
    received: ReceivedBuffers | None
    channel: TaskChannel | None = None
    is_joining: bool = False
    rank_info: WorkerRankInfo | None = None

    def is_module_unchanged(self, module: Module) -> bool:
        """Whether all tensors of the module are as the main process sent them to all workers."""
        received = self.received
        return received is not None and all(received.is_unchanged(tensor) for tensor in tensors_of(module).values())


class StageTask(WorkerTask):
    """A stage of the Trainer: the function that it passes to its launcher, with arguments."""

    def __init__(self, trainer: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.trainer = trainer
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.shared = shared_objects(trainer, [args, kwargs])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "shared": self.shared.objects}

    def pickled(self, dump: DumpFunction = dump) -> Pickled:
        """Pickles the task with ``dump``, and records the objects that the workers receive.

        Raises:
            TypeError: If a part of the task cannot be pickled; the message names the part.
        """
        sent: dict[int, Any] = {}
        pickled = pickle_or_explain(self, dump, sent)
        # The task is in its own message. The cycle would hold all objects until the next garbage collection.
        del sent[next(number for number, obj in sent.items() if obj is self)]
        self.shared = self.shared.with_message(sent)
        return pickled

    @property
    def restart_policy(self) -> RestartPolicy | None:
        """Restart policy of an elastic stage; None if all workers have to finish the stage."""
        is_fitting = self.trainer.state.fn == TrainerFn.FITTING
        return getattr(self.trainer.strategy, "restart_policy", None) if is_fitting else None

    def record_inherited(self) -> None:
        """Records the objects that forked workers inherit."""
        objects, unpicklable = walk(self)
        known = identity_preserved(objects, unpicklable)
        self.shared = self.shared.with_message({number: obj for number, obj in known.items() if obj is not self})

    # --- in a worker ---

    @override
    def run(self, state: WorkerState, message: ReceivedMessage) -> Iterator[Any]:
        trainer = self.trainer
        inherited: Mapping[int, Any] = {}
        if isinstance(self.shared, list):
            self.shared = shared_objects(trainer, [], self.shared)
        else:
            inherited, self.shared = self.shared.in_message, shared_objects(trainer, [], self.shared.objects)
        make_private(trainer.lightning_module)
        received = None
        if message.parts:
            received = ReceivedBuffers(message.parts)
        baseline = None
        is_elastic = self.restart_policy is not None
        if state.rank == 0 or is_elastic:  # any worker may be rank 0 at the end
            baseline = StageBaseline(
                trainer, self.shared, inherited or identity_preserved(message.received_objects), received
            )
        state.save = partial(_save, trainer)
        context = WorkerContext(state.is_continuation, received, state.channel, state.is_joining, state.rank_info)
        strategy: InWorkerStrategy = trainer.strategy
        os.environ["LOCAL_RANK"] = str(state.local_rank)
        state.on_interrupt = strategy.request_interrupt
        strategy.enter_worker(context)
        try:
            value = self.function(*self.args, **self.kwargs)
            state.on_interrupt = None
            strategy.end_stage()
        except BaseException as exception:
            state.on_interrupt = lambda: None  # the results are still to be sent
            exception = strategy.explain_exception(exception)
            strategy.announce_failure(exception)
            results = None if baseline is None else self._results(baseline, None)
            raise TaskFailedError(partial(_end_failed_stage, trainer), results) from exception
        predictions = None
        if trainer.state.fn == TrainerFn.PREDICTING and value is not None:
            predictions = RankPredictions.from_trainer(trainer, value)
            if trainer.num_nodes > 1 and state.rank_info is None:  # each host has its own main process
                value, predictions = predictions.gathered(trainer.world_size), None
            else:
                value = None
        if baseline is None or (is_elastic and trainer.global_rank != 0):
            return iter(()) if predictions is None else predictions.chunks()
        return self._results(baseline, value, predictions)

    def _results(
        self, baseline: StageBaseline, value: Any, predictions: "RankPredictions | None" = None
    ) -> Iterator[Any]:
        module = self.trainer.lightning_module
        chunk: dict[Any, Tensor] = {}
        for name, tensor in baseline.tree.values(module):
            if is_lazy(tensor) or baseline.is_unchanged(tensor):
                continue
            for part_name, part in _parts(name, tensor.detach()):
                if chunk and sum(other.nbytes for other in chunk.values()) + part.nbytes > CHUNK_NUM_BYTES:
                    yield _TensorChunk(chunk)
                    chunk = {}
                chunk[part_name] = part
        yield _TensorChunk(chunk)
        del chunk
        yield TrainerSnapshot.collect(self.trainer, baseline, value)
        if predictions is not None:
            yield from predictions.chunks()

    # --- in the main process ---

    def pull_results(self, pool: WorkerPool, has_results: set[int], timeout_s: float | None = None) -> Any:
        """Pulls the results of all workers into the main process's objects, and returns the stage's return value.

        Args:
            pool: Pool of the workers.
            has_results: Local ranks that have results.
            timeout_s: Maximum time that rank 0 may take for each result, in seconds.
        """
        module = self.trainer.lightning_module
        results = pool.pull(0, timeout_s)
        tensors = tensors_of(module)
        value = None
        for result in results:
            if isinstance(result, _TensorChunk):
                result.copy_into(tensors)
            else:
                assert isinstance(result, TrainerSnapshot)
                value = result.restore(self.trainer, self.shared)
                break
        del result
        sources = [results if rank == 0 else pool.pull(rank) for rank in sorted(has_results)]
        plans = [plan for plan in (next(source, None) for source in sources) if plan is not None]
        return merge_predictions(plans, sources) if plans else value


@dataclass
class _TensorChunk:
    """Tensors of the module, or slices of large ones: (name, shape, first element) → elements."""

    is_only_read = True  # they are copied into the user's module

    tensors: dict[tuple[str, torch.Size, int | None], Tensor]

    def copy_into(self, tensors: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for (name, shape, start), value in self.tensors.items():
                if name not in tensors:
                    continue
                lazy: Any = tensors[name]
                if is_lazy(lazy):
                    lazy.materialize(shape, dtype=value.dtype)
                target = tensors[name].detach()
                if start is not None:
                    target.view(-1)[start : start + value.numel()].copy_(value)
                elif target.shape == value.shape and target.dtype == value.dtype:
                    target.copy_(value)
                else:
                    tensors[name].data = value.clone()


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[Any, Tensor]]:
    # A tensor larger than a chunk is split, unless the main process's tensor may have other strides.
    if tensor.nbytes <= CHUNK_NUM_BYTES or not tensor.is_contiguous():
        yield (name, tensor.shape, None), tensor
        return
    flat = tensor.view(-1)
    step = CHUNK_NUM_BYTES // tensor.element_size()
    for start in range(0, flat.numel(), step):
        yield (name, tensor.shape, start), flat[start : start + step]


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


class FunctionTask(WorkerTask):
    """A function of the user as a task, see ``DDPSpawnStrategy.spawn``.

    Args:
        strategy: Strategy that joins the process group in each worker.
        function: The function.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.
        return_result: Whether the first worker sends its return value.
        joins_process_group: Whether workers join the process group first; Fabric's functions join it themselves.
    """

    def __init__(
        self,
        strategy: Any,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        return_result: bool,
        joins_process_group: bool,
    ) -> None:
        self.strategy = strategy
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.return_result = return_result
        self.joins_process_group = joins_process_group

    def pickled(self, dump: DumpFunction = dump) -> Pickled:
        """Pickles the task; raises as :meth:`StageTask.pickled`."""
        return pickle_or_explain(self, dump)

    restart_policy = None

    def record_inherited(self) -> None:
        """Does nothing: only the function's value is sent back."""

    @override
    def run(self, state: WorkerState, message: ReceivedMessage) -> Iterator[Any]:
        os.environ["LOCAL_RANK"] = str(state.local_rank)
        for argument in (*self.args, *self.kwargs.values()):
            if isinstance(argument, Module):
                make_private(argument)
        if self.joins_process_group:
            self.strategy.enter_worker(WorkerContext(state.is_continuation, None, rank_info=state.rank_info))
            self.strategy.setup_distributed()
        with announcing_failures(self.strategy):
            value = self.function(*self.args, **self.kwargs)
        if state.rank > 0 or not self.return_result:
            return iter(())
        return iter([value])


def pickle_or_explain(
    task: StageTask | FunctionTask, dump: DumpFunction = dump, received_objects: dict[int, Any] | None = None
) -> Pickled:
    """Pickles a task with ``dump``, which adds its objects to ``received_objects``.

    Raises:
        TypeError: If a part of the task cannot be pickled; the message names the part.
    """
    try:
        return dump(task, received_objects=received_objects)
    except Exception as error:
        if isinstance(task, FunctionTask):
            what, reason = "The function, an argument, or the strategy", error
        else:
            what, reason = find_unpicklable(task, error, dump)
        if _COMPILED_MARKER in str(reason):
            raise TypeError(
                f"{what} was made by `torch.compile`, and compiled code cannot be sent to the worker processes"
                f" ({reason}). Compile in `configure_model`, which runs in the workers, or use"
                " `strategy='ddp_fork_ext'`, whose workers inherit all objects."
            ) from error
        raise TypeError(
            f"{what} cannot be sent to the worker processes: {reason}. Do not store open files, locks, or similar"
            " objects in attributes (`setup` runs in the workers and can create them), or use"
            " `strategy='ddp_fork_ext'`, whose workers inherit all objects."
        ) from error
