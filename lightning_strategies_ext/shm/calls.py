"""Calls: numbers that say which collective a rank is in, and with tensors of which dtype, so that ranks can compare."""

from collections.abc import Sequence
from enum import IntEnum, auto
from typing import Final

import torch
from torch import Tensor


class Kind(IntEnum):
    """The collectives that go in rounds."""

    ALL_REDUCE = auto()
    REDUCE = auto()
    BROADCAST = auto()
    ALL_GATHER = auto()
    GATHER = auto()
    SCATTER = auto()
    REDUCE_SCATTER = auto()
    BARRIER = auto()


_MOST_KINDS: Final = 16
#: In an order that is the same on all ranks, which have the same torch.
_DTYPES: Final = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)
_NUMBERS: Final = {dtype: number for number, dtype in enumerate(_DTYPES, start=1)}


def number_of(kind: Kind, tensors: Sequence[Tensor]) -> int:
    """The number of a collective of some tensors, of which the first counts."""
    return kind + _MOST_KINDS * (_NUMBERS[tensors[0].dtype] if tensors else 0)


def described(number: int) -> str:
    """What a number says."""
    kind = Kind(number % _MOST_KINDS).name.lower()
    return f"{kind} of {_DTYPES[number // _MOST_KINDS - 1]}" if number >= _MOST_KINDS else kind
