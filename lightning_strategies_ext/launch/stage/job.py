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
from lightning_strategies_ext.launch.processes.changing_pool import Allowance
from lightning_strategies_ext.launch.processes.pool import WorkerPool
from lightning_strategies_ext.launch.processes.worker import JobFailedError, WorkerState
from lightning_strategies_ext.launch.protocol import Seat
from lightning_strategies_ext.launch.stage.changes import with_identity
from lightning_strategies_ext.launch.stage.culprit import culprit
from lightning_strategies_ext.launch.stage.module_tree import make_private, tensors_of
from lightning_strategies_ext.launch.stage.predictions import PredictionsOfRank, merged
from lightning_strategies_ext.launch.stage.trainer_state import Before, TrainerSnapshot, shared_objects
from lightning_strategies_ext.launch.strategy import WorkerStrategy, telling_the_others
from lightning_strategies_ext.launch.transport.channel import Envelope, JobChannel
from lightning_strategies_ext.launch.transport.messages import Dump, Pickled, dump, walk
from lightning_strategies_ext.launch.transport.segments import Received

log = logging.getLogger(__name__)

#: How much of the module's tensors travels in one piece, in bytes: what bringing it back costs in memory.
PIECE_BYTES = 32 << 20
#: In the error of pickling a compiled function: the class of torch's settings, to which it refers (torch 2.5 to 2.13).
_OF_TORCH_COMPILE = "ConfigModuleInstance"


@dataclass
class WorkerContext:
    """What a strategy knows in a worker, and only there.

    Attributes:
        continues: Whether this stage goes on where an earlier one of the same Trainer ended.
        received: What came from the main process, to tell what has changed since; None if it was inherited in a fork.
        channel: To the main process, for a stage whose ranks may change.
        joins: Whether the others are in the middle of the stage.
        seat: See :class:`.Start`.
    """

    continues: bool
    received: Received | None
    channel: JobChannel | None = None
    joins: bool = False
    seat: Seat | None = None

    def has_module_as_sent(self, module: Module) -> bool:
        """Whether no tensor of the module differs from what the main process sent, to all workers alike."""
        received = self.received
        return received is not None and all(received.is_unchanged(tensor) for tensor in tensors_of(module).values())


class StageJob:
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

    def pickled(self, dump: Dump = dump) -> Pickled:
        """Pickles it, and notes what the workers know then.

        Args:
            dump: What writes it.

        Raises:
            TypeError: If a part of it cannot be pickled; says which.
        """
        sent: dict[int, Any] = {}
        pickled = pickled_or_explained(self, dump, sent)
        # It is in its own message, and would keep itself and all else until the next collection of garbage.
        del sent[next(number for number, obj in sent.items() if obj is self)]
        self.shared = self.shared.with_message(sent)
        return pickled

    @property
    def allowance(self) -> Allowance | None:
        """What may happen to workers in the middle of the stage; None if they all have to come to its end."""
        is_fitting = self.trainer.state.fn == TrainerFn.FITTING
        return getattr(self.trainer.strategy, "allowance", None) if is_fitting else None

    def note_inherited(self) -> None:
        """Notes what the workers know where they get it by being forked."""
        found, unpicklable = walk(self)
        known = with_identity(found, unpicklable)
        self.shared = self.shared.with_message({number: obj for number, obj in known.items() if obj is not self})

    # --- in a worker ---

    def run(self, state: WorkerState, envelope: Envelope) -> Iterator[Any]:
        """Runs the stage; see :class:`.Job`."""
        trainer = self.trainer
        inherited: Mapping[int, Any] = {}
        if isinstance(self.shared, list):
            self.shared = shared_objects(trainer, [], self.shared)
        else:
            inherited, self.shared = self.shared.in_message, shared_objects(trainer, [], self.shared.objects)
        make_private(trainer.lightning_module)
        received = None
        if envelope.parts:
            received = Received(envelope.parts)
        before = None
        may_change = self.allowance is not None
        if state.rank == 0 or may_change:  # any may be the first rank in the end
            before = Before(trainer, self.shared, inherited or with_identity(envelope.found), received)
        state.save = partial(_save, trainer)
        context = WorkerContext(state.continues, received, state.channel, state.joins, state.seat)
        strategy: WorkerStrategy = trainer.strategy
        os.environ["LOCAL_RANK"] = str(state.local_rank)
        state.on_interrupt = strategy.request_interrupt
        strategy.enter_worker(context)
        try:
            value = self.function(*self.args, **self.kwargs)
            state.on_interrupt = None
            strategy.end_stage()
        except BaseException as exception:
            state.on_interrupt = lambda: None  # the results are still to be handed over
            exception = strategy.explained(exception)
            strategy.note_failure(exception)
            results = None if before is None else self._results(before, None)
            raise JobFailedError(partial(_end_failed_stage, trainer), results) from exception
        predictions = None
        if trainer.state.fn == TrainerFn.PREDICTING and value is not None:
            predictions = PredictionsOfRank.of(trainer, value)
            if trainer.num_nodes > 1 and state.seat is None:  # each host has a main process of its own
                value, predictions = predictions.gathered(trainer.world_size), None
            else:
                value = None
        if before is None or (may_change and trainer.global_rank != 0):
            return iter(()) if predictions is None else predictions.pieces()
        return self._results(before, value, predictions)

    def _results(self, before: Before, value: Any, predictions: "PredictionsOfRank | None" = None) -> Iterator[Any]:
        module = self.trainer.lightning_module
        piece: dict[Any, Tensor] = {}
        for name, tensor in before.tree.values(module):
            if is_lazy(tensor) or before.is_unchanged(tensor):
                continue
            for part_name, part in _parts(name, tensor.detach()):
                if piece and sum(other.nbytes for other in piece.values()) + part.nbytes > PIECE_BYTES:
                    yield _ModulePiece(piece)
                    piece = {}
                piece[part_name] = part
        yield _ModulePiece(piece)
        del piece
        yield TrainerSnapshot.collect(self.trainer, before, value)
        if predictions is not None:
            yield from predictions.pieces()

    # --- in the main process ---

    def bring_back(self, pool: WorkerPool, has_results: set[int], timeout_s: float | None = None) -> Any:
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
            if isinstance(result, _ModulePiece):
                result.copy_into(tensors)
            else:
                assert isinstance(result, TrainerSnapshot)
                value = result.restore(self.trainer, self.shared)
                break
        del result
        sources = [results if rank == 0 else pool.pull(rank) for rank in sorted(has_results)]
        plans = [plan for plan in (next(source, None) for source in sources) if plan is not None]
        return merged(plans, sources) if plans else value


