"""Second step of a stage's results: what the stage has changed, compared with the baseline."""

import logging
from collections.abc import Iterator
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
from lightning_strategies_ext.launch.transport.pickling import Pickled, SharedObjects, dump

log = logging.getLogger(__name__)

#: Size of a chunk of the module's tensors in bytes, which is the memory that their transfer needs.
CHUNK_NUM_BYTES = 32 << 20


def diff(trainer: Any, baseline: StageBaseline, value: Any) -> Iterator[TensorChunk | StageDiff]:
    """Yields what a stage has changed: the module's changed tensors in chunks, and then one :class:`.StageDiff`.

    Identity: objects that the main process has are encoded as numbers, so that they remain the user's own objects. New
    objects are encoded by value. Aliasing: objects and tensors that share memory within one encoded value share it in
    the main process, and tensors of the module keep the memory that they have there. Memory: each item is created when
    it is requested, a chunk has at most :data:`CHUNK_NUM_BYTES` unless a tensor cannot be split, and unchanged tensors
    are left out.

    An attribute that cannot be pickled (an open file, a progress bar, a thread) keeps its value in the main process.

    Args:
        trainer: The Trainer.
        baseline: State before the stage.
        value: Return value of the stage.

    Raises:
        Exception: If an item in the user's queue or the return value cannot be pickled.
    """
    module = trainer.lightning_module
    chunk: dict[Any, Tensor] = {}
    for name, tensor in baseline.tree.values(module):
        if is_lazy(tensor) or baseline.is_unchanged(tensor):
            continue
        for part_name, part in _parts(name, tensor.detach()):
            if chunk and sum(other.nbytes for other in chunk.values()) + part.nbytes > CHUNK_NUM_BYTES:
                yield TensorChunk(chunk)
                chunk = {}
            chunk[part_name] = part
    yield TensorChunk(chunk)
    del chunk
    yield _stage_diff(trainer, baseline, value)


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[Any, Tensor]]:
    # A tensor larger than a chunk is split, unless the main process's tensor may have other strides.
    if tensor.nbytes <= CHUNK_NUM_BYTES or not tensor.is_contiguous():
        yield (name, tensor.shape, None), tensor
        return
    flat = tensor.view(-1)
    step = CHUNK_NUM_BYTES // tensor.element_size()
    for start in range(0, flat.numel(), step):
        yield (name, tensor.shape, start), flat[start : start + step]


def _stage_diff(trainer: Any, baseline: StageBaseline, value: Any) -> StageDiff:
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
    return StageDiff(
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
