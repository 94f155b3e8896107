"""Tensors as the process group moves them: flat, contiguous, plain, and such that what comes can be written back."""

from collections.abc import Generator, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import Parameter

_PLAIN: Final = (Tensor, Parameter)


class HasNoMemoryError(Exception):
    """Raised for what is a tensor to torch's dispatcher only, such as a DTensor or one that traces."""


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is torch's own; others may have no memory."""
    return type(tensor) in _PLAIN


def is_tracing() -> bool:
    """Whether torch follows what is called with tensors that have no memory, and nothing is to be carried out."""
    return torch._guards.active_fake_mode() is not None


def flat(tensor: Tensor, name: str) -> Tensor:
    """The tensor as one row; a copy if it is not contiguous.

    Args:
        tensor: Any.
        name: Of the collective, for messages.

    Raises:
        HasNoMemoryError: If its memory cannot be read.
        ValueError: If it is not of the CPU, or not dense.
    """
    if not is_plain(tensor) and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise HasNoMemoryError
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{name}: the process group 'shm' moves tensors of the CPU, and this one is on {tensor.device}. Use"
            " 'nccl' for GPUs."
        )
    if tensor.layout != torch.strided:
        raise ValueError(f"{name}: the process group 'shm' moves dense tensors here, and this one is {tensor.layout}.")
    with torch._C.DisableTorchFunctionSubclass():
        row = tensor.detach().contiguous().view(-1)
        row.data_ptr()  # an error now, for what vmap and the like hand on, and not in the middle of the operation
        return row


def check_one_part_per_rank(wholes: Sequence[Tensor], parts: Sequence[Tensor], num_ranks: int, name: str) -> None:
    """Refuses tensors that are not as large as a part for each rank.

    Args:
        wholes: Those that have the parts of all ranks.
        parts: One for each, of its dtype.
        num_ranks: How many ranks there are.
        name: The argument that the wholes are.

    Raises:
        ValueError: If one does not fit.
    """
    for whole, part in zip(wholes, parts, strict=True):
        if whole.numel() != part.numel() * num_ranks or whole.dtype != part.dtype:
            raise ValueError(
                f"`{name}` of {whole.numel()} {whole.dtype} elements must have {num_ranks} times the"
                f" {part.numel()} {part.dtype} elements of the other tensor, one part per rank."
            )


def then_copy(
    progress: Generator[None, None, None], flats: Sequence[Tensor], tensors: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Generator[None, None, None]:
    """Carries out an operation on flat tensors, then writes those of the outputs back that are copies."""
    yield from progress
    ids = {id(output) for output in outputs}
    for row, tensor in zip(flats, tensors, strict=True):
        if id(tensor) in ids and row.data_ptr() != tensor.data_ptr():
            with torch._C.DisableTorchFunctionSubclass():
                _write(tensor.detach(), row.view(tensor.shape))


def _write(into: Tensor, values: Tensor) -> None:
    # Where a tensor is expanded, one element stands for several, which all have got the same.
    for dim, stride in enumerate(into.stride()):
        if stride == 0 and into.size(dim) > 1:
            into, values = into.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    into.copy_(values)
