"""Third of three modules for a stage's results: applies the changes to the main process's objects."""

import logging
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from lightning_strategies_ext.launch.protocol import EncodedValue, StageDiff, TensorChunk
from lightning_strategies_ext.launch.tasks.baseline import is_of_user
from lightning_strategies_ext.launch.tasks.module_tree import put_parts, tensors_of
from lightning_strategies_ext.launch.tasks.object_changes import (
    TREE_ATTRIBUTES,
    WHOLE,
    all_attributes,
    decode,
    delete,
    put,
    refill,
    write,
)
from lightning_strategies_ext.launch.tasks.result_queue import ResultQueue, read_queue
from lightning_strategies_ext.launch.transport.pickling import SharedObjects

log = logging.getLogger(__name__)

_LOST = (
    "%s was not returned from the workers and is unchanged in the main process (%s). To return it, store objects that"
    " can be pickled and unpickled."
)
_SHARE = (
    "%s has only what rank 0, one of %d ranks, collected in `predict`. Use the return value of"
    " `predict(return_predictions=True)`, write a file on each rank, or gather the data in the callback"
    " (`trainer.strategy.all_gather`, `torch.distributed.all_gather_object`)."
)
_warned: "weakref.WeakKeyDictionary[Any, set[str]]" = weakref.WeakKeyDictionary()


def apply(results: Iterator[Any], trainer: Any, shared: SharedObjects) -> Any:
    """Applies the results of a stage to the main process's objects, and returns the stage's return value.

    - Identity: objects of the user, such as modules, parameters, callbacks, and containers, are updated in place and
      remain the same objects.
    - Aliasing: tensors of the module keep their memory, into which new values are copied, unless their shape or dtype
      has changed.
    - Memory: in addition to the module, one chunk of tensors exists at a time.

    Args:
        results: Items of :func:`.diff`, as they arrive; read up to the :class:`.StageDiff`.
        trainer: The Trainer.
        shared: Objects that the workers have, including those in the message to them.
    """
    tensors = tensors_of(trainer.lightning_module)
    for result in results:
        if isinstance(result, StageDiff):
            return _apply_diff(result, trainer, shared)
        _copy_chunk(result, tensors)
    return None


def _copy_chunk(chunk: TensorChunk, tensors: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for (name, shape, start), value in chunk.tensors.items():
            if name not in tensors:
                continue
            lazy: Any = tensors[name]
            if is_lazy(lazy):
                lazy.materialize(shape, dtype=value.dtype)
            if start is None:
                write(tensors[name], value)
            else:
                tensors[name].detach().view(-1)[start : start + value.numel()].copy_(value)


def _apply_diff(diff: StageDiff, trainer: Any, shared: SharedObjects) -> Any:
    module, strategy = trainer.lightning_module, trainer.strategy
    for number, pickled in diff.classes:
        shared.object_of(number).__class__ = pickled.load()
    lost = [*diff.lost, *_set_attributes(diff.attributes, shared)]
    if diff.training is not None:
        tree, *fit_state = decode(diff.training, shared)
        for number, parts in tree:
            put_parts(shared.object_of(number), parts)
        if fit_state:
            strategy.optimizers, strategy.lr_scheduler_configs, strategy.exchange_state = fit_state
    modules, parameters = dict(module.named_modules()), dict(module.named_parameters())
    for name, mode in diff.modes.items():
        if name in modules:
            modules[name].training = mode
    for name, needs_grad in diff.trainable.items():
        if name in parameters:
            parameters[name].requires_grad_(needs_grad)
    if diff.precision is not None:
        trainer.precision_plugin.load_state_dict(decode(diff.precision, shared))
    if diff.loaders is not None:
        strategy.loader_states = decode(diff.loaders, shared)
    for number, name, reason in lost:
        _warn_once(trainer, shared.object_of(number), name, _LOST, reason)
    for number, name in diff.shares:
        _warn_once(trainer, shared.object_of(number), name, _SHARE, trainer.num_devices * trainer.num_nodes)
    strategy.connect(module)
    module.trainer = trainer
    read_queue(trainer, ResultQueue(decode(item, shared) for item in diff.queue))
    return None if diff.value is None else decode(diff.value, shared)


def _set_attributes(
    attributes: list[tuple[int, str, EncodedValue | None]], shared: SharedObjects
) -> Iterator[tuple[int, str, str]]:
    """Sets or removes attributes. Yields those that keep their value, each with the reason."""
    for number, name, encoded in attributes:
        holder = shared.object_of(number)
        if encoded is None:
            if name in all_attributes(holder):
                delete(holder, name)
            continue
        try:
            value = decode(encoded, shared)
            before = all_attributes(holder)
            if name == WHOLE:
                value.restore(holder, TREE_ATTRIBUTES if isinstance(holder, Module) else ())
                for attribute, new in all_attributes(holder).items():
                    if _update_in_place(shared, before.get(attribute), new):
                        put(holder, {attribute: before[attribute]})
            elif not _update_in_place(shared, before.get(name), value):
                put(holder, {name: value})
        except Exception as error:
            log.debug("%s.%s keeps its value in the main process: %s", type(holder).__name__, name, error)
            yield number, name, str(error)


def _update_in_place(shared: SharedObjects, old: Any, new: Any) -> bool:
    """Copies the elements of a new container into the old one, which the user may hold. Returns whether it did so."""
    # An old container that the workers had now belongs to another attribute, or is unused.
    if type(old) is not type(new) or old is new or shared.number_of(old) is not None:
        return False
    if isinstance(old, deque) and old.maxlen != new.maxlen:
        return False
    return refill(old, new)


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
    kinds = {pl.LightningDataModule: "datamodule", Logger: "logger", pl.Callback: "callback"}
    kind = next((text for cls, text in kinds.items() if isinstance(holder, cls)), "object")
    path, module = name, trainer.lightning_module
    if isinstance(holder, Module) and module is not None:
        prefix = next((prefix for prefix, part in module.named_modules() if part is holder), "")
        path = ".".join(filter(None, (prefix, name)))
        kind, holder = "LightningModule", module
    holder_text = f"the {kind} {type(holder).__name__}"
    return f"`{path}` of {holder_text}" if path else holder_text[0].upper() + holder_text[1:]
