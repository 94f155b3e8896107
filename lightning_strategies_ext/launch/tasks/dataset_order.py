"""Predictions of several ranks, in the order in which one process would have made them.

Each rank predicted a shard of the samples. :func:`in_dataset_order` sorts the samples by their position in the dataset
and splits them into batches again. The function is independent of processes: a rank is represented by a list of keys
and an iterator over outputs. Each output is read as late and released as early as the order allows.

Limitations: the result may differ bitwise from that of one process, because a model may return other values for other
batches. An output that cannot be split into samples stays whole. A batch ends early if the next sample has another
shape, dtype, or structure; nothing is padded. Only tensors, arrays, and collections of these are copied.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_strategies_ext.nested import MAPPINGS, class_identity, is_collection, parts_of, rebuild

IntArray = npt.NDArray[np.int64]

#: Dtypes whose rows torch cannot write to given positions (float8 in 2.5, the others still in 2.13), each with a dtype
#: of the same size that supports it.
WRITABLE_DTYPES = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.int8,
    torch.float8_e4m3fnuz: torch.int8,
    torch.float8_e5m2: torch.int8,
    torch.float8_e5m2fnuz: torch.int8,
}

#: Types of values that apply to each sample of a batch. Numbers are excluded: they may be computed from all samples.
CONSTANTS = (str, bool, type(None))


@dataclass
class KeyedOutputs:
    """Predictions of one rank.

    Args:
        keys: For each batch, the position of each of its samples in the dataset. A key may occur more than once.
        outputs: Yields the return value of ``predict_step`` for each batch. Reading an item may be expensive.
    """

    keys: list[list[int]]
    outputs: Iterator[Any]


def in_dataset_order(ranks: Sequence[KeyedOutputs], batch_size: int) -> list[Any]:
    """Returns the batches that a single process would have returned: samples by ascending key, without duplicates.

    Of samples with the same key, the first of the lowest rank is kept. An output that cannot be split into samples
    stays whole, at the position of the smallest of its kept keys. Tensors and arrays are copied, without their autograd
    history. All iterators are read to their ends.

    Args:
        ranks: Predictions of each rank, by rank. Ranks may have different numbers of batches, or none.
        batch_size: Number of samples in each batch of the result, except the last.

    Raises:
        ValueError: If ``batch_size`` is less than 1, or a rank has more or fewer outputs than lists of keys.
    """
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1, not {batch_size}.")
    sizes = np.array([len(batch) for rank in ranks for batch in rank.keys], dtype=np.int64)
    keys = np.fromiter(chain.from_iterable(chain.from_iterable(rank.keys for rank in ranks)), dtype=np.int64)
    first_rows = np.unique(keys, return_index=True)[1]  # by ascending key, the first sample of each
    batches = np.repeat(np.arange(len(sizes)), sizes)[first_rows]
    rows = first_rows - (np.cumsum(sizes) - sizes)[batches]

    outputs = OutputReader(ranks, sizes.tolist(), np.bincount(batches, minlength=len(sizes)).tolist())
    result: list[Any] = []
    for start in range(0, len(first_rows), batch_size):
        result += outputs.assemble(batches[start : start + batch_size], rows[start : start + batch_size])
    outputs.exhaust()
    return result


class OutputReader:
    """Outputs of all ranks, numbered in rank order, each held from its first use to its last.

    Args:
        ranks: Predictions of each rank, by rank.
        sizes: Number of samples of each output.
        num_remaining_rows: For each output, the number of its samples that are in the result.
    """

    def __init__(self, ranks: Sequence[KeyedOutputs], sizes: list[int], num_remaining_rows: list[int]) -> None:
        self._iterators = [iter(rank.outputs) for rank in ranks]
        self._rank_of = [rank for rank, predictions in enumerate(ranks) for _ in predictions.keys]
        ends = np.cumsum([0, *(len(rank.keys) for rank in ranks)]).tolist()
        self._next, self._ends = ends[:-1], ends[1:]
        self._sizes = sizes
        self._num_remaining_rows = num_remaining_rows
        self._cached: dict[int, Any] = {}
        self._layouts: dict[int, SampleLayout | None] = {}
        self._interpretations = ListInterpretations()

    def assemble(self, batches: IntArray, rows: IntArray) -> list[Any]:
        """Returns row ``rows[i]`` of output ``batches[i]`` for each i, as one batch if their layouts agree."""
        present, counts = np.unique(batches, return_counts=True)
        numbers: dict[SampleLayout, int] = {}
        layouts = np.empty(len(batches), dtype=np.int64)  # a change of layout splits the batch
        is_included = np.ones(len(batches), dtype=bool)
        for batch in present.tolist():
            rank = self._rank_of[batch]
            while self._next[rank] <= batch:
                self._read(rank)
            is_row, layout = batches == batch, self._layouts[batch]
            if layout is None:
                layouts[is_row] = -1 - batch
                is_included[is_row] = False
                is_included[is_row.argmax()] = batch in self._cached  # once, at its first kept key
            else:
                layouts[is_row] = numbers.setdefault(layout, len(numbers))
        batches, rows, layouts = batches[is_included], rows[is_included], layouts[is_included]

        result: list[Any] = []
        boundaries = np.flatnonzero(np.diff(layouts)) + 1
        for run in np.split(np.arange(len(layouts)), boundaries) if len(layouts) else ():
            layout = self._layouts[int(batches[run[0]])]
            if layout is None:
                result.append(copied(self._cached.pop(int(batches[run[0]]))))
            else:
                result.append(self._gather(layout, batches[run], rows[run]))

        for batch, count in zip(present.tolist(), counts.tolist(), strict=True):
            self._num_remaining_rows[batch] -= count
            if not self._num_remaining_rows[batch]:
                self._cached.pop(batch, None)
                del self._layouts[batch]
        return result

    def exhaust(self) -> None:
        """Reads the iterators of all ranks to their ends.

        Raises:
            ValueError: If a rank has more or fewer outputs than lists of keys.
        """
        for rank, iterator in enumerate(self._iterators):
            while self._next[rank] < self._ends[rank]:
                self._read(rank)
            if next(iterator, self) is not self:
                raise ValueError(f"Rank {rank} has more outputs than lists of keys. Pass the keys of each batch.")

    def _gather(self, layout: "SampleLayout", batches: IntArray, rows: IntArray) -> Any:
        present = np.unique(batches).tolist()
        positions = [np.flatnonzero(batches == batch) for batch in present]
        return gather(
            layout, [self._cached[batch] for batch in present], [rows[position] for position in positions], positions
        )

    def _read(self, rank: int) -> None:
        batch = self._next[rank]
        try:
            output = next(self._iterators[rank])
        except StopIteration:
            missing = self._ends[rank] - batch
            raise ValueError(f"Rank {rank} has keys for {missing} more batch(es) than it has outputs.") from None
        self._next[rank] += 1
        if self._num_remaining_rows[batch]:
            self._cached[batch] = output
            layout = layout_of(output, self._sizes[batch], self._interpretations)
            self._layouts[batch] = None if layout is None or is_of_batch(layout) else layout


@dataclass(frozen=True)
class SampleLayout:
    """Properties that outputs must share for their samples to be in one batch.

    Args:
        kind: Type of the value; for a collection, :func:`.class_identity` its type.
        details: Dtype, device, and shape of a row of a tensor or array; the keys of a mapping; ``ENTRY_PER_SAMPLE``;
            the value of a constant.
        parts: Layouts of a collection's values.
    """

    kind: Any
    details: Hashable = None
    parts: tuple["SampleLayout", ...] = ()


ENTRY_PER_SAMPLE = "one entry per sample"


class ListInterpretations:
    """Records which lists have one entry per sample, and which are collections whose values are split separately.

    A list with as many entries as samples, each of which can be split into samples, may be either. It is interpreted
    like an unambiguous list at the same position in an earlier output. Without such a list the output stays whole,
    which is always correct.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], bool] = {}

    def has_entry_per_sample(self, values: list[Any], num_samples: int, position: tuple[int, ...]) -> bool | None:
        """Whether a list that can be split has one entry per sample; None if unknown. ``position``: the path to it."""
        may_be_entries = len(values) == num_samples
        if may_be_entries and all(can_be_split(value, num_samples, (type(None),)) for value in values):
            return self._known.get(position)
        self._known[position] = may_be_entries
        return may_be_entries


