"""Commits: copies of the training state in the memory of each rank.

A commit has two parts. The *shared* state is the same on all ranks: the content of a Lightning checkpoint (weights,
buffers, optimizers, schedulers, precision, loops with their position in the data, callbacks), and the totals of metrics
and logged values over all ranks (:mod:`.epoch_totals`). The *local* state is specific to each rank: metrics, logged
values, buffers (which replace those of the shared state), and random states. If a rank's local state is lost, the
totals replace the metrics and logged values of all ranks.

Tensors are copied into the tensors of the previous commit, so that only the first two commits allocate memory: the
second also contains the state that optimizers create in their first step. Copies from a GPU go to pinned memory if
enough is free, and are synchronized together.
"""

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
from lightning_strategies_ext.elastic.commit_state import (
    TensorPlaceholder,
    bytes_of,
    extract_tensors,
    insert_tensors,
    items_in,
    pickle_state,
)
from lightning_strategies_ext.elastic.epoch_totals import EpochTotals
from lightning_strategies_ext.launch.tasks.module_tree import tensors_of
from lightning_strategies_ext.uneven.step_state import StepStateSnapshot


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
        totals: Totals of this epoch; None if the ranks have different metrics or logged values.
        settings: Attributes of the Trainer and its loops that callbacks may change.
        tuned: Attributes of the module that callbacks have tuned in a trial, with their values.
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
    tuned: dict[str, Any]


class CommitTooLargeError(RuntimeError):
    """The memory of this host is too small for the commits of its ranks."""


