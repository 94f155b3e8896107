"""Fabric's collectives, and the order of samples, for multi-process strategies."""

from typing import Any, TypeVar

from torch import Tensor

from lightning_strategies_ext._lightning.samplers import share_orders
from lightning_strategies_ext.arguments import barrier_name
from lightning_strategies_ext.collectives import Collectives
from lightning_strategies_ext.collectives.sampler_order import SharedOrder

T = TypeVar("T")


class ForwardedCollectives:
    """Mixin with Fabric's collectives; precedes Lightning's class among the base classes.

    Attributes:
        collectives: Collectives of the engine.
    """

    collectives: Collectives

    def all_reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over ranks in one round trip, see :meth:`.Collectives.reduce`."""
        return self.collectives.reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gathers one tensor per rank, see :meth:`.Collectives.all_gather`."""
        return self.collectives.all_gather(tensor, group, sync_grads)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Returns the object of rank ``src`` on every rank; small objects take one round trip."""
        return self.collectives.broadcast(obj, src)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits until all ranks have called it. An optional name is shown in the error if it fails."""
        self.collectives.barrier(barrier_name(*args, **kwargs))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns whether the decision is True on all ranks, or with ``all=False`` on any rank."""
        return self.collectives.reduce_boolean_decision(decision, all)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Replaces the order of a user's random sampler with rank 0's order, see :class:`.SharedOrder`."""
        share_orders(dataloader, lambda sampler: SharedOrder(sampler, self.broadcast, epoch=0))
        return dataloader
