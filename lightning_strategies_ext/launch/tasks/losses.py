"""Warnings about what a stage stores in attributes of the user and the main process does not receive."""

import logging
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.nn import Module
from torch.utils.data import RandomSampler, SequentialSampler

from lightning_strategies_ext.launch.tasks.attributes import all_attributes

log = logging.getLogger(__name__)

_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "lightning_strategies_ext")
_DEPTH = 4
_MANY = 1000
_warned: "weakref.WeakKeyDictionary[Any, set[str]]" = weakref.WeakKeyDictionary()


def is_of_user(holder: Any, name: str) -> bool:
    """Whether an attribute is the user's: neither of a library's class, nor one that Lightning gives a module."""
    is_of_library = type(holder).__module__.partition(".")[0] in _LIBRARIES
    if isinstance(holder, Module):
        return name not in _names_of_libraries() and not (is_of_library and name.startswith("_"))
    return not is_of_library


@cache
def _names_of_libraries() -> frozenset[str]:
    return frozenset({*vars(Module()), *vars(pl.LightningModule())})


def warn_of_lost(trainer: Any, holder: Any, name: str, reason: Any) -> None:
    """Warns once that attribute ``name`` of an object of the main process keeps its value from before the stage."""
    text = (
        "%s was not returned from the workers and is unchanged in the main process (%s). To return it, store objects"
        " that can be pickled and unpickled."
    )
    _warn_once(trainer, holder, name, text, reason)


def warn_of_share(trainer: Any, holder: Any, name: str) -> None:
    """Warns once that attribute ``name`` holds only what rank 0 has collected in ``predict``."""
    text = (
        "%s has only what rank 0, one of %d ranks, collected in `predict`. Use the return value of"
        " `predict(return_predictions=True)`, write a file on each rank, or gather the data in the callback"
        " (`trainer.strategy.all_gather`, `torch.distributed.all_gather_object`)."
    )
    _warn_once(trainer, holder, name, text, trainer.num_devices * trainer.num_nodes)


def _warn_once(trainer: Any, holder: Any, name: str, text: str, *args: Any) -> None:
    if not is_of_user(holder, name):
        return
    with suppress(TypeError):  # for an unhashable object, the warning is repeated
        warned = _warned.setdefault(holder, set())
        if name + text in warned:
            return
        warned.add(name + text)
    log.warning(text, _attribute_text(trainer, holder, name), *args)


def _attribute_text(trainer: Any, holder: Any, name: str) -> str:
    kind, prefix = "object", ""
    module = trainer.lightning_module
    if isinstance(holder, Module) and module is not None:
        prefix = next((path + "." for path, part in module.named_modules() if part is holder and path), "")
        kind, holder = "LightningModule", module
    elif isinstance(holder, pl.LightningDataModule):
        kind = "datamodule"
    elif isinstance(holder, Logger):
        kind = "logger"
    elif isinstance(holder, pl.Callback):
        kind = "callback"
    whole = f"the {kind} {type(holder).__name__}"
    if name:
        return f"`{prefix}{name}` of {whole}"
    return f"`{prefix[:-1]}` of {whole}" if prefix else whole[0].upper() + whole[1:]


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
