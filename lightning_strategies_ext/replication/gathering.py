"""Gathers the outputs of replicas for their parts of a batch into one output for the whole batch.

Tensors and arrays are concatenated along their first dimension, and floating-point numbers are averaged over the
samples. Integers become one entry per replica, because nothing indicates whether to add them. See :func:`gather`.

Limitations: A floating-point number that is not a mean over the samples (a sum, a maximum) is averaged like a mean,
unless autograd has recorded the reduction (:func:`denominator_of`). Tensors are not padded. Tensors inside objects that
are not collections are not moved. A list of values for the whole batch cannot be distinguished from a list with one
entry per sample if both fit.
"""

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch.nn.utils.rnn import PackedSequence

from lightning_strategies_ext.nested import MAPPINGS, class_identity, is_collection, labels_of, parts_of, rebuild
from lightning_strategies_ext.replication.denominators import SUM, Count, denominator_of, drop_gradient_of_empty_mean
from lightning_strategies_ext.replication.splitting import LIBRARY_ADVICE, is_array

INEXACT_NUMBERS = (float, complex, np.inexact)
NUMBERS = (int, np.integer, np.bool_, *INEXACT_NUMBERS)  # bool is an int


def gather(
    values: Sequence[Any],
    sizes: Sequence[int],
    device: torch.device,
    name: str,
    lengths: Sequence[int] | None = None,
) -> Any:
    """Returns one value for the whole batch. Tensors keep their autograd history.

    Floating-point numbers, also as 0-dim tensors, become the result of :func:`value_of_batch`. Integers and bools
    become a tensor with one entry per replica, but equal bools stay a bool. Other tensors and arrays are concatenated.
    Tuples, mappings, dataclasses, and lists of values with a row per sample are gathered part by part. Lists with one
    entry per sample are concatenated. For other objects, the result is the first if all are equal, else a list of them.

    Args:
        values: Value of each replica.
        sizes: Number of samples of each replica.
        device: Device of tensors in the result.
        name: Name of the value in error messages.
        lengths: Number of entries of a list with one entry per sample; ``sizes`` if None. They differ if ``sizes`` are
            numbers of tokens.

    Raises:
        ValueError: If the values differ in type or structure, or shapes differ in more than the first dimension.
    """
    first = values[0]
    is_none = [value is None for value in values]
    if any(is_none):
        if all(is_none):
            return None
        raise ValueError(
            f"`{name}` cannot be gathered: it is None in replica {is_none.index(True)}, but not in replica"
            f" {is_none.index(False)}. Use a value in all replicas, or None in all. {LIBRARY_ADVICE}"
        )
    if any(isinstance(value, torch.Tensor) for value in values):
        return gather_tensors(values, sizes, device, name)
    if any(isinstance(value, np.ndarray) for value in values):
        return gather_arrays(values, sizes, device, name)
    if all(isinstance(value, (bool, np.bool_)) and value == first for value in values):
        return first
    if all(isinstance(value, NUMBERS) for value in values):
        if any(isinstance(value, INEXACT_NUMBERS) for value in values):
            return weighted_mean(values, sizes, device)
        return torch.tensor(list(map(to_python_number, values)), device=device)
    if any(isinstance(value, PackedSequence) for value in values):
        raise ValueError(
            f"`{name}` is a PackedSequence, which cannot be gathered. Return the padded tensor and the lengths: "
            "`torch.nn.utils.rnn.pad_packed_sequence`."
        )
    if any(map(is_collection, values)):
        check_types(values, name)
        if isinstance(first, list) and (
            are_lists_of_samples(values, sizes) or (lengths is not None and are_lists_of_samples(values, lengths))
        ):
            return [move_tensors(entry, device) for value in values for entry in value]
        return gather_parts(values, sizes, device, name, lengths)
    return first if all(is_equal_object(value, first) for value in values) else list(values)


def value_of_batch(
    values: Sequence[torch.Tensor | float], denominators: Sequence[Any], sizes: Sequence[int], device: torch.device
) -> torch.Tensor | float:
    """Returns the value for the whole batch from the replicas' values for their parts.

    Sums are added. Means are weighted by their denominators, for example a mean over tokens by its number of tokens.
    Means with equal denominators (for example a mean of several losses) and values of unknown denominator are weighted
    by the number of samples, unless a denominator is a :class:`Count`.

    Args:
        values: Numbers or tensors, see :func:`weighted_mean`.
        denominators: Result of :func:`denominator_of` for each value.
        sizes: Number of samples of each replica.
        device: Device of the result.
    """
    kinds = set(map(type, denominators))
    if kinds <= {int, float, Count} and Count in kinds:
        return weighted_mean(values, denominators, device)
    if kinds <= {int, float}:
        return weighted_mean(values, sizes if len(set(denominators)) == 1 else denominators, device)
    if len(values) == 1 or kinds not in ({type(SUM)}, {torch.Tensor}):
        return weighted_mean(values, sizes, device)
    tensors = torch.stack([torch.as_tensor(value, device=device).reshape(()) for value in values])
    if denominators[0] is SUM:
        return tensors.sum()
    dtype = torch.promote_types(tensors.dtype, torch.float32)
    weights = torch.stack([denominator.to(device, dtype) for denominator in denominators])
    # A mean over no elements is NaN and gets weight 0. No operation here synchronizes with a GPU.
    for value, weight in zip(values, weights, strict=True):
        drop_gradient_of_empty_mean(value, weight)
    total = (torch.where(weights > 0, tensors, 0) * weights).sum() / weights.sum()
    return total.to(tensors.dtype)


