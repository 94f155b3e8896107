"""A commit: the state of a run, copied into the memory of each rank.

What a checkpoint of Lightning's has is the same on all ranks: weights, optimizers, schedulers, precision, loops with
the position in the data, callbacks. What is each rank's own stays with it: random numbers, metrics, buffers. What they
count together is in it as a whole, too (:mod:`.totals`).

Tensors are copied into those of the commit before, so that commits after the first allocate nothing.
"""

import copy
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_strategies_ext._lightning import trainer_stages, user_modules
from lightning_strategies_ext.collectives import Collectives
from lightning_strategies_ext.elastic.totals import Totals
from lightning_strategies_ext.gpus import wait_until_computed
from lightning_strategies_ext.memory import free_memory
from lightning_strategies_ext.nested import is_collection, parts_of, rebuilt
from lightning_strategies_ext.uneven.step_state import StepState


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor in a structure."""

    index: int
    shape: torch.Size
    dtype: torch.dtype


@dataclass
class Shared:
    """The part of a commit that is the same on all ranks, without its tensors.

    Attributes:
        batches: Batches done in all epochs.
        step: Optimizer steps done.
        world_size: Number of ranks.
        first_world_size: Number of ranks when ``fit`` began.
        checkpoint: Lightning's, with a slot for each tensor.
        modes: ``training`` of each submodule by name.
        trained: ``requires_grad`` of each parameter by name.
        slots: Those slots.
        totals: What the ranks have added up in this epoch, if that can be said.
    """

    batches: int
    step: int
    world_size: int
    first_world_size: int
    checkpoint: Any
    modes: dict[str, bool]
    trained: dict[str, bool]
    slots: list[Slot]
    totals: Totals | None


class CommitTooLargeError(RuntimeError):
    """This host has not the memory for a commit of each of its ranks."""


class Commit:
    """The newest state that a rank can go back to.

    Args:
        num_local_ranks: How many ranks this host has, which are about to take memory for commits together; 1 for a rank
            that comes to others, who have taken theirs.

    Attributes:
        shared: What all ranks have; None before the first commit.
    """

    #: What to do where memory is short.
    cure = "Start fewer ranks per host (`devices=...`)"

    def __init__(self, num_local_ranks: int) -> None:
        self.shared: Shared | None = None
        self._num_local_ranks = num_local_ranks
        self._free = free_memory()  # before any of them takes some
        self._tensors: list[Tensor] = []
        self._own: Any = None
        self._random: Any = None

    @property
    def batches(self) -> int:
        """Batches that were done in all epochs; -1 without a commit."""
        return -1 if self.shared is None else self.shared.batches

    @property
    def step(self) -> int:
        """Optimizer steps that were done; -1 without a commit."""
        return -1 if self.shared is None else self.shared.step

    def has_parts_of(self, world_size: int) -> bool:
        """Whether this rank has what is its own, and the ranks have been as many."""
        return self._own is not None and self.shared is not None and self.shared.world_size == world_size

    def take(self, trainer: "pl.Trainer", first_world_size: int, collectives: Collectives) -> None:
        """Copies the state, between two optimizer steps; called by all ranks together.

        Args:
            trainer: The Trainer.
            first_world_size: Number of ranks when ``fit`` began.
            collectives: Of the ranks.

        Raises:
            CommitTooLargeError: If this host has not the memory.
            torch.distributed.DistBackendError: If an exchange between GPUs was cut off, and with it the state.
        """
        # Users' hooks are called here, which may wait for other ranks. After the totals nothing does.
        checkpoint = trainer_stages.dump_checkpoint(trainer)
        totals = Totals.of(trainer, collectives)
        found: list[Tensor] = []
        slots: list[Slot] = []
        packed = _packed(checkpoint, found, slots)
        if self.shared is None or self.shared.slots != slots:
            self._check_fits(slots)
        module = trainer.lightning_module
        modes = {name: submodule.training for name, submodule in module.named_modules()}
        trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        batches: int = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        wait_until_computed()
        self._own = self._copy_own(trainer)
        self._random = user_modules.random_states()
        sizes = trainer.world_size, first_world_size
        self._write(Shared(batches, trainer.global_step, *sizes, packed, modes, trained, slots, totals), found)

    def note(self, step: int) -> None:
        """Called before each step with the number of those done; it is of use to nobody else."""

    def take_last(self, trainer: "pl.Trainer", first_world_size: int, collectives: Collectives) -> None:
        """Called at the end of ``fit``: nobody goes back to here, if the memory is that of this process."""

    def _copy_own(self, trainer: "pl.Trainer") -> Any:
        """What is this rank's and in no checkpoint, random numbers aside."""
        return StepState(trainer)

    def _restore_own(self, trainer: "pl.Trainer", own: Any) -> None:
        own.restore()

    def _write(self, shared: Shared, found: list[Tensor]) -> None:
        del self._tensors[len(found) :]
        for index, tensor in enumerate(found):
            old = self._tensors[index] if index < len(self._tensors) else None
            if old is not None and (old.shape, old.dtype, old.layout) == (tensor.shape, tensor.dtype, tensor.layout):
                old.copy_(tensor)
            else:
                self._tensors[index : index + 1] = [tensor.detach().to("cpu", copy=True)]
        self.shared = shared

    def _check_fits(self, slots: list[Slot]) -> None:
        """Refuses a commit for which there is no memory.

        Args:
            slots: Of the commit.

        Raises:
            CommitTooLargeError: If there is none.
        """
        num_bytes = sum(slot.shape.numel() * slot.dtype.itemsize for slot in slots)
        if num_bytes * self._num_local_ranks > self._free:
            raise CommitTooLargeError(
                f"A commit has {num_bytes / 2**30:.1f} GiB, and each of the {self._num_local_ranks} ranks of this host"
                f" keeps one; {self._free / 2**30:.1f} GiB of memory were free when `fit` began. {self.cure}, or use"
                " `strategy='ddp_ext'` with a ModelCheckpoint."
            )

    def receive(self, collectives: Collectives, src: int, shared: Shared | None, is_behind: bool) -> None:
        """Takes the commit of another rank; called by all ranks, of which some may have it already.

        Args:
            collectives: What carries it.
            src: The rank that has it.
            shared: As that rank has it.
            is_behind: Whether this rank does not.

        Raises:
            CommitTooLargeError: If this host has not the memory.
        """
        assert shared is not None
        tensors = self._tensors
        # What a callback keeps besides its state, such as ModelCheckpoint's `current_score`, may be on some ranks only.
        is_other = is_behind or self.shared is None or self.shared.slots != shared.slots
        if is_other:
            self._check_fits(shared.slots)
            tensors = [torch.empty(slot.shape, dtype=slot.dtype) for slot in shared.slots]
        collectives.broadcast_tensors(tensors, src)
        if is_other:  # from here on, when all of it is there
            self.shared, self._tensors = shared, tensors
        if is_behind:
            self._own = self._random = None

    def checkpoint(self) -> dict[str, Any]:
        """The checkpoint of Lightning's, with tensors of its own."""
        assert self.shared is not None
        filled: dict[str, Any] = _filled(self.shared.checkpoint, self._tensors)
        return filled

    def restore(self, trainer: "pl.Trainer", rank: int, *, are_the_same: bool) -> None:
        """Makes a Trainer's state that of the commit.

        Args:
            trainer: The Trainer.
            rank: Of this process.
            are_the_same: Whether each rank has what was its own, so that nothing is missing when that is added up.
        """
        assert self.shared is not None
        module = trainer.lightning_module
        trainer_stages.leave_evaluation(trainer)
        trainer.should_stop = False
        for name, submodule in module.named_modules():
            submodule.training = self.shared.modes.get(name, submodule.training)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(self.shared.trained.get(name, parameter.requires_grad))
        module.zero_grad(set_to_none=True)
        trainer_stages.restore_checkpoint(trainer, self.checkpoint())
        if self._own is not None:
            self._restore_own(trainer, self._own)
        if not are_the_same and self.shared.totals is not None:
            self.shared.totals.restore(trainer, rank)
        self.restore_random()

    def restore_random(self) -> None:
        """Makes random numbers those of the commit; again before the first step, since loaders draw some."""
        if self._random is not None:
            user_modules.set_random_states(self._random)


def _packed(value: Any, tensors: list[Tensor], slots: list[Slot]) -> Any:
    if isinstance(value, Tensor):
        slots.append(Slot(len(tensors), value.shape, value.dtype))
        tensors.append(value)
        return slots[-1]
    if is_collection(value):
        return rebuilt(value, [_packed(part, tensors, slots) for part in parts_of(value)])
    return copy.deepcopy(value)


def _filled(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Slot):
        return tensors[value.index].clone()
    if is_collection(value):
        return rebuilt(value, [_filled(part, tensors) for part in parts_of(value)])
    return copy.deepcopy(value)
