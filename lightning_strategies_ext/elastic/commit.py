"""Commits: copies of the training state in the memory of each rank.

The content of a Lightning checkpoint is the same on all ranks: weights, optimizers, schedulers, precision, loops with
their position in the data, callbacks. Random states, metrics, and buffers are specific to each rank. A commit also
contains the totals that the ranks accumulate together (:mod:`.epoch_totals`).

Tensors are copied into the tensors of the previous commit, so that only the first commit allocates memory. Copies from
a GPU go to pinned memory if enough is free, and are synchronized together.
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
from lightning_strategies_ext.elastic.epoch_totals import EpochTotals
from lightning_strategies_ext.launch.tasks.module_tree import tensors_of
from lightning_strategies_ext.nested import is_collection, parts_of, rebuild
from lightning_strategies_ext.uneven.step_state import StepStateSnapshot


@dataclass(frozen=True)
class TensorPlaceholder:
    """Placeholder of a tensor in a nested structure."""

    index: int
    shape: torch.Size
    dtype: torch.dtype


@dataclass
class SharedState:
    """The part of a commit that is the same on all ranks, without its tensors.

    Attributes:
        batches: Number of batches done in all epochs.
        step: Number of optimizer steps done.
        world_size: Number of ranks at the commit.
        first_world_size: Number of ranks when ``fit`` began.
        checkpoint: Lightning checkpoint, with a placeholder for each tensor.
        modes: ``training`` of each submodule by name.
        parameters: Shape and ``requires_grad`` of each parameter by name.
        omitted: Parameters and buffers by name that the checkpoint's ``state_dict`` omits, with a placeholder for each.
        placeholders: Placeholders of ``checkpoint`` and ``omitted``.
        totals: Values that the ranks have accumulated in this epoch; None if the ranks have logged different values.
        settings: Attributes of the Trainer and its loops that callbacks may change.
        found: Attributes of the module that tuning callbacks have set, with their values.
    """

    batches: int
    step: int
    world_size: int
    first_world_size: int
    checkpoint: Any
    modes: dict[str, bool]
    parameters: dict[str, tuple[torch.Size, bool]]
    omitted: Any
    placeholders: list[TensorPlaceholder]
    totals: EpochTotals | None
    settings: dict[str, Any]
    found: dict[str, Any]


class CommitTooLargeError(RuntimeError):
    """The memory of this host is too small for the commits of its ranks."""


class Commit:
    """Newest state that a rank can restore.

    Args:
        num_local_ranks: Number of ranks of this host that are about to allocate their first commits; 1 for a rank that
            joins, because the other ranks have already allocated theirs.

    Attributes:
        shared: State that is the same on all ranks; None before the first commit.
    """

    #: Remedy for a lack of memory, as text for users.
    remedy = "Start fewer ranks per host (`devices=...`)"
    _can_be_pinned = True

    def __init__(self, num_local_ranks: int) -> None:
        self.shared: SharedState | None = None
        self._num_local_ranks = num_local_ranks
        self._free = free_memory()  # before the ranks of this host allocate commits
        self._may_pin = False
        self._tensors: list[Tensor] = []
        self._local_state: Any = None
        self._random: Any = None

    @property
    def batches(self) -> int:
        """Number of batches done in all epochs at the commit; -1 without a commit."""
        return -1 if self.shared is None else self.shared.batches

    @property
    def step(self) -> int:
        """Number of optimizer steps done at the commit; -1 without a commit."""
        return -1 if self.shared is None else self.shared.step

    def has_local_state_for(self, world_size: int) -> bool:
        """Returns whether the rank-specific state is available and the commit's world had the given number of ranks."""
        return self._local_state is not None and self.shared is not None and self.shared.world_size == world_size

    def capture(self, trainer: "pl.Trainer", first_world_size: int, collectives: Collectives) -> None:
        """Copies the state between two optimizer steps. Collective: all ranks call it.

        Args:
            trainer: The Trainer.
            first_world_size: Number of ranks when ``fit`` began.
            collectives: Collectives of the ranks.

        Raises:
            CommitTooLargeError: If this host has too little memory.
            torch.distributed.DistBackendError: If a collective between GPUs was aborted, so that the state is invalid.
        """
        # `dump_commit` calls hooks of users, which may wait for other ranks. No code after the totals waits.
        checkpoint = trainer_stages.dump_commit(trainer)
        totals = EpochTotals.gather(trainer, collectives)
        found: list[Tensor] = []
        placeholders: list[TensorPlaceholder] = []
        packed = _packed(checkpoint, found, placeholders)
        module = trainer.lightning_module
        omitted = _packed(_omitted_tensors(module, checkpoint["state_dict"]), found, placeholders)
        if self.shared is None or self.shared.placeholders != placeholders:
            self._check_fits(placeholders)
        modes = {name: submodule.training for name, submodule in module.named_modules()}
        parameters = {name: (each.shape, each.requires_grad) for name, each in module.named_parameters()}
        batches: int = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        synchronize_gpu()
        self._local_state = self._copy_local_state(trainer)
        self._random = user_modules.random_states()
        sizes = trainer.world_size, first_world_size
        of_callbacks = trainer_stages.settings_of(trainer), trainer_stages.found_by_trials(trainer)
        shared = SharedState(
            batches,
            trainer.global_step,
            *sizes,
            packed,
            modes,
            parameters,
            omitted,
            placeholders,
            totals,
            *of_callbacks,
        )
        self._write(shared, found)

    def record_step(self, step: int) -> None:
        """Records the number of optimizer steps done. Called before each step; a no-op in this class."""

    def capture_final(self, trainer: "pl.Trainer", first_world_size: int, collectives: Collectives) -> None:
        """Called at the end of ``fit``. A no-op here: a commit in the memory of this process is not needed any more."""

    def _copy_local_state(self, trainer: "pl.Trainer") -> Any:
        """Returns the rank-specific state that no checkpoint contains, without random states."""
        return StepStateSnapshot(trainer)

    def _restore_local_state(self, trainer: "pl.Trainer", local_state: Any) -> None:
        local_state.restore()

    def _write(self, shared: SharedState, found: list[Tensor]) -> None:
        kept: list[Tensor | None] = [None] * len(found)
        for index, (old, tensor) in enumerate(zip(self._tensors, found, strict=False)):
            if (old.shape, old.dtype, old.layout) == (tensor.shape, tensor.dtype, tensor.layout):
                kept[index] = old
        self._tensors = []  # frees tensors of other shapes before new ones are allocated
        self._tensors = copy_to_host(found, kept, may_pin=self._may_pin)
        self.shared = shared

    def _check_fits(self, placeholders: list[TensorPlaceholder]) -> None:
        """Checks that this host has enough memory for a commit, and decides whether to pin the memory.

        Args:
            placeholders: Placeholders of the commit.

        Raises:
            CommitTooLargeError: If there is too little memory.
        """
        num_bytes = sum(each.shape.numel() * each.dtype.itemsize for each in placeholders)
        if num_bytes * self._num_local_ranks > self._free:
            raise CommitTooLargeError(
                f"A commit has {num_bytes / 2**30:.1f} GiB, and each of the {self._num_local_ranks} ranks of this"
                f" host stores one; {self._free / 2**30:.1f} GiB of memory were free when `fit` began. {self.remedy},"
                " or use `strategy='ddp_ext'` with a ModelCheckpoint."
            )
        pinned = sum(pinned_bytes(each.shape.numel() * each.dtype.itemsize) for each in placeholders)
        is_of_gpu = self._can_be_pinned and torch.cuda.is_initialized()
        self._may_pin = is_of_gpu and pinned * self._num_local_ranks <= self._free

    def receive(self, collectives: Collectives, src: int, shared: SharedState | None, is_behind: bool) -> None:
        """Receives the commit of another rank. Collective: all ranks call it, also those that have the commit.

        Args:
            collectives: Collectives of the ranks.
            src: Rank that sends its commit.
            shared: Shared state of that rank.
            is_behind: Whether this rank lacks the commit.

        Raises:
            CommitTooLargeError: If this host has too little memory.
        """
        assert shared is not None
        tensors = self._tensors
        # Attributes of a callback, such as ModelCheckpoint's `current_score`, may hold a tensor on some ranks only.
        is_other = is_behind or self.shared is None or self.shared.placeholders != shared.placeholders
        if is_other:
            self._check_fits(shared.placeholders)
            tensors = [
                torch.empty(each.shape, dtype=each.dtype, pin_memory=self._may_pin) for each in shared.placeholders
            ]
        collectives.broadcast_tensors(tensors, src)
        if is_other:  # only after all tensors have arrived
            self.shared, self._tensors = shared, tensors
        if is_behind:
            self._local_state = self._random = None

    def checkpoint(self) -> dict[str, Any]:
        """Returns the Lightning checkpoint, with new copies of its tensors."""
        assert self.shared is not None
        filled: dict[str, Any] = _filled(self.shared.checkpoint, self._tensors)
        return filled

    def restore(self, trainer: "pl.Trainer", rank: int, *, is_complete: bool) -> None:
        """Restores the state of a Trainer from the commit.

        Args:
            trainer: The Trainer.
            rank: Rank of this process.
            is_complete: Whether every rank has its rank-specific state, so that the sums over all ranks are complete.
                If not, the totals are restored.
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
        if self._local_state is not None:
            self._restore_local_state(trainer, self._local_state)
        if not is_complete and self.shared.totals is not None:
            self.shared.totals.restore(trainer, rank)
        self.restore_random()

    def find_difference(self, trainer: "pl.Trainer") -> str | None:
        """Describes the first parameter or parameter group that differs from the commit; None if there is none."""
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
            if old != new and old != []:  # a custom optimizer may store its groups elsewhere
                found = _groups_text(old), _groups_text(new)
                return f"optimizer {index} {found[0]} in the commit, and {found[1]} on this rank"
        return None

    def restore_random(self) -> None:
        """Restores the random states. Called again before the first step, because DataLoaders draw random numbers."""
        if self._random is not None:
            user_modules.set_random_states(self._random)


def copy_model(trainer: "pl.Trainer") -> Callable[[], None]:
    """Copies the module's structure and tensors, and the parameter groups.

    Returns:
        A function that reverts later changes to them.
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
    """Returns parameters and buffers that a ``state_dict`` omits, such as frozen weights or non-persistent buffers."""
    return {name: tensor.detach() for name, tensor in tensors_of(module).items() if name not in state_dict}


def _shape_text(shape: torch.Size | None) -> str:
    return "does not exist" if shape is None else f"has the shape {tuple(shape)}"


def _group_sizes(groups: list[dict[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _groups_text(sizes: list[int] | None) -> str:
    return "does not exist" if sizes is None else f"has parameter groups of {sizes} parameters"


def _packed(value: Any, tensors: list[Tensor], placeholders: list[TensorPlaceholder]) -> Any:
    if isinstance(value, Tensor):
        placeholders.append(TensorPlaceholder(len(tensors), value.shape, value.dtype))
        tensors.append(value)
        return placeholders[-1]
    if is_collection(value):
        return rebuild(value, [_packed(part, tensors, placeholders) for part in parts_of(value)])
    return copy.deepcopy(value)


def _filled(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, TensorPlaceholder):
        return tensors[value.index].clone()
    if is_collection(value):
        return rebuild(value, [_filled(part, tensors) for part in parts_of(value)])
    return copy.deepcopy(value)
