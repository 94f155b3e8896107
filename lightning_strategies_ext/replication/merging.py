"""Merges the changes that replicas have made during a step into the module.

Buffers: the module keeps the buffers of the first replica. An error is raised for integers that differ between
replicas, and for a queue, into which each replica has written rows of its samples. A warning is logged for integers
that may count samples.

Attributes: the module receives the value, if all replicas have set equal values. Lists, dicts, sets, and deques are
merged, if the result equals that of one step with the whole batch: entries that replicas append to a list, in order;
entries that they add to a set; dict entries that all replicas set to the same value, or that each replica sets under
different keys. Any other change is an error.

Limitations: Containers inside a container of more than 64 entries, or inside other objects, are not merged.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import Module

from lightning_strategies_ext.nested import class_identity
from lightning_strategies_ext.replication.metrics import ReplicaMetric
from lightning_strategies_ext.replication.shared_tensors import CONTAINERS, MAX_INSPECTED_LENGTH, entries_of, version_of

#: Stands for an attribute or entry that does not exist.
MISSING = object()
#: Attributes that are merged separately, or not at all: the lists of weights of torch's recurrent modules.
HANDLED_ATTRIBUTES = {"_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"}
_MUTABLE = CONTAINERS - {tuple}
_STRUCTURE_ADVICE = (
    "Each replica changes its own copy of the module, and only one can be kept. Make the change in a hook that runs"
    " once, such as `on_train_batch_start`."
)
#: Maximum number of integers in a buffer that is checked for equal counts of samples, and their types.
_MAX_COUNTS = 4096
_COUNT_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class UnmergeableError(Exception):
    """Raised if changes of replicas cannot be merged. The message names the changed object.

    Args:
        name: The changed object.
        action: What the step did with it.
        advice: Reason and solution, if they are not those for changes that differ between replicas.
    """

    def __init__(self, name: str, action: str = "changed", advice: str | None = None) -> None:
        super().__init__(name)
        self.action = action
        self.advice = advice


@dataclass
class ModuleCopy:
    """A copied module in a replica.

    Attributes:
        module: Copied module.
        attributes_before: Attributes of the copy before the step.
        parameters_before: Parameters of the copy before the step.
        submodules_before: Submodules of the copy before the step.
        buffers_before: Buffers of the copy before the step, without running statistics.
        buffer_names: Names of all buffers of the copy before the step.
    """

    module: Module
    attributes_before: dict[str, Any]
    parameters_before: dict[str, Any]
    submodules_before: dict[str, Any]
    buffers_before: dict[str, "BufferState"]
    buffer_names: tuple[str, ...] = ()


@dataclass
class BufferState:
    """State of a buffer before a step.

    Attributes:
        buffer: The buffer.
        version: Its version.
        counts: Copy of its values, if it may count samples.
    """

    buffer: Tensor | None
    version: int
    counts: Tensor | None


def buffers_to_compare(module: Module, has_counts: bool) -> dict[str, BufferState]:
    """Returns the state of the buffers of a replica's module, except running statistics.

    Running statistics are the buffers of torch's modules (batch normalization, observers), and buffers with the names
    that torch uses for them.

    Args:
        module: Module in a replica.
        has_counts: Whether to copy the values of buffers that may count samples. One replica's copy is sufficient.
    """
    if type(module).__module__.startswith("torch."):
        return {}
    states = {}
    for name, buffer in module._buffers.items():
        if not name.startswith("running_") and name != "num_batches_tracked":
            counts = None
            if has_counts and buffer is not None and buffer.dtype in _COUNT_TYPES and buffer.layout == torch.strided:
                counts = buffer.clone() if 0 < buffer.numel() <= _MAX_COUNTS else None
            states[name] = BufferState(buffer, version_of(buffer), counts)
    return states


def merge_module(
    original: Module,
    copies: Sequence[ModuleCopy],
    containers: Sequence[str],
    sizes: Sequence[int],
    device: torch.device,
    merged: set[int],
) -> None:
    """Merges the changes of replicas into one module, without its submodules.

    Args:
        original: The module.
        copies: Its copy in each replica.
        containers: Names of its attributes that are containers, of which each replica has a copy.
        sizes: Number of samples of each replica.
        device: Device of the module.
        merged: Ids of the containers that have been merged, as for :func:`merge_containers`.

    Raises:
        UnmergeableError: If changes cannot be merged.
    """
    for copy in copies:
        for before, kind in ((copy.parameters_before, "parameter"), (copy.submodules_before, "submodule")):
            now = copy.module._parameters if kind == "parameter" else copy.module._modules
            if now.keys() == before.keys() and all(map(is_, now.values(), before.values())):
                continue
            for name in {**before, **now}:
                if before.get(name, MISSING) is not now.get(name, MISSING):
                    action = "set" if name in now else "deleted"
                    raise UnmergeableError(f"the {kind} `self.{name}`", action, _STRUCTURE_ADVICE)
    _merge_buffers(original, copies, sizes, device)
    changed: dict[str, None] = {}
    for copy in copies:
        now, before = copy.module.__dict__, copy.attributes_before
        changed.update((name, None) for name, value in now.items() if before.get(name, MISSING) is not value)
        if len(now) < len(before) or not before.keys() <= now.keys():
            changed.update((name, None) for name in before if name not in now)
    for name in changed:
        if name in HANDLED_ATTRIBUTES:
            continue
        values = [copy.module.__dict__.get(name, MISSING) for copy in copies]
        values = [move_data_to_device(value, device) for value in values]
        if not all(is_equal_value(values[0], value) for value in values[1:]):
            raise UnmergeableError(f"`self.{name}`")
        warn_if_counts_samples(f"self.{name}", original.__dict__.get(name), values[0], sizes)
        if values[0] is MISSING:
            original.__dict__.pop(name, None)
        else:
            setattr(original, name, values[0])
    for name in containers:
        if name not in changed:
            copied = [copy.module.__dict__[name] for copy in copies]
            merge_containers(original.__dict__[name], copied, f"self.{name}", sizes, device, merged)


def merge_containers(
    original: Any, copies: Sequence[Any], path: str, sizes: Sequence[int], device: torch.device, merged: set[int]
) -> None:
    """Merges the changes of replicas into a container of the module.

    Args:
        original: Container of the module.
        copies: Copies of the replicas, in order.
        path: Path of the container in messages, such as ``self.outputs``.
        sizes: Number of samples of each replica.
        device: Device of tensors in the result.
        merged: Ids of the module's containers that have been merged. A container with several paths is merged once.

    Raises:
        UnmergeableError: If the result would differ from the result of one step with the whole batch.
    """
    if id(original) in merged:
        return
    merged.add(id(original))
    if isinstance(original, tuple):
        _merge_nested(original, copies, path, sizes, device, merged)
    elif isinstance(original, list):
        length = len(original)
        if any(not _starts_with(values, original) for values in copies):
            raise UnmergeableError(f"the list `{path}`, to which a step may only append,")
        _merge_nested(original, copies, path, sizes, device, merged)
        for values in copies:
            original.extend(move_data_to_device(value, device) for value in values[length:])
    elif isinstance(original, dict):
        if not all(_is_equal_container(values, original) for values in copies):
            _merge_nested(original, copies, path, sizes, device, merged)
            _merge_keys(original, copies, path, sizes, device, merged)
    elif all(_is_equal_container(values, original) for values in copies):
        return
    elif isinstance(original, set) and all(values >= original for values in copies):
        original.update(*copies)
    elif all(_is_equal_container(values, copies[0]) for values in copies):
        original.clear()
        (original.update if isinstance(original, set) else original.extend)(copies[0])
    else:
        raise UnmergeableError(f"`{path}`")


def is_equal_value(one: Any, other: Any) -> bool:
    """Returns whether values that two replicas have set are equal; False for types that are not compared."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, type) and isinstance(other, type):
        return class_identity(one) == class_identity(other)
    if class_identity(type(one)) != class_identity(type(other)):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(is_equal_value, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_equal_value(value, other[key]) for key, value in one.items())
    return isinstance(one, (bool, int, float, str, bytes, Enum, np.generic, torch.device, torch.dtype)) and one == other


