"""One stage of the Trainer (``fit``, ``validate``, ``test``, ``predict``) as a job for workers.

The main process sends the Trainer with all that hangs on it. A worker runs the stage on its copy. Afterwards the main
process pulls the results from the first worker: the module's tensors in pieces, which are copied into the module that
the user holds, then the state of everything else (:mod:`.trainer_state`). Predictions come from all workers.
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

from lightning_strategies_ext._lightning import trainer_stages
from lightning_strategies_ext.launch.processes.elastic_pool import RestartPolicy
from lightning_strategies_ext.launch.processes.pool import WorkerPool
from lightning_strategies_ext.launch.processes.worker_main import TaskFailedError, WorkerState
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

#: How much of the module's tensors travels in one piece, in bytes: what bringing it back costs in memory.
CHUNK_NUM_BYTES = 32 << 20
#: In the error of pickling a compiled function: the class of torch's settings, to which it refers (torch 2.5 to 2.13).
_OF_TORCH_COMPILE = "ConfigModuleInstance"


@dataclass
class WorkerContext:
    """What a strategy knows in a worker, and only there.

    Attributes:
        is_continuation: Whether this stage goes on where an earlier one of the same Trainer ended.
        received: What came from the main process, to tell what has changed since; None if it was inherited in a fork.
        channel: To the main process, for a stage whose ranks may change.
        is_joining: Whether the others are in the middle of the stage.
        rank_info: See :class:`.WorkerSetup`.
    """

    is_continuation: bool
    received: ReceivedBuffers | None
    channel: TaskChannel | None = None
    is_joining: bool = False
    rank_info: WorkerRankInfo | None = None

    def is_module_unchanged(self, module: Module) -> bool:
        """Whether no tensor of the module differs from what the main process sent, to all workers alike."""
        received = self.received
        return received is not None and all(received.is_unchanged(tensor) for tensor in tensors_of(module).values())


class StageTask:
    """A stage, ready to be sent.

    Args:
        trainer: The Trainer.
        function: What the Trainer asked its launcher to run.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(self, trainer: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.trainer = trainer
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.shared = shared_objects(trainer, [args, kwargs])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "shared": self.shared.objects}

    def pickled(self, dump: DumpFunction = dump) -> Pickled:
        """Pickles it, and notes what the workers know then.

        Args:
            dump: What writes it.

        Raises:
            TypeError: If a part of it cannot be pickled; says which.
        """
        sent: dict[int, Any] = {}
        pickled = pickle_or_explain(self, dump, sent)
        # It is in its own message, and would keep itself and all else until the next collection of garbage.
        del sent[next(number for number, obj in sent.items() if obj is self)]
        self.shared = self.shared.with_message(sent)
        return pickled

    @property
    def restart_policy(self) -> RestartPolicy | None:
        """What may happen to workers in the middle of the stage; None if they all have to come to its end."""
        is_fitting = self.trainer.state.fn == TrainerFn.FITTING
        return getattr(self.trainer.strategy, "restart_policy", None) if is_fitting else None

    def record_inherited(self) -> None:
        """Notes what the workers know where they get it by being forked."""
        objects, unpicklable = walk(self)
        known = identity_preserved(objects, unpicklable)
        self.shared = self.shared.with_message({number: obj for number, obj in known.items() if obj is not self})

    # --- in a worker ---

    def run(self, state: WorkerState, message: ReceivedMessage) -> Iterator[Any]:
        """Runs the stage; see :class:`.WorkerTask`."""
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
        if state.rank == 0 or is_elastic:  # any may be the first rank in the end
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
            state.on_interrupt = lambda: None  # the results are still to be handed over
            exception = strategy.explain_exception(exception)
            strategy.announce_failure(exception)
            results = None if baseline is None else self._results(baseline, None)
            raise TaskFailedError(partial(_end_failed_stage, trainer), results) from exception
        predictions = None
        if trainer.state.fn == TrainerFn.PREDICTING and value is not None:
            predictions = RankPredictions.from_trainer(trainer, value)
            if trainer.num_nodes > 1 and state.rank_info is None:  # each host has a main process of its own
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
        """Pulls the results of all workers, puts them where they belong and returns the stage's return value.

        Args:
            pool: The workers.
            has_results: The local ranks that have results.
            timeout_s: How long rank 0 may take for each.
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
    """Some of the module's tensors, or slices of large ones: (name, shape, first element) → elements."""

    is_only_read = True  # they are copied into the module that the user holds

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
    # A tensor beyond the size of a piece is cut, unless the receiver's may have other strides.
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
    except Exception:  # a hook of the user's, perhaps the one that did not let the results go
        log.warning("The weights alone are saved, since the rest of the checkpoint failed:", exc_info=True)
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
        log.debug("clean-up after a failed stage failed too", exc_info=True)


class FunctionTask:
    """A function of the user's as a job, see ``DDPSpawnStrategy.spawn``.

    Args:
        strategy: The strategy, which joins the process group in each worker.
        function: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        return_result: Whether the first worker's return value comes back.
        joins_process_group: Whether workers join the process group first; Fabric's functions do it themselves.
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
        """Pickles it.

        Args:
            dump: What writes it.

        Raises:
            TypeError: If a part of it cannot be pickled; says which.
        """
        return pickle_or_explain(self, dump)

    restart_policy = None

    def record_inherited(self) -> None:
        """Does nothing: only the function's value comes back."""

    def run(self, state: WorkerState, message: ReceivedMessage) -> Iterator[Any]:
        """Runs the function; see :class:`.WorkerTask`."""
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
    """Pickles a job.

    Args:
        task: The job.
        dump: What writes it.
        received_objects: See :func:`.dump`.

    Raises:
        TypeError: If a part of it cannot be pickled; says which.
    """
    try:
        return dump(task, received_objects=received_objects)
    except Exception as error:
        what, reason = (
            ("What the workers need", error) if isinstance(task, FunctionTask) else find_unpicklable(task, error, dump)
        )
        if _OF_TORCH_COMPILE in str(reason):
            raise TypeError(
                f"{what} was made by `torch.compile`, and what is compiled cannot be sent to the worker processes"
                f" ({reason}). Compile in `configure_model`, which runs in the workers, or use"
                " `strategy='ddp_fork_ext'`, whose workers get everything by being forked."
            ) from error
        raise TypeError(
            f"{what} cannot be sent to the worker processes: {reason}. Keep open files, locks and the like out of"
            " attributes (`setup` runs in the workers, and can make them), or use `strategy='ddp_fork_ext'`, whose"
            " workers get everything by being forked."
        ) from error
