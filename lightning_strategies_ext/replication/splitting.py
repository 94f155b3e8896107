"""A batch, cut into one part for each replica.

Tensors and arrays are cut along their first dimension, into views; collections keep their types. How many samples a
batch has is what its tensors and arrays agree on. See ``count_samples``.

What it does not promise: to look into objects that are not collections (each part gets the object itself), to see that
a value has as many rows as there are samples by accident, or to tell a list of values for the whole batch from a list
with one entry per sample where both fit. What cannot be told apart by its rules is for the user's own function.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_strategies_ext.nested import contains, is_collection, labels_of, parts_of, rebuilt
from lightning_strategies_ext.replication.single_process import IF_OF_A_LIBRARY

#: The numbers of samples that a value may have, the likeliest first: none if it cannot be split, None if it has no say.
Sizes: TypeAlias = tuple[int, ...] | None

ARRAYS = (torch.Tensor, np.ndarray)

FIX = f"Give the strategy a `scatter` function that splits it: `DataParallelStrategy(scatter=...)`. {IF_OF_A_LIBRARY}"


@dataclass(frozen=True)
class Part:
    """What one replica gets of a batch.

    Args:
        value: Of the same structure as the batch.
        num_samples: How many of the batch's samples it holds.
    """

    value: Any
    num_samples: int


def split(batch: Any, num_parts: int, name: str = "batch") -> list[Part]:
    """Returns a batch in at most ``num_parts`` parts, in order, their sizes as equal as can be, the larger first.

    No part is empty, but that a batch of no samples is one part. Tensors and arrays in the parts are views of the
    batch's. A batch that makes one part is that part itself, not copied.

    Args:
        batch: What to split. See ``count_samples`` for what can be.
        num_parts: At least 1.
        name: What error messages call the batch.

    Raises:
        ValueError: If the batch cannot be split.
    """
    if num_parts < 1:
        raise ValueError(f"`num_parts` must be at least 1, not {num_parts}.")
    num_samples = count_samples(batch, name)
    num_parts = max(1, min(num_parts, num_samples))
    if num_parts == 1:
        return [Part(batch, num_samples)]
    size, num_larger = divmod(num_samples, num_parts)
    sizes = [size + 1] * num_larger + [size] * (num_parts - num_larger)
    return list(map(Part, cut(batch, num_samples, spans_of(sizes)), sizes))


def split_like(value: Any, sizes: Sequence[int], name: str) -> list[Any]:
    """Returns a value in parts of given sizes, for what is passed beside a batch that was split already.

    In it, tensors, arrays and lists with as many rows or entries as ``sizes`` sum up to are split. All else is given to
    each part as it is.

    Args:
        value: What to split.
        sizes: For each part, the number of its samples.
        name: What error messages call the value.

    Raises:
        ValueError: If the value holds a tensor of as many rows, or a packed sequence, that cannot be split.
    """
    num_samples = sum(sizes)
    for place, found in uncuttable(value, name, num_samples):
        raise ValueError(unsplittable(place, found))
    return cut(value, num_samples, spans_of(sizes))


def count_samples(batch: Any, name: str = "batch") -> int:
    """Returns how many samples a batch has: what its parts agree on.

    A tensor or array says its first dimension, if it has one. In tuples, mappings and dataclasses, all who have a say
    must agree. A list that holds tensors may be one of values for the whole batch, or have one entry per sample: what
    stands beside it decides, and else what is likelier. Lists without tensors, and tuples of strings, which is what
    torch's ``default_collate`` makes of strings, count only where there is no tensor at all.

    Raises:
        ValueError: If the parts disagree, if nothing has a say, or if something is of a kind that cannot be split.
    """
    for opinion in (strong_sizes, weak_sizes):
        sizes = opinion(batch)
        if sizes:
            return sizes[0]
        if sizes is not None:
            raise ValueError(disagreement(list(votes(batch, name, opinion)), name))
    raise ValueError(
        f"`{name}` is of type {type(batch).__name__} and cannot be split: there is no tensor, array or list in it "
        f"that tells how many samples it has. {FIX}"
    )


def strong_sizes(value: Any) -> Sizes:
    """What a value with tensors says about the number of samples."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested:
            return ()
        return value.shape[:1] or None
    if isinstance(value, list):
        return sizes_of_list(value)
    if isinstance(value, np.ndarray):
        return value.shape[:1] or None
    if whole_batch_only(value):
        return ()
    if is_collection(value):
        return agreed(parts_of(value), strong_sizes)
    return () if callable(getattr(value, "to", None)) else None  # an object with tensors that nobody can look into


