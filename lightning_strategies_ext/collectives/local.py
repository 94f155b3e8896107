"""The collectives of a rank that answers alone: one that has failed, or that is still to enter a world of others."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_strategies_ext.collectives.base import Collectives

T = TypeVar("T")


class LocalCollectives(Collectives):
    """Gives each operation this rank's own value, and waits for nobody.

    What is gathered has the shape that it has with all ranks, and this rank's value in the place of each, since callers
    look there by rank. Reductions, of whatever kind, and broadcasts return what they are given.

    Args:
        rank: Of this process among all.
        world_size: Number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(lambda: torch.device("cpu"))
        self._rank = rank
        self._world_size = world_size

    def rank(self, group: Any = None) -> int:
        """This rank's number among all."""
        return self._rank

    def world_size(self, group: Any = None) -> int:
        """The number of all ranks."""
        return self._world_size

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Returns the tensor."""
        return tensor

    def gather_list(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """A list of this tensor alone: a metric is of this rank's data then."""
        return [tensor.detach()]

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Returns the object."""
        return obj

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decides alone."""
        return bool(decision)

    def begin_sum(self, tensor: Tensor, name: str) -> Callable[[], None]:
        """Leaves the tensor as it is."""
        return lambda: None

    def barrier(self, name: str | None = None) -> None:
        """Returns."""

    def _all_reduce(self, tensor: Tensor, op: str, group: Any) -> None:
        """Leaves the tensor as it is."""

    def _all_gather(self, output: Tensor, tensor: Tensor, group: Any) -> None:
        output.view(self._world_size, -1).copy_(tensor.expand(self._world_size, -1))

    def _broadcast(self, tensors: Iterable[Tensor], src: int) -> None:
        """Leaves the tensors as they are."""