def warn_if_counts_samples(path: str, before: Any, after: Any, sizes: Sequence[int]) -> None:
    """Warns if a number that all replicas have set to the same value looks like a count of their samples."""
    if type(after) is not int or len(set(sizes)) > 1 or len(sizes) < 2 or sizes[0] < 2:
        return
    counted = after - before if type(before) is int else after
    if counted > 0 and counted % sizes[0] == 0:
        _warn_of_count(path, counted, sizes)


def _warn_of_count(path: str, growth: int, sizes: Sequence[int]) -> None:
    rank_zero_warn(
        f"`{path}` has grown by {growth} in each of {len(sizes)} replicas, which have {sizes[0]} samples each. An"
        " attribute or buffer that all replicas set to the same value is set once: if it counts samples, it counts the"
        " samples of only one replica. Count in `on_train_batch_end` or a similar hook, which receives the whole batch."
    )


def _merge_buffers(original: Module, copies: Sequence[ModuleCopy], sizes: Sequence[int], device: torch.device) -> None:
    for name in copies[0].buffers_before:
        if _has_lost_writes(name, copies, sizes, device):
            raise UnmergeableError(f"the buffer `self.{name}`")
    buffers = [copy.module._buffers for copy in copies]
    # Code that runs once may have registered other buffers, which the replicas lack.
    for name in [name for name in copies[0].buffer_names if any(name not in named for named in buffers)]:
        if any(name in named for named in buffers):
            raise UnmergeableError(f"the buffer `self.{name}`")
        original._buffers.pop(name, None)
    original._buffers.update(buffers[0])


