"""A commit: the state of a run, copied into the memory of each rank.

What a checkpoint of Lightning's has is the same on all ranks: weights, optimizers, schedulers, precision, loops with
the position in the data, callbacks. What is each rank's own stays with it: random numbers, metrics, buffers. What they
count together is in it as a whole, too (:mod:`.totals`).

Tensors are copied into those of the commit before, so that commits after the first allocate nothing. Those of a GPU are
in pinned memory if there is room for it, and waited for together.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.parsing import lightning_setattr
from torch import Tensor

from lightning_strategies_ext._lightning import trainer_stages, user_modules
from lightning_strategies_ext._system.gpu_sync import copy_to_host, pinned_bytes, synchronize_gpu
from lightning_strategies_ext._system.memory import free_memory
from lightning_strategies_ext.collectives import Collectives
from lightning_strategies_ext.elastic.totals import Totals
from lightning_strategies_ext.launch.tasks.module_tree import tensors_of
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
        parameters: Shape and ``requires_grad`` of each parameter by name.
        omitted: Parameters and buffers by name that the checkpoint's ``state_dict`` omits, with a slot for each.
        slots: Those slots.
        totals: What the ranks have added up in this epoch, if that can be said.
        settings: Those of the Trainer and its loops that callbacks may change.
        found: Attributes of the module that finders have set, with their values.
    """

    batches: int
    step: int
    world_size: int
    first_world_size: int
    checkpoint: Any
    modes: dict[str, bool]
    parameters: dict[str, tuple[torch.Size, bool]]
    omitted: Any
    slots: list[Slot]
    totals: Totals | None
    settings: dict[str, Any]
    found: dict[str, Any]


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
    _can_be_pinned = True

    def __init__(self, num_local_ranks: int) -> None:
        self.shared: Shared | None = None
        self._num_local_ranks = num_local_ranks
        self._free = free_memory()  # before any of them takes some
        self._may_pin = False
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
        checkpoint = trainer_stages.dump_commit(trainer)
        totals = Totals.of(trainer, collectives)
        found: list[Tensor] = []
        slots: list[Slot] = []
        packed = _packed(checkpoint, found, slots)
        module = trainer.lightning_module
        omitted = _packed(_omitted_tensors(module, checkpoint["state_dict"]), found, slots)
        if self.shared is None or self.shared.slots != slots:
            self._check_fits(slots)
        modes = {name: submodule.training for name, submodule in module.named_modules()}
        parameters = {name: (each.shape, each.requires_grad) for name, each in module.named_parameters()}
        batches: int = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        synchronize_gpu()
        self._own = self._copy_own(trainer)
        self._random = user_modules.random_states()
        sizes = trainer.world_size, first_world_size
        of_callbacks = trainer_stages.settings_of(trainer), trainer_stages.found_by_trials(trainer)
        shared = Shared(
            batches, trainer.global_step, *sizes, packed, modes, parameters, omitted, slots, totals, *of_callbacks
        )
        self._write(shared, found)

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
        kept: list[Tensor | None] = [None] * len(found)
        for index, (old, tensor) in enumerate(zip(self._tensors, found, strict=False)):
            if (old.shape, old.dtype, old.layout) == (tensor.shape, tensor.dtype, tensor.layout):
                kept[index] = old
        self._tensors = []  # those that do not fit are freed before others are made
        self._tensors = copy_to_host(found, kept, may_pin=self._may_pin)
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
        pinned = sum(pinned_bytes(slot.shape.numel() * slot.dtype.itemsize) for slot in slots)
        is_of_gpu = self._can_be_pinned and torch.cuda.is_initialized()
        self._may_pin = is_of_gpu and pinned * self._num_local_ranks <= self._free

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
            tensors = [torch.empty(slot.shape, dtype=slot.dtype, pin_memory=self._may_pin) for slot in shared.slots]
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
            _, is_trained = self.shared.parameters.get(name, (None, parameter.requires_grad))
            parameter.requires_grad_(is_trained)
        module.zero_grad(set_to_none=True)
        for name, value in self.shared.found.items():
            lightning_setattr(module, name, value)
        trainer_stages.restore_checkpoint(trainer, self.checkpoint())
        omitted, tensors = _filled(self.shared.omitted, self._tensors), tensors_of(module)
        for name in omitted.keys() & tensors.keys():  # a rank may lack buffers that the forward pass creates
            _overwrite(tensors[name], omitted[name])
        if self._own is not None:
            self._restore_own(trainer, self._own)
        if not are_the_same and self.shared.totals is not None:
            self.shared.totals.restore(trainer, rank)
        self.restore_random()

    def find_difference(self, trainer: "pl.Trainer") -> str | None:
        """Names the first parameter or parameter group that differs from the commit's; None if all are the same."""
        assert self.shared is not None
        there = {name: shape for name, (shape, _) in self.shared.parameters.items()}
        here = {name: parameter.shape for name, parameter in trainer.lightning_module.named_parameters()}
        for name in {**there, **here}:
            if there.get(name) != here.get(name):
                found = _shape_text(there.get(name)), _shape_text(here.get(name))
                return f"the parameter `{name}` {found[0]} in the commit, and {found[1]} on this rank"
        states = self.shared.checkpoint["optimizer_states"]
        sizes_there = [_group_sizes(state.get("param_groups", [])) for state in states]
        sizes_here = [_group_sizes(optimizer.param_groups) for optimizer in trainer.optimizers]
        for index, (old, new) in enumerate(zip_longest(sizes_there, sizes_here)):
            if old != new and old != []:  # an optimizer of the user's may keep its groups elsewhere
                found = _groups_text(old), _groups_text(new)
                return f"optimizer {index} {found[0]} in the commit, and {found[1]} on this rank"
        return None

    def restore_random(self) -> None:
        """Makes random numbers those of the commit; again before the first step, since loaders draw some."""
        if self._random is not None:
            user_modules.set_random_states(self._random)