def sizes_of_list(values: list[Any]) -> Sizes:
    """What a list says if it holds tensors: the size of each for the whole batch, or its own length, or both."""
    sizes = agreed(values, strong_sizes)
    if sizes is None:
        return (len(values),) if contains(values, is_array) else None
    if not sizes:
        return (len(values),) if alike(values) and not contains(values, whole_batch_only) else ()
    if are_samples(values):
        return (len(values), *(size for size in sizes if size != len(values)))
    return sizes if len(values) in sizes else (*sizes, len(values))


def weak_sizes(value: Any) -> Sizes:
    """What a value without tensors says about the number of samples."""
    if isinstance(value, list) or is_strings(value):
        return (len(value),)
    return agreed(parts_of(value), weak_sizes) if is_collection(value) else None


def agreed(values: Iterable[Any], opinion: Callable[[Any], Sizes]) -> Sizes:
    """The sizes that all of the values who have a say can have, in the order of the first."""
    result: Sizes = None
    for value in values:
        sizes = opinion(value)
        if sizes is None or sizes == result:
            continue
        result = sizes if result is None else tuple(size for size in result if size in sizes)
        if not result:
            return ()
    return result


def cut(value: Any, num_samples: int, spans: list[tuple[int, int]]) -> list[Any]:
    """Returns a value's part for each span of samples, given by its start and its length."""
    if isinstance(value, torch.Tensor):
        if value.ndim and value.shape[0] == num_samples:
            # Not tensor_split: torch forbids to write in place to one of several views that an operation returned.
            return [value.narrow(0, start, length) for start, length in spans]
        return [value] * len(spans)
    if isinstance(value, np.ndarray):
        has_rows = value.ndim > 0 and value.shape[0] == num_samples
    elif isinstance(value, list):
        has_rows = len(value) == num_samples and has_entry_per_sample(value)
        if not has_rows and not contains(value, is_array):
            return [value] * len(spans)
    else:
        has_rows = is_strings(value) and len(value) == num_samples
    if has_rows:
        return [value[start : start + length] for start, length in spans]
    if not is_collection(value) or not (parts := parts_of(value)):
        return [value] * len(spans)
    columns = [cut(part, num_samples, spans) for part in parts]
    return [rebuilt(value, list(row)) for row in zip(*columns, strict=True)]


def has_entry_per_sample(values: list[Any]) -> bool:
    """Whether a list of as many entries as samples has one for each, not values for the whole batch."""
    sizes = agreed(values, strong_sizes)
    return not sizes or len(values) not in sizes or are_samples(values)


def uncuttable(value: Any, place: str, num_samples: int) -> Iterator[tuple[str, Any]]:
    """Yields what ``cut`` would come upon but could not cut, and the place of it."""
    if isinstance(value, torch.Tensor):
        if value.is_nested or (value.layout is not torch.strided and value.shape[:1] == (num_samples,)):
            yield place, value
    elif whole_batch_only(value):
        yield place, value
    elif isinstance(value, list) and len(value) == num_samples and has_entry_per_sample(value):
        return
    elif is_collection(value):
        for label, part in zip(labels_of(value), parts_of(value), strict=True):
            yield from uncuttable(part, place + label, num_samples)


