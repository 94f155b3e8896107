"""Sharding of an epoch's samples in elastic training, without processes: the loader of each rank in each world."""

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
    """The ranks of successive worlds, which iterate over an epoch.

    Args:
        make: Function that creates a loader.
    """

    def __init__(self, make: Any) -> None:
        self.make = make
        self.state: dict[str, int] | None = None
        self.batches: list[list[int]] = []

    def run(self, world_size: int, num_steps: int | None, epoch: int = 0, batch_size: int | None = None) -> None:
        """Runs the given number of steps in one world, or all remaining steps."""
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
                assert next(iterator, None) is None, (step, length)  # the loader has no more batches than its length
        now[0] = last
        self.state = loaders[0].state_dict()


def test_each_sample_is_in_one_batch_and_no_batch_has_a_single_sample():
    chance = random.Random(3)
    for _ in range(300):
        num_samples, batch_size = chance.randint(2, 90), chance.randint(1, 7)
        worlds = Worlds(lambda n=num_samples, b=batch_size: make_loader(n, b))
        num_worlds = chance.randint(1, 4)
        for number in range(num_worlds):
            is_last = number == num_worlds - 1
            worlds.run(chance.randint(1, 5), None if is_last else chance.randint(0, 4))
        counts = Counter(index for batch in worlds.batches for index in batch)
        assert counts == Counter(range(num_samples))
        sizes = {len(batch) for batch in worlds.batches}
        assert max(sizes) <= batch_size + (batch_size > 1)
        assert min(sizes) >= min(2, batch_size), worlds.batches


def test_batches_of_one_sample_are_counted_in_an_incomplete_step():
    worlds = Worlds(lambda: make_loader(7, 1))
    worlds.run(4, 2)
    assert worlds.state == {"epoch": 0, "samples": 7, "batches": 2}
    assert sorted(index for (index,) in worlds.batches) == list(range(7))
    worlds.run(2, None)
    assert len(worlds.batches) == 7


def test_in_one_world_the_order_is_that_of_torchs_distributed_sampler():
    stock = [list(DistributedSampler(range(32), 2, rank, shuffle=True, seed=5)) for rank in range(2)]
    worlds = Worlds(lambda: make_loader(32, 4))
    worlds.run(2, None)
    assert [worlds.batches[0::2], worlds.batches[1::2]] == [
        [indices[start : start + 4] for start in range(0, 16, 4)] for indices in stock
    ]


def test_a_new_epoch_has_another_order_and_starts_with_its_first_sample():
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


def test_a_world_with_another_batch_size_continues_with_the_remaining_samples():
    worlds = Worlds(lambda: make_loader(60, 6))
    worlds.run(2, 2)
    worlds.run(3, None, batch_size=4)
    assert Counter(index for batch in worlds.batches for index in batch) == Counter(range(60))
    assert {len(batch) for batch in worlds.batches} == {6, 4}


def test_with_drop_last_an_incomplete_batch_is_dropped():
    worlds = Worlds(lambda: make_loader(30, 4, drop_last=True))
    worlds.run(2, None)
    assert [len(batch) for batch in worlds.batches] == [4] * 6


@pytest.mark.parametrize("has_generator", [False, True])
def test_a_custom_sampler_has_the_same_order_on_all_ranks(has_generator):
    def make() -> DataLoader:
        # The generator of a rank that joins has a different state.
        generator = torch.Generator().manual_seed(random.randrange(1000)) if has_generator else None
        drawn = WeightedRandomSampler([1.0] * 40, 40, replacement=False, generator=generator)
        return make_loader(40, 5, DistributedSamplerWrapper(drawn, 2, 0, seed=1))

    worlds = Worlds(make)
    worlds.run(2, 2)
    worlds.run(4, None)
    assert Counter(index for batch in worlds.batches for index in batch) == Counter(range(40))
    assert worlds.batches[0] != sorted(worlds.batches[0])


def test_a_rank_without_remaining_samples_has_a_batch_for_shadowing():
    loader = make_loader(20, 4)
    sampler = shard_loader(loader, 1, 2, lambda given: given, lambda: 0)
    sampler.load_state_dict({"epoch": 0, "samples": 17, "batches": 2})
    assert (len(sampler), len(loader)) == (0, 2)
    assert len(next(iter(loader))[0]) == 4


def test_a_rank_that_drops_all_its_remaining_samples_has_a_batch_for_shadowing():
    loaders = [make_loader(27, 4, drop_last=True) for _ in range(2)]
    for rank, loader in enumerate(loaders):
        sampler = shard_loader(loader, rank, 2, lambda given: given, lambda: 0)
        sampler.load_state_dict({"epoch": 0, "samples": 20, "batches": 2})
    assert [len(loader) for loader in loaders] == [3, 2]
    assert [len(next(iter(loader))[0]) for loader in loaders] == [4, 4]


@pytest.mark.parametrize("is_again", [False, True])
def test_a_loader_object_can_be_sharded_again(is_again):
    loader = make_loader(20, 4)
    shard_loader(loader, 0, 2, lambda given: 2 * given, lambda: 0)
    if is_again:
        shard_loader(loader, 0, 2, lambda given: 2 * given, lambda: 0)
    assert next(iter(loader))[0].numel() == 8
