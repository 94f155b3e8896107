"""First of three modules for a stage's results: captures the state before a stage, and finds what has changed.

The results consist of attributes, not of a ``state_dict``, so that they include attributes that no checkpoint has. They
contain all attributes of callbacks and loggers. Attributes of the LightningModule, its submodules, and the datamodule
may be large, so the results contain only those that the stage has changed.
"""

import hashlib
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.utils.data import RandomSampler, SequentialSampler

from lightning_strategies_ext.launch.tasks.module_tree import ModuleTree, is_in_shared_memory
from lightning_strategies_ext.launch.tasks.object_changes import WHOLE, all_attributes, attributes_of
from lightning_strategies_ext.launch.transport.memory_files import ReceivedBuffers
from lightning_strategies_ext.launch.transport.pickling import SharedObjects, dump
from lightning_strategies_ext.launch.transport.reducers import names_of_computed

_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "lightning_strategies_ext")
#: Depth to which nested containers are counted, and length from which the elements of a container are not.
_DEPTH = 4
_MAX_COUNTED_LENGTH = 1000


class StageBaseline:
    """State before a stage.

    - Identity: the baseline refers to the Trainer's own objects, and keeps the objects of the message alive.
    - Aliasing: tensors are recorded by the address of their data, so that a tensor with new memory counts as changed.
    - Memory: no tensor is copied, because the memory files of the message keep the values before the stage. Only
      digests of attributes are added.

    Args:
        trainer: The Trainer.
        shared: Objects that the main process has, including those in its message.
        received: Memory files of the message.

    Attributes:
        tree: The module's tree.
    """

    def __init__(self, trainer: Any, shared: SharedObjects, received: ReceivedBuffers) -> None:
        module = trainer.lightning_module
        self.tree = ModuleTree(module)
        self.shared = shared
        self._received = received
        # Fingerprints cover the contents of shared objects, in place of which a result has only their numbers.
        self._shared_by_name = replace(shared, in_message={})
        # The stage sets the Trainer's datamodule later.
        datamodules = {id(obj): obj for obj in shared.objects if isinstance(obj, LightningDataModule)}
        compared = [*module.modules(), *datamodules.values()]
        self._classes = [(holder, _class_of(holder)) for holder in compared]
        self._fingerprints: list[tuple[Any, dict[str, Any]]] = [
            (holder, {name: fingerprint for name, _, fingerprint in self._fingerprints_of(holder)})
            for holder in compared
        ]
        self._names = [(obj, dict.fromkeys(all_attributes(obj))) for obj in (*trainer.callbacks, *trainer.loggers)]
        is_predicting = trainer.state.fn == TrainerFn.PREDICTING
        collecting = [*trainer.callbacks, module] if is_predicting else []
        self._extents = [(holder, dict(_extents(holder))) for holder in collecting]
        tensors = (*module.parameters(), *module.buffers(), *shared.in_message.values())
        self._sent = [obj for obj in tensors if isinstance(obj, (Tensor, np.ndarray))]  # keeps ids unique
        self._addresses = {id(obj): _data_address(obj) for obj in self._sent}

    def is_unchanged(self, obj: Any) -> bool:
        """Whether an object is a tensor or array that was sent and still has the same memory and values."""
        if not isinstance(obj, (Tensor, np.ndarray)) or self._addresses.get(id(obj)) != _data_address(obj):
            return False
        if isinstance(obj, Tensor):
            return is_in_shared_memory(obj) or self._received.is_unchanged(obj)
        is_plain = obj.flags.c_contiguous and not obj.dtype.hasobject
        return is_plain and self._received.is_unchanged_memory(obj.ctypes.data, obj.nbytes)

    def changed_attributes(self) -> Iterator[tuple[Any, str, Any]]:
        """Yields new and changed attributes of the module, its submodules, and the datamodule: object, name, value."""
        for holder, before in self._fingerprints:
            for name, value, fingerprint in self._fingerprints_of(holder):
                digest, buffers = fingerprint
                is_same = digest is not None and before.get(name) == fingerprint
                if not is_same or (self._received and not all(self._received.is_unchanged_memory(*b) for b in buffers)):
                    yield holder, name, value

    def removed_attributes(self) -> Iterator[tuple[Any, str]]:
        """Yields removed attributes of the module, its submodules, the datamodule, callbacks, and loggers."""
        for holder, before in (*self._fingerprints, *self._names):
            removed = before.keys() - {WHOLE, *all_attributes(holder)}
            if removed and WHOLE not in attributes_of(holder):
                yield from ((holder, name) for name in removed)

    def changed_classes(self) -> Iterator[Any]:
        """Yields modules and datamodules with a new class: lazy layers after their first batch, parametrized layers."""
        for holder, before in self._classes:
            if _class_of(holder) != before:
                yield holder

    def collected_attributes(self, trainer: Any) -> Iterator[tuple[Any, str]]:
        """Yields collections of the user's callbacks and LightningModule with the data of this rank's samples only.

        These collections have grown during a ``predict`` that shards the samples and returns no predictions.
        """
        if not self._extents or trainer.world_size == 1 or trainer.predict_loop.return_predictions:
            return
        if _has_all_samples(trainer):
            return
        for holder, before in self._extents:
            for name, (kind, extent) in _extents(holder):
                kind_before, extent_before = before.get(name, (None, 0))
                # A new tensor may hold anything; callbacks collect in lists.
                if extent > extent_before and (kind is kind_before or not issubclass(kind, (Tensor, np.ndarray))):
                    yield holder, name

    def _fingerprints_of(self, holder: Any) -> Iterator[tuple[str, Any, tuple[Any, list[Any]]]]:
        """Yields name, value, and fingerprint of each attribute: a digest, None if unknown, and the buffers."""
        for name, value in attributes_of(holder).items():
            is_empty = isinstance(value, (dict, set)) and not value
            if is_empty or value is None or isinstance(value, (bool, int, float, str)):  # most attributes of a module
                yield name, value, ((type(value), None if is_empty else value), [])
                continue
            try:
                pickled = dump(value, self._shared_by_name, is_return=True)
            except Exception:  # for example, it holds an open file
                yield name, value, (None, [])
                continue
            arrays = [np.frombuffer(buffer, dtype=np.uint8) for buffer in pickled.buffers]
            buffers = [(array.ctypes.data, array.nbytes) if self._received else _digest(array) for array in arrays]
            yield name, value, (_digest(pickled.data), buffers)