def copy_model(trainer: "pl.Trainer") -> Callable[[], None]:
    """Copies the module's structure and tensors, and the parameter groups.

    Returns:
        A function that undoes later changes to them.
    """
    modules = [*trainer.lightning_module.modules()]
    modes = [module.training for module in modules]
    registries: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (registry, dict(registry))
        for module in modules
        for registry in (module._modules, module._parameters, module._buffers)
    ]
    tensors = [
        (tensor, tensor.requires_grad, tensor.detach().to("cpu", copy=True))
        for tensor in tensors_of(trainer.lightning_module).values()
    ]
    groups = [
        (optimizer, [(group, {**group, "params": [*group["params"]]}) for group in optimizer.param_groups])
        for optimizer in trainer.optimizers
    ]

    def undo() -> None:
        for optimizer, pairs in groups:
            optimizer.param_groups = [group for group, _ in pairs]
            registries.extend(pairs)
        for registry, copied in registries:
            registry.clear()
            registry.update(copied)
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for tensor, is_trained, value in tensors:
            tensor.requires_grad_(is_trained)
            _overwrite(tensor, value)

    return undo


def _overwrite(tensor: Tensor, value: Tensor) -> None:
    if tensor.shape == value.shape:
        tensor.detach().copy_(value)
    else:
        tensor.data = value.to(tensor)


def _omitted_tensors(module: "pl.LightningModule", state_dict: dict[str, Any]) -> dict[str, Tensor]:
    """Parameters and buffers that a ``state_dict`` omits: frozen weights, for example, or non-persistent buffers."""
    return {name: tensor.detach() for name, tensor in tensors_of(module).items() if name not in state_dict}


def _shape_text(shape: torch.Size | None) -> str:
    return "does not exist" if shape is None else f"has the shape {tuple(shape)}"


def _group_sizes(groups: list[dict[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _groups_text(sizes: list[int] | None) -> str:
    return "does not exist" if sizes is None else f"has parameter groups of {sizes} parameters"


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
