"""Codec that sends the largest gradients with their indices."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_strategies_ext.torch_distributed.compression.residuals import Residuals

#: Parameters with fewer elements are sent whole: biases, weights of normalization layers.
_MIN_SIZE = 1024
#: Size of the sample that determines the threshold: at least ``_MIN_SAMPLE`` gradients, and one in ``_SAMPLED``.
_MIN_SAMPLE = 4096
_SAMPLED = 64
#: Factor by which more gradients than requested pass the threshold, because a sample is inexact.
_MARGIN = 1.2


class TopKCodec:
    """Codec that sends the largest gradients; implements :class:`.compressed_gradients.Codec`.

    Args:
        fraction: Fraction of each parameter's gradients that is sent.
        residuals: Residuals of this rank.
    """

    def __init__(self, fraction: float, residuals: Residuals) -> None:
        self._fraction = fraction
        self._residuals = residuals

    def sum(self, parameters: Sequence[Tensor], flat: Tensor, scale: float, group: Any) -> int:
        """Implements :meth:`.compressed_gradients.Codec.sum`."""
        residual = self._residuals.flat(parameters, flat)
        residual.add_(flat, alpha=scale)
        sizes = [parameter.numel() for parameter in parameters]
        begins = torch.tensor([0, *sizes]).cumsum(0).tolist()
        places = torch.cat(
            [self._chosen(each).add_(begin) for each, begin in zip(residual.split(sizes), begins, strict=False)]
        )
        values = residual[places].float()
        residual[places] -= values.to(residual.dtype)  # zero, except for the additional bits of float64
        # Values and indices in one message: an index fits into the four bytes of a value.
        message = torch.cat([values, places.to(torch.int32).view(torch.float32)])
        messages = message.new_empty(group.size(), len(message))
        dist.all_gather(list(messages), message, group=group)
        flat.zero_()
        for of_rank in messages:
            values, places = of_rank.chunk(2)
            flat.index_add_(0, places.view(torch.int32), values.to(flat.dtype))
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
    """Returns the indices of ``count`` large values. Nearly all are among the largest; the result is deterministic."""
    size, magnitudes = len(values), values.abs()
    stride = size // max(_MIN_SAMPLE, size // _SAMPLED) | 1  # odd, so that the sample is not aligned with rows
    if values.device.type == "cpu" and stride > 1:
        sample = magnitudes[::stride]
        num_above = min(len(sample), max(1, round(_MARGIN * count / size * len(sample))))
        limit = sample.kthvalue(len(sample) - num_above + 1).values
        places = (magnitudes >= limit).nonzero().view(-1)
        if len(places) >= count:
            return places[magnitudes[places].topk(count, sorted=False).indices]
    return magnitudes.topk(count, sorted=False).indices
