"""Samples and DataLoaders of a fuzzed case."""

import os
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

from tests.fuzz.cases import Case

SEED = 11
WIDTH = 8
NUM_TOKENS = 20


class Samples(Dataset[Any]):
    """Dataset of random features, tokens, and targets, with the number of each sample."""

    def __init__(self, num_samples: int, container: str, dtype: torch.dtype, repeats_one: bool = False) -> None:
        self.repeats_one = repeats_one
        generator = torch.Generator().manual_seed(7)
        self.features = torch.randn(num_samples, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        self.tokens = torch.randint(NUM_TOKENS, (num_samples, 3), generator=generator)
        self.container = container

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> Any:
        index = max(index, int(self.repeats_one))
        features, tokens = self.features[index], self.tokens[index]
        target = features[:3].sum().sin()
        if self.container == "dict":
            return {"index": index, "features": features, "tokens": tokens, "target": target}
        return index, features, tokens, target


class Stream(IterableDataset[Any]):
    """A dataset that yields the samples of this rank. If the ranks are uneven, rank 0 has one batch less."""

    def __init__(self, samples: Samples, world_size: int, num_less: int) -> None:
        self.samples, self.world_size, self.num_less = samples, world_size, num_less

    def __iter__(self) -> Iterator[Any]:
        rank = _rank_now()
        share = len(self.samples) // self.world_size - (self.num_less if rank == 0 else 0)
        for position in range(share):
            yield self.samples[position * self.world_size + rank]


def _rank_now() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("HOROVOD_RANK", "0"))


class WholeBatches(BatchSampler):
    """A sampler that yields global batches, for training on one device."""

    def __init__(self, samplers: list[DistributedSampler[Any]], batch_size: int, drop_last: bool) -> None:
        super().__init__(samplers[0], batch_size, drop_last)
        self.sampler = self  # Lightning sets the epoch of the sampler
        self.samplers = samplers

    def set_epoch(self, epoch: int) -> None:
        for sampler in self.samplers:
            sampler.set_epoch(epoch)

    def _of_ranks(self) -> list[BatchSampler]:
        return [BatchSampler(sampler, self.batch_size, self.drop_last) for sampler in self.samplers]

    def __iter__(self) -> Iterator[list[int]]:
        for batches in zip(*self._of_ranks(), strict=True):
            yield [index for batch in batches for index in batch]

    def __len__(self) -> int:
        return len(self._of_ranks()[0])


def loader(case: Case, kind: str, purpose: str) -> Any:
    training = purpose == "train"
    num_samples = case.num_samples if training else case.num_evaluation_samples
    dtype = torch.float64 if case.precision == "64-true" else torch.float32
    samples = Samples(num_samples, case.container, dtype, repeats_one=kind == "ext" and case.fault == "sample")
    if training and case.data == "iterable":
        num_less = case.batch_size if case.uneven else 0
        return DataLoader(
            Stream(samples, case.world_size, num_less), batch_size=case.batch_size, drop_last=case.drop_last
        )
    one = _map_loader(case, kind, samples, training)
    if training and case.data == "combined":
        # `dp_ext` splits a batch by the number of its samples, which must be the same in both of its parts.
        num_others = num_samples - (0 if case.strategy == "dp_ext" else 5)
        other = _map_loader(case, kind, Samples(num_others, case.container, dtype), training)
        return CombinedLoader([one, other], mode="max_size" if case.shuffle else "min_size")
    return one


def _map_loader(case: Case, kind: str, samples: Samples, training: bool) -> DataLoader[Any]:
    shuffle, drop_last = training and case.shuffle, training and case.drop_last
    if case.strategy == "dp_ext" or kind != "one" or not training:
        whole = case.strategy == "dp_ext" or kind == "one"
        batch_size = case.batch_size * (case.world_size if whole else 1)
        generator = torch.Generator().manual_seed(5) if case.strategy == "dp_ext" else None
        return DataLoader(samples, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, generator=generator)
    samplers = [
        DistributedSampler(samples, case.world_size, rank, shuffle=training, seed=SEED)  # as Lightning shards
        for rank in range(case.world_size)
    ]
    return DataLoader(samples, batch_sampler=WholeBatches(samplers, case.batch_size, drop_last))


class Data(pl.LightningDataModule):
    def __init__(self, case: Case, kind: str) -> None:
        super().__init__()
        self.case, self.kind = case, kind

    def train_dataloader(self) -> Any:
        return loader(self.case, self.kind, "train")

    def val_dataloader(self) -> Any:
        return loader(self.case, self.kind, "evaluate")

    test_dataloader = predict_dataloader = val_dataloader
