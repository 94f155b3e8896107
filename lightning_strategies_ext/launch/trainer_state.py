"""What the main process learns from a worker about a Trainer that has run there, but for the module's tensors.

It goes by attributes, not by ``state_dict``: a callback's or a logger's every attribute comes back, also what its
author never thought of saving. An attribute that cannot be pickled (an open file, a progress bar, a thread) stays as it
is in the main process. Objects that the user holds keep their identity.

Of the LightningModule and the datamodule, which may be large, the parts come back that the user names.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.nn import Module, Parameter
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_strategies_ext import _lightning
from lightning_strategies_ext.launch.messages import Pickled, Shared, dump
from lightning_strategies_ext.launch.result_queue import ResultQueue, fill_queue, read_queue

log = logging.getLogger(__name__)

# Loaders and data stay in the worker that made them: the main process has the user's.
_NEVER_SENT = (DataLoader, Dataset, Sampler, CombinedLoader)


def shared_objects(trainer: Any, arguments: Any, objects: Sequence[Any] = ()) -> Shared:
    """The objects of a Trainer that the main process and the workers both have.

    Args:
        trainer: The Trainer.
        arguments: What the stage was called with: loaders, datamodules.
        objects: In a worker, the objects as they were received.
    """
    if objects:
        return Shared(objects, _NEVER_SENT)
    module = trainer.lightning_module
    metrics, connectors = _lightning.connectors_of(trainer)
    found = [trainer, trainer.strategy, metrics, *connectors, *_lightning.loops_of(trainer), trainer.profiler]
    found += [*trainer.callbacks, *trainer.loggers, trainer.strategy.accelerator, trainer.precision_plugin]
    found += [*module.modules(), *module.parameters(), *module.buffers()]
    found += [trainer.datamodule, *_data_in([arguments, _lightning.data_of(trainer)])]
    return Shared([obj for obj in found if obj is not None], _NEVER_SENT)


def _data_in(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, CombinedLoader):
        value = value.flattened
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _data_in(item)
    elif isinstance(value, DataLoader):
        yield from (value, value.dataset, value.sampler)
    elif isinstance(value, LightningDataModule):
        yield value


@dataclass
class TrainerSnapshot:
    """The state of a Trainer, ready to be sent.

    Attributes:
        attributes: (number of a shared object, attribute, value).
        training: New submodules, optimizers and schedulers, in one pickle since they refer to each other.
        modes: ``training`` of each submodule by name.
        trainable: ``requires_grad`` of each parameter by name.
        named: (0 for the module or 1 for the datamodule, dotted name, value) as the user asked for.
        precision: State of the precision plugin.
        queue: What ``add_to_queue`` put.
        value: What the stage returned.
    """

    attributes: list[tuple[int, str, Pickled]]
    training: Pickled | None
    modes: dict[str, bool]
    trainable: dict[str, bool]
    named: list[tuple[int, str, Pickled]]
    precision: Pickled | None
    queue: list[Pickled] = field(default_factory=list)
    value: Pickled | None = None

    # --- in a worker ---

    @classmethod
    def collect(cls, trainer: Any, shared: Shared, names: set[str], value: Any) -> "TrainerSnapshot":
        """Collects the state after a stage.

        Args:
            trainer: The Trainer.
            shared: What the main process has.
            names: Submodules, parameters and buffers that the module had when it came; others are new.
            value: What the stage returned.
        """
        module = trainer.lightning_module
        training = None
        if trainer.state.fn == TrainerFn.FITTING:
            strategy = trainer.strategy
            parts = list(_new_parts(module, names, shared)), strategy.optimizers, strategy.lr_scheduler_configs
            training = _pickled(parts, shared, "The optimizers' state")
        queue = ResultQueue()
        fill_queue(trainer, queue)
        return cls(
            attributes=list(_attributes(trainer, shared)),
            training=training,
            modes={name: child.training for name, child in module.named_modules()},
            trainable={name: parameter.requires_grad for name, parameter in module.named_parameters()},
            named=list(_named(trainer, shared)),
            precision=_pickled(trainer.precision_plugin.state_dict(), shared, "The precision plugin's state"),
            queue=[dump(item, shared, returning=True) for item in queue],
            value=dump(value, shared, returning=True),
        )

    # --- in the main process ---

    def restore(self, trainer: Any, shared: Shared) -> Any:
        """Makes the main process's objects so, and returns what the stage returned."""
        module, strategy = trainer.lightning_module, trainer.strategy
        for number, name, pickled in self.attributes:
            _set(shared.objects[number], name, _loaded(pickled, shared, name))
        if self.training is not None:
            new, optimizers, schedulers = self.training.load(shared)
            for path, part, is_persistent in new:
                parent, _, name = path.rpartition(".")
                if isinstance(part, (Module, Parameter)):
                    setattr(module.get_submodule(parent), name, part)
                else:
                    module.get_submodule(parent).register_buffer(name, part, is_persistent)
            strategy.optimizers = optimizers
            strategy.lr_scheduler_configs = schedulers
        modules, parameters = dict(module.named_modules()), dict(module.named_parameters())
        for name, mode in self.modes.items():
            if name in modules:
                modules[name].training = mode
        for name, needs_grad in self.trainable.items():
            if name in parameters:
                parameters[name].requires_grad_(needs_grad)
        if self.precision is not None:
            trainer.precision_plugin.load_state_dict(self.precision.load(shared))
        strategy.connect(module)
        module.trainer = trainer
        for which, path, pickled in self.named:
            parent, _, name = path.rpartition(".")
            _set(_at((module, trainer.datamodule)[which], parent), name, pickled.load(shared))
        read_queue(trainer, ResultQueue(item.load(shared) for item in self.queue))
        return None if self.value is None else self.value.load(shared)


