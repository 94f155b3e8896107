"""The samples of an epoch, shared out anew among the ranks of each world, none twice and none left out.

The order of an epoch is the same in every world: that which Lightning's distributed sampler has for one rank. A world
of ``size`` ranks that begins where ``done`` samples of it are done gives rank ``r`` the samples
``order[done:][r::size]``, as Horovod's own elastic sampler does. Unlike with torch's ``DistributedSampler`` none is
repeated to make ranks even: see :mod:`..uneven`.

Where an epoch ends depends on the worlds that it went through, so a batch of one sample could come out of nothing, for
which layers like batch normalisation raise. There is none: what would be one goes into the batch before, or to others.
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
    """A rank's samples in one world.

    Args:
        base: What says the order. Its own ranks do not matter.
        rank: Of this process.
        world_size: Number of ranks.
        batch_size: Samples per batch and rank.
        batches_done: Says how many batches of the epoch this rank is past, in all worlds.

    Attributes:
        num_past: Batches of the epoch that were before this world.
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
        self.num_past = 0

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch it is; a new one begins at its beginning."""
        if epoch != self._epoch:
            self._epoch, self._done, self.num_past = epoch, 0, 0

    def __iter__(self) -> Iterator[int]:
        seed = self._whole.seed + self._epoch
        generator = getattr(users_sampler(self._whole), "generator", None)
        with isolate_rng():  # a sampler of the user's may draw from any generator
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            self._whole.set_epoch(self._epoch)
            order = list(self._whole)
        if not len(self):  # a batch to shadow the steps of the others with
            yield from order[-self._batch_size :]
            return
        end = self._done + self._num_in_full_steps
        yield from islice(order, self._done + self._rank, end, self._world_size)
        if self._rank < self._num_sharers:
            yield from islice(order, end + self._rank, None, self._num_sharers)

    def __len__(self) -> int:
        """Samples that are left of the epoch for this rank."""
        return self._num_left_for(self._rank)

    def state_dict(self) -> dict[str, int]:
        """Where in the epoch the ranks are, for a checkpoint."""
        here = self._batches_done() - self.num_past
        done = self._done + here * self._batch_size * self._world_size
        if here >= num_batches(self._num_left_for(0), self._batch_size):  # rank 0 has the most
            done = self._num_samples
        return {"epoch": self._epoch, "samples": done, "batches": self.num_past + here}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on from there, in a world of any size."""
        self._epoch, self._done, self.num_past = state["epoch"], state["samples"], state["batches"]

    def _num_left_for(self, rank: int) -> int:
        rest = range(self._done + self._num_in_full_steps + rank, self._num_samples, self._num_sharers)
        return self._num_in_full_steps // self._world_size + (len(rest) if rank < self._num_sharers else 0)

    @property
    def _num_in_full_steps(self) -> int:
        left = self._num_samples - self._done
        return left - left % (self._world_size * self._batch_size)

    @property
    def _num_sharers(self) -> int:
        """Ranks that get samples in the last step, if it is not full: not all if some would get only one."""
        rest = self._num_samples - self._done - self._num_in_full_steps
        return min(self._world_size, max(1, rest // 2))


class ElasticBatchSampler(BatchSampler):
    """The batches of a rank in one world; the last has a sample more where it would leave one alone.

    Args:
        sampler: The samples.
        batch_size: Samples per batch.
        drop_last: Whether samples are left out that fill no batch.
        given: The batch sampler in whose place this is.
    """

    sampler: ElasticSampler

    def __init__(self, sampler: ElasticSampler, batch_size: int, drop_last: bool, given: BatchSampler) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.given = given

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
        """Batches of the epoch for this rank, with those that were before this world."""
        left = len(self.sampler)
        return self.sampler.num_past + (
            left // self.batch_size if self.drop_last else num_batches(left, self.batch_size)
        )


def num_batches(num_samples: int, batch_size: int) -> int:
    """How many batches so many samples make, of which none has one sample only if there are more."""
    full, rest = divmod(num_samples, batch_size)
    return full + (rest > 1 or (rest == 1 and not full))


def share_out(
    loader: Any, rank: int, world_size: int, batch_size_of: Callable[[int], int], batches_done: Callable[[], int]
) -> ElasticSampler:
    """Gives a training loader an :class:`ElasticSampler`, in the place of Lightning's distributed one.

    Args:
        loader: A DataLoader as Lightning has prepared it.
        rank: Of this process.
        world_size: Number of ranks.
        batch_size_of: What becomes of the batch size that the loader was given.
        batches_done: See :class:`ElasticSampler`.

    Returns:
        That sampler.

    Raises:
        ValueError: If it has no samples that could be shared out.
    """
    batches, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    if isinstance(batches, ElasticBatchSampler):  # the user's own object, which comes again in each world
        batches = batches.given
    if type(batches) is not BatchSampler or not isinstance(sampler, DistributedSampler):
        raise ValueError(
            "`elastic=True` shares out the samples of the training data anew whenever the ranks change, which cannot"
            f" be done for {_described(loader)}. Use a DataLoader over a dataset with a length, with `batch_size`, and"
            " leave `Trainer(use_distributed_sampler=True)`."
        )
    batch_size = batch_size_of(batches.batch_size)
    shared = ElasticSampler(sampler, rank, world_size, batch_size, batches_done)
    # DataLoader keeps its users from setting this one by mistake; a new loader could not be one of their own class.
    vars(loader)["batch_sampler"] = ElasticBatchSampler(shared, batch_size, batches.drop_last, batches)
    # Lightning keeps the state of loaders that have these, in every checkpoint.
    loader.state_dict, loader.load_state_dict = shared.state_dict, shared.load_state_dict
    return shared


def _described(loader: Any) -> str:
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__}"
    if isinstance(loader.dataset, IterableDataset):
        return f"the IterableDataset {type(loader.dataset).__name__}"
    kinds = type(loader.sampler).__name__, type(loader.batch_sampler).__name__
    return f"a DataLoader with the sampler {kinds[0]} and the batch sampler {kinds[1]}"
