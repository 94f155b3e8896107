"""Fabric's names of the collectives, and the order of samples, for strategies whose ranks are processes."""

from typing import Any, TypeVar

from torch import Tensor

from lightning_strategies_ext._lightning.samplers import share_orders
from lightning_strategies_ext.arguments import name_of_barrier
from lightning_strategies_ext.collectives import Collectives
from lightning_strategies_ext.collectives.sampler_order import SharedOrder

T = TypeVar("T")


class ForwardedCollectives:
    """Fabric's collectives as methods; stands before Lightning's class among a strategy's bases.

    Attributes:
        collectives: What carries them out.
    """

    collectives: Collectives

    def all_reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over ranks in one round trip, see :meth:`.Collectives.reduce`."""
        return self.collectives.reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gathers one tensor per rank, see :meth:`.Collectives.all_gather`."""
        return self.collectives.all_gather(tensor, group, sync_grads)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Gives every rank the object of rank ``src``; small ones in one round trip."""
        return self.collectives.broadcast(obj, src)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Returns when every rank has called it; a name, if one is given, is shown in the error if it fails."""
        self.collectives.barrier(name_of_barrier(*args, **kwargs))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agrees on a decision: whether all ranks say yes, or with ``all=False`` whether any does."""
        return self.collectives.reduce_boolean_decision(decision, all)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Replaces the order of a user's random sampler by that of rank 0, see :class:`.SharedOrder`."""
        share_orders(dataloader, lambda sampler: SharedOrder(sampler, self.broadcast, epoch=0))
        return dataloader
