"""Residuals of a lossy exchange, which are added to the next gradients (error feedback)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_strategies_ext._system.gpu_sync import note_use


class Residuals:
    """Residuals of one rank by parameter: its part of what the sum over all ranks lacks, in float32 at least."""

    def __init__(self) -> None:
        self._of: dict[Tensor, Tensor] = {}
        self._flats: dict[tuple[int, ...], Tensor] = {}

    def flat(self, parameters: Sequence[Tensor], like: Tensor) -> Tensor:
        """Returns the residuals of parameters as one contiguous tensor. Writes to it change the residuals.

        Args:
            parameters: Parameters of a bucket, or of a share of it. DDP rebuilds its buckets after the first step.
            like: Tensor of the same dtype and device, with the same number of elements.
        """
        key = tuple(map(id, parameters))
        flat = self._flats.get(key)
        if flat is None:
            flat = torch.zeros_like(like)
            views = flat.split([parameter.numel() for parameter in parameters])
            for parameter, view in zip(parameters, views, strict=True):
                if (before := self._of.get(parameter)) is not None:
                    view.copy_(before)
                    note_use(before)
                self._of[parameter] = view
            moved = set(key)
            self._flats = {old: kept for old, kept in self._flats.items() if not moved.intersection(old)}
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
            if (own := self._of.pop(parameter, None)) is not None:
                piece.add_(own, alpha=size)
                own.zero_()
                note_use(own)

    def gather_totals(
        self, parameters: Sequence[Tensor], sum_over_ranks: Callable[[Sequence[Tensor]], None], size: int
    ) -> list[Tensor]:
        """Sums the residuals over all ranks, and gives each rank the same part. Collective: all ranks call it.

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
        """Sets a residual to this rank's part of a sum, which another number of ranks may have saved."""
        self._own(parameter).copy_(total).div_(size)

    def _own(self, parameter: Tensor) -> Tensor:
        own = self._of.get(parameter)
        if own is None:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            own = self._of[parameter] = parameter.new_zeros(parameter.numel(), dtype=dtype)
        return own
