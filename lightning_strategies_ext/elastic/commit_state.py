"""Nested state of a commit: its tensors are extracted and stored apart, and all else can be pickled."""

import copy
import io
import pickle
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_strategies_ext.nested import is_collection, parts_of, rebuild

T = TypeVar("T")


@dataclass(frozen=True)
class TensorPlaceholder:
    """Placeholder of a tensor in a nested structure; the index is that of the tensor in the commit's list."""

    index: int
    shape: torch.Size
    dtype: torch.dtype

    def allocate(self, *, may_pin: bool) -> Tensor:
        """Returns an uninitialized tensor on the host, in pinned memory if possible."""
        if may_pin:
            with suppress(RuntimeError):  # CUDA has no memory to pin
                return torch.empty(self.shape, dtype=self.dtype, pin_memory=True)
        return torch.empty(self.shape, dtype=self.dtype)


class _HostPickler(pickle.Pickler):
    """Pickler that stores all tensors as tensors of the CPU: a process that loads them may have other devices."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def pickle_state(state: Any) -> bytes:
    """Returns the pickle of state of a commit, with all tensors on the CPU.

    Raises:
        RuntimeError: If the state cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        _HostPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(state)
    except Exception as error:
        raise RuntimeError(
            f"The state of this run cannot be passed to new or restarted ranks: {error}. Make sure that the state that"
            " callbacks and modules put into checkpoints can be pickled."
        ) from error
    return buffer.getvalue()


def bytes_of(tensors: Iterable[Tensor | TensorPlaceholder]) -> int:
    """Returns the size of tensors, in bytes."""
    return sum(each.shape.numel() * each.dtype.itemsize for each in tensors)


def items_in(value: Any, kind: type[T]) -> Iterator[T]:
    """Yields the items of a type in a nested structure."""
    if isinstance(value, kind):
        yield value
    elif is_collection(value):
        for part in parts_of(value):
            yield from items_in(part, kind)


def extract_tensors(value: Any, tensors: list[Tensor], placeholders: list[TensorPlaceholder]) -> Any:
    """Returns a copy of a nested structure with placeholders for its tensors, and appends both to the lists."""
    if isinstance(value, Tensor):
        placeholders.append(TensorPlaceholder(len(tensors), value.shape, value.dtype))
        tensors.append(value)
        return placeholders[-1]
    if is_collection(value):
        return rebuild(value, [extract_tensors(part, tensors, placeholders) for part in parts_of(value)])
    return copy.deepcopy(value)


def insert_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Returns a copy of a nested structure with copies of the tensors in place of their placeholders."""
    if isinstance(value, TensorPlaceholder):
        return tensors[value.index].clone()
    if is_collection(value):
        return rebuild(value, [insert_tensors(part, tensors) for part in parts_of(value)])
    return copy.deepcopy(value)
