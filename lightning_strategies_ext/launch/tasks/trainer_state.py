"""What the main process learns from a worker about a Trainer that has run there, but for the module's tensors.

It goes by attributes, not by ``state_dict``: every attribute of a callback, a logger, the LightningModule and its parts
or the datamodule comes back, also what its author never thought of saving. Of the last three, which may be large, only
what the stage has changed. An attribute that cannot be pickled (an open file, a progress bar, a thread) stays as it is
in the main process. Objects that the user holds keep their identity (:mod:`.changes`).
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

# Loaders and data stay in the worker that made them: the main process has the user's. A profiler that runs is of no use
# anywhere else, and pickle takes it nevertheless.
_UNSENDABLE_TYPES = (DataLoader, Dataset, Sampler, CombinedLoader, profiler.profile, autograd_profiler.profile)


def shared_objects(trainer: Any, arguments: Any, objects: Sequence[Any] = ()) -> SharedObjects:
    """The objects of a Trainer that the main process and the workers both have.

    Args:
        trainer: The Trainer.
        arguments: What the stage was called with: loaders, datamodules.
        objects: In a worker, the objects as they were received.
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
    """What the first worker notes before a stage, to tell afterwards what has changed.

    Args:
        trainer: The Trainer.
        shared: What the main process has, without what it sent.
        sent: What it sent.
        received: Where that came in.

    Attributes:
        tree: The module's tree.
        collections: What the user's callbacks hold, if the stage is ``predict``.
        shared: What the main process has, with what it sent.
        received: Where that came in.
        places: Where its tensors and arrays are, by id.
    """

    def __init__(
        self, trainer: Any, shared: SharedObjects, sent: Mapping[int, Any], received: ReceivedBuffers | None
    ) -> None:
        module = trainer.lightning_module
        self.tree = ModuleTree(module)
        self.received = received
        # The stage itself gives the Trainer its datamodule, later.
        datamodules = {id(obj): obj for obj in shared.objects if isinstance(obj, LightningDataModule)}
        self._holders = [*module.modules(), *datamodules.values()]
        self._classes = [_class_of(holder) for holder in self._holders]
        self._fingerprints = Fingerprints(self._holders, shared, received)
        self._names = [(obj, set(all_attributes(obj))) for obj in (*trainer.callbacks, *trainer.loggers)]
        self.collections = Collections(trainer)
        self.shared = shared.with_message(sent)
        tensors = (*module.parameters(), *module.buffers(), *sent.values())
        self._sent = [obj for obj in tensors if isinstance(obj, (Tensor, np.ndarray))]  # their ids are theirs alone
        self.places = {id(obj): data_address(obj) for obj in self._sent}

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Whether a tensor is one that was sent, where it was, with the values that it had."""
        if self.places.get(id(tensor)) != data_address(tensor):
            return False
        return is_in_shared_memory(tensor) or (self.received is not None and self.received.is_unchanged(tensor))

    def changed_attributes(self) -> Iterator[tuple[Any, str]]:
        """Attributes of the LightningModule, of its submodules and of the datamodule that are new or have changed."""
        for holder in self._holders:
            for name in self._fingerprints.changed(holder):
                yield holder, name

    def removed_attributes(self) -> Iterator[tuple[Any, str]]:
        """Those that are not there any more, and those of callbacks and loggers."""
        for holder in self._holders:
            for name in self._fingerprints.removed(holder):
                yield holder, name
        for holder, names in self._names:
            if WHOLE not in attributes_of(holder):
                for name in names - all_attributes(holder).keys():
                    yield holder, name

    def changed_classes(self) -> Iterator[Any]:
        """Those that are of another class now: a lazy layer is once it has seen a batch, a parametrized one is."""
        for holder, before in zip(self._holders, self._classes, strict=True):
            if _class_of(holder) != before:
                yield holder


@dataclass
class TrainerSnapshot:
    """The state of a Trainer, ready to be sent.

    Attributes:
        classes: (number of a shared object, its class).
        attributes: (number of a shared object, attribute, value); no value for an attribute that vanished.
        training: What has changed in the module's tree, optimizers and schedulers, in one message since they refer to
            each other; of another stage than ``fit`` the first alone.
        modes: ``training`` of each submodule by name.
        trainable: ``requires_grad`` of each parameter by name.
        loaders: Where the training loaders are, of those that say it.
        precision: State of the precision plugin.
        queue: What ``add_to_queue`` put.
        value: What the stage returned.
        lost: (number of a shared object, attribute, why it does not come back).
        shares: (number of a shared object, attribute) of what a callback has collected of this rank's share of samples.
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
        """Collects the state after a stage.

        Args:
            trainer: The Trainer.
            baseline: What was noted before it.
            value: What the stage returned.

        Raises:
            Exception: If what the user put in the queue, or what the stage returned, cannot be pickled.
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
            training = _encode_or_warn(encoder, (tree,), "What is new in the LightningModule")
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
        """Makes the main process's objects so, and returns what the stage returned.

        Args:
            trainer: The Trainer.
            shared: What the workers had of it, with what was sent.
        """
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
        """Sets an attribute. A list, dictionary or the like that the user may hold is filled in place."""
        holder = shared.object_of(number)
        try:
            value = encoded.load(shared)
            before = all_attributes(holder)
            if name == WHOLE:
                set_attribute(holder, name, value)
                for each, new in all_attributes(holder).items():
                    if _is_filled(shared, before.get(each), new):
                        put(holder, {each: before[each]})
            elif not _is_filled(shared, before.get(name), value):
                set_attribute(holder, name, value)
        except Exception as error:
            log.debug("%s.%s stays as it is in the main process: %s", type(holder).__name__, name, error)
            self.lost.append((number, name, str(error)))


def _is_filled(shared: SharedObjects, old: Any, new: Any) -> bool:
    """Whether a list or the like that the user may hold gets the elements of the one that was to replace it."""
    # One that the workers had is another attribute's now, or of no more use.
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
            log.warning("A %s stays what it was in the main process: %s", type(holder).__name__, error)


def _attributes(
    trainer: Any, baseline: StageBaseline, encoder: ValueEncoder, lost: list[tuple[int, str, str]]
) -> Iterator[tuple[int, str, EncodedValue | None]]:
    metrics, _ = trainer_stages.connectors_of(trainer)
    loops = trainer_stages.loops_of(trainer)
    holders = [trainer, metrics, *loops, trainer.profiler, *trainer.callbacks, *trainer.loggers]
    attributes = [(holder, name) for holder in holders for name in attributes_of(holder)]
    for holder, name in (*attributes, *baseline.changed_attributes()):
        number, value = baseline.shared.number_of(holder), attributes_of(holder).get(name)
        if number is not None:  # a new callback comes with the list that holds it
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
        if name == WHOLE:  # one attribute that stays here does not keep the others here
            here = all_attributes(holder)
            for each, part in named_attributes_of(holder).items():
                if part is here.get(each):
                    yield from _attribute(holder, number, each, part, shared, encoder, lost)
                else:
                    lost.append((number, each, f"its class pickles it in another form, and fails: {error}"))
            return
        log.debug("%s.%s stays as it is in the main process: %s", type(holder).__name__, name, error)
        if not _stays(value, shared.never):
            lost.append((number, name, str(error)))


def _stays(value: Any, never: tuple[type, ...]) -> bool:
    """Whether a value is a dataset, a loader or the like, or a list of such, which stay in the worker."""
    return isinstance(value, never) or (
        isinstance(value, (list, tuple)) and bool(value) and all(isinstance(each, never) for each in value)
    )


def _number(shared: SharedObjects, obj: Any) -> int:
    number = shared.number_of(obj)
    assert number is not None
    return number


def _encode_or_warn(encoder: ValueEncoder, value: Any, what: str) -> EncodedValue | None:
    try:
        return encoder.encode(value)
    except Exception as error:
        log.warning("%s does not come back from the workers, since it cannot be pickled: %s", what, error)
        return None
