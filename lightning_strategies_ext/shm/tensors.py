"""Tensors for the process group: flat, contiguous, plain; results are copied back to the caller's tensors."""

from collections.abc import Generator, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import Parameter

_PLAIN: Final = (Tensor, Parameter)


class NoStorageError(Exception):
    """Raised for a tensor that only torch's dispatcher supports, such as a DTensor, or a tensor of a trace."""


def is_plain(tensor: Tensor) -> bool:
    """Returns whether a tensor is of torch's own class; tensors of other classes may have no memory."""
    return type(tensor) in _PLAIN


def is_tracing() -> bool:
    """Returns whether torch is tracing, with tensors that have no memory, so that no operation must be executed."""
    return torch._guards.active_fake_mode() is not None


def flat(tensor: Tensor, name: str) -> Tensor:
    """Returns a tensor as one row; a copy if it is not contiguous.

    Args:
        tensor: Tensor of any shape and class.
        name: Name of the collective, for messages.

    Raises:
        NoStorageError: If the memory of the tensor cannot be read.
        ValueError: If the tensor is not on the CPU, or not dense.
    """
    if not is_plain(tensor) and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise NoStorageError
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{name}: the process group 'shm' supports only CPU tensors, but this one is on {tensor.device}. Use"
            " 'nccl' for GPUs."
        )
    if tensor.layout != torch.strided:
        raise ValueError(
            f"{name}: the process group 'shm' supports only dense tensors here, but this one is {tensor.layout}."
        )
    with torch._C.DisableTorchFunctionSubclass():
        row = tensor.detach().contiguous().view(-1)
        row.data_ptr()  # raises for tensors of vmap and the like, before the operation has begun
        return row


def check_one_part_per_rank(full_tensors: Sequence[Tensor], parts: Sequence[Tensor], num_ranks: int, name: str) -> None:
    """Checks that tensors have the size of one part per rank.

    Args:
        full_tensors: Tensors with the parts of all ranks.
        parts: One part for each of ``full_tensors``, of the same dtype.
        num_ranks: Number of ranks.
        name: Name of the argument with ``full_tensors``, for messages.

    Raises:
        ValueError: If a size or dtype does not match.
    """
    for full, part in zip(full_tensors, parts, strict=True):
        if full.numel() != part.numel() * num_ranks or full.dtype != part.dtype:
            raise ValueError(
                f"`{name}` of {full.numel()} {full.dtype} elements must have {num_ranks} times the"
                f" {part.numel()} {part.dtype} elements of the other tensor, one part per rank."
            )


def with_copy_back(
    progress: Generator[None, None, None], flats: Sequence[Tensor], tensors: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Generator[None, None, None]:
    """Runs an operation on flat tensors, then copies the results to the outputs whose flat tensors are copies."""
    yield from progress
    ids = {id(output) for output in outputs}
    for row, tensor in zip(flats, tensors, strict=True):
        if id(tensor) in ids and row.data_ptr() != tensor.data_ptr():
            with torch._C.DisableTorchFunctionSubclass():
                _write(tensor.detach(), row.view(tensor.shape))


def _write(target: Tensor, values: Tensor) -> None:
    # In an expanded tensor, one element stands for several elements, which have received equal values.
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.size(dim) > 1:
            target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    target.copy_(values)
