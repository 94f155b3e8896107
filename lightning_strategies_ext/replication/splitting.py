"""Splits a batch into one part per replica.

Tensors and arrays are split along their first dimension, into views; collections keep their types. The number of
samples is the size on which the tensors and arrays of the batch agree, see :func:`count_samples`.

Limitations: Objects that are not collections are not split; each part contains the object itself. A value whose number
of rows equals the number of samples by accident is split. A list of values for the whole batch cannot be distinguished
from a list with one entry per sample if both fit. In such cases, the user passes a ``scatter`` function.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_strategies_ext.nested import contains, is_collection, labels_of, parts_of, rebuild

#: Possible numbers of samples of a value, the most likely first; empty if it cannot be split, None if undetermined.
Sizes: TypeAlias = tuple[int, ...] | None

#: Last sentence of errors about the code of a step, because the user may be unable to change this code.
LIBRARY_ADVICE = "If the step is code of a library, use `strategy='ddp_ext'`."
SCATTER_ADVICE = (
    f"Give the strategy a `scatter` function that splits it: `DataParallelStrategy(scatter=...)`. {LIBRARY_ADVICE}"
)


@dataclass(frozen=True)
class BatchPart:
    """Part of a batch for one replica.

    Args:
        value: Data of the part, with the structure of the batch.
        num_samples: Number of samples in the part.
    """

    value: Any
    num_samples: int


def split(batch: Any, num_parts: int, name: str = "batch") -> list[BatchPart]:
    """Splits a batch into at most ``num_parts`` parts, in order, with sizes that differ by at most 1, the larger first.

    No part is empty, except that a batch without samples is one part. Tensors and arrays in the parts are views of the
    batch. If there is only one part, it is the batch itself.

    Args:
        batch: Batch to split, see :func:`count_samples`.
        num_parts: Maximum number of parts, at least 1.
        name: Name of the batch in error messages.

    Raises:
        ValueError: If the batch cannot be split.
    """
    if num_parts < 1:
        raise ValueError(f"`num_parts` must be at least 1, not {num_parts}.")
    num_samples = count_samples(batch, name)
    num_parts = max(1, min(num_parts, num_samples))
    if num_parts == 1:
        return [BatchPart(batch, num_samples)]
    size, num_larger = divmod(num_samples, num_parts)
    sizes = [size + 1] * num_larger + [size] * (num_parts - num_larger)
    return list(map(BatchPart, split_by_spans(batch, num_samples, spans_from_sizes(sizes)), sizes))


def split_like(value: Any, sizes: Sequence[int], name: str) -> list[Any]:
    """Splits a value into parts of given sizes, for arguments that accompany a batch that is already split.

    Tensors, arrays, and lists with ``sum(sizes)`` rows or entries are split. Other values are in every part, unchanged.

    Args:
        value: Value to split.
        sizes: Number of samples of each part.
        name: Name of the value in error messages.

    Raises:
        ValueError: If the value contains a tensor that cannot be split, or a packed sequence.
    """
    num_samples = sum(sizes)
    for path, found in unsplittable_values(value, name, num_samples):
        raise ValueError(unsplittable_message(path, found))
    return split_by_spans(value, num_samples, spans_from_sizes(sizes))


def count_samples(batch: Any, name: str = "batch") -> int:
    """Returns the number of samples of a batch, on which its values must agree.

    A tensor or array determines it by its first dimension, if it has one. All tensors and arrays in tuples, mappings,
    and dataclasses must agree. A list with tensors may contain values for the whole batch, or one entry per sample: the
    other values of the batch decide. If both cases are possible, entries that agree on a size are values for the batch,
    unless they look like uncollated samples. Lists without tensors, and tuples of strings (which torch's
    ``default_collate`` returns for strings), are used only if the batch contains no tensor.

    Raises:
        ValueError: If values disagree, if no value determines the number, or if a value cannot be split.
    """
    for sizes_of in (sizes_from_tensors, sizes_from_lists):
        sizes = sizes_of(batch)
        if sizes:
            return sizes[0]
        if sizes is not None:
            raise ValueError(disagreement_message(list(size_hints(batch, name, sizes_of)), name))
    raise ValueError(
        f"`{name}` is of type {type(batch).__name__} and cannot be split: it contains no tensor, array or list that"
        f" shows its number of samples. {SCATTER_ADVICE}"
    )


def sizes_from_tensors(value: Any) -> Sizes:
    """Returns the possible numbers of samples of a value, from its tensors and arrays."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested:
            return ()
        return value.shape[:1] or None
    if isinstance(value, list):
        return sizes_from_list_of_tensors(value)
    if isinstance(value, np.ndarray):
        return value.shape[:1] or None
    if is_packed_batch(value):
        return ()
    if is_collection(value):
        return common_sizes(parts_of(value), sizes_from_tensors)
    return () if callable(getattr(value, "to", None)) else None  # an object with tensors that is not a collection


