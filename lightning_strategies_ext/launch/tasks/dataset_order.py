"""The predictions of several ranks, in the order in which one process would have made them.

Each rank predicted its share of the samples. ``in_dataset_order`` sorts the samples by their position in the dataset
and cuts them into batches again. It knows no processes: a rank is a list of keys and an iterator over outputs, and
each output is asked for as late, and let go as early, as the order allows.

What it does not promise: the bits of one process (a model may give other values for other batches), that every output
is cut into samples (one that cannot be stays whole), that a batch is full (it ends early where the next sample has
another shape, dtype or structure; nothing is padded), or copies of objects that are neither tensors, arrays nor
collections of these.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_strategies_ext.nested import MAPPINGS, identity_of, is_collection, parts_of, rebuilt

IntArray = npt.NDArray[np.int64]

#: Dtypes whose rows torch cannot put at given positions (float8 in 2.5, the others still in 2.13), and those of the
#: same size whose rows it can.
CARRIERS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.int8,
    torch.float8_e4m3fnuz: torch.int8,
    torch.float8_e5m2: torch.int8,
    torch.float8_e5m2fnuz: torch.int8,
}


#: What is the same for each sample of a batch. Numbers are not: they may be computed from all samples.
CONSTANTS = (str, bool, type(None))


@dataclass
class KeyedOutputs:
    """What one rank predicted.

    Args:
        keys: For each batch, the position of each of its samples in the dataset. A key may occur more than once.
        outputs: Yields what ``predict_step`` returned, for each batch in turn. Asking for an item may be expensive.
    """

    keys: list[list[int]]
    outputs: Iterator[Any]


def in_dataset_order(ranks: Sequence[KeyedOutputs], batch_size: int) -> list[Any]:
    """Returns the batches that a single process would have returned: samples by ascending key, none twice.

    Of samples with the same key the lowest rank's is kept, and of this rank's the earliest. An output that cannot be
    cut into samples stays whole, at the position of the smallest of its kept keys. Tensors and arrays are copied,
    without their autograd history. Every iterator is read to its end.

    Args:
        ranks: By rank. They may have different numbers of batches, or none.
        batch_size: The number of samples in each batch of the result, but for the last.

    Raises:
        ValueError: If a rank has more or fewer outputs than lists of keys.
    """
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1, not {batch_size}.")
    sizes = np.array([len(batch) for rank in ranks for batch in rank.keys], dtype=np.int64)
    keys = np.fromiter(chain.from_iterable(chain.from_iterable(rank.keys for rank in ranks)), dtype=np.int64)
    kept = np.unique(keys, return_index=True)[1]  # by ascending key, the first sample of each
    batches = np.repeat(np.arange(len(sizes)), sizes)[kept]
    rows = kept - (np.cumsum(sizes) - sizes)[batches]

    outputs = OutputReader(ranks, sizes.tolist(), np.bincount(batches, minlength=len(sizes)).tolist())
    result: list[Any] = []
    for start in range(0, len(kept), batch_size):
        result += outputs.assemble(batches[start : start + batch_size], rows[start : start + batch_size])
    outputs.exhaust()
    return result


class OutputReader:
    """The outputs of all ranks, numbered in rank order, each held from the first use of it to the last.

    Args:
        ranks: Whose iterators are read.
        sizes: For each output, its number of samples.
        rows_left: For each output, how many of its samples are kept, that is, will be asked for.
    """

    def __init__(self, ranks: Sequence[KeyedOutputs], sizes: list[int], rows_left: list[int]) -> None:
        self._iterators = [iter(rank.outputs) for rank in ranks]
        self._rank_of = [rank for rank, predictions in enumerate(ranks) for _ in predictions.keys]
        ends = np.cumsum([0, *(len(rank.keys) for rank in ranks)]).tolist()
        self._next, self._ends = ends[:-1], ends[1:]
        self._sizes = sizes
        self._rows_left = rows_left
        self._held: dict[int, Any] = {}
        self._layouts: dict[int, SampleLayout | None] = {}
        self._interpretations = ListInterpretations()

    def assemble(self, batches: IntArray, rows: IntArray) -> list[Any]:
        """Returns row ``rows[i]`` of output ``batches[i]`` for each i, as one batch unless something cuts it."""
        present, counts = np.unique(batches, return_counts=True)
        numbers: dict[SampleLayout, int] = {}
        layouts = np.empty(len(batches), dtype=np.int64)  # where it changes, the batch is cut
        stays = np.ones(len(batches), dtype=bool)
        for batch in present.tolist():
            self._read_through(batch)
            of_batch, layout = batches == batch, self._layouts[batch]
            if layout is None:
                layouts[of_batch] = -1 - batch
                stays[of_batch] = False
                stays[of_batch.argmax()] = batch in self._held  # once, at the first of its kept keys
            else:
                layouts[of_batch] = numbers.setdefault(layout, len(numbers))
        batches, rows, layouts = batches[stays], rows[stays], layouts[stays]

        result: list[Any] = []
        cuts = np.flatnonzero(np.diff(layouts)) + 1
        for run in np.split(np.arange(len(layouts)), cuts) if len(layouts) else ():
            layout = self._layouts[int(batches[run[0]])]
            if layout is None:
                result.append(copied(self._held.pop(int(batches[run[0]]))))
            else:
                result.append(self._gather(layout, batches[run], rows[run]))

        for batch, count in zip(present.tolist(), counts.tolist(), strict=True):
            self._rows_left[batch] -= count
            if not self._rows_left[batch]:
                self._held.pop(batch, None)
                del self._layouts[batch]
        return result

    def exhaust(self) -> None:
        """Reads every rank's iterator to its end.

        Raises:
            ValueError: If one yields another number of outputs than the rank has lists of keys.
        """
        for rank, iterator in enumerate(self._iterators):
            while self._next[rank] < self._ends[rank]:
                self._read(rank)
            if next(iterator, self) is not self:
                raise ValueError(f"Rank {rank} has more outputs than lists of keys. Give the keys of each batch.")

    def _gather(self, layout: "SampleLayout", batches: IntArray, rows: IntArray) -> Any:
        present = np.unique(batches).tolist()
        positions = [np.flatnonzero(batches == batch) for batch in present]
        return gather(
            layout, [self._held[batch] for batch in present], [rows[position] for position in positions], positions
        )

    def _read_through(self, batch: int) -> None:
        rank = self._rank_of[batch]
        while self._next[rank] <= batch:
            self._read(rank)

    def _read(self, rank: int) -> None:
        batch = self._next[rank]
        try:
            output = next(self._iterators[rank])
        except StopIteration:
            missing = self._ends[rank] - batch
            raise ValueError(f"Rank {rank} has keys for {missing} more batch(es) than it has outputs.") from None
        self._next[rank] += 1
        if self._rows_left[batch]:
            self._held[batch] = output
            layout = layout_of(output, self._sizes[batch], self._interpretations)
            self._layouts[batch] = None if layout is None or is_of_batch(layout) else layout


@dataclass(frozen=True)
class SampleLayout:
    """What outputs must have in common for their samples to share a batch.

    Args:
        kind: The type of the value; of a collection, what tells it from others.
        details: Dtype, device and shape of a row of a tensor or array; the keys of a dict; ``ENTRY_PER_SAMPLE``; the
            value of a constant.
        parts: The forms of a collection's values.
    """

    kind: Any
    details: Hashable = None
    parts: tuple["SampleLayout", ...] = ()


ENTRY_PER_SAMPLE = "one entry per sample"


class ListInterpretations:
    """Which lists hold one entry per sample, and which are collections of values that are cut each on its own.

    A list of as many entries as samples, each of which could be cut into samples, may be either. It is read like the
    other lists at the same position in the outputs. Where none has told yet, the output stays whole, which is never
    wrong.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], bool] = {}

    def has_entry_per_sample(self, values: list[Any], num_samples: int, position: tuple[int, ...]) -> bool | None:
        """Tells for a list that can be split, at a position given by the position in each collection around it."""
        may_be_entries = len(values) == num_samples
        if may_be_entries and all(can_be_split(value, num_samples, (type(None),)) for value in values):
            return self._known.get(position)
        self._known[position] = may_be_entries
        return may_be_entries


