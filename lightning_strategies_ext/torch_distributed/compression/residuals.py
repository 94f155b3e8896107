"""What a lossy exchange has left out so far, to be added to the next gradients (error feedback)."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor


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
                if parameter in self._of:
                    view.copy_(self._of[parameter])
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

    def take_together(self, parameters: Iterable[Tensor], sum_over_ranks: Callable[[Tensor], None], size: int) -> None:
        """Gives each rank the same part of what is missing; called by all ranks together.

        Args:
            parameters: All that there may be, in the same order on all ranks.
            sum_over_ranks: Sums a tensor of one dimension in place.
            size: Number of ranks.
        """
        for parameter in parameters:
            own = self._own(parameter)
            sum_over_ranks(own)
            own.div_(size)

    def total(self, parameter: Tensor, size: int) -> Tensor:
        """What is missing of one parameter's gradients, after :meth:`take_together`: shape ``(numel,)``."""
        return self._own(parameter) * size

    def put(self, parameter: Tensor, total: Tensor, size: int) -> None:
        """The reverse of :meth:`total`; the number of ranks may be another."""
        self._own(parameter).copy_(total).div_(size)

    def _own(self, parameter: Tensor) -> Tensor:
        own = self._of.get(parameter)
        if own is None:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            own = self._of[parameter] = torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)
        return own