def sizes_from_list_of_tensors(values: list[Any]) -> Sizes:
    """Returns the possible numbers of samples of a list with tensors: the size of its entries, its length, or both."""
    sizes = common_sizes(values, sizes_from_tensors)
    if sizes is None:
        return (len(values),) if contains(values, is_array) else None
    if not sizes:  # the entries have different sizes
        return (len(values),) if are_alike(values) and not contains(values, is_packed_batch) else ()
    if are_uncollated_samples(values):
        return (len(values), *(size for size in sizes if size != len(values)))
    return sizes if len(values) in sizes else (*sizes, len(values))


def sizes_from_lists(value: Any) -> Sizes:
    """Returns the possible numbers of samples of a value without tensors, from lists and tuples of strings."""
    if isinstance(value, list) or is_tuple_of_strings(value):
        return (len(value),)
    return common_sizes(parts_of(value), sizes_from_lists) if is_collection(value) else None


def common_sizes(values: Iterable[Any], sizes_of: Callable[[Any], Sizes]) -> Sizes:
    """Returns the sizes that are possible for all values that determine one, in the order of the first such value."""
    result: Sizes = None
    for value in values:
        sizes = sizes_of(value)
        if sizes is None or sizes == result:
            continue
        result = sizes if result is None else tuple(size for size in result if size in sizes)
        if not result:
            return ()
    return result


def split_by_spans(value: Any, num_samples: int, spans: list[tuple[int, int]]) -> list[Any]:
    """Returns a value's part for each span of samples; a span is a start and a length."""
    if isinstance(value, torch.Tensor):
        if value.ndim and value.shape[0] == num_samples:
            # Not tensor_split: torch forbids in-place writes to a view that an operation returned with other views.
            return [value.narrow(0, start, length) for start, length in spans]
        return [value] * len(spans)
    if isinstance(value, np.ndarray):
        has_rows = value.ndim > 0 and value.shape[0] == num_samples
    elif isinstance(value, list):
        has_rows = len(value) == num_samples and is_list_of_samples(value)
        if not has_rows and not contains(value, is_array):
            return [value] * len(spans)
    else:
        has_rows = is_tuple_of_strings(value) and len(value) == num_samples
    if has_rows:
        return [value[start : start + length] for start, length in spans]
    if not is_collection(value) or not (parts := parts_of(value)):
        return [value] * len(spans)
    columns = [split_by_spans(part, num_samples, spans) for part in parts]
    return [rebuild(value, list(row)) for row in zip(*columns, strict=True)]


def is_list_of_samples(values: list[Any]) -> bool:
    """Returns whether a list whose length is the number of samples has one entry per sample."""
    sizes = common_sizes(values, sizes_from_tensors)
    return not sizes or len(values) not in sizes or are_uncollated_samples(values)


def unsplittable_values(value: Any, path: str, num_samples: int) -> Iterator[tuple[str, Any]]:
    """Yields the path and value of each part that must be split, but cannot be split by :func:`split_by_spans`."""
    if isinstance(value, torch.Tensor):
        if value.is_nested or (value.layout is not torch.strided and value.shape[:1] == (num_samples,)):
            yield path, value
    elif is_packed_batch(value):
        yield path, value
    elif isinstance(value, list) and len(value) == num_samples and is_list_of_samples(value):
        return
    elif is_collection(value):
        for label, part in zip(labels_of(value), parts_of(value), strict=True):
            yield from unsplittable_values(part, path + label, num_samples)


