"""First step of a stage's results: the state before the stage, which the first worker captures.

The results consist of attributes, not of a ``state_dict``, so that they include attributes that no checkpoint has: all
attributes of callbacks and loggers, and those attributes of the LightningModule, its submodules, and the datamodule,
which may be large, that the stage has changed.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.nn import Module
from torch.utils.data import RandomSampler, SequentialSampler

from lightning_strategies_ext.launch.tasks.module_tree import ModuleTree
from lightning_strategies_ext.launch.tasks.object_changes import (
    WHOLE,
    Fingerprints,
    all_attributes,
    attributes_of,
    data_address,
    is_in_shared_memory,
)
from lightning_strategies_ext.launch.transport.by_value import names_of_computed
from lightning_strategies_ext.launch.transport.memory_files import ReceivedBuffers
from lightning_strategies_ext.launch.transport.pickling import SharedObjects

_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "lightning_strategies_ext")
_DEPTH = 4
_MANY = 1000


def capture(
    trainer: Any, shared: SharedObjects, sent: Mapping[int, Any], received: ReceivedBuffers | None
) -> "StageBaseline":
    """Captures the state before a stage.

    Identity: the baseline refers to the Trainer's own objects, and keeps those of the message alive. Aliasing: tensors
    are recorded by the address of their data, so that a tensor that gets other memory counts as changed. Memory: no
    tensor is copied, as the memory files of the message keep the values before the stage; digests of small attributes
    are all that is added.

    Args:
        trainer: The Trainer.
        shared: Objects that the main process has, without those in its message.
        sent: Objects in the message, by number.
        received: Memory files of the message; None if it had none.
    """
    return StageBaseline(trainer, shared, sent, received)


class StageBaseline:
    """State before a stage, see :func:`capture`.

    Attributes:
        tree: The module's tree.
        collections: Sizes of the user's collections, if the stage is ``predict``.
        shared: Objects that the main process has, including those in its message.
        received: Memory files of the message; None if it had none.
        places: Data addresses of the tensors and arrays that were sent, by id.
    """

    def __init__(
        self, trainer: Any, shared: SharedObjects, sent: Mapping[int, Any], received: ReceivedBuffers | None
    ) -> None:
        module = trainer.lightning_module
        self.tree = ModuleTree(module)
        self.received = received
        # The stage sets the Trainer's datamodule later.
        datamodules = {id(obj): obj for obj in shared.objects if isinstance(obj, LightningDataModule)}
        self._holders = [*module.modules(), *datamodules.values()]
        self._classes = [_class_of(holder) for holder in self._holders]
        self._fingerprints = Fingerprints(self._holders, shared, received)
        self._names = [(obj, set(all_attributes(obj))) for obj in (*trainer.callbacks, *trainer.loggers)]
        self.collections = Collections(trainer)
        self.shared = shared.with_message(sent)
        tensors = (*module.parameters(), *module.buffers(), *sent.values())
        self._sent = [obj for obj in tensors if isinstance(obj, (Tensor, np.ndarray))]  # keeps ids unique
        self.places = {id(obj): data_address(obj) for obj in self._sent}

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Whether a tensor was sent and still has the same memory and values."""
        if self.places.get(id(tensor)) != data_address(tensor):
            return False
        return is_in_shared_memory(tensor) or (self.received is not None and self.received.is_unchanged(tensor))

    def changed_attributes(self) -> Iterator[tuple[Any, str]]:
        """Yields attributes of the LightningModule, its submodules, and the datamodule that are new or have changed."""
        for holder in self._holders:
            for name in self._fingerprints.changed(holder):
                yield holder, name

    def removed_attributes(self) -> Iterator[tuple[Any, str]]:
        """Yields removed attributes of the module, its submodules, the datamodule, callbacks, and loggers."""
        for holder in self._holders:
            for name in self._fingerprints.removed(holder):
                yield holder, name
        for holder, names in self._names:
            if WHOLE not in attributes_of(holder):
                for name in names - all_attributes(holder).keys():
                    yield holder, name

    def changed_classes(self) -> Iterator[Any]:
        """Yields modules and datamodules with a new class: lazy layers after their first batch, parametrized layers."""
        for holder, before in zip(self._holders, self._classes, strict=True):
            if _class_of(holder) != before:
                yield holder


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


class Collections:
    """Sizes of collections in the user's callbacks and LightningModule before ``predict``, to find those that grow.

    Args:
        trainer: The Trainer, before the stage.
    """

    def __init__(self, trainer: Any) -> None:
        is_predicting = trainer.state.fn == TrainerFn.PREDICTING
        holders = [*trainer.callbacks, trainer.lightning_module] if is_predicting else []
        self._before = [(holder, dict(_extents(holder))) for holder in holders]

    def collected(self, trainer: Any) -> Iterator[tuple[Any, str]]:
        """Yields attributes that have grown, if ranks had shards of the samples and no predictions are returned."""
        if not self._before or trainer.world_size == 1 or trainer.predict_loop.return_predictions:
            return
        if _has_all_samples(trainer):
            return
        for holder, before in self._before:
            for name, (kind, extent) in _extents(holder):
                kind_before, extent_before = before.get(name, (None, 0))
                # A new tensor may hold anything; callbacks collect in lists.
                if extent > extent_before and (kind is kind_before or not issubclass(kind, (Tensor, np.ndarray))):
                    yield holder, name


def _has_all_samples(trainer: Any) -> bool:
    loaders = CombinedLoader(trainer.predict_dataloaders, "sequential").flattened
    samplers = [getattr(getattr(loader, "batch_sampler", None), "sampler", None) for loader in loaders]
    return all(isinstance(sampler, (SequentialSampler, RandomSampler)) for sampler in samplers)


def _extents(holder: Any) -> Iterator[tuple[str, tuple[type, int]]]:
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
    return len(value) + (sum(_extent(item, depth - 1) for item in value) if depth and len(value) <= _MANY else 0)