def can_be_split(value: Any, num_samples: int, constants: tuple[type, ...] = CONSTANTS) -> bool:
    """Whether an output, or a value in it, can be split into samples; ``constants`` apply to each sample."""
    if isinstance(value, torch.Tensor):
        # Rows of other tensors cannot be indexed and joined.
        plain = value.layout == torch.strided and not value.is_nested and not value.is_quantized
        return plain and value.ndim > 0 and value.shape[0] == num_samples
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and value.shape[0] == num_samples
    if isinstance(value, list) and len(value) == num_samples:
        return True
    if isinstance(value, tuple) and len(value) == num_samples and any(isinstance(part, str) for part in value):
        return False  # ambiguous: a string per sample, or strings for the whole batch
    if is_collection(value):
        return all(can_be_split(part, num_samples, constants) for part in parts_of(value))
    return isinstance(value, constants)


def layout_of(
    value: Any, num_samples: int, interpretations: ListInterpretations, position: tuple[int, ...] = ()
) -> SampleLayout | None:
    """Returns how an output is split into samples, or None if it cannot be split."""
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
    return SampleLayout(
        class_identity(type(value)), tuple(value) if isinstance(value, MAPPINGS) else None, tuple(parts)
    )


def is_of_batch(layout: SampleLayout) -> bool:
    """Whether an output has strings or bools and no values of single samples, such as the name of a batch's file."""
    leaves = [layout]
    for leaf in leaves:
        leaves += leaf.parts
    kinds = {leaf.kind for leaf in leaves if isinstance(leaf.kind, type)}
    return bool(kinds & {str, bool}) and kinds <= {*CONSTANTS}