def can_be_split(value: Any, num_samples: int, constants: tuple[type, ...] = CONSTANTS) -> bool:
    """Whether each sample's part of an output, or of a value in it, can be told.

    Args:
        value: The output, or a value in it.
        num_samples: The number of samples that it is for.
        constants: Types of objects that are taken as the same for each sample.
    """
    if isinstance(value, torch.Tensor):
        # Only such tensors have rows that can be indexed and joined.
        plain = value.layout == torch.strided and not value.is_nested and not value.is_quantized
        return plain and value.ndim > 0 and value.shape[0] == num_samples
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and value.shape[0] == num_samples
    if isinstance(value, list) and len(value) == num_samples:
        return True
    if isinstance(value, tuple) and len(value) == num_samples and any(isinstance(part, str) for part in value):
        return False  # one string per sample, or strings for the whole batch
    if is_collection(value):
        return all(can_be_split(part, num_samples, constants) for part in parts_of(value))
    return isinstance(value, constants)


def layout_of(
    value: Any, num_samples: int, interpretations: ListInterpretations, position: tuple[int, ...] = ()
) -> SampleLayout | None:
    """Returns how an output is cut into samples, or None if it cannot be."""
    if not can_be_split(value, num_samples):
        return None
    if isinstance(value, torch.Tensor):
        return SampleLayout(torch.Tensor, (value.dtype, value.device, value.shape[1:]))
    if isinstance(value, np.ndarray):
        return SampleLayout(type(value), (value.dtype, value.shape[1:]))
    if isinstance(value, CONSTANTS):
        return SampleLayout(type(value), value)
    if isinstance(value, list):
        has_entry_per_sample = interpretations.has_entry_per_sample(value, num_samples, position)
        if has_entry_per_sample is not False:
            return SampleLayout(list, ENTRY_PER_SAMPLE) if has_entry_per_sample else None
    parts: list[SampleLayout] = []
    for i, part in enumerate(parts_of(value)):
        layout = layout_of(part, num_samples, interpretations, (*position, i))
        if layout is None:
            return None
        parts.append(layout)
    return SampleLayout(identity_of(type(value)), tuple(value) if isinstance(value, MAPPINGS) else None, tuple(parts))