def weighted_mean(
    values: Sequence[torch.Tensor | float], sizes: Sequence[int], device: torch.device
) -> torch.Tensor | float:
    """Returns the mean over all samples, from the means of the replicas' samples.

    The result is differentiable and keeps the dtype of floating-point tensors. Equal numbers, or tensors that are the
    same object, are returned without rounding errors.

    Args:
        values: Numbers, tensors of one shape, or both, which results in a tensor.
        sizes: Number of samples of each value. If all are 0, the values have equal weights.
        device: Device of the result, if it is a tensor.
    """
    counts = sizes if any(sizes) else [1] * len(sizes)
    total = sum(counts)
    # Means over no samples are left out, because they are NaN, and NaN times the weight 0 is NaN.
    terms = [(value, count) for value, count in zip(values, counts, strict=True) if count]
    first = terms[0][0]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not tensors:
        if all(value == first for value, _ in terms):
            return to_python_number(first) * 1.0  # type: ignore[no-any-return]
        return sum(to_python_number(value) * count for value, count in terms) / total  # type: ignore[no-any-return]
    if all(value is values[0] for value in values):
        return tensors[0].to(device)

    dtype = tensors[0].dtype
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    if not dtype.is_floating_point and not dtype.is_complex:
        dtype = torch.get_default_dtype()
    wide = torch.promote_types(dtype, torch.float32)  # 16-bit additions would accumulate rounding errors
    summed = torch.as_tensor(first, device=device, dtype=wide) * (terms[0][1] / total)
    for value, count in terms[1:]:
        summed = summed.add(torch.as_tensor(value, device=device, dtype=wide), alpha=count / total)
    return summed.to(dtype)


def _mean(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.float()).mean()


#: Function for each ``reduce_op``.
_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": _mean,
    "avg": _mean,
    "sum": torch.sum,
    "min": torch.min,
    "max": torch.max,
    "product": torch.prod,
}


def reduce_replicas(collection: Any, reduce_op: Any) -> Any:
    """Reduces each tensor of a collection, as gathered from replicas, over all of its entries.

    Args:
        collection: Tensor, or collection of tensors; other entries are unchanged.
        reduce_op: Reduction, "mean", "avg", "sum", "min", "max", "product", or a ``torch.distributed.ReduceOp``.

    Returns:
        The collection with 0-dim tensors. The mean of integers is a float.

    Raises:
        ValueError: If ``reduce_op`` is unknown.
    """
    name = "mean" if reduce_op is None else str(getattr(reduce_op, "name", reduce_op)).lower()
    if name not in _REDUCTIONS:
        raise ValueError(f"`reduce_op={reduce_op!r}` is unknown. Use one of {', '.join(_REDUCTIONS)}.")
    return apply_to_collection(collection, torch.Tensor, _REDUCTIONS[name])


def gather_tensors(values: Sequence[Any], sizes: Sequence[int], device: torch.device, name: str) -> Any:
    """Gathers tensors, or 0-dim tensors and numbers: a replica may return 0.0 if it has no data for a loss."""
    if not all(isinstance(value, (torch.Tensor, *NUMBERS)) for value in values):
        check_types(values, name)
    if any(isinstance(value, torch.Tensor) and value.is_nested for value in values):
        raise ValueError(
            f"`{name}` is a nested tensor, which cannot be gathered. Return a list, such as `list(x.unbind())`."
        )
    shapes = [tuple(value.shape) if isinstance(value, torch.Tensor) else () for value in values]
    if any(shapes):
        check_shapes(shapes, name)
        tensors = [value.to(device) for value in values]
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    if any(is_inexact(value) for value in values):
        return value_of_batch(values, list(map(denominator_of, values)), sizes, device)
    return torch.stack([torch.as_tensor(value, device=device) for value in values])


def gather_arrays(values: Sequence[Any], sizes: Sequence[int], device: torch.device, name: str) -> Any:
    """Gathers values of which some are arrays. Arrays without dimensions are treated as numbers."""
    if not all(isinstance(value, np.ndarray) for value in values):
        check_types(values, name)
    shapes = [value.shape for value in values]
    if not any(shapes):
        return gather([value.item() for value in values], sizes, device, name)
    check_shapes(shapes, name)
    if len(values) == 1:
        return values[0]
    # `np.concatenate` drops the masks of masked arrays.
    is_masked = any(isinstance(value, np.ma.MaskedArray) for value in values)
    return np.ma.concatenate(values) if is_masked else np.concatenate(values)  # type: ignore[no-untyped-call]


