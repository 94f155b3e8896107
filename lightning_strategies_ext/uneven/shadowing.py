"""Collectives of a step that some ranks shadow: a rank that has run out of batches does not contribute."""

from abc import ABC, abstractmethod
from math import inf
from typing import Any

import torch
from torch import Tensor

from lightning_strategies_ext.collectives import Collectives


class ShadowedSteps(ABC):
    """Steps that a rank without another batch repeats without effect.

    Args:
        collectives: Collectives of all ranks.
        rank: Rank of this process.
        world_size: Number of ranks.
        device: Device of the few numbers that ranks exchange.
    """

    def __init__(self, collectives: Collectives, rank: int, world_size: int, device: torch.device) -> None:
        self._collectives = collectives
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._is_shadowing = False

    @property
    def is_shadowing(self) -> bool:
        """Whether this rank repeats its last batch without effect."""
        return self._is_shadowing

    @abstractmethod
    def handles_reduce(self, tensor: Any, group: Any) -> bool:
        """Whether a reduction belongs to a step that some ranks may shadow; the same on all ranks."""

    def reduce(self, tensor: Tensor, op: str) -> Tensor:
        """Reduces a tensor over the ranks that do not shadow; over all ranks if all shadow, at the end of a window.

        Args:
            tensor: Tensor of any shape and dtype, the same on all ranks.
            op: "mean", "sum", "min", "max" or "product".
        """
        tensor = tensor.detach()
        if op in ("sum", "product"):
            part = torch.full_like(tensor, int(op == "product")) if self._is_shadowing else tensor.clone()
            reduced: Tensor = self._collectives.reduce(part, None, op)
            return reduced
        values = tensor.reshape(-1)
        if op == "mean" and not tensor.is_floating_point():
            values = values.to(torch.get_default_dtype())
        counted = torch.full_like(values, _neutral(op, values.dtype)) if self._is_shadowing else values
        # Whether any rank contributes; for a mean, the number of contributing ranks.
        mark = values.new_full((1,), int(self._is_shadowing == (op == "min")))
        parts: Tensor = self._collectives.reduce(
            torch.cat([counted, values, mark]), None, "sum" if op == "mean" else op
        )
        counted, of_all, mark = parts.split([len(values), len(values), 1])
        if op == "mean":
            counted, of_all = counted / mark, of_all / self._world_size
        does_any_count = mark == 0 if op == "min" else mark > 0
        return torch.where(does_any_count, counted, of_all).view(tensor.shape)


def _neutral(op: str, dtype: torch.dtype) -> Any:
    """Returns the neutral element of a reduction."""
    if op == "mean":
        return 0
    if dtype.is_floating_point:
        return inf if op == "min" else -inf
    if dtype == torch.bool:
        return op == "min"
    return torch.iinfo(dtype).max if op == "min" else torch.iinfo(dtype).min
