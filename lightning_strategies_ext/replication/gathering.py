"""What the replicas' steps returned for their parts of a batch, joined to what one step returns for the whole of it.

Tensors and arrays are joined along their first dimension and floating-point numbers averaged over the samples. Whole
numbers stay apart, one entry per replica, since nothing tells whether they are to be added. See ``gather``.

What it does not promise: that a number which is not a mean over the samples (a sum, a maximum) becomes that of the
whole batch, except where autograd has recorded it (``denominator_of``), padding, to move tensors inside objects that
are not collections, or to tell a list of values for the whole batch from a list with one entry per sample where both
fit.
"""

from collections.abc import Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_strategies_ext.nested import MAPPINGS, identity_of, is_collection, labels_of, parts_of, rebuilt
from lightning_strategies_ext.replication.single_process import IF_OF_A_LIBRARY
from lightning_strategies_ext.replication.splitting import is_array

#: What :func:`denominator_of` returns for a sum.
SUM = "sum"
#: The reductions of torch's losses, by the number that autograd saves.
_REDUCTIONS: dict[Any, str] = {1: "mean", 2: SUM}
FLAGS = (bool, np.bool_)
FRACTIONS = (float, complex, np.inexact)
NUMBERS = (int, np.integer, np.bool_, *FRACTIONS)  # bool is an int


def gather(values: Sequence[Any], sizes: Sequence[int], device: torch.device, name: str) -> Any:
    """Returns one value for the whole batch. Tensors keep their autograd history.

    Floating-point numbers, also as 0-dim tensors, become the result of ``value_of_batch``; whole numbers and bools a
    tensor with one entry per replica, except that equal bools stay a bool. Other tensors and arrays are concatenated.
    Tuples, mappings and dataclasses are gathered part by part, and so are lists of values for the whole of a replica's
    samples. Lists with one entry per sample are concatenated. Of other objects the first is returned if all are equal,
    else a list of them.

    Args:
        values: What each replica returned.
        sizes: How many samples each replica got.
        device: Where the tensors of the result are.
        name: What error messages call the value.

    Raises:
        ValueError: If the values differ in type or structure, or tensors in another dimension than the first.
    """
    first = values[0]
    if any(value is None for value in values):
        return gather_none(values, name)
    if any(isinstance(value, torch.Tensor) for value in values):
        return gather_tensors(values, sizes, device, name)
    if any(isinstance(value, np.ndarray) for value in values):
        return gather_arrays(values, sizes, device, name)
    if all(isinstance(value, FLAGS) and value == first for value in values):
        return first
    if all(isinstance(value, NUMBERS) for value in values):
        if any(isinstance(value, FRACTIONS) for value in values):
            return weighted_mean(values, sizes, device)
        return torch.tensor(list(map(as_python, values)), device=device)
    if any(isinstance(value, PackedSequence) for value in values):
        raise ValueError(
            f"`{name}` is a PackedSequence, which cannot be gathered. Return the padded tensor and the lengths: "
            "`torch.nn.utils.rnn.pad_packed_sequence`."
        )
    if any(map(is_collection, values)):
        check_types(values, name)
        if isinstance(first, list) and has_entry_per_sample(values, sizes):
            return [moved(entry, device) for value in values for entry in value]
        return gather_parts(values, sizes, device, name)
    return first if all(is_same(value, first) for value in values) else list(values)


def denominator_of(value: Any) -> Any:
    """Returns the divisor of a mean, as autograd has saved it with the last operation; :data:`SUM` for a sum.

    It is the number of elements or, with class weights or ignored entries, the sum of their weights.

    Args:
        value: A tensor of one element, such as a loss, or anything else.

    Returns:
        A number or a tensor, :data:`SUM`, or None if the last operation was not one of torch's losses, ``x.mean()``, or
        ``x.sum() / count``, or if a backward pass has run. A plain ``x.sum()`` is None: it may be one over several
        losses, each of which is a mean.
    """
    node: Any = value.grad_fn if isinstance(value, torch.Tensor) else None
    if node is None:
        return None
    try:
        if node.name() in ("MeanBackward0", "MeanBackward1"):
            return getattr(node, "_saved_self_sym_numel", None)
        if node.name() == "DivBackward0":
            (summed, _), (divided_by, _) = node.next_functions
            if divided_by is not None or summed is None or summed.name() != "SumBackward0" or node._saved_other.ndim:
                return None
            return node._saved_other.item() if node._saved_other.is_cpu else node._saved_other
        reduction = _REDUCTIONS.get(getattr(node, "_saved_reduction", None))
        if reduction is None or reduction == SUM:
            return reduction
        if hasattr(node, "_saved_total_weight"):
            return node._saved_total_weight
        return node._saved_self.numel() if hasattr(node, "_saved_self") else None
    except RuntimeError:  # a backward pass has freed what was saved
        return None


