"""Operation numbers: which collective a rank has started, and for which tensors, so that ranks can compare them."""

import zlib
from collections.abc import Sequence
from enum import IntEnum, auto
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import ReduceOp


class CollectiveKind(IntEnum):
    """Collectives that consist of rounds."""

    ALL_REDUCE = auto()
    REDUCE = auto()
    BROADCAST = auto()
    ALL_GATHER = auto()
    GATHER = auto()
    SCATTER = auto()
    REDUCE_SCATTER = auto()
    BARRIER = auto()


#: Kinds whose number includes a root.
_ROOTED: Final = (CollectiveKind.REDUCE, CollectiveKind.BROADCAST, CollectiveKind.GATHER, CollectiveKind.SCATTER)
#: The orders are equal on all ranks, because all ranks have the same version of torch. Number 0 means none.
_DTYPES: Final = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)
_DTYPE_NUMBERS: Final = {dtype: number for number, dtype in enumerate(_DTYPES, start=1)}
_OPS: Final = sorted(ReduceOp.RedOpType.__members__)
_OP_NUMBERS: Final = {name: number for number, name in enumerate(_OPS, start=1)}
#: Numbers of kinds, reductions, dtypes, and roots that an operation number of 32 bits distinguishes.
_MAX_KINDS, _MAX_OPS, _MAX_DTYPES, _MAX_ROOTS = 16, 16, 256, 65536


def operation_id(kind: CollectiveKind, tensors: Sequence[Tensor], op: Any = None, root: int = 0) -> int:
    """Returns the number of an operation.

    Args:
        kind: Kind of the collective.
        tensors: Tensors of the operation; only the dtype of the first tensor is used.
        op: Reduction operator, or None.
        root: Rank of the root in the group, if the collective has one.
    """
    dtype_number = _DTYPE_NUMBERS[tensors[0].dtype] if tensors else 0
    op_number = 0 if op is None else _OP_NUMBERS[op.name]
    return kind + _MAX_KINDS * (op_number + _MAX_OPS * (dtype_number + _MAX_DTYPES * (root % _MAX_ROOTS)))


def checksum_of(tensors: Sequence[Tensor]) -> int:
    """Returns a checksum of the sizes and dtypes of tensors."""
    layout = [(tensor.numel(), _DTYPE_NUMBERS[tensor.dtype]) for tensor in tensors]
    return zlib.crc32(repr(layout).encode())


def describe_operation(number: int) -> str:
    """Returns a description of an operation number, for messages."""
    rest, kind = divmod(number, _MAX_KINDS)
    rest, op = divmod(rest, _MAX_OPS)
    root, dtype = divmod(rest, _MAX_DTYPES)
    parts = [CollectiveKind(kind).name.lower()]
    if dtype:
        parts.append(f"of {_DTYPES[dtype - 1]}")
    if op:
        parts.append(f"({_OPS[op - 1]})")
    if kind in _ROOTED:
        parts.append(f"with root {root}")
    return " ".join(parts)