def is_of_batch(layout: SampleLayout) -> bool:
    """Whether an output has a string or bool, and nothing of single samples: as the name of a file with a batch."""
    leaves = [layout]
    for leaf in leaves:
        leaves += leaf.parts
    kinds = {leaf.kind for leaf in leaves if isinstance(leaf.kind, type)}
    return bool(kinds & {str, bool}) and kinds <= {*CONSTANTS}


def gather(layout: SampleLayout, values: list[Any], rows: list[IntArray], positions: list[IntArray]) -> Any:
    """Returns one batch, in which row ``rows[i][j]`` of ``values[i]`` stands at ``positions[i][j]``."""
    if layout.kind in CONSTANTS:
        return layout.details
    if layout.kind is torch.Tensor:
        # Allocated once, with no other tensor of its size beside it that would leave holes between those that stay.
        tensor = values[0].new_empty((sum(map(len, rows)), *values[0].shape[1:]))
        dtype = CARRIERS.get(tensor.dtype, tensor.dtype)
        for value, row, position in zip(values, rows, positions, strict=True):
            tensor.view(dtype)[as_slice(position)] = value.detach().view(dtype)[as_slice(row)]
        return tensor
    if isinstance(layout.kind, type) and issubclass(layout.kind, np.ndarray):
        array = np.empty_like(values[0], shape=(sum(map(len, rows)), *values[0].shape[1:]))
        for value, row, position in zip(values, rows, positions, strict=True):
            array[as_slice(position)] = value[as_slice(row)]
        return array
    if layout.details == ENTRY_PER_SAMPLE:
        entries: list[Any] = [None] * sum(map(len, rows))
        for value, row, position in zip(values, rows, positions, strict=True):
            for source, target in zip(row.tolist(), position.tolist(), strict=True):
                entries[target] = copied(value[source])
        return entries
    columns = zip(*map(parts_of, values), strict=True)
    parts = [gather(part, list(column), rows, positions) for part, column in zip(layout.parts, columns, strict=True)]
    return rebuilt(values[0], parts)


def as_slice(positions: IntArray) -> Any:
    """The same positions as a slice where they are evenly spaced, which needs no copy in between."""
    steps = np.unique(np.diff(positions))
    if len(steps) > 1 or (len(steps) == 1 and steps[0] <= 0):
        return positions
    step = int(steps[0]) if len(steps) else 1
    return slice(int(positions[0]), int(positions[-1]) + 1, step)


def copied(value: Any) -> Any:
    """Returns the value with every tensor, array and collection in it copied, and other objects as they are."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if is_collection(value):
        return rebuilt(value, [copied(part) for part in parts_of(value)])
    return value
