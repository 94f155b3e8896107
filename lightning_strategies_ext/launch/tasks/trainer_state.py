"""State of a Trainer after a stage in a worker, without the module's tensors, and its transfer to the main process.

The state consists of attributes, not of a ``state_dict``, so that it includes attributes that no checkpoint has: all
attributes of callbacks and loggers, and those attributes of the LightningModule, its submodules, and the datamodule,
which may be large, that the stage has changed. An attribute that cannot be pickled (an open file, a progress bar, a
thread) keeps its value in the main process. Objects that the user holds keep their identity (:mod:`.object_changes`).
"""

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, profiler
from torch.autograd import profiler as autograd_profiler
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_strategies_ext._lightning import trainer_data, trainer_logging, trainer_stages
from lightning_strategies_ext.launch.tasks.attributes import (
    WHOLE,
    all_attributes,
    attributes_of,
    delete_attribute,
    named_attributes_of,
    put,
    set_attribute,
)
from lightning_strategies_ext.launch.tasks.losses import Collections, warn_of_lost, warn_of_share
from lightning_strategies_ext.launch.tasks.module_tree import ModuleTree, put_parts
from lightning_strategies_ext.launch.tasks.object_changes import (
    EncodedValue,
    Fingerprints,
    ValueEncoder,
    data_address,
    is_in_shared_memory,
)
from lightning_strategies_ext.launch.tasks.result_queue import ResultQueue, fill_queue, read_queue
from lightning_strategies_ext.launch.transport.memory_files import ReceivedBuffers
from lightning_strategies_ext.launch.transport.parametrized import names_of_computed
from lightning_strategies_ext.launch.transport.pickling import Pickled, SharedObjects, dump

log = logging.getLogger(__name__)

# Loaders and data stay in the worker that created them: the main process has the user's. A running profiler is useless
# in another process, although it can be pickled.
_UNSENDABLE_TYPES = (DataLoader, Dataset, Sampler, CombinedLoader, profiler.profile, autograd_profiler.profile)


def shared_objects(trainer: Any, arguments: Any, objects: Sequence[Any] = ()) -> SharedObjects:
    """Returns the objects of a Trainer that the main process and the workers have.

    Args:
        trainer: The Trainer.
        arguments: Arguments of the stage: loaders, datamodules.
        objects: In a worker, the received objects.
    """
    if objects:
        return SharedObjects(objects, _UNSENDABLE_TYPES)
    module = trainer.lightning_module
    metrics, connectors = trainer_stages.connectors_of(trainer)
    found = [trainer, trainer.strategy, metrics, *connectors, *trainer_stages.loops_of(trainer), trainer.profiler]
    found += [*trainer.callbacks, *trainer.loggers, trainer.strategy.accelerator, trainer.precision_plugin]
    found += [*module.modules(), *module.parameters(), *module.buffers()]
    found += [trainer.datamodule, *_data_in([arguments, trainer_data.data_of(trainer)])]
    return SharedObjects([obj for obj in found if obj is not None], _UNSENDABLE_TYPES)


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


