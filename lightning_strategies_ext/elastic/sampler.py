"""Sharding of an epoch's samples among the ranks of each world; no sample is repeated or omitted.

The order of an epoch is the same in every world: that of Lightning's distributed sampler for a single rank. In a world
of ``size`` ranks that begins after ``done`` samples, rank ``r`` gets the samples ``order[done:][r::size]``, as in
Horovod's elastic sampler, except in an incomplete last step, in which fewer ranks may get samples. Ranks may therefore
get different numbers of batches (:mod:`..uneven`). torch's ``DistributedSampler`` repeats samples instead.

The size of the last batches of an epoch depends on the sizes of its worlds. Layers such as batch normalization raise an
error for a batch of one sample. Therefore a single last sample is added to the previous batch, or to that of another
rank.
"""

import copy
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from lightning_strategies_ext._lightning import trainer_data
from lightning_strategies_ext._lightning.samplers import users_sampler


class ElasticSampler(Sampler[int]):
    """Sampler of the remaining samples of an epoch, for a rank in one world.

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
        self._single_rank_sampler: DistributedSampler[Any] = copy.copy(base)
        self._num_samples = len(base.dataset)  # type: ignore[arg-type]
        self._single_rank_sampler.num_replicas, self._single_rank_sampler.rank = 1, 0
        self._single_rank_sampler.num_samples = self._single_rank_sampler.total_size = self._num_samples
        self._rank = rank
        self._world_size = world_size
        self._batch_size = batch_size
        self._batches_done = batches_done
        self._epoch = 0
        self._num_samples_before = 0
        self.num_batches_before = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch; a new epoch starts with its first sample."""
        if epoch != self._epoch:
            self._epoch, self._num_samples_before, self.num_batches_before = epoch, 0, 0

    def __iter__(self) -> Iterator[int]:
        order, end = self._order(), self._num_samples_before + self._num_samples_in_full_steps
        yield from islice(order, self._num_samples_before + self._rank, end, self._world_size)
        if self._rank < self._num_ranks_in_last_step:
            yield from islice(order, end + self._rank, None, self._num_ranks_in_last_step)

    def shadow_batch(self) -> list[int]:
        """Returns a batch for a rank without remaining batches, which repeats it while the other ranks continue."""
        return self._order()[-self._batch_size :]

    def _order(self) -> list[int]:
        """Returns the samples of the epoch in their order."""
        seed = self._single_rank_sampler.seed + self._epoch
        generator = getattr(users_sampler(self._single_rank_sampler), "generator", None)
        with isolate_rng():  # a custom sampler may draw from any generator
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            self._single_rank_sampler.set_epoch(self._epoch)
            return list(self._single_rank_sampler)

    def __len__(self) -> int:
        """Returns the number of remaining samples of the epoch for this rank."""
        return self._num_remaining_of(self._rank)

    def state_dict(self) -> dict[str, int]:
        """Returns the position of the ranks in the epoch, for a checkpoint."""
        num_batches_in_world = self._batches_done() - self.num_batches_before
        num_samples = self._num_samples_before + num_batches_in_world * self._batch_size * self._world_size
        most_batches = num_batches(self._num_remaining_of(0), self._batch_size)  # no rank has more samples than rank 0
        if num_batches_in_world >= most_batches:
            num_samples = self._num_samples
        return {"epoch": self._epoch, "samples": num_samples, "batches": self.num_batches_before + num_batches_in_world}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues from a position, in a world of any size."""
        self._epoch, self.num_batches_before = state["epoch"], state["batches"]
        self._num_samples_before = state["samples"]

    def _num_remaining_of(self, rank: int) -> int:
        num_in_full_steps, num_ranks = self._num_samples_in_full_steps, self._num_ranks_in_last_step
        if rank >= num_ranks:
            return num_in_full_steps // self._world_size
        last_step = range(self._num_samples_before + num_in_full_steps + rank, self._num_samples, num_ranks)
        return num_in_full_steps // self._world_size + len(last_step)

    @property
    def _num_samples_in_full_steps(self) -> int:
        """Number of remaining samples of all ranks in steps in which each rank has a full batch."""
        num_remaining = self._num_samples - self._num_samples_before
        return num_remaining - num_remaining % (self._world_size * self._batch_size)

    @property
    def _num_ranks_in_last_step(self) -> int:
        """Number of ranks that get samples in an incomplete last step: at least two each, unless batches have one."""
        num_samples_in_last_step = self._num_samples - self._num_samples_before - self._num_samples_in_full_steps
        if self._batch_size == 1:
            return num_samples_in_last_step
        return min(self._world_size, max(1, num_samples_in_last_step // 2))


class ElasticBatchSampler(BatchSampler):
    """Batch sampler of a rank in one world; a single last sample is added to the batch before it.

    Args:
        sampler: Sampler of the rank.
        batch_size: Number of samples per batch.
        drop_last: Whether to drop an incomplete last batch.
        original: Batch sampler of the user's DataLoader, which this one replaces.
    """

    sampler: ElasticSampler

    def __init__(self, sampler: ElasticSampler, batch_size: int, drop_last: bool, original: BatchSampler) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.original = original

    def __iter__(self) -> Iterator[list[int]]:
        if not self._num_remaining:
            yield self.sampler.shadow_batch()
            return
        previous: list[int] = []
        for batch in super().__iter__():
            if previous and len(batch) == 1 < self.batch_size:
                batch = [*previous, *batch]
            elif previous:
                yield previous
            previous = batch
        if previous:
            yield previous

    def __len__(self) -> int:
        """Returns the number of batches of the epoch for this rank, including those before this world."""
        return self.sampler.num_batches_before + self._num_remaining

    @property
    def _num_remaining(self) -> int:
        num_samples = len(self.sampler)
        return num_samples // self.batch_size if self.drop_last else num_batches(num_samples, self.batch_size)


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
        batch_size_of: Function that returns the batch size of a rank for the batch size that the user has set.
        batches_done: Argument of :class:`ElasticSampler`.

    Returns:
        The new sampler.

    Raises:
        ValueError: If the DataLoader's samples cannot be sharded.
    """
    original, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    if isinstance(original, ElasticBatchSampler):  # the batch sampler of an earlier world
        original = original.original
    if type(original) is not BatchSampler or not isinstance(sampler, DistributedSampler):
        raise ValueError(
            f"`elastic=True` cannot be combined with {_loader_text(loader)}, because its samples cannot be divided"
            " again when the number of ranks changes. Use a DataLoader with `batch_size` over a dataset with a"
            " length, and do not set `Trainer(use_distributed_sampler=False)`."
        )
    batch_size = batch_size_of(original.batch_size)
    elastic_sampler = ElasticSampler(sampler, rank, world_size, batch_size, batches_done)
    # DataLoader forbids setting this attribute; a new DataLoader would not be of the user's subclass.
    vars(loader)["batch_sampler"] = ElasticBatchSampler(elastic_sampler, batch_size, original.drop_last, original)
    # With these methods, Lightning saves the state of DataLoaders in every checkpoint.
    loader.state_dict, loader.load_state_dict = elastic_sampler.state_dict, elastic_sampler.load_state_dict
    return elastic_sampler