def gather(layout: SampleLayout, values: list[Any], rows: list[IntArray], positions: list[IntArray]) -> Any:
    """Returns one batch that has row ``rows[i][j]`` of ``values[i]`` at ``positions[i][j]``."""
    if layout.kind in CONSTANTS:
        return layout.details
    if isinstance(layout.kind, type) and issubclass(layout.kind, (torch.Tensor, np.ndarray)):
        # One allocation, without a temporary copy of the same size, which would fragment memory.
        shape = (sum(map(len, rows)), *values[0].shape[1:])
        if layout.kind is torch.Tensor:
            result = values[0].new_empty(shape)
            dtype = WRITABLE_DTYPES.get(result.dtype, result.dtype)
            target, values = result.view(dtype), [value.detach().view(dtype) for value in values]
        else:
            result = target = np.empty_like(values[0], shape=shape)
        for value, row, position in zip(values, rows, positions, strict=True):
            target[as_slice(position)] = value[as_slice(row)]
        return result
    if layout.details == ENTRY_PER_SAMPLE:
        entries: list[Any] = [None] * sum(map(len, rows))
        for value, row, position in zip(values, rows, positions, strict=True):
            for source, target in zip(row.tolist(), position.tolist(), strict=True):
                entries[target] = copied(value[source])
        return entries
    columns = zip(*map(parts_of, values), strict=True)
    parts = [gather(part, list(column), rows, positions) for part, column in zip(layout.parts, columns, strict=True)]
    return rebuild(values[0], parts)


def as_slice(positions: IntArray) -> Any:
    """Returns evenly spaced positions as a slice, which avoids a copy; others unchanged."""
    steps = np.unique(np.diff(positions))
    if len(steps) > 1 or (len(steps) == 1 and steps[0] <= 0):
        return positions
    step = int(steps[0]) if len(steps) else 1
    return slice(int(positions[0]), int(positions[-1]) + 1, step)


def copied(value: Any) -> Any:
    """Returns the value with copies of all tensors, arrays, and collections in it; other objects are shared."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if is_collection(value):
        return rebuild(value, [copied(part) for part in parts_of(value)])
    return value