def gather_parts(
    values: Sequence[Any], sizes: Sequence[int], device: torch.device, name: str, lengths: Sequence[int] | None = None
) -> Any:
    """Gathers collections of one type part by part."""
    first = values[0]
    labels = labels_of(first)
    if isinstance(first, MAPPINGS):  # the order of keys may differ
        check_labels(labels, [labels_of(value) for value in values], name, "keys", any_order=True)
        columns = [[value[key] for value in values] for key in first]
    else:
        check_labels(labels, [labels_of(value) for value in values], name, "parts")
        columns = [list(column) for column in zip(*map(parts_of, values), strict=True)]
    parts = [
        gather(column, sizes, device, name + label, lengths) for label, column in zip(labels, columns, strict=True)
    ]
    return rebuild(first, parts)


def are_lists_of_samples(lists: Sequence[list[Any]], sizes: Sequence[int]) -> bool:
    """Returns whether lists have one entry per sample, and are concatenated instead of gathered part by part."""
    lengths = list(map(len, lists))
    if len(set(lengths)) > 1:
        return True
    return lengths == list(sizes) and not have_rows_per_sample(lists, sizes)


def have_rows_per_sample(lists: Sequence[list[Any]], sizes: Sequence[int]) -> bool:
    """Returns whether entries have a row per sample, as in ``[predictions, loss]``, where the number is ignored."""
    has_rows = False
    for column in zip(*lists, strict=True):
        row_flags = [has_row_per_sample(value, size) for value, size in zip(column, sizes, strict=True)]
        if False in row_flags:
            return False
        has_rows = has_rows or all(row_flags)
    return has_rows


def has_row_per_sample(value: Any, size: int) -> bool | None:
    """Returns whether a value has a row for each sample of a replica; None if this is unknown."""
    if is_array(value):
        return value.shape[0] == size if value.ndim else None
    if value is None or isinstance(value, (*NUMBERS, str, bytes)):
        return None
    if not is_collection(value):
        return False
    row_flags = [has_row_per_sample(part, size) for part in parts_of(value)]
    if False in row_flags:
        # A list may have one entry per sample, even if the entries have no rows.
        return None if isinstance(value, list) and len(value) == size else False
    return True if True in row_flags else None


def move_tensors(value: Any, device: torch.device) -> Any:
    """Returns the value with its tensors on the device; the value itself if they all are on the device."""
    if isinstance(value, torch.Tensor | PackedSequence):
        return value.to(device)  # type: ignore[arg-type]
    if not is_collection(value):
        return value
    parts = parts_of(value)
    moved = [move_tensors(part, device) for part in parts]
    return value if all(map(is_, parts, moved)) else rebuild(value, moved)


def is_equal_object(value: Any, other: Any) -> bool:
    """Returns whether two objects are the same object, or ``value == other`` is True."""
    try:
        return value is other or (value == other) is True
    except Exception:  # user-defined comparisons may raise
        return False


def is_inexact(value: Any) -> bool:
    """Returns whether a number or tensor is floating-point or complex."""
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, INEXACT_NUMBERS)


def to_python_number(number: Any) -> Any:
    """Converts a NumPy number to a Python number."""
    return number.item() if isinstance(number, np.generic) else number


def check_types(values: Sequence[Any], name: str) -> None:
    """Raises ValueError if the values have different types."""
    for i, value in enumerate(values):
        if class_identity(type(value)) != class_identity(type(values[0])):
            raise ValueError(
                f"`{name}` cannot be gathered: it is of type {type(value).__name__} in replica {i}, but of type"
                f" {type(values[0]).__name__} in replica 0. Use the same type for all samples. {LIBRARY_ADVICE}"
            )


def check_shapes(shapes: Sequence[tuple[int, ...]], name: str) -> None:
    """Raises ValueError if shapes differ in more than the first dimension."""
    for i, shape in enumerate(shapes):
        if shape[1:] != shapes[0][1:] or len(shape) != len(shapes[0]):
            raise ValueError(
                f"`{name}` cannot be gathered: its shape is {shape} in replica {i}, but {shapes[0]} in replica 0. Only"
                " the first dimension may differ. Pad to one length, or use a list with one entry per sample."
                f" {LIBRARY_ADVICE}"
            )


def check_labels(
    labels: list[str], labels_of_replicas: list[list[str]], name: str, kind: str, any_order: bool = False
) -> None:
    """Raises ValueError if the replicas' collections have different keys or parts."""
    for i, others in enumerate(labels_of_replicas):
        if (sorted(others) != sorted(labels)) if any_order else (others != labels):
            raise ValueError(
                f"`{name}` cannot be gathered: its {kind} are {', '.join(others) or 'none'} in replica {i}, but"
                f" {', '.join(labels) or 'none'} in replica 0. Use the same {kind} for all samples. {LIBRARY_ADVICE}"
            )