def _digest(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _data_address(obj: Tensor | np.ndarray[Any, Any]) -> int:
    """Returns the address of an array's or strided CPU tensor's data, which ``tensor.data = ...`` changes; else 0."""
    if isinstance(obj, np.ndarray):
        return obj.ctypes.data
    return obj.data_ptr() if obj.device.type == "cpu" and obj.layout == torch.strided and not is_lazy(obj) else 0


def _class_of(holder: Any) -> tuple[type, list[str]]:
    return type(holder), names_of_computed(type(holder))


def is_of_user(holder: Any, name: str) -> bool:
    """Whether an attribute is the user's: neither of a library's class, nor one that Lightning gives a module."""
    is_of_library = type(holder).__module__.partition(".")[0] in _LIBRARIES
    if isinstance(holder, Module):
        return name not in _names_of_libraries() and not (is_of_library and name.startswith("_"))
    return not is_of_library


@cache
def _names_of_libraries() -> frozenset[str]:
    return frozenset({*vars(Module()), *vars(pl.LightningModule())})


def _has_all_samples(trainer: Any) -> bool:
    loaders = CombinedLoader(trainer.predict_dataloaders, "sequential").flattened
    samplers = [getattr(getattr(loader, "batch_sampler", None), "sampler", None) for loader in loaders]
    return all(isinstance(sampler, (SequentialSampler, RandomSampler)) for sampler in samplers)


def _extents(holder: Any) -> Iterator[tuple[str, tuple[type, int]]]:
    """Yields the names of the user's attributes, each with its class and its number of elements."""
    for name, value in all_attributes(holder).items():
        if is_of_user(holder, name):
            with suppress(Exception):  # a parameter of a lazy layer has no length yet
                yield name, (type(value), _extent(value, _DEPTH))


def _extent(value: Any, depth: int) -> int:
    """Returns the number of elements of a container and of those in it, and of rows of tensors and arrays."""
    if isinstance(value, (Tensor, np.ndarray)):
        return len(value) if value.ndim else 0
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple, set, deque)):
        return 0
    # Elements of long containers are not counted: they may be large data of the user.
    return len(value) + (
        sum(_extent(item, depth - 1) for item in value) if depth and len(value) <= _MAX_COUNTED_LENGTH else 0
    )