class Commit:
    """Newest state that a rank can restore.

    Args:
        num_allocating_ranks: Number of ranks of this host that are about to allocate their first commits; 1 for a rank
            that joins, because the other ranks have already allocated theirs.

    Attributes:
        shared: State that is the same on all ranks; None before the first commit.
    """

    #: Advice on how to use less memory, for messages.
    remedy = "Start fewer ranks per host (`devices=...`)"
    #: Whether tensors may be in pinned memory, to which copies from a GPU are faster.
    _can_be_pinned = True

    def __init__(self, num_allocating_ranks: int) -> None:
        self.shared: SharedState | None = None
        self._num_allocating_ranks = num_allocating_ranks
        self._free = free_memory()  # free bytes before the ranks of this host allocate commits
        self._may_pin = False
        self._tensors: list[Tensor] = []
        self._local_state: Any = None
        self._random: Any = None  # part of the local state; restored again before the first step

    @property
    def batches(self) -> int:
        """Number of batches done in all epochs at the commit; -1 without a commit."""
        return -1 if self.shared is None else self.shared.batches

    @property
    def step(self) -> int:
        """Number of optimizer steps done at the commit; -1 without a commit."""
        return -1 if self.shared is None else self.shared.step

    def has_local_state_for(self, world_size: int) -> bool:
        """Returns whether the local state is available and the commit's world had the given number of ranks."""
        return self._local_state is not None and self.shared is not None and self.shared.world_size == world_size

    def capture(self, trainer: "pl.Trainer", first_world_size: int, collectives: Collectives) -> None:
        """Commits the state between two optimizer steps. Collective: all ranks call it.

        Args:
            trainer: The Trainer.
            first_world_size: Number of ranks when ``fit`` began.
            collectives: Collectives of the ranks.

        Raises:
            CommitTooLargeError: If this host has too little memory.
            torch.distributed.DistBackendError: If a collective between GPUs was aborted, so that the state is invalid.
        """
        # First, because both may wait for other ranks: `dump_commit` calls hooks of users, and `gather` is collective.
        # If a rank is lost here, the previous commit is still complete.
        checkpoint = trainer_stages.dump_commit(trainer)
        totals = EpochTotals.gather(trainer, collectives)
        tensors: list[Tensor] = []
        placeholders: list[TensorPlaceholder] = []
        module = trainer.lightning_module
        extracted = extract_tensors(checkpoint, tensors, placeholders)
        omitted = extract_tensors(_omitted_tensors(module, checkpoint["state_dict"]), tensors, placeholders)
        if self.shared is None or self.shared.placeholders != placeholders:
            self._check_fits(placeholders)
        synchronize_gpu()
        self._local_state = self._copy_local_state(trainer)
        self._random = user_modules.random_states()
        shared = SharedState(
            batches=trainer.fit_loop.epoch_loop.batch_progress.total.ready,
            step=trainer.global_step,
            world_size=trainer.world_size,
            first_world_size=first_world_size,
            checkpoint=extracted,
            modes={name: submodule.training for name, submodule in module.named_modules()},
            parameters={name: (each.shape, each.requires_grad) for name, each in module.named_parameters()},
            omitted=omitted,
            placeholders=placeholders,
            totals=totals,
            settings=trainer_stages.settings_of(trainer),
            tuned=trainer_stages.found_by_trials(trainer),
        )
        self._write(shared, tensors)

    def record_step(self, step: int) -> None:
        """Records the number of optimizer steps done. Called before each step; a no-op in this class."""

    def capture_final(self, trainer: "pl.Trainer", first_world_size: int, collectives: Collectives) -> None:
        """Called at the end of ``fit``. A no-op here: a commit in the memory of this process is not needed any more."""

    def _copy_local_state(self, trainer: "pl.Trainer") -> Any:
        """Returns the local state, except random states."""
        return StepStateSnapshot(trainer)

    def _restore_local_state(self, trainer: "pl.Trainer", local_state: Any) -> None:
        local_state.restore()

    def _write(self, shared: SharedState, tensors: list[Tensor]) -> None:
        reusable: list[Tensor | None] = [None] * len(tensors)
        for index, (old, tensor) in enumerate(zip(self._tensors, tensors, strict=False)):
            if (old.shape, old.dtype, old.layout) == (tensor.shape, tensor.dtype, tensor.layout):
                reusable[index] = old
        self._tensors = []  # frees tensors of other shapes before new ones are allocated
        self._tensors = copy_to_host(tensors, reusable, may_pin=self._may_pin)
        if self.shared is None:
            pickle_state(shared)  # an error now, not when a rank is lost
        self.shared = shared

    def _check_fits(self, placeholders: list[TensorPlaceholder]) -> None:
        """Checks that this host has enough memory for a commit, and decides whether to pin the memory.

        Args:
            placeholders: Placeholders of the commit.

        Raises:
            CommitTooLargeError: If there is too little memory.
        """
        self._check_bytes_fit(bytes_of(placeholders))
        pinned = sum(pinned_bytes(each.shape.numel() * each.dtype.itemsize) for each in placeholders)
        is_useful = self._can_be_pinned and torch.cuda.is_initialized()
        self._may_pin = is_useful and pinned * self._num_allocating_ranks <= self._free

    def check_later_size(self, trainer: "pl.Trainer") -> int:
        """Checks that later commits fit, which contain the state that optimizers create in their first step.

        Args:
            trainer: The Trainer, after the first optimizer step that follows the first commit.

        Returns:
            Size of such a commit, in bytes.

        Raises:
            CommitTooLargeError: If this host has too little memory.
        """
        assert self.shared is not None
        committed = bytes_of(items_in(self.shared.checkpoint["optimizer_states"], TensorPlaceholder))
        current = bytes_of(
            tensor for optimizer in trainer.optimizers for tensor in items_in(optimizer.state_dict(), Tensor)
        )
        num_bytes = bytes_of(self.shared.placeholders) + max(0, current - committed)
        self._check_bytes_fit(num_bytes)
        return num_bytes

    def _check_bytes_fit(self, num_bytes: int) -> None:
        if num_bytes * self._num_allocating_ranks > self._free:
            raise CommitTooLargeError(
                f"A commit has {num_bytes / 2**30:.1f} GiB, and each of the {self._num_allocating_ranks} ranks of this"
                f" host stores one; {self._free / 2**30:.1f} GiB of memory were free when `fit` began. {self.remedy},"
                " or use `strategy='ddp_ext'` with a ModelCheckpoint."
            )

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
        must_replace = is_behind or self.shared is None or self.shared.placeholders != shared.placeholders
        if must_replace:
            self._check_fits(shared.placeholders)
            tensors = [each.allocate(may_pin=self._may_pin) for each in shared.placeholders]
        collectives.broadcast_tensors(tensors, src)
        if must_replace:  # only now, because a rank may be lost during the broadcast
            self.shared, self._tensors = shared, tensors
        if is_behind:
            self._local_state = self._random = None

    def build_checkpoint(self) -> dict[str, Any]:
        """Returns the Lightning checkpoint, with new copies of its tensors."""
        assert self.shared is not None
        checkpoint: dict[str, Any] = insert_tensors(self.shared.checkpoint, self._tensors)
        return checkpoint

    def restore(self, trainer: "pl.Trainer", rank: int, *, all_ranks_have_local_state: bool) -> None:
        """Restores the state of a Trainer from the commit.

        Args:
            trainer: The Trainer.
            rank: Rank of this process.
            all_ranks_have_local_state: Whether the sum of the metrics and logged values of all ranks is complete. If
                not, the totals are restored in place of the local values.
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
        for name, value in self.shared.tuned.items():
            lightning_setattr(module, name, value)
        trainer_stages.restore_checkpoint(trainer, self.build_checkpoint())
        omitted, tensors = insert_tensors(self.shared.omitted, self._tensors), tensors_of(module)
        for name in omitted.keys() & tensors.keys():  # a rank may lack buffers that the forward pass creates
            _overwrite(tensors[name], omitted[name])
        if self._local_state is not None:
            self._restore_local_state(trainer, self._local_state)
        if not all_ranks_have_local_state and self.shared.totals is not None:
            self.shared.totals.restore(trainer, rank)
        self.restore_random()

    def find_difference(self, trainer: "pl.Trainer") -> str | None:
        """Describes the first parameter or parameter group that differs from the commit; None if there is none."""
        assert self.shared is not None
        committed = {name: shape for name, (shape, _) in self.shared.parameters.items()}
        current = {name: parameter.shape for name, parameter in trainer.lightning_module.named_parameters()}
        for name in {**committed, **current}:
            if committed.get(name) != current.get(name):
                found = _shape_text(committed.get(name)), _shape_text(current.get(name))
                return f"the parameter `{name}` {found[0]} in the commit, and {found[1]} on this rank"
        states = self.shared.checkpoint["optimizer_states"]
        committed_sizes = [_group_sizes(state.get("param_groups", [])) for state in states]
        current_sizes = [_group_sizes(optimizer.param_groups) for optimizer in trainer.optimizers]
        for index, (old, new) in enumerate(zip_longest(committed_sizes, current_sizes)):
            if old != new and old != []:  # the state of a custom optimizer may lack `param_groups`
                found = _groups_text(old), _groups_text(new)
                return f"optimizer {index} {found[0]} in the commit, and {found[1]} on this rank"
        return None

    def restore_random(self) -> None:
        """Restores the random states. Called again before the first step, because DataLoaders draw random numbers."""
        if self._random is not None:
            user_modules.set_random_states(self._random)


def snapshot_model(trainer: "pl.Trainer") -> Callable[[], None]:
    """Copies the module's structure and tensors, and the optimizers' parameter groups.

    Returns:
        A function that reverts later changes to them.
    """
    modules = [*trainer.lightning_module.modules()]
    modes = [module.training for module in modules]
    registries: list[tuple[dict[str, Any], dict[str, Any]]] = [  # each with a copy
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

    def revert() -> None:
        for optimizer, copied_groups in groups:
            optimizer.param_groups = [group for group, _ in copied_groups]
        copied_dicts = [*registries, *(pair for _, copied_groups in groups for pair in copied_groups)]
        for original, copied in copied_dicts:
            original.clear()
            original.update(copied)
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for tensor, is_trained, value in tensors:
            tensor.requires_grad_(is_trained)
            _overwrite(tensor, value)

    return revert


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