def value_of_batch(
    values: Sequence[torch.Tensor | float], denominators: Sequence[Any], sizes: Sequence[int], device: torch.device
) -> torch.Tensor | float:
    """Returns the value for the whole batch of what replicas have computed from their parts.

    Sums add up, and means count by what they were divided by: a mean over tokens by its tokens. A mean over as many
    elements in parts of different sizes is one of other things than samples, as of several losses, and values of
    which nothing is known are taken for means over samples: both count by the samples.

    Args:
        values: See :func:`weighted_mean`.
        denominators: For each value, what :func:`denominator_of` returned.
        sizes: See :func:`weighted_mean`.
        device: See :func:`weighted_mean`.
    """
    kinds = set(map(type, denominators))
    if kinds <= {int, float}:
        return weighted_mean(values, sizes if len(set(denominators)) == 1 else denominators, device)
    if len(values) == 1 or kinds not in ({type(SUM)}, {torch.Tensor}):
        return weighted_mean(values, sizes, device)
    tensors = torch.stack([torch.as_tensor(value, device=device).reshape(()) for value in values])
    if denominators[0] is SUM:
        return tensors.sum()
    dtype = torch.promote_types(tensors.dtype, torch.float32)
    weights = torch.stack([denominator.to(device, dtype) for denominator in denominators])
    # A mean over nothing is NaN, and counts for nothing. Nothing here waits for a GPU.
    total = (torch.where(weights > 0, tensors, 0) * weights).sum() / weights.sum()
    return total.to(tensors.dtype)


def weighted_mean(
    values: Sequence[torch.Tensor | float], sizes: Sequence[int], device: torch.device
) -> torch.Tensor | float:
    """Returns the mean over all samples of values that are each a mean over one replica's samples.

    It is differentiable. The dtype of floating-point tensors is kept, and numbers that are all equal, or tensors that
    are all the same object, stay exactly that.

    Args:
        values: Numbers, tensors of one shape, or some of each, which gives a tensor.
        sizes: How many samples each value stands for. If there are none at all, each value counts the same.
        device: Where the result is, if it is a tensor.
    """
    counts = sizes if any(sizes) else [1] * len(sizes)
    total = sum(counts)
    # A mean over no samples is left out, not given the weight 0: it is NaN, which times 0 is NaN.
    terms = [(value, count) for value, count in zip(values, counts, strict=True) if count]
    first = terms[0][0]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not tensors:
        if all(value == first for value, _ in terms):
            return as_python(first) * 1.0  # type: ignore[no-any-return]
        return sum(as_python(value) * count for value, count in terms) / total  # type: ignore[no-any-return]
    if all(value is values[0] for value in values):
        return tensors[0].to(device)

    dtype = tensors[0].dtype
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    if not dtype.is_floating_point and not dtype.is_complex:
        dtype = torch.get_default_dtype()
    wide = torch.promote_types(dtype, torch.float32)  # 16 bits would lose some in each addition
    summed = torch.as_tensor(first, device=device, dtype=wide) * (terms[0][1] / total)
    for value, count in terms[1:]:
        summed = summed.add(torch.as_tensor(value, device=device, dtype=wide), alpha=count / total)
    return summed.to(dtype)


def gather_none(values: Sequence[Any], name: str) -> None:
    """Checks that all values are None, if one is."""
    is_none = [value is None for value in values]
    if not all(is_none):
        raise ValueError(
            f"`{name}` cannot be gathered: replica {is_none.index(True)} returned None and replica "
            f"{is_none.index(False)} did not. Return a value from each, or None from all."
            f" {IF_OF_A_LIBRARY}"
        )


def gather_tensors(values: Sequence[Any], sizes: Sequence[int], device: torch.device, name: str) -> Any:
    """Gathers tensors, or 0-dim tensors and numbers: a replica with nothing to compute a loss from may return 0.0."""
    if not all(isinstance(value, (torch.Tensor, *NUMBERS)) for value in values):
        check_types(values, name)
    if any(isinstance(value, torch.Tensor) and value.is_nested for value in values):
        raise ValueError(f"`{name}` is a nested tensor, which cannot be gathered. Return a list: `list(x.unbind())`.")
    shapes = [tuple(value.shape) if isinstance(value, torch.Tensor) else () for value in values]
    if any(shapes):
        check_shapes(shapes, name)
        tensors = [value.to(device) for value in values]
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    if any(is_fraction(value) for value in values):
        return value_of_batch(values, list(map(denominator_of, values)), sizes, device)
    return torch.stack([torch.as_tensor(value, device=device) for value in values])


def gather_arrays(values: Sequence[Any], sizes: Sequence[int], device: torch.device, name: str) -> Any:
    """Gathers values of which some are arrays. Those of no dimension are the numbers in them."""
    if not all(isinstance(value, np.ndarray) for value in values):
        check_types(values, name)
    shapes = [value.shape for value in values]
    if not any(shapes):
        return gather([value.item() for value in values], sizes, device, name)
    check_shapes(shapes, name)
    if len(values) == 1:
        return values[0]
    # numpy's own function drops the masks of masked arrays.
    is_masked = any(isinstance(value, np.ma.MaskedArray) for value in values)
    return np.ma.concatenate(values) if is_masked else np.concatenate(values)  # type: ignore[no-untyped-call]


