"""Codecs, which sum gradients over ranks in fewer bytes, and the residuals that lossy codecs keep.

:mod:`.power_sgd` has the codec of PowerSGD.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_strategies_ext._system.gpu_sync import record_use

#: Parameters with fewer elements are sent whole: biases, weights of normalization layers.
_MIN_SIZE = 1024
#: Size of the sample that determines the threshold: at least ``_MIN_SAMPLE`` gradients, and one in ``_SAMPLED``.
_MIN_SAMPLE = 4096
_SAMPLED = 64
#: Factor by which more gradients than requested pass the threshold, because a sample is inexact.
_MARGIN = 1.2


class Codec(Protocol):
    """Sums gradients over ranks in fewer bytes than the gradients have."""

    def sum(self, parameters: Sequence[Tensor], flat: Tensor, scale: float, group: Any) -> int:
        """Sums the gradients of some parameters, times a factor, over the ranks of a group, in place.

        Args:
            parameters: Parameters in their order in ``flat``.
            flat: Gradients of the parameters, contiguous, of shape ``(numel,)``; float32 or float64.
            scale: Factor of the gradients.
            group: Process group of the ranks.

        Returns:
            Number of bytes that this rank has passed to collectives.
        """

    def state_dict(self, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
        """Returns the state that is kept between steps and is the same on all ranks, by name of the parameter."""

    def load_state_dict(self, state: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        """Restores the state that :meth:`state_dict` has returned."""


class CastCodec:
    """Codec that sums in fewer bits; implements :class:`Codec`.

    It is in use if hosts have several ranks each. Otherwise :class:`.CompressedGradients` casts the gradients.

    Args:
        dtype: Dtype in which gradients are sent and summed.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def sum(self, parameters: Sequence[Tensor], flat: Tensor, scale: float, group: Any) -> int:
        """Implements :meth:`Codec.sum`."""
        cast = flat.mul_(scale).to(self._dtype)
        dist.all_reduce(cast, group=group)
        flat.copy_(cast)
        return cast.nbytes

    def state_dict(self, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
        """Returns an empty dictionary: the codec has no state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        """Does nothing: the codec has no state."""


class Residuals:
    """Residuals of a lossy exchange, which are added to the next gradients (error feedback).

    For each parameter, a rank holds its part of the error of the sum over all ranks, in float32 or float64.
    """

    def __init__(self) -> None:
        self._by_parameter: dict[Tensor, Tensor] = {}
        self._flats: dict[tuple[int, ...], Tensor] = {}

    def flat(self, parameters: Sequence[Tensor], like: Tensor) -> Tensor:
        """Returns the residuals of parameters as one contiguous tensor. Writes to it change the residuals.

        Args:
            parameters: Parameters of a bucket, or of a shard of it. DDP rebuilds its buckets after the first step.
            like: Tensor of the same dtype and device, with the same number of elements.
        """
        key = tuple(map(id, parameters))
        flat = self._flats.get(key)
        if flat is None:
            flat = torch.zeros_like(like)
            views = flat.split([parameter.numel() for parameter in parameters])
            for parameter, view in zip(parameters, views, strict=True):
                if (before := self._by_parameter.get(parameter)) is not None:
                    view.copy_(before)
                    record_use(before)
                self._by_parameter[parameter] = view
            moved = set(key)
            self._flats = {
                old_key: old_flat for old_key, old_flat in self._flats.items() if not moved.intersection(old_key)
            }
            self._flats[key] = flat
        return flat

    def add_to_gradients(self, parameters: Sequence[Tensor], flat: Tensor, size: int) -> None:
        """Adds the residuals of parameters to gradients that another rank exchanges in place of this rank.

        Args:
            parameters: Parameters in their order in ``flat``.
            flat: Gradients of the parameters, contiguous, of shape ``(numel,)``, before they are divided by ``size``.
            size: Number of ranks.
        """
        pieces = flat.split([parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            if (own := self._by_parameter.pop(parameter, None)) is not None:
                piece.add_(own, alpha=size)
                own.zero_()
                record_use(own)

    def gather_totals(
        self, parameters: Sequence[Tensor], sum_over_ranks: Callable[[Sequence[Tensor]], None], size: int
    ) -> list[Tensor]:
        """Sums the residuals over all ranks, and assigns each rank an equal part. Collective: all ranks call it.

        Args:
            parameters: All parameters that may have residuals, in the same order on all ranks.
            sum_over_ranks: Callable that sums tensors in place over all ranks.
            size: Number of ranks.

        Returns:
            Sum of the residuals of each parameter, of shape ``(numel,)``.
        """
        own = [self._own(parameter) for parameter in parameters]
        sum_over_ranks(own)
        totals = [tensor.clone() for tensor in own]
        for tensor in own:
            tensor.div_(size)
        return totals

    def distribute(self, parameter: Tensor, total: Tensor, size: int) -> None:
        """Sets a residual to this rank's part of a sum that a different number of ranks may have saved."""
        self._own(parameter).copy_(total).div_(size)

    def _own(self, parameter: Tensor) -> Tensor:
        own = self._by_parameter.get(parameter)
        if own is None:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            own = self._by_parameter[parameter] = parameter.new_zeros(parameter.numel(), dtype=dtype)
        return own


class TopKCodec:
    """Codec that sends the largest gradients; implements :class:`Codec`.

    Args:
        fraction: Fraction of each parameter's gradients that is sent.
        residuals: Residuals of this rank.
    """

    def __init__(self, fraction: float, residuals: Residuals) -> None:
        self._fraction = fraction
        self._residuals = residuals

    def sum(self, parameters: Sequence[Tensor], flat: Tensor, scale: float, group: Any) -> int:
        """Implements :meth:`Codec.sum`."""
        residual = self._residuals.flat(parameters, flat)
        residual.add_(flat, alpha=scale)
        sizes = [parameter.numel() for parameter in parameters]
        begins = torch.tensor([0, *sizes]).cumsum(0).tolist()
        indices = torch.cat(
            [self._chosen(each).add_(begin) for each, begin in zip(residual.split(sizes), begins, strict=False)]
        )
        values = residual[indices].float()
        residual[indices] -= values.to(residual.dtype)  # zero, except for the additional bits of float64
        # Values and indices in one message: an index fits into the four bytes of a value.
        message = torch.cat([values, indices.to(torch.int32).view(torch.float32)])
        messages = message.new_empty(group.size(), len(message))
        dist.all_gather(list(messages), message, group=group)
        flat.zero_()
        for rank_message in messages:
            values, indices = rank_message.chunk(2)
            flat.index_add_(0, indices.view(torch.int32), values.to(flat.dtype))
        return message.nbytes

    def state_dict(self, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
        """Returns an empty dictionary: the codec has no state except the residuals."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        """Does nothing: the codec has no state."""

    def _chosen(self, values: Tensor) -> Tensor:
        size = len(values)
        if size < _MIN_SIZE:
            return torch.arange(size, device=values.device)
        return _largest(values, max(1, round(self._fraction * size)))


def _largest(values: Tensor, count: int) -> Tensor:
    """Returns the indices of ``count`` values, nearly all of which are among the largest. Deterministic."""
    size, magnitudes = len(values), values.abs()
    stride = size // max(_MIN_SAMPLE, size // _SAMPLED) | 1  # odd, so that the sample is not aligned with rows
    if values.device.type == "cpu" and stride > 1:
        sample = magnitudes[::stride]
        num_above = min(len(sample), max(1, round(_MARGIN * count / size * len(sample))))
        limit = sample.kthvalue(len(sample) - num_above + 1).values
        indices = (magnitudes >= limit).nonzero().view(-1)
        if len(indices) >= count:
            return indices[magnitudes[indices].topk(count, sorted=False).indices]
    return magnitudes.topk(count, sorted=False).indices
