"""Second of three modules for a stage's results: encodes the changes of the stage, which the baseline finds."""

import logging
from collections.abc import Iterator
from itertools import chain
from types import FunctionType
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_strategies_ext._lightning import trainer_logging, trainer_stages
from lightning_strategies_ext.launch.protocol import EncodedValue, StageDiff, TensorChunk
from lightning_strategies_ext.launch.tasks.baseline import StageBaseline
from lightning_strategies_ext.launch.tasks.object_changes import (
    WHOLE,
    ValueEncoder,
    all_attributes,
    attributes_of,
    named_attributes_of,
)
from lightning_strategies_ext.launch.tasks.result_queue import ResultQueue, fill_queue
from lightning_strategies_ext.launch.transport.pickling import Pickled, dump

log = logging.getLogger(__name__)

#: Size of a chunk of the module's tensors in bytes: the additional memory during their transfer.
CHUNK_NUM_BYTES = 32 << 20


def diff(trainer: Any, baseline: StageBaseline, value: Any) -> Iterator[TensorChunk | StageDiff]:
    """Yields the changes of a stage: the module's changed tensors in chunks, and then one :class:`.StageDiff`.

    - Identity: objects that the main process has are encoded as numbers, so that they remain the user's own objects.
      New objects are encoded by value.
    - Aliasing: objects and tensors that share memory within one encoded value share it in the main process, and tensors
      of the module keep the memory that they have there.
    - Memory: each item is created when it is requested, a chunk has at most :data:`CHUNK_NUM_BYTES` unless a tensor
      cannot be split, and unchanged tensors are omitted.

    An attribute that cannot be pickled (an open file, a progress bar, a thread) keeps its value in the main process.

    Args:
        trainer: The Trainer.
        baseline: State before the stage.
        value: Return value of the stage.

    Raises:
        Exception: If an item in the user's queue or the return value cannot be pickled.
    """
    chunk: dict[Any, Tensor] = {}
    for name, tensor in baseline.tree.values(trainer.lightning_module):
        if is_lazy(tensor) or baseline.is_unchanged(tensor):
            continue
        for part_name, part in _parts(name, tensor.detach()):
            if chunk and sum(other.nbytes for other in chunk.values()) + part.nbytes > CHUNK_NUM_BYTES:
                yield TensorChunk(chunk)
                chunk = {}
            chunk[part_name] = part
    yield TensorChunk(chunk)
    del chunk
    yield _ObjectDiff(trainer, baseline).stage_diff(value)


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[Any, Tensor]]:
    # A tensor larger than a chunk is split, unless the main process's tensor may have other strides.
    if tensor.nbytes <= CHUNK_NUM_BYTES or not tensor.is_contiguous():
        yield (name, tensor.shape, None), tensor
        return
    flat = tensor.view(-1)
    step = CHUNK_NUM_BYTES // tensor.element_size()
    for start in range(0, flat.numel(), step):
        yield (name, tensor.shape, start), flat[start : start + step]


class _ObjectDiff:
    """Encodes everything that a stage has changed except the tensors of its module."""

    def __init__(self, trainer: Any, baseline: StageBaseline) -> None:
        self._trainer = trainer
        self._baseline = baseline
        self._encoder = ValueEncoder(baseline.shared, baseline.is_unchanged)
        self._lost: list[tuple[int, str, str]] = []

    def stage_diff(self, value: Any) -> StageDiff:
        trainer, module = self._trainer, self._trainer.lightning_module
        tree = [(self._number(holder), parts) for holder, parts in self._baseline.tree.changes(module)]
        training = loaders = None
        if trainer.state.fn == TrainerFn.FITTING:
            strategy = trainer.strategy
            parts = (tree, strategy.optimizers, strategy.lr_scheduler_configs, strategy.exchange_state)
            training = self._encode_or_warn(parts, "The optimizers' state")
            loaders = self._encode_or_warn(strategy.loader_states, "The position in the training data")
        if training is None and tree:
            training = self._encode_or_warn((tree,), "The new structure of the LightningModule")
        queue = ResultQueue()
        fill_queue(trainer, queue)
        return StageDiff(
            classes=list(self._classes()),
            attributes=list(self._attributes()),
            training=training,
            modes={name: child.training for name, child in module.named_modules()},
            trainable={name: parameter.requires_grad for name, parameter in module.named_parameters()},
            loaders=loaders,
            precision=self._encode_or_warn(trainer.precision_plugin.state_dict(), "The precision plugin's state"),
            queue=[self._encoder.encode(item) for item in queue],
            value=self._encoder.encode(value),
            lost=self._lost,
            shares=[(self._number(obj), name) for obj, name in self._baseline.collected_attributes(trainer)],
        )

    def _number(self, obj: Any) -> int:
        number = self._baseline.shared.number_of(obj)
        assert number is not None
        return number

    def _encode_or_warn(self, value: Any, what: str) -> EncodedValue | None:
        try:
            return self._encoder.encode(value)
        except Exception as error:
            log.warning("%s cannot be pickled, so it was not returned from the workers: %s", what, error)
            return None

    def _classes(self) -> Iterator[tuple[int, Pickled]]:
        for holder in self._baseline.changed_classes():
            try:
                yield self._number(holder), dump(type(holder))
            except Exception as error:
                text = "The new class %s of an object cannot be pickled. The main process keeps the old class: %s"
                log.warning(text, type(holder).__name__, error)

    def _attributes(self) -> Iterator[tuple[int, str, EncodedValue | None]]:
        trainer = self._trainer
        metrics, _ = trainer_stages.connectors_of(trainer)
        holders = [trainer, metrics, *trainer_stages.loops_of(trainer), trainer.profiler]
        holders += [*trainer.callbacks, *trainer.loggers]
        attributes = ((holder, name, value) for holder in holders for name, value in attributes_of(holder).items())
        for holder, name, value in chain(attributes, self._baseline.changed_attributes()):
            number = self._baseline.shared.number_of(holder)
            if number is not None:  # a new callback is sent with the list that holds it
                yield from self._attribute(holder, number, name, value)
        for holder, name in self._baseline.removed_attributes():
            yield self._number(holder), name, None

    def _attribute(self, holder: Any, number: int, name: str, value: Any) -> Iterator[tuple[int, str, EncodedValue]]:
        if isinstance(value, FunctionType) or trainer_logging.is_bound_to_stage(value):
            return
        try:
            yield number, name, self._encoder.encode(value)
        except Exception as error:
            if name == WHOLE:  # sends its attributes separately
                own = all_attributes(holder)
                for attribute, part in named_attributes_of(holder).items():
                    if part is own.get(attribute):
                        yield from self._attribute(holder, number, attribute, part)
                    else:
                        reason = f"its class pickles it in another form, which fails: {error}"
                        self._lost.append((number, attribute, reason))
                return
            log.debug("%s.%s keeps its value in the main process: %s", type(holder).__name__, name, error)
            if not _is_unsendable(value, self._baseline.shared.never):
                self._lost.append((number, name, str(error)))


def _is_unsendable(value: Any, never: tuple[type, ...]) -> bool:
    """Whether a value is of an unsendable type, such as a dataset or loader, or a list or tuple of such values."""
    return isinstance(value, never) or (
        isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, never) for item in value)
    )