def _attributes(trainer: Any, shared: Shared) -> Iterator[tuple[int, str, Pickled]]:
    metrics, _ = _lightning.connectors_of(trainer)
    holders = [trainer, metrics, *_lightning.loops_of(trainer), trainer.profiler, *trainer.callbacks, *trainer.loggers]
    for holder in holders:
        number = shared.number_of(holder)
        if number is None:  # a new callback, say: it comes with the list that holds it
            continue
        for name, value in _state_of(holder).items():
            if isinstance(value, FunctionType) or _lightning.is_bound_to_stage(value):
                continue
            try:
                yield number, name, dump(value, shared, returning=True)
            except Exception as error:
                log.debug("%s.%s stays as it is in the main process: %s", type(holder).__name__, name, error)


def _state_of(holder: Any) -> dict[str, Any]:
    state: dict[str, Any] = vars(holder)
    if getattr(type(holder), "__getstate__", None) is not getattr(object, "__getstate__", None):
        own = holder.__getstate__()
        if isinstance(own, dict):  # what it empties for pickling is this process's, and the main process has its own
            return {name: value for name, value in own.items() if value is not None or state.get(name) is None}
    return state


def _new_parts(module: Module, names: set[str], shared: Shared) -> Iterator[tuple[str, Any, bool]]:
    """What was made in the worker: (name, submodule or parameter or buffer, whether a state dict has it).

    Of a new submodule only the whole, not what is inside of it.
    """
    persistent = module.state_dict().keys()
    found: list[str] = []
    for name, part in (*module.named_modules(), *module.named_parameters(), *module.named_buffers()):
        is_new = name not in names
        if isinstance(part, Module) and shared.number_of(part) is None:  # in the place of another
            is_new = is_new or any(f"{name}.{inner}" not in names for inner, _ in part.named_parameters())
        if is_new and not any(name.startswith(f"{other}.") for other in found):
            found.append(name)
            yield name, part, name in persistent


def _named(trainer: Any, shared: Shared) -> Iterator[tuple[int, str, Pickled]]:
    strategy = trainer.strategy
    holders = (
        ("LightningModule", trainer.lightning_module, getattr(strategy, "module_attributes", ())),
        ("LightningDataModule", trainer.datamodule, getattr(strategy, "datamodule_attributes", ())),
    )
    for which, (kind, holder, names) in enumerate(holders):
        for path in dict.fromkeys([*names, *getattr(holder, "returned_attributes", ())]):
            try:
                yield which, path, dump(_at(holder, path), shared, returning=True)
            except Exception as error:
                log.warning("The attribute %r of the %s does not come back from the workers: %s", path, kind, error)


def _at(holder: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        holder = getattr(holder, name)
    return holder


def _pickled(obj: Any, shared: Shared, what: str) -> Pickled | None:
    try:
        return dump(obj, shared, returning=True)
    except Exception as error:
        log.warning("%s does not come back from the workers, since it cannot be pickled: %s", what, error)
        return None


_MISSING = object()


def _loaded(pickled: Pickled, shared: Shared, name: str) -> Any:
    try:
        return pickled.load(shared)
    except Exception as error:
        log.debug("%s stays as it is in the main process: %s", name, error)
        return _MISSING


def _set(holder: Any, name: str, value: Any) -> None:
    """Sets an attribute. A list, dictionary or the like that the user may hold is filled in place."""
    if value is _MISSING:
        return
    old: Any = getattr(holder, name, None)
    if type(old) is type(value) and old is not value:
        if isinstance(old, list):
            old[:] = value
            return
        if isinstance(old, (dict, set)):
            old.clear()
            old.update(value)
            return
        if isinstance(old, deque) and old.maxlen == value.maxlen:
            old.clear()
            old.extend(value)
            return
    setattr(holder, name, value)