class StageBaseline:
    """State that the first worker records before a stage, to find what the stage changes.

    Args:
        trainer: The Trainer.
        shared: Objects that the main process has, without those in its message.
        sent: Objects in the message, by number.
        received: Memory files of the message; None if it had none.

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


@dataclass
class TrainerSnapshot:
    """State of a Trainer, encoded for the main process.

    Attributes:
        classes: (number of a shared object, its new class).
        attributes: (number of a shared object, attribute, value); the value is None if the attribute was removed.
        training: Changes of the module's tree; after ``fit`` also optimizers, schedulers, and the state of the gradient
            exchange. Encoded together, since they refer to each other.
        modes: ``training`` of each submodule by name.
        trainable: ``requires_grad`` of each parameter by name.
        loaders: Positions of the training loaders that have a ``state_dict``.
        precision: State of the precision plugin.
        queue: Items that ``add_to_queue`` has put.
        value: Return value of the stage.
        lost: (number of a shared object, attribute, reason why it cannot be transferred).
        shares: (number of a shared object, attribute) of data that a callback has collected from this rank's samples.
    """

    classes: list[tuple[int, Pickled]]
    attributes: list[tuple[int, str, EncodedValue | None]]
    training: EncodedValue | None
    modes: dict[str, bool]
    trainable: dict[str, bool]
    loaders: EncodedValue | None
    precision: EncodedValue | None
    queue: list[EncodedValue] = field(default_factory=list)
    value: EncodedValue | None = None
    lost: list[tuple[int, str, str]] = field(default_factory=list)
    shares: list[tuple[int, str]] = field(default_factory=list)

    # --- in a worker ---

    @classmethod
    def collect(cls, trainer: Any, baseline: StageBaseline, value: Any) -> "TrainerSnapshot":
        """Collects the state after a stage that has returned ``value``.

        Raises:
            Exception: If an item in the user's queue or the return value cannot be pickled.
        """
        module, shared = trainer.lightning_module, baseline.shared
        encoder = ValueEncoder(shared, baseline.received, baseline.places)
        tree = [(_number(shared, holder), parts) for holder, parts in baseline.tree.changes(module)]
        training = loaders = None
        if trainer.state.fn == TrainerFn.FITTING:
            strategy = trainer.strategy
            parts = (tree, strategy.optimizers, strategy.lr_scheduler_configs, strategy.exchange_state)
            training = _encode_or_warn(encoder, parts, "The optimizers' state")
            loaders = _encode_or_warn(encoder, strategy.states_of_loaders, "The position in the training data")
        if training is None and tree:
            training = _encode_or_warn(encoder, (tree,), "The new structure of the LightningModule")
        queue = ResultQueue()
        fill_queue(trainer, queue)
        lost: list[tuple[int, str, str]] = []
        return cls(
            classes=list(_classes(baseline)),
            attributes=list(_attributes(trainer, baseline, encoder, lost)),
            training=training,
            modes={name: child.training for name, child in module.named_modules()},
            trainable={name: parameter.requires_grad for name, parameter in module.named_parameters()},
            loaders=loaders,
            precision=_encode_or_warn(encoder, trainer.precision_plugin.state_dict(), "The precision plugin's state"),
            queue=[encoder.encode(item) for item in queue],
            value=encoder.encode(value),
            lost=lost,
            shares=[(_number(shared, obj), name) for obj, name in baseline.collections.collected(trainer)],
        )

    # --- in the main process ---

    def restore(self, trainer: Any, shared: SharedObjects) -> Any:
        """Restores the state into the main process's objects, and returns the stage's return value."""
        module, strategy = trainer.lightning_module, trainer.strategy
        for number, pickled in self.classes:
            shared.object_of(number).__class__ = pickled.load()
        for number, name, encoded in self.attributes:
            if encoded is None:
                delete_attribute(shared.object_of(number), name)
            else:
                self._restore(shared, number, name, encoded)
        if self.training is not None:
            tree, *of_fit = self.training.load(shared)
            for number, parts in tree:
                put_parts(shared.object_of(number), parts)
            if of_fit:
                strategy.optimizers, strategy.lr_scheduler_configs, strategy.exchange_state = of_fit
        modules, parameters = dict(module.named_modules()), dict(module.named_parameters())
        for name, mode in self.modes.items():
            if name in modules:
                modules[name].training = mode
        for name, needs_grad in self.trainable.items():
            if name in parameters:
                parameters[name].requires_grad_(needs_grad)
        if self.precision is not None:
            trainer.precision_plugin.load_state_dict(self.precision.load(shared))
        if self.loaders is not None:
            strategy.states_of_loaders = self.loaders.load(shared)
        for number, name, reason in self.lost:
            warn_of_lost(trainer, shared.object_of(number), name, reason)
        for number, name in self.shares:
            warn_of_share(trainer, shared.object_of(number), name)
        strategy.connect(module)
        module.trainer = trainer
        read_queue(trainer, ResultQueue(item.load(shared) for item in self.queue))
        return None if self.value is None else self.value.load(shared)

    def _restore(self, shared: SharedObjects, number: int, name: str, encoded: EncodedValue) -> None:
        """Sets an attribute. A container that the user may hold is updated in place."""
        holder = shared.object_of(number)
        try:
            value = encoded.load(shared)
            before = all_attributes(holder)
            if name == WHOLE:
                set_attribute(holder, name, value)
                for attribute, new in all_attributes(holder).items():
                    if _update_in_place(shared, before.get(attribute), new):
                        put(holder, {attribute: before[attribute]})
            elif not _update_in_place(shared, before.get(name), value):
                set_attribute(holder, name, value)
        except Exception as error:
            log.debug("%s.%s keeps its value in the main process: %s", type(holder).__name__, name, error)
            self.lost.append((number, name, str(error)))


def _update_in_place(shared: SharedObjects, old: Any, new: Any) -> bool:
    """Copies the elements of a new container into the old one, which the user may hold. Returns whether it has."""
    # An old container that the workers had now belongs to another attribute, or is unused.
    if type(old) is not type(new) or old is new or shared.number_of(old) is not None:
        return False
    if isinstance(old, list):
        old[:] = new
    elif isinstance(old, (dict, set)):
        old.clear()
        old.update(new)
    elif isinstance(old, deque) and old.maxlen == new.maxlen:
        old.clear()
        old.extend(new)
    else:
        return False
    return True


def _class_of(holder: Any) -> tuple[type, list[str]]:
    return type(holder), names_of_computed(type(holder))


def _classes(baseline: StageBaseline) -> Iterator[tuple[int, Pickled]]:
    for holder in baseline.changed_classes():
        try:
            yield _number(baseline.shared, holder), dump(type(holder))
        except Exception as error:
            text = "The new class %s of an object cannot be pickled. The main process keeps the old class: %s"
            log.warning(text, type(holder).__name__, error)


def _attributes(
    trainer: Any, baseline: StageBaseline, encoder: ValueEncoder, lost: list[tuple[int, str, str]]
) -> Iterator[tuple[int, str, EncodedValue | None]]:
    metrics, _ = trainer_stages.connectors_of(trainer)
    loops = trainer_stages.loops_of(trainer)
    holders = [trainer, metrics, *loops, trainer.profiler, *trainer.callbacks, *trainer.loggers]
    attributes = [(holder, name) for holder in holders for name in attributes_of(holder)]
    for holder, name in (*attributes, *baseline.changed_attributes()):
        number, value = baseline.shared.number_of(holder), attributes_of(holder).get(name)
        if number is not None:  # a new callback is sent with the list that holds it
            yield from _attribute(holder, number, name, value, baseline.shared, encoder, lost)
    for holder, name in baseline.removed_attributes():
        yield _number(baseline.shared, holder), name, None


def _attribute(
    holder: Any,
    number: int,
    name: str,
    value: Any,
    shared: SharedObjects,
    encoder: ValueEncoder,
    lost: list[tuple[int, str, str]],
) -> Iterator[tuple[int, str, EncodedValue]]:
    if isinstance(value, FunctionType) or trainer_logging.is_bound_to_stage(value):
        return
    try:
        yield number, name, encoder.encode(value)
    except Exception as error:
        if name == WHOLE:  # sends its attributes separately
            own = all_attributes(holder)
            for attribute, part in named_attributes_of(holder).items():
                if part is own.get(attribute):
                    yield from _attribute(holder, number, attribute, part, shared, encoder, lost)
                else:
                    lost.append((number, attribute, f"its class pickles it in another form, which fails: {error}"))
            return
        log.debug("%s.%s keeps its value in the main process: %s", type(holder).__name__, name, error)
        if not _is_unsendable(value, shared.never):
            lost.append((number, name, str(error)))


def _is_unsendable(value: Any, never: tuple[type, ...]) -> bool:
    """Whether a value is of an unsendable type, such as a dataset or loader, or a list or tuple of such values."""
    return isinstance(value, never) or (
        isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, never) for item in value)
    )


def _number(shared: SharedObjects, obj: Any) -> int:
    number = shared.number_of(obj)
    assert number is not None
    return number


def _encode_or_warn(encoder: ValueEncoder, value: Any, what: str) -> EncodedValue | None:
    try:
        return encoder.encode(value)
    except Exception as error:
        log.warning("%s cannot be pickled, so it was not returned from the workers: %s", what, error)
        return None
