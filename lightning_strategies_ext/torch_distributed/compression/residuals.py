"""What a lossy exchange has left out so far, to be added to the next gradients (error feedback)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_strategies_ext._system.gpu_sync import note_use


class Residuals:
    """Of one rank, for each parameter: its part of what is missing from the sum over all ranks, in float32 at least."""

    def __init__(self) -> None:
        self._of: dict[Tensor, Tensor] = {}
        self._flats: dict[tuple[int, ...], Tensor] = {}

    def flat(self, parameters: Sequence[Tensor], like: Tensor) -> Tensor:
        """The residuals of parameters next to each other, in memory that stays: what is written to it is kept.

        Args:
            parameters: Those of a bucket, or of a share of it. DDP makes its buckets anew after the first step.
            like: A tensor of the same dtype and device, with as many elements.
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

    def hand_over(self, parameters: Sequence[Tensor], flat: Tensor, size: int) -> None:
        """Adds to gradients what is left over of earlier ones, for who will exchange them in place of this rank.

        Args:
            parameters: In their order in ``flat``.
            flat: Their gradients, next to each other, of one dimension, before they are divided by ``size``.
            size: Number of ranks.
        """
        pieces = flat.split([parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            if (own := self._of.pop(parameter, None)) is not None:
                piece.add_(own, alpha=size)
                own.zero_()
                note_use(own)

    def take_together(
        self, parameters: Sequence[Tensor], sum_over_ranks: Callable[[Sequence[Tensor]], None], size: int
    ) -> list[Tensor]:
        """Gives each rank the same part of what is missing; called by all ranks together.

        Args:
            parameters: All that there may be, in the same order on all ranks.
            sum_over_ranks: Sums tensors in place.
            size: Number of ranks.

        Returns:
            What is missing as a whole, by parameter: shape ``(numel,)``.
        """
        own = [self._own(parameter) for parameter in parameters]
        sum_over_ranks(own)
        totals = [tensor.clone() for tensor in own]
        for tensor in own:
            tensor.div_(size)
        return totals

    def put(self, parameter: Tensor, total: Tensor, size: int) -> None:
        """Gives this rank its part of what is missing, on as many ranks as before or others."""
        self._own(parameter).copy_(total).div_(size)

    def _own(self, parameter: Tensor) -> Tensor:
        own = self._of.get(parameter)
        if own is None:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            own = self._of[parameter] = parameter.new_zeros(parameter.numel(), dtype=dtype)
        return own