@dataclass
class _ModulePiece:
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
    if tensor.nbytes <= PIECE_BYTES or not tensor.is_contiguous():
        yield (name, tensor.shape, None), tensor
        return
    flat = tensor.view(-1)
    step = PIECE_BYTES // tensor.element_size()
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


class CallJob:
    """A function of the user's as a job, see ``DDPSpawnStrategy.spawn``.

    Args:
        strategy: The strategy, which joins the process group in each worker.
        function: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        return_result: Whether the first worker's return value comes back.
        joins_group: Whether workers join the process group first; Fabric's functions do it themselves.
    """

    def __init__(
        self,
        strategy: Any,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        return_result: bool,
        joins_group: bool,
    ) -> None:
        self.strategy = strategy
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.return_result = return_result
        self.joins_group = joins_group

    def pickled(self, dump: Dump = dump) -> Pickled:
        """Pickles it.

        Args:
            dump: What writes it.

        Raises:
            TypeError: If a part of it cannot be pickled; says which.
        """
        return pickled_or_explained(self, dump)

    allowance = None

    def note_inherited(self) -> None:
        """Does nothing: only the function's value comes back."""

    def run(self, state: WorkerState, envelope: Envelope) -> Iterator[Any]:
        """Runs the function; see :class:`.Job`."""
        os.environ["LOCAL_RANK"] = str(state.local_rank)
        for argument in (*self.args, *self.kwargs.values()):
            if isinstance(argument, Module):
                make_private(argument)
        if self.joins_group:
            self.strategy.enter_worker(WorkerContext(state.continues, None, seat=state.seat))
            self.strategy.setup_distributed()
        with telling_the_others(self.strategy):
            value = self.function(*self.args, **self.kwargs)
        if state.rank > 0 or not self.return_result:
            return iter(())
        return iter([value])


def pickled_or_explained(job: StageJob | CallJob, dump: Dump = dump, found: dict[int, Any] | None = None) -> Pickled:
    """Pickles a job.

    Args:
        job: The job.
        dump: What writes it.
        found: See :func:`.dump`.

    Raises:
        TypeError: If a part of it cannot be pickled; says which.
    """
    try:
        return dump(job, found=found)
    except Exception as error:
        what, reason = ("What the workers need", error) if isinstance(job, CallJob) else culprit(job, error, dump)
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
