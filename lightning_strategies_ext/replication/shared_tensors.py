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
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence, Set
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module, Parameter

from lightning_strategies_ext.replication.metrics import is_metric

#: Types of containers that replicas copy, and whose entries are inspected; subclasses are opaque objects.
CONTAINERS = frozenset((list, tuple, set, deque, dict, OrderedDict, defaultdict, Counter))
#: Maximum number of entries of a container that is inspected.
MAX_INSPECTED_LENGTH = 64
#: Types of most entries, which contain no tensor.
_TYPES_WITHOUT_TENSORS = frozenset((int, float, bool, str, bytes, complex, type(None)))
_MAX_ARRAY_BYTES = 1 << 16
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class SharedTensorGuard:
    """Detects whether tensors have been written to since the last :meth:`snapshot`.

    Args:
        values: Tensors and arrays to check, each with the parameter that it is or was copied from, or with its name in
            messages.
    """

    def __init__(self, values: Sequence[tuple[Any, Parameter | str]]) -> None:
        self._values = values
        self._with_norm = [(value, origin) for value, origin in values if _has_norm(value)]
        self.snapshot()

    def snapshot(self) -> None:
        """Records the current state of the values."""
        self._versions, self._norms = self._current_versions(), self._current_norms()

    def find_written(self) -> Parameter | str | None:
        """Returns the parameter or the name of the first value that has been written to, or None."""
        versions = self._current_versions()
        if versions != self._versions:
            changes = [before != now for before, now in zip(self._versions, versions, strict=True)]
            return self._values[changes.index(True)][1]
        for (_, origin), before, now in zip(self._with_norm, self._norms, self._current_norms(), strict=True):
            if before != now and not math.isnan(before):
                return origin
        return None

    def _current_versions(self) -> list[int]:
        return [version_of(value) for value, _ in self._values]

    @torch.no_grad()
    def _current_norms(self) -> list[float]:
        parameters = [parameter for parameter, _ in self._with_norm]
        return [norm.item() for norm in torch._foreach_norm(parameters)] if parameters else []


def version_of(value: Any) -> int:
    """Returns a number that changes when a tensor or a small array is written to in place; 0 for other objects."""
    if isinstance(value, np.ndarray):
        return hash(value.tobytes()) if value.nbytes <= _MAX_ARRAY_BYTES else 0
    try:
        return value._version  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError):  # tensors that were created in inference mode have no version
        return 0


def tensors_in(
    value: Any, path: str, checked: Set[int], outer_containers: tuple[Any, ...] = ()
) -> Iterator[tuple[Any, str]]:
    """Yields the tensors and arrays in an attribute, each with its path.

    Args:
        value: Value of the attribute.
        path: Path of the attribute in messages, such as ``self.teachers``.
        checked: Ids of modules and parameters that are checked separately, and therefore left out.
        outer_containers: Containers that contain the value. A container within itself is left out.
    """
    if isinstance(value, (Tensor, np.ndarray)):
        if id(value) not in checked:
            yield value, path
    elif type(value) in CONTAINERS:
        if any(value is container for container in outer_containers):
            return
        outer_containers = (*outer_containers, value)
        is_small_set = type(value) is set and len(value) <= MAX_INSPECTED_LENGTH
        for key, entry in ((..., entry) for entry in value) if is_small_set else entries_of(value):
            if type(entry) not in _TYPES_WITHOUT_TENSORS:  # this check is faster than formatting a path
                entry_path = f"{path}{{...}}" if is_small_set else f"{path}[{key!r}]"
                yield from tensors_in(entry, entry_path, checked, outer_containers)
    elif isinstance(value, Module) and not is_metric(value):
        for module_path, module in value.named_modules(prefix=path):
            if id(module) not in checked and not is_metric(module):
                for name, tensor in chain(module._parameters.items(), module._buffers.items()):
                    if tensor is not None and id(tensor) not in checked and not has_renormalized_weight(module):
                        yield tensor, f"{module_path}.{name}"


def entries_of(container: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the keys and entries of a container; nothing for a set or for a container that is too long to inspect."""
    if len(container) <= MAX_INSPECTED_LENGTH and not isinstance(container, set):
        yield from container.items() if isinstance(container, dict) else enumerate(container)


def has_renormalized_weight(module: Module) -> bool:
    """Returns whether a module's forward pass writes to its weight: embeddings with ``max_norm`` renormalize rows."""
    return isinstance(module, (Embedding, EmbeddingBag)) and module.max_norm is not None


def _has_norm(value: Any) -> bool:
    return type(value) is Parameter and value.is_cpu and value.dtype in _FLOATS  # a copy of a parameter is a Tensor
