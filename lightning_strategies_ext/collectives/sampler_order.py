"""Order of a user's random sampler: in each epoch, all ranks use the order of rank 0.

Each rank draws the whole order and takes its shard. If the ranks' random states differ, for example after dropout,
their orders differ, and some samples would be repeated and others left out.
"""

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch


class SharedOrder:
    """Dataset of indices for Lightning's distributed samplers, in place of a user's sampler.

    The ranks share an order when the first iteration of an epoch begins. Later iterations in the same epoch repeat the
    order without a collective, so that a rank can iterate over the loader alone.

    Args:
        sampler: The user's sampler. Items beyond its length are not used.
        broadcast: Function that returns the object of rank 0 on every rank.
        epoch: The current epoch.
        is_shared_now: Whether the ranks share the order at once, because some of them do not iterate.
    """

    def __init__(self, sampler: Any, broadcast: Callable[[Any], Any], epoch: int, is_shared_now: bool = False) -> None:
        self._users = sampler
        self._broadcast = broadcast
        self._epoch = epoch
        self._order: list[Any] | None = None
        if is_shared_now:
            self.reset()

    def __len__(self) -> int:
        return len(self._users)  # Lightning rejects a sampler without a length

    def __getitem__(self, index: int) -> Any:
        assert self._order is not None  # `reset` comes first
        return self._order[index]

    def reset(self) -> None:
        """Shares the order, once per epoch. Lightning calls it when an iteration begins."""
        if self._order is not None:
            return
        generator = getattr(self._users, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.set_state(self._broadcast(generator.get_state()))
            self._order = self._draw()
            return
        order = self._draw()  # on all ranks, so that random states stay equal if they are equal
        are_numbers = all(type(index) is int for index in order)
        shared = self._broadcast(torch.tensor(order) if are_numbers else order)
        self._order = shared.tolist() if isinstance(shared, torch.Tensor) else shared

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch. Lightning calls it on all ranks before an epoch."""
        if callable(set_epoch := getattr(self._users, "set_epoch", None)):
            set_epoch(epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, None

    def _draw(self) -> list[Any]:
        return [*islice(self._users, len(self))]
