"""Collectives of a rank without peers: a rank that has failed, or has not joined a world with other ranks yet."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_strategies_ext.collectives.base import Collectives

T = TypeVar("T")


class LocalCollectives(Collectives):
    """Collectives that use only this rank's value and do not wait for other ranks.

    A gathered result has the shape that it has with all ranks, with this rank's value at every index, because callers
    index it by rank. Reductions and broadcasts return their input.

    Args:
        rank: Global rank of this process.
        world_size: Number of ranks.
    """

    is_local = True

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(lambda: torch.device("cpu"))
        self._rank = rank
        self._world_size = world_size

    def rank(self, group: Any = None) -> int:
        """Returns the global rank of this process."""
        return self._rank

    def world_size(self, group: Any = None) -> int:
        """Returns the number of all ranks."""
        return self._world_size

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Returns the tensor."""
        return tensor

    def gather_list(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """Returns a list of this tensor alone, so that a metric covers only this rank's data."""
        return [tensor.detach()]

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Returns the object."""
        return obj

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns the decision of this rank."""
        return bool(decision)

    def start_all_reduce(self, tensor: Tensor, op: str, name: str) -> Callable[[], None]:
        """Leaves the tensor unchanged."""
        return lambda: None

    def start_all_gather(self, output: Tensor, tensor: Tensor, name: str) -> Callable[[], None]:
        """Copies this rank's tensor to each place of the output."""
        self._all_gather(output, tensor, None)
        return lambda: None

    def barrier(self, name: str | None = None) -> None:
        """Returns immediately."""

    def _all_reduce(self, tensor: Tensor, op: str, group: Any) -> None:
        """Leaves the tensor unchanged."""

    def _all_gather(self, output: Tensor, tensor: Tensor, group: Any) -> None:
        output.view(self._world_size, -1).copy_(tensor.expand(self._world_size, -1))

    def _broadcast(self, tensors: Iterable[Tensor], src: int) -> None:
        """Leaves the tensors unchanged."""
