"""Sharding of an epoch's samples among the ranks of each world; no sample is repeated or omitted.

The order of an epoch is the same in every world: that of Lightning's distributed sampler for a single rank. In a world
of ``size`` ranks that begins after ``done`` samples, rank ``r`` gets the samples ``order[done:][r::size]``, as in
Horovod's elastic sampler. Unlike in torch's ``DistributedSampler``, no sample is repeated to give all ranks the same
number: see :mod:`..uneven`.

The end of an epoch depends on the sizes of its worlds, so that a batch of one sample could occur at random, for which
layers such as batch normalization raise. To avoid this, a single sample is added to the previous batch or to other
ranks' batches.
"""

import copy
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from lightning_strategies_ext._lightning.samplers import users_sampler


class ElasticSampler(Sampler[int]):
    """Samples of a rank in one world.

    Args:
        base: Sampler that defines the order; its number of replicas and its rank are not used.
        rank: Rank of this process.
        world_size: Number of ranks.
        batch_size: Number of samples per batch and rank.
        batches_done: Function that returns the number of batches of the epoch that this rank has done, in all worlds.

    Attributes:
        num_batches_before: Number of batches of the epoch that were done before this world.
    """

    def __init__(
        self,
        base: DistributedSampler[Any],
        rank: int,
        world_size: int,
        batch_size: int,
        batches_done: Callable[[], int],
    ) -> None:
        self._whole: DistributedSampler[Any] = copy.copy(base)
        self._num_samples = len(base.dataset)  # type: ignore[arg-type]
        self._whole.num_replicas, self._whole.rank = 1, 0
        self._whole.num_samples = self._whole.total_size = self._num_samples
        self._rank = rank
        self._world_size = world_size
        self._batch_size = batch_size
        self._batches_done = batches_done
        self._epoch = 0
        self._done = 0  # samples of the epoch, before this world
        self.num_batches_before = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch; a new epoch starts with its first sample."""
        if epoch != self._epoch:
            self._epoch, self._done, self.num_batches_before = epoch, 0, 0

    def __iter__(self) -> Iterator[int]:
        seed = self._whole.seed + self._epoch
        generator = getattr(users_sampler(self._whole), "generator", None)
        with isolate_rng():  # a custom sampler may draw from any generator
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            self._whole.set_epoch(self._epoch)
            order = list(self._whole)
        if not len(self):  # a batch for shadowing the steps of the other ranks
            yield from order[-self._batch_size :]
            return
        end = self._done + self._num_in_full_steps
        yield from islice(order, self._done + self._rank, end, self._world_size)
        if self._rank < self._num_ranks_in_last_step:
            yield from islice(order, end + self._rank, None, self._num_ranks_in_last_step)

    def __len__(self) -> int:
        """Returns the number of remaining samples of the epoch for this rank."""
        return self._num_left_for(self._rank)

    def state_dict(self) -> dict[str, int]:
        """Returns the position of the ranks in the epoch, for a checkpoint."""
        here = self._batches_done() - self.num_batches_before
        done = self._done + here * self._batch_size * self._world_size
        if here >= num_batches(self._num_left_for(0), self._batch_size):  # rank 0 has the most samples
            done = self._num_samples
        return {"epoch": self._epoch, "samples": done, "batches": self.num_batches_before + here}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues from a position, in a world of any size."""
        self._epoch, self._done, self.num_batches_before = state["epoch"], state["samples"], state["batches"]

    def _num_left_for(self, rank: int) -> int:
        rest = range(self._done + self._num_in_full_steps + rank, self._num_samples, self._num_ranks_in_last_step)
        return self._num_in_full_steps // self._world_size + (len(rest) if rank < self._num_ranks_in_last_step else 0)

    @property
    def _num_in_full_steps(self) -> int:
        left = self._num_samples - self._done
        return left - left % (self._world_size * self._batch_size)

    @property
    def _num_ranks_in_last_step(self) -> int:
        """Number of ranks that get samples in an incomplete last step; fewer than all if a rank would get only one."""
        rest = self._num_samples - self._done - self._num_in_full_steps
        return min(self._world_size, max(1, rest // 2))


class ElasticBatchSampler(BatchSampler):
    """Batches of a rank in one world; a single last sample is added to the batch before it.

    Args:
        sampler: Sampler of the rank.
        batch_size: Number of samples per batch.
        drop_last: Whether to drop an incomplete last batch.
        original: Batch sampler that this one replaces.
    """

    sampler: ElasticSampler

    def __init__(self, sampler: ElasticSampler, batch_size: int, drop_last: bool, original: BatchSampler) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.original = original

    def __iter__(self) -> Iterator[list[int]]:
        before: list[int] = []
        for batch in super().__iter__():
            if before and len(batch) == 1 < self.batch_size:
                batch = [*before, *batch]
            elif before:
                yield before
            before = batch
        if before:
            yield before

    def __len__(self) -> int:
        """Returns the number of batches of the epoch for this rank, including those before this world."""
        left = len(self.sampler)
        return self.sampler.num_batches_before + (
            left // self.batch_size if self.drop_last else num_batches(left, self.batch_size)
        )


def num_batches(num_samples: int, batch_size: int) -> int:
    """Returns the number of batches for a number of samples; a single last sample belongs to the batch before it."""
    full, rest = divmod(num_samples, batch_size)
    return full + (rest > 1 or (rest == 1 and not full))


def shard_loader(
    loader: Any, rank: int, world_size: int, batch_size_of: Callable[[int], int], batches_done: Callable[[], int]
) -> ElasticSampler:
    """Gives a training DataLoader an :class:`ElasticSampler` in place of Lightning's distributed sampler.

    Args:
        loader: DataLoader, prepared by Lightning.
        rank: Rank of this process.
        world_size: Number of ranks.
        batch_size_of: Function that returns the batch size to use for the DataLoader's batch size.
        batches_done: Argument of :class:`ElasticSampler`.

    Returns:
        The new sampler.

    Raises:
        ValueError: If the DataLoader's samples cannot be sharded.
    """
    batches, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    if isinstance(batches, ElasticBatchSampler):  # the user's DataLoader object, used again in each world
        batches = batches.original
    if type(batches) is not BatchSampler or not isinstance(sampler, DistributedSampler):
        raise ValueError(
            f"`elastic=True` cannot be combined with {_described(loader)}, because its samples cannot be divided"
            " again when the number of ranks changes. Use a DataLoader with `batch_size` over a dataset with a"
            " length, and do not set `Trainer(use_distributed_sampler=False)`."
        )
    batch_size = batch_size_of(batches.batch_size)
    shared = ElasticSampler(sampler, rank, world_size, batch_size, batches_done)
    # DataLoader forbids setting this attribute; a new DataLoader would not be of the user's subclass.
    vars(loader)["batch_sampler"] = ElasticBatchSampler(shared, batch_size, batches.drop_last, batches)
    # Lightning saves the state of DataLoaders with these methods in every checkpoint.
    loader.state_dict, loader.load_state_dict = shared.state_dict, shared.load_state_dict
    return shared


def _described(loader: Any) -> str:
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__}"
    if isinstance(loader.dataset, IterableDataset):
        return f"the IterableDataset {type(loader.dataset).__name__}"
    kinds = type(loader.sampler).__name__, type(loader.batch_sampler).__name__
    return f"a DataLoader with the sampler {kinds[0]} and the batch sampler {kinds[1]}"