def gather_parts(values: Sequence[Any], sizes: Sequence[int], device: torch.device, name: str) -> Any:
    """Gathers what each of several collections of one type holds at the same place."""
    first = values[0]
    labels = labels_of(first)
    if isinstance(first, MAPPINGS):  # whose order may differ
        check_labels(labels, [labels_of(value) for value in values], name, "the keys", any_order=True)
        columns = [[value[key] for value in values] for key in first]
    else:
        check_labels(labels, [labels_of(value) for value in values], name, "the parts")
        columns = [list(column) for column in zip(*map(parts_of, values), strict=True)]
    parts = [gather(column, sizes, device, name + label) for label, column in zip(labels, columns, strict=True)]
    return rebuilt(first, parts)


def has_entry_per_sample(lists: Sequence[list[Any]], sizes: Sequence[int]) -> bool:
    """Whether lists are to be concatenated, not gathered part by part."""
    lengths = list(map(len, lists))
    if len(set(lengths)) > 1:
        return True
    return lengths == list(sizes) and not are_for_all_samples(lists, sizes)


def are_for_all_samples(lists: Sequence[list[Any]], sizes: Sequence[int]) -> bool:
    """Whether each entry of the lists is a value for all of a replica's samples, as in ``[predictions, loss]``."""
    has_rows = False
    for column in zip(*lists, strict=True):
        answers = [is_for_all_samples(value, size) for value, size in zip(column, sizes, strict=True)]
        if False in answers:
            return False
        has_rows = has_rows or all(answers)
    return has_rows


def is_for_all_samples(value: Any, size: int) -> bool | None:
    """Whether a value has a row for each of a replica's samples. None if it may or may not be for all samples."""
    if is_array(value):
        return value.shape[0] == size if value.ndim else None
    if value is None or isinstance(value, (*NUMBERS, str, bytes)):
        return None
    if not is_collection(value):
        return False
    answers = [is_for_all_samples(part, size) for part in parts_of(value)]
    if False in answers:
        return None if isinstance(value, list) and len(value) == size else False
    return True if True in answers else None


def moved(value: Any, device: torch.device) -> Any:
    """Returns the value with the tensors in it on the device: the value itself if they all are there already."""
    if isinstance(value, torch.Tensor | PackedSequence):
        return value.to(device)  # type: ignore[arg-type]
    if not is_collection(value):
        return value
    parts = parts_of(value)
    moved_parts = [moved(part, device) for part in parts]
    return value if all(map(is_, parts, moved_parts)) else rebuilt(value, moved_parts)


def is_same(value: Any, other: Any) -> bool:
    """Whether both are the same object or compare as equal, by an answer that is plainly True."""
    try:
        return value is other or (value == other) is True
    except Exception:  # a comparison is the user's code, and may refuse
        return False


def is_fraction(value: Any) -> bool:
    """Whether a number or tensor is of floating-point or complex numbers."""
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, FRACTIONS)


def as_python(number: Any) -> Any:
    """Returns a number of numpy's as one of Python's."""
    return number.item() if isinstance(number, np.generic) else number


def check_types(values: Sequence[Any], name: str) -> None:
    """Raises if the values are not all of one type."""
    kinds = [type(value).__name__ for value in values]
    for i, value in enumerate(values):
        if identity_of(type(value)) != identity_of(type(values[0])):
            raise ValueError(
                f"`{name}` cannot be gathered: replica {i} returned a value of type {kinds[i]} and replica 0 of type "
                f"{kinds[0]}. Return the same type whatever the samples."
                f" {IF_OF_A_LIBRARY}"
            )


def check_shapes(shapes: Sequence[tuple[int, ...]], name: str) -> None:
    """Raises if shapes differ in more than the first dimension."""
    for i, shape in enumerate(shapes):
        if shape[1:] != shapes[0][1:] or len(shape) != len(shapes[0]):
            raise ValueError(
                f"`{name}` cannot be gathered: replica {i} returned the shape {shape} and replica 0 {shapes[0]}: they "
                "differ in more than the first dimension. Pad to one length or return a list with one entry per sample."
                f" {IF_OF_A_LIBRARY}"
            )


def check_labels(
    labels: list[str], of_replicas: list[list[str]], name: str, what: str, any_order: bool = False
) -> None:
    """Raises if the replicas' collections do not hold values at the same places."""
    for i, others in enumerate(of_replicas):
        if (sorted(others) != sorted(labels)) if any_order else (others != labels):
            raise ValueError(
                f"`{name}` cannot be gathered: replica {i} returned {what} {', '.join(others) or 'of nothing'} and "
                f"replica 0 {', '.join(labels) or 'of nothing'}. Return the same ones whatever the samples."
                f" {IF_OF_A_LIBRARY}"
            )
