"""The samples of an epoch, shared out anew among the ranks of each world, none twice and none left out.

The order of an epoch is the same in every world: that which Lightning's distributed sampler has for one rank. A world
of ``size`` ranks that begins where ``done`` samples of it are done gives rank ``r`` the samples
``order[done:][r::size]`` (as Horovod's own elastic sampler does). Unlike with torch's ``DistributedSampler`` none is
repeated to make ranks even: see :mod:`..uneven`.
"""

import copy
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler


class ElasticSampler(Sampler[int]):
    """A rank's samples in one world.

    Args:
        base: What says the order. Its own ranks do not matter.
        rank: Of this process.
        world_size: Number of ranks.
        batch_size: Samples per batch and rank.
        batches_done: Says how many batches of the epoch this rank is past, in all worlds.
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
        self._past = 0  # batches of the epoch, before this world

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch it is; a new one begins at its beginning."""
        if epoch != self._epoch:
            self._epoch, self._done, self._past = epoch, 0, 0

    def __iter__(self) -> Iterator[int]:
        with isolate_rng():  # a sampler of the user's may draw from torch's own generator
            torch.manual_seed(self._whole.seed + self._epoch)
            self._whole.set_epoch(self._epoch)
            order = list(self._whole)
        own = islice(order, self._done + self._rank, None, self._world_size)
        # A rank for which none is left needs one to shadow the steps of the others with.
        yield from own if self._num_left else order[-1:]

    def __len__(self) -> int:
        """Samples of the epoch for this rank, as if all before had been in batches of the present size."""
        return self._past * self._batch_size + self._num_left

    def state_dict(self) -> dict[str, int]:
        """Where in the epoch the ranks are, for a checkpoint."""
        here = self._batches_done() - self._past
        done = self._done + here * self._batch_size * self._world_size
        return {"epoch": self._epoch, "samples": min(done, self._num_samples), "batches": self._past + here}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on from there, in a world of any size."""
        self._epoch, self._done, self._past = state["epoch"], state["samples"], state["batches"]

    @property
    def _num_left(self) -> int:
        return len(range(self._done + self._rank, self._num_samples, self._world_size))


def share_out(
    loader: Any, rank: int, world_size: int, batch_size_of: Callable[[int], int], batches_done: Callable[[], int]
) -> None:
    """Gives a training loader an :class:`ElasticSampler`, in the place of Lightning's distributed one.

    Args:
        loader: A DataLoader as Lightning has prepared it.
        rank: Of this process.
        world_size: Number of ranks.
        batch_size_of: What becomes of the batch size that the loader was given.
        batches_done: See :class:`ElasticSampler`.

    Raises:
        ValueError: If it has no samples that could be shared out.
    """
    batches, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    if not isinstance(batches, BatchSampler) or not isinstance(sampler, DistributedSampler):
        raise ValueError(
            "`elastic=True` shares out the samples of the training data anew whenever the ranks change, which cannot"
            f" be done for {_described(loader)}. Use a DataLoader over a dataset with a length, with `batch_size`, and"
            " leave `Trainer(use_distributed_sampler=True)`."
        )
    given = vars(batches).setdefault("_given_batch_size", batches.batch_size)  # the user's object may come again
    batches.batch_size = batch_size_of(given)
    batches.sampler = shared = ElasticSampler(sampler, rank, world_size, batches.batch_size, batches_done)
    # Lightning keeps the state of loaders that have these, in every checkpoint.
    loader.state_dict, loader.load_state_dict = shared.state_dict, shared.load_state_dict


def _described(loader: Any) -> str:
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__}"
    if isinstance(loader.dataset, IterableDataset):
        return f"the IterableDataset {type(loader.dataset).__name__}"
    kinds = type(loader.sampler).__name__, type(loader.batch_sampler).__name__
    return f"a DataLoader with the sampler {kinds[0]} and the batch sampler {kinds[1]}"
