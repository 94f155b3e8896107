"""How elastic training shares out the samples of an epoch, without processes: every rank's loader in every world."""

import random
from collections import Counter
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

from lightning_strategies_ext.elastic.sampler import shard_loader


def make_loader(num_samples: int, batch_size: int, sampler: Any = None, **kwargs: Any) -> DataLoader:
    data = TensorDataset(torch.arange(num_samples))
    sampler = DistributedSampler(data, 2, 0, shuffle=True, seed=5) if sampler is None else sampler
    return DataLoader(data, batch_size, sampler=sampler, **kwargs)


class Worlds:
    """Goes through an epoch as ranks of one world after another would.

    Args:
        make: Makes a loader.
    """

    def __init__(self, make: Any) -> None:
        self.make = make
        self.state: dict[str, int] | None = None
        self.batches: list[list[int]] = []

    def run(self, world_size: int, num_steps: int | None, epoch: int = 0, batch_size: int | None = None) -> None:
        """Does so many steps in one world, or all that are left."""
        done = 0 if self.state is None else self.state["batches"]
        now = [done]
        loaders = [self.make() for _ in range(world_size)]
        for rank, loader in enumerate(loaders):
            sampler = shard_loader(loader, rank, world_size, lambda given: batch_size or given, lambda: now[0])
            sampler.set_epoch(epoch)
            if self.state is not None:
                sampler.load_state_dict(self.state)
        lengths = [len(loader) for loader in loaders]
        iterators = [iter(loader) for loader in loaders]
        last = max(lengths) if num_steps is None else min(done + num_steps, max(lengths))
        for step in range(done, last):
            for length, iterator in zip(lengths, iterators, strict=True):
                if step < length:
                    self.batches.append(next(iterator)[0].tolist())
        for step, (length, iterator) in enumerate(zip(lengths, iterators, strict=True)):
            if num_steps is None and length > done:
                assert next(iterator, None) is None, (step, length)  # no more than it says
        now[0] = last
        self.state = loaders[0].state_dict()


def test_each_sample_counts_once_in_whatever_worlds_and_none_is_alone():
    chance = random.Random(3)
    for _ in range(300):
        num_samples, batch_size = chance.randint(2, 90), chance.randint(2, 7)
        worlds = Worlds(lambda n=num_samples, b=batch_size: make_loader(n, b))
        num_worlds = chance.randint(1, 4)
        for number in range(num_worlds):
            is_last = number == num_worlds - 1
            worlds.run(chance.randint(1, 5), None if is_last else chance.randint(0, 4))
        counts = Counter(index for batch in worlds.batches for index in batch)
        assert counts == Counter(range(num_samples))
        sizes = {len(batch) for batch in worlds.batches}
        assert max(sizes) <= batch_size + 1
        assert min(sizes) >= 2, worlds.batches


def test_without_a_change_the_order_is_that_of_torchs_distributed_sampler():
    theirs = [list(DistributedSampler(range(32), 2, rank, shuffle=True, seed=5)) for rank in range(2)]
    worlds = Worlds(lambda: make_loader(32, 4))
    worlds.run(2, None)
    assert [worlds.batches[0::2], worlds.batches[1::2]] == [
        [indices[start : start + 4] for start in range(0, 16, 4)] for indices in theirs
    ]


def test_another_epoch_has_another_order_and_begins_at_its_beginning():
    first, second = Worlds(lambda: make_loader(32, 4)), Worlds(lambda: make_loader(32, 4))
    first.run(2, None, epoch=0)
    second.run(2, None, epoch=1)
    assert first.batches != second.batches
    sampler = shard_loader(make_loader(32, 4), 0, 2, lambda given: given, lambda: 0)
    sampler.load_state_dict({"epoch": 0, "samples": 16, "batches": 2})
    assert len(sampler) == 8
    sampler.set_epoch(0)
    assert len(sampler) == 8
    sampler.set_epoch(1)
    assert len(sampler) == 16


def test_batches_of_another_size_continue_after_the_last_sample():
    worlds = Worlds(lambda: make_loader(60, 6))
    worlds.run(2, 2)
    worlds.run(3, None, batch_size=4)
    assert Counter(index for batch in worlds.batches for index in batch) == Counter(range(60))
    assert {len(batch) for batch in worlds.batches} == {6, 4}


def test_what_fills_no_batch_is_dropped_where_the_user_wants_that():
    worlds = Worlds(lambda: make_loader(30, 4, drop_last=True))
    worlds.run(2, None)
    assert [len(batch) for batch in worlds.batches] == [4] * 6


@pytest.mark.parametrize("has_generator", [False, True])
def test_a_sampler_of_the_users_draws_the_same_on_all_ranks(has_generator):
    def make() -> DataLoader:
        # A rank that joins has a generator in another state.
        generator = torch.Generator().manual_seed(random.randrange(1000)) if has_generator else None
        drawn = WeightedRandomSampler([1.0] * 40, 40, replacement=False, generator=generator)
        return make_loader(40, 5, DistributedSamplerWrapper(drawn, 2, 0, seed=1))

    worlds = Worlds(make)
    worlds.run(2, 2)
    worlds.run(4, None)
    assert Counter(index for batch in worlds.batches for index in batch) == Counter(range(40))
    assert worlds.batches[0] != sorted(worlds.batches[0])


def test_a_rank_for_which_nothing_is_left_has_a_batch_to_shadow_with():
    loader = make_loader(20, 4)
    sampler = shard_loader(loader, 1, 2, lambda given: given, lambda: 0)
    sampler.load_state_dict({"epoch": 0, "samples": 17, "batches": 2})
    assert (len(sampler), len(loader)) == (0, 2)
    assert len(next(iter(loader))[0]) == 4


@pytest.mark.parametrize("is_again", [False, True])
def test_a_loader_of_the_users_own_can_come_again(is_again):
    loader = make_loader(20, 4)
    shard_loader(loader, 0, 2, lambda given: 2 * given, lambda: 0)
    if is_again:
        shard_loader(loader, 0, 2, lambda given: 2 * given, lambda: 0)
    assert next(iter(loader))[0].numel() == 8