def _has_lost_writes(name: str, copies: Sequence[ModuleCopy], sizes: Sequence[int], device: torch.device) -> bool:
    """Returns whether the first replica's buffer lacks counts or rows that other replicas have written.

    Warns if it may lack counts that are equal in all replicas.

    Only the other replicas are checked for writes, because the first uses the module's buffers, which hooks of an
    optimizer may have changed. Buffers of different shapes are caches whose size depends on the part of the batch.
    """
    buffers = [copy.module._buffers.get(name) for copy in copies]
    before = [copy.buffers_before[name] for copy in copies]
    if all(
        buffer is state.buffer and version_of(buffer) == state.version
        for state, buffer in zip(before[1:], buffers[1:], strict=True)
    ):
        return False
    first, *others = (None if buffer is None else buffer.to(device) for buffer in buffers)
    if first is None:
        return False
    comparable = [other for other in others if other is not None and other.shape == first.shape]
    if any(_is_count_or_queue(first, other, max(sizes)) for other in comparable):
        return True
    counts = before[1].counts if len(before) > 1 else None
    if counts is not None and len(comparable) == len(others):
        _warn_if_buffer_counts_samples(name, counts.to(device), first, sizes)
    return False


def _warn_if_buffer_counts_samples(name: str, before: Tensor, after: Tensor, sizes: Sequence[int]) -> None:
    """Warns if integers that are equal in all replicas have grown by their number of samples, each or in total."""
    if len(set(sizes)) > 1 or sizes[0] < 2 or after.dtype not in _COUNT_TYPES or after.shape != before.shape:
        return
    growth = after.long() - before.long()
    if (growth == sizes[0]).all() or (growth.sum() == sizes[0] and (growth >= 0).all()):
        _warn_of_count(f"self.{name}", sizes[0], sizes)