class ShardedLoaders:
    """The training DataLoaders of this rank, with the remaining samples of the epoch after a restore.

    Args:
        trainer: The Trainer, in ``fit``.
    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        self._trainer = trainer
        self._num_sharded = 0  # number of loaders sharded since the last restore
        self._partial_epoch: int | None = None  # epoch of which the DataLoaders have only the remaining samples

    def reset(self) -> None:
        """Makes the Trainer create its DataLoaders again, from the restored position in the epoch."""
        trainer_data.reset_loaders(self._trainer)
        self._num_sharded, self._partial_epoch = 0, None

    def shard(self, loader: Any, rank: int, world_size: int, batch_size_of: Callable[[int], int]) -> None:
        """Shards the remaining samples of a new DataLoader; the arguments are those of :func:`shard_loader`."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        sampler = shard_loader(loader, rank, world_size, batch_size_of, lambda: progress.current.ready)
        states = trainer_data.pending_loader_states(self._trainer)
        if self._num_sharded < len(states):  # the Trainer loads the state only after it has read the length
            sampler.load_state_dict(states[self._num_sharded])
            self._partial_epoch = states[self._num_sharded]["epoch"]
        self._num_sharded += 1

    def before_epoch(self) -> None:
        """Creates the DataLoaders again after a partial epoch, because the Trainer has read their length."""
        epoch = self._trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
        if self._partial_epoch not in (None, epoch):
            trainer_data.reset_training_loaders(self._trainer)
            self._partial_epoch = None
            with isolate_rng():  # in training without a restore, no random numbers are drawn here
                self._trainer.fit_loop.setup_data()


def _loader_text(loader: Any) -> str:
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__}"
    if isinstance(loader.dataset, IterableDataset):
        return f"the IterableDataset {type(loader.dataset).__name__}"
    kinds = type(loader.sampler).__name__, type(loader.batch_sampler).__name__
    return f"a DataLoader with the sampler {kinds[0]} and the batch sampler {kinds[1]}"
