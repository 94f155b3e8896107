"""Finds the denominator of a mean, such as a loss, in the operations that autograd has recorded."""

from typing import Any

import torch

#: Result of :func:`denominator_of` for a sum.
SUM = "sum"
#: Reductions of torch's losses, by the number that autograd saves.
_LOSS_REDUCTIONS: dict[Any, str] = {1: "mean", 2: SUM}
#: Names of operations that keep the element of a tensor of one element.
_SHAPE_OPERATIONS = frozenset(
    f"{name}Backward0" for name in ("Clone", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze")
) | {"SqueezeBackward1", "SqueezeBackward2"}
#: Names of operations of which each element of the result belongs to an element of the input.
_ELEMENTWISE_OPERATIONS = _SHAPE_OPERATIONS | {
    f"{name}Backward{index}"
    for name in (
        *("Abs", "Add", "Clamp", "Div", "Exp", "Log", "Log1P", "LogSigmoid", "Mul", "Neg"),
        *("Pow", "Relu", "Rsub", "Sigmoid", "Softplus", "Sqrt", "Sub", "Tanh", "ToCopy"),
    )
    for index in (0, 1)
}


def denominator_of(value: Any) -> Any:
    """Returns the denominator of a mean, which autograd has saved with the last operation; :data:`SUM` for a sum.

    The denominator is the number of elements or, with class weights or ignored entries, the sum of their weights.

    Args:
        value: Tensor of one element, such as a loss, or any other object.

    Returns:
        A number, a tensor, or :data:`SUM`. None if the last operation was not one of torch's losses, ``x.mean()``, or
        ``x.sum() / count``, or if a backward pass has run. None also for a plain ``x.sum()``, which may add up several
        losses that are means.
    """
    node = _reduction_of(value)
    if node is None:
        return None
    try:
        if node.name() in ("MeanBackward0", "MeanBackward1"):
            numel = getattr(node, "_saved_self_sym_numel", None)
            return Count(numel) if numel is not None and _reduces_selected(node) else numel
        if node.name() == "DivBackward0":
            if not _divides_sum(node) or node._saved_other.ndim:
                return None
            if not node._saved_other.is_cpu:
                return node._saved_other
            number = node._saved_other.item()
            return number if _was_python_number(node._saved_other) else Count(number)
        reduction = _LOSS_REDUCTIONS.get(getattr(node, "_saved_reduction", None))
        if reduction is None or reduction == SUM:
            return reduction
        if hasattr(node, "_saved_total_weight"):
            return node._saved_total_weight
        if not hasattr(node, "_saved_self"):
            return None
        numel = node._saved_self.numel()
        return Count(numel) if _reduces_selected(node) else numel
    except RuntimeError:  # a backward pass has freed the saved values
        return None


class Count(float):
    """Denominator that counts elements of the part, such as those of a mask, and is not a constant of the model."""


def _reduction_of(value: Any) -> Any:
    """Returns the last operation of a tensor of one element, without operations that only change its shape."""
    node: Any = value.grad_fn if isinstance(value, torch.Tensor) else None
    while node is not None and node.name() in _SHAPE_OPERATIONS:
        [(node, _)] = node.next_functions
    return node


def _reduces_selected(reduction: Any) -> bool:
    """Returns whether the reduced elements were selected by a mask, and only elementwise operations follow.

    Elements that are selected by integers may be entries of a constant list, such as one loss per task.
    """
    node = reduction.next_functions[0][0]
    while node is not None and node.name() in _ELEMENTWISE_OPERATIONS:
        inputs = [before for before, _ in node.next_functions if before is not None]
        node = inputs[0] if len(inputs) == 1 else None
    if node is None or node.name() != "IndexBackward0":
        return node is not None and node.name() == "MaskedSelectBackward0"
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in node._saved_indices)


def _divides_sum(node: Any) -> bool:
    """Returns whether a division divides a plain sum by a constant."""
    (summed, _), (divided_by, _) = node.next_functions
    return divided_by is None and summed is not None and summed.name() == "SumBackward0"


def _was_python_number(divisor: torch.Tensor) -> bool:
    """Returns whether autograd has saved a Python number, which has a lower priority in type promotion."""
    small = torch.float16 if divisor.is_floating_point() else torch.int8
    return divisor.dtype is not small and torch.result_type(torch.zeros((), dtype=small), divisor) is small


def drop_gradient_of_empty_mean(value: Any, count: torch.Tensor) -> None:
    """Sets the gradient that a division by a count of 0 sends to its sum to 0. It would be NaN: 0 divided by 0."""
    node = _reduction_of(value)
    if node is not None and node.name() == "DivBackward0" and _divides_sum(node):
        node.register_hook(lambda inputs, outputs: tuple(_zero_if_empty(gradient, count) for gradient in inputs))


def _zero_if_empty(gradient: torch.Tensor | None, count: torch.Tensor) -> torch.Tensor | None:
    return None if gradient is None else torch.where(count.to(gradient.device) > 0, gradient, 0)
