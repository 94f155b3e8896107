"""Lists, dicts, sets, and deques in a module's attributes: a copy for each replica, and the merge after a step.

Each replica changes its own copy. After the step, the changes are merged into the module's container, if the result
equals that of one step with the whole batch: entries that replicas append to a list, in order; entries that they add to
a set; dict entries that all replicas set to the same value, or that each replica sets under different keys. Any other
change is an error.

Limitations: Containers inside a container of more than 64 entries, or inside other objects, are not merged.
"""

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import chain
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_strategies_ext.nested import class_identity
from lightning_strategies_ext.replication.context import ReplicaContext
from lightning_strategies_ext.replication.metrics import ReplicaMetric, is_metric

MISSING = object()
_DICTS = (dict, OrderedDict, defaultdict, Counter)
CONTAINERS = frozenset((list, tuple, set, deque, *_DICTS))
_CHANGEABLE = CONTAINERS - {tuple}
MAX_OPEN_LENGTH = 64


class UnmergeableError(Exception):
    """Raised if changes of replicas cannot be merged. The message names the changed object."""


def entries_of(container: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the keys and entries of a container; nothing for a set, or for more than ``MAX_OPEN_LENGTH`` entries."""
    if len(container) <= MAX_OPEN_LENGTH and not isinstance(container, set):
        yield from container.items() if isinstance(container, dict) else enumerate(container)


def copy_for_replica(value: Any, context: ReplicaContext) -> Any:
    """Returns a copy of a container for a replica, with proxies of metrics; other values are returned unchanged."""
    if is_metric(value):
        return ReplicaMetric(value, context)
    kind = type(value)
    if kind not in CONTAINERS:
        return value
    own = {key: copied for key, entry in entries_of(value) if (copied := copy_for_replica(entry, context)) is not entry}
    if kind is tuple:
        return tuple(own.get(i, entry) for i, entry in enumerate(value)) if own else value
    result = copy.copy(value)
    for key, entry in own.items():
        result[key] = entry
    return result


def merge_containers(
    original: Any, copies: Sequence[Any], path: str, sizes: Sequence[int], device: torch.device
) -> None:
    """Merges the changes of replicas into a container of the module.

    Args:
        original: Container of the module.
        copies: Copies of the replicas, in order.
        path: Path of the container in messages, such as ``self.outputs``.
        sizes: Number of samples of each replica.
        device: Device of tensors in the result.

    Raises:
        UnmergeableError: If the result would differ from the result of one step with the whole batch.
    """
    if isinstance(original, tuple):
        _merge_entries(original, copies, path, sizes, device)
    elif isinstance(original, list):
        length = len(original)
        if any(not _starts_with(values, original) for values in copies):
            raise UnmergeableError(f"the list `{path}`, to which a step may only append,")
        _merge_entries(original, copies, path, sizes, device)
        for values in copies:
            original.extend(move_data_to_device(value, device) for value in values[length:])
    elif isinstance(original, dict):
        if not all(_is_equal(values, original) for values in copies):
            _merge_entries(original, copies, path, sizes, device)
            _merge_keys(original, copies, path, sizes, device)
    elif all(_is_equal(values, original) for values in copies):
        return
    elif isinstance(original, set) and all(values >= original for values in copies):
        original.update(*copies)
    elif all(_is_equal(values, copies[0]) for values in copies):
        original.clear()
        (original.update if isinstance(original, set) else original.extend)(copies[0])
    else:
        raise UnmergeableError(f"`{path}`")


def is_same(one: Any, other: Any) -> bool:
    """Returns whether values that two replicas have set are equal."""
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
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(value, other[key]) for key, value in one.items())
    return isinstance(one, (bool, int, float, str, bytes, Enum, np.generic, torch.device, torch.dtype)) and one == other


def warn_if_counts_samples(path: str, before: Any, after: Any, sizes: Sequence[int]) -> None:
    """Warns if a number that all replicas have set to the same value looks like a count of their samples."""
    if type(after) is not int or len(set(sizes)) > 1 or len(sizes) < 2 or sizes[0] < 2:
        return
    counted = after - before if type(before) is int else after
    if counted > 0 and counted % sizes[0] == 0:
        rank_zero_warn(
            f"`{path}` has grown by {counted} in each of {len(sizes)} replicas, which have {sizes[0]} samples each."
            " An attribute that all replicas set to the same value is set once: if it counts samples, it counts the"
            " samples of only one replica. Count in `on_train_batch_end` or a similar hook, which receives the whole"
            " batch."
        )


def _merge_entries(original: Any, copies: Sequence[Any], path: str, sizes: Sequence[int], device: torch.device) -> None:
    """Merges the containers inside a container."""
    for key, entry in list(entries_of(original)):
        others = [_get(values, key) for values in copies]
        if type(entry) in _CHANGEABLE and all(type(other) is type(entry) for other in others):
            merge_containers(entry, others, f"{path}[{key!r}]", sizes, device)


def _merge_keys(original: Any, copies: Sequence[Any], path: str, sizes: Sequence[int], device: torch.device) -> None:
    """Merges the other changes in a dict."""
    if (
        isinstance(original, defaultdict) and original.default_factory is list
    ):  # replicas may have appended to new lists
        for key in dict.fromkeys(key for values in copies for key in values if key not in original):
            original[key] = []
            merge_containers(
                original[key], [values.get(key, []) for values in copies], f"{path}[{key!r}]", sizes, device
            )
    opened = {key for key, entry in entries_of(original) if type(entry) in _CHANGEABLE}
    changes = []
    for values in copies:
        keys = [key for key in {**original, **values} if key not in opened or key not in values]
        changed = {key: values.get(key, MISSING) for key in keys}
        changes.append({key: new for key, new in changed.items() if not _is_unchanged(original.get(key, MISSING), new)})
    is_alike = all(is_same(changed, changes[0]) for changed in changes)
    [(key, times)] = Counter(chain.from_iterable(changes)).most_common(1) or [(None, 0)]
    if times > 1 and not is_alike:
        raise UnmergeableError(f"`{path}[{key!r}]`")
    for changed in changes[:1] if is_alike else changes:
        for key, new in changed.items():
            if is_alike:
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
    if len(start) > MAX_OPEN_LENGTH:
        return _is_equal(values[: len(start)], start)
    return len(values) >= len(start) and all(
        _is_unchanged(ours, theirs) or (type(ours) is type(theirs) and type(ours) in _CHANGEABLE)
        for ours, theirs in zip(start, values, strict=False)
    )


def _is_unchanged(ours: Any, theirs: Any) -> bool:
    return ours is theirs or (isinstance(theirs, ReplicaMetric) and theirs.__wrapped__ is ours) or is_same(ours, theirs)


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)  # fast: containers compare entries by identity first
    except (RuntimeError, ValueError):  # different tensors or arrays
        return False