def spans_from_sizes(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the start and the length of each part."""
    return list(zip(accumulate(sizes, initial=0), sizes, strict=False))


def is_array(value: Any) -> bool:
    """Returns whether the value is a tensor or array."""
    return isinstance(value, (torch.Tensor, np.ndarray))


def is_tuple_of_strings(value: Any) -> bool:
    """Returns whether the value is a tuple of strings, which ``default_collate`` returns for strings."""
    return type(value) is tuple and bool(value) and all(isinstance(part, str | bytes) for part in value)


def is_packed_batch(value: Any) -> bool:
    """Returns whether a value is a packed sequence or nested tensor, which holds all samples and cannot be split."""
    return isinstance(value, PackedSequence) or (isinstance(value, torch.Tensor) and value.is_nested)


def are_uncollated_samples(values: list[Any]) -> bool:
    """Returns whether all entries contain numbers and tensors; collating would have turned the numbers into tensors."""
    return all(has_number_beside_tensor(value) for value in values)


def has_number_beside_tensor(value: Any) -> bool:
    """Returns whether a collection contains both a tensor and a number or string, ignoring lists inside it."""
    if isinstance(value, torch.Tensor) or not is_collection(value):
        return False
    leaves = list(leaves_of(value))
    return any(is_array(leaf) and leaf.ndim for leaf in leaves) and any(
        isinstance(leaf, int | float | complex | str | bytes) or (is_array(leaf) and not leaf.ndim) for leaf in leaves
    )


def leaves_of(collection: Any) -> Iterator[Any]:
    """Yields the leaves of a collection and its inner collections; inner lists are leaves."""
    for part in parts_of(collection):
        if is_collection(part) and not isinstance(part, list):
            yield from leaves_of(part)
        else:
            yield part


def are_alike(values: list[Any]) -> bool:
    """Returns whether the entries of a list may belong to different samples: equal type, dtype, and ndim, or None."""
    kinds = {
        (type(value), *((value.dtype, value.ndim) if is_array(value) else ())) for value in values if value is not None
    }
    return len(kinds) < 2


@dataclass(frozen=True)
class SizeHint:
    """Possible numbers of samples of the value at one path of a batch."""

    path: str
    value: Any
    sizes: tuple[int, ...]


def size_hints(value: Any, path: str, sizes_of: Callable[[Any], Sizes]) -> Iterator[SizeHint]:
    """Yields the values that determine the number of samples, for messages. A list is one value if its parts agree."""
    sizes = sizes_of(value)
    if sizes is None:
        return
    has_inner_values = is_collection(value) and not is_packed_batch(value) and not is_tuple_of_strings(value)
    if has_inner_values and not (sizes and isinstance(value, list)):
        for label, part in zip(labels_of(value), parts_of(value), strict=True):
            yield from size_hints(part, path + label, sizes_of)
    else:
        yield SizeHint(path, value, sizes)


def disagreement_message(hints: list[SizeHint], name: str) -> str:
    """Returns an error message that explains why no size is possible for all values."""
    for i, hint in enumerate(hints):
        if not hint.sizes:
            return unsplittable_message(hint.path, hint.value)
        for other in hints[:i]:
            if not set(hint.sizes) & set(other.sizes):
                return (
                    f"`{name}` cannot be split: `{other.path}` has {sizes_text(other.sizes)} samples, "
                    f"but `{hint.path}` has {sizes_text(hint.sizes)}. {SCATTER_ADVICE}"
                )
    found = ", ".join(f"`{hint.path}` has {sizes_text(hint.sizes)}" for hint in hints)
    return f"`{name}` cannot be split, because its parts have no common number of samples: {found}. {SCATTER_ADVICE}"


def sizes_text(sizes: tuple[int, ...]) -> str:
    """Formats sizes for messages."""
    return " or ".join(map(str, sizes))


def unsplittable_message(path: str, value: Any) -> str:
    """Returns an error message for a value that cannot be split."""
    if isinstance(value, torch.Tensor):
        kind = "a nested tensor" if value.is_nested else f"a tensor of layout {value.layout}"
    else:
        kind = f"a {type(value).__name__}"
    return f"`{path}` is {kind}, which cannot be split into samples. {SCATTER_ADVICE}"
