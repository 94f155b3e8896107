"""Reductions of the tensors of several ranks, always in rank order.

In a fixed order, results are bitwise equal on every rank and in every run. The sum of two ranks does not depend on the
order, so it is bitwise equal to gloo's. For three or more ranks, gloo uses another order.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import ReduceOp

#: Function that combines two tensors into a third.
Combine = Callable[..., Any]

_BY_OP: Final[dict[Any, Combine]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
#: Names and dtypes of reductions that torch has been found to support.
_defined: set[tuple[str, torch.dtype]] = set()
_BITWISE: Final = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


class Reduction:
    """One reduction.

    Args:
        op: Reduction operator of torch.distributed, except ``PREMUL_SUM``.
        dtype: Dtype of the tensors.
        num_ranks: Number of ranks, for the average.

    Attributes:
        op: Reduction operator.

    Raises:
        ValueError: If the operator is unknown, or not defined for the dtype.
    """

    def __init__(self, op: Any, dtype: torch.dtype, num_ranks: int) -> None:
        kind = getattr(op, "op", op)
        combine = _BY_OP.get(kind)
        if combine is None:
            raise ValueError(
                f"`op={op}`: the process group 'shm' supports {', '.join(known.name for known in _BY_OP)}."
            )
        if kind in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(f"`op={kind.name}` requires integers or bool, but the tensor has dtype {dtype}.")
        if dtype.is_complex and kind not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ValueError(f"`op={kind.name}` is not defined for {dtype}; only SUM and AVG are.")
        self.op = kind
        self._combine = combine
        self._num_ranks = num_ranks
        # At this point an error concerns only this rank; during the operation it would break the whole group.
        self._check_is_defined(dtype)

    def __call__(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Reduces tensors of one shape into ``out``, which may be one of them."""
        if len(parts) == 1:
            out.copy_(parts[0])
        elif len(parts) == 2:
            self._combine(parts[0], parts[1], out=out)
        else:
            self._fold(parts, out)
        self.divide(out)

    def divide(self, total: Tensor) -> None:
        """Divides a sum by the number of ranks if the operator is AVG; truncates integers, as NCCL does."""
        if self.op == ReduceOp.AVG:
            is_integer = not (total.is_floating_point() or total.is_complex())
            total.div_(self._num_ranks, rounding_mode="trunc" if is_integer else None)

    def undivided(self) -> "Reduction":
        """Returns the same reduction, but SUM instead of AVG."""
        undivided = copy(self)
        undivided.op = ReduceOp.SUM if self.op == ReduceOp.AVG else self.op
        return undivided

    def _check_is_defined(self, dtype: torch.dtype) -> None:
        if (self.op.name, dtype) in _defined:
            return
        try:
            sample = torch.empty(1, dtype=dtype)
            self([sample, sample, sample], sample.clone())
        except RuntimeError as error:
            raise ValueError(f"`op={self.op.name}` is not defined for {dtype}: {str(error).splitlines()[0]}") from error
        _defined.add((self.op.name, dtype))

    def _fold(self, parts: Sequence[Tensor], out: Tensor) -> None:
        # `out` may be a part that has not been combined yet.
        total = self._combine(parts[0], parts[1])
        for part in parts[2:-1]:
            self._combine(total, part, out=total)
        self._combine(total, parts[-1], out=out)
