"""PowerSGD: the gradients of a matrix are sent as the product of two thin matrices.

For the symbols, see algorithm 1 of Vogels et al. 2019. Here the thin matrices are transposed, so that a column is
contiguous in memory: on CPUs, the products then take a quarter of the time.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_strategies_ext.shm.one_shot import OneShotAllReduce, is_short
from lightning_strategies_ext.shm.reduction import Reduction
from lightning_strategies_ext.torch_distributed.compression.codecs import Residuals

#: Size of the noise in a query's rows. It keeps directions in which the gradients of one step were zero.
_NOISE_SCALE = 1e-6
_MIN_NORM = 1e-30


class _Matrix(NamedTuple):
    """A gradient matrix that is compressed.

    Attributes:
        gradient: Gradients of shape ``(n, m)``.
        residual: Residuals of shape ``(n, m)``: of earlier steps; then with the gradients added; then of this step.
        query: Directions of shape ``(r, m)`` in which the last gradients were largest, the same on all ranks.
        p_factor: Thin matrix of shape ``(r, n)``, a part of the first message.
        q_factor: Thin matrix of shape ``(r, m)``, a part of the second message.
    """

    gradient: Tensor
    residual: Tensor
    query: Tensor
    p_factor: Tensor
    q_factor: Tensor


class PowerSGDCodec:
    """Codec that sends thin matrices; implements :class:`.codecs.Codec`.

    Args:
        rank: Number of columns of the thin matrices.
        residuals: Residuals of this rank.
        ranks_per_host: Number of ranks of this host that exchange at the same time, each with ranks of other hosts.
    """

    def __init__(self, rank: int, residuals: Residuals, ranks_per_host: int = 1) -> None:
        self._rank = rank
        self._residuals = residuals
        self._num_sharing = ranks_per_host
        self._queries: dict[Tensor, Tensor] = {}
        self._noises: dict[int, Tensor] = {}

    def sum(self, parameters: Sequence[Tensor], flat: Tensor, scale: float, group: Any) -> int:
        """Implements :meth:`.codecs.Codec.sum`."""
        residual = self._residuals.flat(parameters, flat)
        sizes = [parameter.numel() for parameter in parameters]
        pieces = list(zip(parameters, flat.split(sizes), residual.split(sizes), strict=True))
        uncompressed = [piece for piece in pieces if not self._is_compressible(piece[0])]
        compressed = [piece for piece in pieces if self._is_compressible(piece[0])]
        shapes = [_shape_of(parameter) for parameter, _, _ in compressed]
        first = _Message(
            [parameter.numel() for parameter, _, _ in uncompressed] + [self._rank * n for n, _ in shapes], flat
        )
        second = _Message([self._rank * m for _, m in shapes], flat)
        for part, (_, gradient, residual) in zip(first.parts, uncompressed, strict=False):
            torch.mul(gradient, scale, out=part)
            part.add_(residual)
            residual.zero_()
        p_factors = first.parts[len(uncompressed) :]
        matrices = [
            _Matrix(g.view(n, m), e.view(n, m), self._query(parameter, m), left.view(-1, n), right.view(-1, m))
            for (parameter, g, e), (n, m), left, right in zip(compressed, shapes, p_factors, second.parts, strict=True)
        ]
        self._sum(matrices, scale, first.flat, second.flat, group)
        for part, (_, gradient, _) in zip(first.parts, uncompressed, strict=False):
            gradient.copy_(part)
        return first.flat.nbytes + second.flat.nbytes

    def state_dict(self, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
        """Returns the queries, by name of the parameter."""
        return {names[parameter]: query.clone() for parameter, query in self._queries.items()}

    def load_state_dict(self, state: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        """Restores the queries that have the same number of columns."""
        for name, query in state.items():
            if name in parameters and len(query) == self._rank:
                self._queries[parameters[name]] = query.to(parameters[name].device, copy=True)

    def _sum(self, matrices: Sequence[_Matrix], scale: float, first: Tensor, second: Tensor, group: Any) -> None:
        # One matrix after the other, so that each stays in the core's caches.
        for each in matrices:
            each.residual.add_(each.gradient, alpha=scale)
            torch.mm(each.query, each.residual.T, out=each.p_factor)
        self._all_reduce(first, group)
        for each in matrices:
            _orthonormalize(each.p_factor)
            torch.mm(each.p_factor, each.residual, out=each.q_factor)
            each.residual.addmm_(each.p_factor.T, each.q_factor, alpha=-1)
        if matrices:
            self._all_reduce(second, group)
        for each in matrices:
            torch.mm(each.p_factor.T, each.q_factor, out=each.gradient)
            each.query.copy_(each.q_factor)

    def _all_reduce(self, message: Tensor, group: Any) -> None:
        is_over_gloo = dist.get_backend(group) == "gloo"
        if not (is_over_gloo and is_short(message.nbytes, group.size(), self._num_sharing)):
            dist.all_reduce(message, group=group)
            return
        one_shot = OneShotAllReduce(group, message, Reduction(dist.ReduceOp.SUM, message.dtype, group.size()))
        one_shot.wait()
        one_shot.combine()

    def _is_compressible(self, parameter: Tensor) -> bool:
        n, m = _shape_of(parameter)
        return (n + m) * self._rank < n * m

    def _query(self, parameter: Tensor, size: int) -> Tensor:
        """Returns the directions to search for large gradients. No row is zero: later steps could not restore it."""
        noise = self._noises.get(size)
        if noise is None:
            generator = torch.Generator().manual_seed(size)
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            noise = torch.randn(self._rank, size, generator=generator, dtype=dtype).to(parameter.device)
            self._noises[size] = noise
        query = self._queries.get(parameter)
        if query is None:
            query = self._queries[parameter] = noise.clone()
            return query
        return query.div_(query.norm(dim=1, keepdim=True).clamp_(min=_MIN_NORM)).add_(noise, alpha=_NOISE_SCALE)


class _Message:
    """Tensors that are sent as one tensor.

    Args:
        sizes: Number of elements of each part.
        like: Tensor with the dtype and device of the message.
    """

    def __init__(self, sizes: Sequence[int], like: Tensor) -> None:
        self.flat = like.new_empty(sum(sizes))
        self.parts = list(self.flat.split(list(sizes))) if sizes else []


def _shape_of(parameter: Tensor) -> tuple[int, int]:
    n = parameter.shape[0] if parameter.dim() > 1 else 1
    return n, parameter.numel() // max(n, 1)


def _orthonormalize(rows: Tensor) -> None:
    """Makes rows orthogonal and of unit length, in place."""
    if rows.device.type == "cpu":
        rows.copy_(torch.linalg.qr(rows.T).Q.T)
        return
    # The Gram-Schmidt process reads no value from a GPU, which would require a wait.
    for index, row in enumerate(rows):
        if index:
            before = rows[:index]
            row.sub_(before.T @ (before @ row))
        row.div_(row.norm().clamp_(min=_MIN_NORM))
