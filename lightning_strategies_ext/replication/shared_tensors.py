"""Detects writes to shared tensors: parameters, and tensors and arrays in attributes, which a step must not change.

Attributes include lists, dicts, tuples, and sets at any depth, and modules in these containers, which are not
submodules and therefore not replicated.

If each replica writes to a shared tensor, the change happens once per replica, or is lost with a copy on another GPU.
torch counts most writes to a tensor, but not writes through ``parameter.data``, a common way to update a target
network. On the CPU, where replicas share the parameters, these writes are detected by comparing norms.

Limitations: These changes are not detected: writes through ``.data`` to parameters on GPUs, because a check would
synchronize with the device, or to tensors that are not parameters; changes that preserve a parameter's norm; changes of
an array of more than 64 KiB; and changes inside a container of more than 64 entries.
"""

import math
from collections.abc import Iterator, Sequence, Set
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module, Parameter

from lightning_strategies_ext.replication.containers import CONTAINERS, MAX_OPEN_LENGTH, entries_of
from lightning_strategies_ext.replication.metrics import is_metric

#: Types of immutable entries, which most containers have.
_PLAIN = frozenset((int, float, bool, str, bytes, complex, type(None)))
_MAX_ARRAY_BYTES = 1 << 16
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class SharedTensorGuard:
    """Detects whether tensors have been written to since the last :meth:`snapshot`.

    Args:
        values: Tensors and arrays to check.
        origins: For each value, the parameter that it is or was copied from, or its name in messages.
    """

    def __init__(self, values: Sequence[Any], origins: Sequence[Parameter | str]) -> None:
        self._values, self._origins = values, origins
        self._measured = [(value, origin) for value, origin in zip(values, origins, strict=True) if _has_norm(value)]
        self.snapshot()

    def snapshot(self) -> None:
        """Records the current state of the values."""
        self._versions, self._norms = self._versions_now(), self._norms_now()

    def first_written(self) -> Parameter | str | None:
        """Returns the origin of a value that has been written to, or None."""
        versions = self._versions_now()
        if versions != self._versions:
            changes = [before != now for before, now in zip(self._versions, versions, strict=True)]
            return self._origins[changes.index(True)]
        for (_, origin), before, now in zip(self._measured, self._norms, self._norms_now(), strict=True):
            if before != now and not math.isnan(before):
                return origin
        return None

    def _versions_now(self) -> list[int]:
        return [version_of(value) for value in self._values]

    @torch.no_grad()
    def _norms_now(self) -> list[float]:
        parameters = [parameter for parameter, _ in self._measured]
        return [norm.item() for norm in torch._foreach_norm(parameters)] if parameters else []


def version_of(value: Any) -> int:
    """Returns a number that changes when a tensor or a small array is written to in place; 0 for other objects."""
    if isinstance(value, np.ndarray):
        return hash(value.tobytes()) if value.nbytes <= _MAX_ARRAY_BYTES else 0
    try:
        return value._version  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError):  # tensors that were created in inference mode have no version
        return 0


def _has_norm(value: Any) -> bool:
    return type(value) is Parameter and value.is_cpu and value.dtype in _FLOATS  # a copy of a parameter is a Tensor


def writable_in(value: Any, place: str, known: Set[int]) -> Iterator[tuple[Any, str]]:
    """Yields the tensors and arrays in an attribute, each with its path.

    Args:
        value: Value of the attribute.
        place: Path of the attribute in messages.
        known: Ids of modules and parameters that are checked separately.
    """
    if isinstance(value, (Tensor, np.ndarray)):
        if id(value) not in known:
            yield value, place
    elif type(value) in CONTAINERS:
        is_small_set = type(value) is set and len(value) <= MAX_OPEN_LENGTH
        for key, entry in ((..., entry) for entry in value) if is_small_set else entries_of(value):
            if type(entry) not in _PLAIN:  # this check is faster than formatting a name
                name = f"{place}{{...}}" if is_small_set else f"{place}[{key!r}]"
                yield from writable_in(entry, name, known)
    elif isinstance(value, Module) and not is_metric(value):
        for path, module in value.named_modules(prefix=place):
            if id(module) not in known and not is_metric(module):
                for name, tensor in chain(module._parameters.items(), module._buffers.items()):
                    if tensor is not None and id(tensor) not in known and not writes_to_weight(module):
                        yield tensor, f"{path}.{name}"


def writes_to_weight(module: Module) -> bool:
    """Returns whether a module's forward pass writes to its weight: embeddings with ``max_norm`` renormalize rows."""
    return isinstance(module, (Embedding, EmbeddingBag)) and module.max_norm is not None