def spans_of(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Returns for each part where it starts and how long it is."""
    return list(zip(accumulate(sizes, initial=0), sizes, strict=False))


def is_array(value: Any) -> bool:
    """Whether the value has rows."""
    return isinstance(value, ARRAYS)


def is_strings(value: Any) -> bool:
    """Whether the value is what ``default_collate`` makes of the strings in tuples: a tuple of them."""
    return type(value) is tuple and bool(value) and all(isinstance(part, str | bytes) for part in value)


def whole_batch_only(value: Any) -> bool:
    """Whether the value packs the samples of a batch in a way that cannot be cut."""
    return isinstance(value, PackedSequence) or (isinstance(value, torch.Tensor) and value.is_nested)


def are_samples(values: list[Any]) -> bool:
    """Whether the entries of a list look like samples that were not collated: collating leaves no numbers in them."""
    return all(has_number_beside_tensor(value) for value in values)


def has_number_beside_tensor(value: Any) -> bool:
    """Whether a collection holds both a tensor and a number or string, not counting those in lists within it."""
    if isinstance(value, torch.Tensor) or not is_collection(value):
        return False
    leaves = list(leaves_of(value))
    return any(is_array(leaf) and leaf.ndim for leaf in leaves) and any(
        isinstance(leaf, int | float | complex | str | bytes) or (is_array(leaf) and not leaf.ndim) for leaf in leaves
    )


def leaves_of(collection: Any) -> Iterator[Any]:
    """Yields what a collection and the collections in it hold, lists within it not opened."""
    for part in parts_of(collection):
        if is_collection(part) and not isinstance(part, list):
            yield from leaves_of(part)
        else:
            yield part


def alike(values: list[Any]) -> bool:
    """Whether the entries of a list may be those of different samples, which are of one kind or missing."""
    kinds = {
        (type(value), *((value.dtype, value.ndim) if is_array(value) else ())) for value in values if value is not None
    }
    return len(kinds) < 2


@dataclass(frozen=True)
class Vote:
    """What the value at one place in a batch says about the number of samples."""

    place: str
    value: Any
    sizes: tuple[int, ...]


def votes(value: Any, place: str, opinion: Callable[[Any], Sizes]) -> Iterator[Vote]:
    """Yields who has a say, for messages: tensors, and lists as one, unless the parts of a list disagree."""
    sizes = opinion(value)
    if sizes is None:
        return
    is_open = is_collection(value) and not whole_batch_only(value) and not is_strings(value)
    if is_open and not (sizes and isinstance(value, list)):
        for label, part in zip(labels_of(value), parts_of(value), strict=True):
            yield from votes(part, place + label, opinion)
    else:
        yield Vote(place, value, sizes)


def disagreement(votes: list[Vote], name: str) -> str:
    """Says why the votes have no size in common."""
    for i, vote in enumerate(votes):
        if not vote.sizes:
            return unsplittable(vote.place, vote.value)
        for other in votes[:i]:
            if not set(vote.sizes) & set(other.sizes):
                return (
                    f"`{name}` cannot be split: `{other.place}` has {in_words(other.sizes)} samples, "
                    f"but `{vote.place}` has {in_words(vote.sizes)}. {FIX}"
                )
    found = ", ".join(f"`{vote.place}` has {in_words(vote.sizes)}" for vote in votes)
    return f"`{name}` cannot be split, its parts have no number of samples in common: {found}. {FIX}"


def in_words(sizes: tuple[int, ...]) -> str:
    """Names the sizes."""
    return " or ".join(map(str, sizes))


def unsplittable(place: str, value: Any) -> str:
    """Says that the value at a place is of a kind that cannot be split."""
    if isinstance(value, torch.Tensor):
        kind = "a nested tensor" if value.is_nested else f"a tensor of layout {value.layout}"
    else:
        kind = f"a {type(value).__name__}"
    return f"`{place}` is {kind}, which cannot be split into samples. {FIX}"