def _is_count_or_queue(one: Tensor, other: Tensor, num_samples: int) -> bool:
    """Returns whether a buffer differs between two replicas like a count or a queue, not like a running mean.

    Integers are counts. A queue receives one row per sample: the rows that differ are one block, which may wrap around,
    and their number is a multiple of the number of samples. In a running mean, any entries may differ.
    """
    differs = (one != other) & ((one == one) | (other == other))  # treats NaNs as equal
    if not one.is_floating_point() or not differs.any():
        return bool(differs.any())
    for dim in range(one.ndim):
        rows = differs.movedim(dim, 0).reshape(one.shape[dim], -1).any(1)
        num_boundaries = (rows != rows.roll(1)).sum()  # a block has two
        if num_boundaries == 2 and rows.sum() % num_samples == 0:
            return True
    return False


def _merge_nested(
    original: Any, copies: Sequence[Any], path: str, sizes: Sequence[int], device: torch.device, merged: set[int]
) -> None:
    for key, entry in list(entries_of(original)):
        copied = [_get(values, key) for values in copies]
        if _is_merged(entry, copied):
            merge_containers(entry, copied, f"{path}[{key!r}]", sizes, device, merged)


def _is_merged(entry: Any, copies: Sequence[Any]) -> bool:
    """Returns whether :func:`_merge_nested` merges an entry of a container, of which replicas have copies."""
    if any(type(value) is not type(entry) for value in copies):
        return False
    if type(entry) is tuple:  # may contain lists; a tuple with other entries is a new value
        return all(len(value) == len(entry) for value in copies) and all(
            _is_merged(part, column) or all(_is_unchanged(part, value) for value in column)
            for part, *column in zip(entry, *copies, strict=True)
        )
    return type(entry) in _MUTABLE


def _merge_keys(
    original: Any, copies: Sequence[Any], path: str, sizes: Sequence[int], device: torch.device, merged: set[int]
) -> None:
    """Merges new and deleted keys of a dict, and the changed values that :func:`_merge_nested` does not merge."""
    merged_keys = {key for key, entry in entries_of(original) if _is_merged(entry, [_get(c, key) for c in copies])}
    if isinstance(original, defaultdict) and original.default_factory is list:
        for key in dict.fromkeys(key for values in copies for key in values if key not in original):
            lists = [values.get(key, []) for values in copies]  # replicas may have appended to new lists
            if all(type(values) is list for values in lists):
                original[key] = []
                merged_keys.add(key)
                merge_containers(original[key], lists, f"{path}[{key!r}]", sizes, device, merged)
    changes = []
    for values in copies:
        keys = [key for key in {**original, **values} if key not in merged_keys]
        after = {key: values.get(key, MISSING) for key in keys}
        changes.append({key: new for key, new in after.items() if not _is_unchanged(original.get(key, MISSING), new)})
    are_equal = all(is_equal_value(changed, changes[0]) for changed in changes)
    [(key, num_replicas)] = Counter(chain.from_iterable(changes)).most_common(1) or [(None, 0)]
    if num_replicas > 1 and not are_equal:  # several replicas have changed this key
        raise UnmergeableError(f"`{path}[{key!r}]`")
    for changed in changes[:1] if are_equal else changes:
        for key, new in changed.items():
            if are_equal:
                warn_if_counts_samples(f"{path}[{key!r}]", original.get(key), new, sizes)
            if new is MISSING:
                original.pop(key, None)
            else:
                original[key] = move_data_to_device(new, device)


def _get(values: Any, key: Any) -> Any:
    try:
        return values[key]
    except (KeyError, IndexError):
        return MISSING


def _starts_with(values: list[Any], start: list[Any]) -> bool:
    """Returns whether a list begins with the entries of another; changes inside of containers are allowed."""
    if len(start) > MAX_INSPECTED_LENGTH:
        return _is_equal_container(values[: len(start)], start)
    return len(values) >= len(start) and all(
        _is_merged(before, [after]) or _is_unchanged(before, after)
        for before, after in zip(start, values, strict=False)
    )


def _is_unchanged(before: Any, after: Any) -> bool:
    if before is after or (isinstance(after, ReplicaMetric) and after.__wrapped__ is before):
        return True
    return is_equal_value(before, after)


def _is_equal_container(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)  # fast: containers compare entries by identity first
    except (RuntimeError, ValueError):  # different tensors or arrays
        return False
