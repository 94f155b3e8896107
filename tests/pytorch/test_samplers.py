"""The samples of a rank: all ranks use rank 0's order of a random sampler; ranks may have no samples.

Each sample of an epoch counts once, on one of the ranks, although the ranks draw different random numbers in each step,
as with dropout.
"""

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, Sampler, SubsetRandomSampler, WeightedRandomSampler

from tests.support.horovod_ranks import run_horovod
from tests.support.models import make_trainer
from tests.support.ranks import leave_process_group, run_ranks

pytestmark = pytest.mark.processes

NUM_SAMPLES = 12


class Endless(Sampler):
    """A sampler with a length, which continues indefinitely."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(NUM_SAMPLES).tolist()


class Buckets(Sampler):
    """A sampler whose items are batches, and which records its epochs."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return NUM_SAMPLES // 2

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[2 * number, 2 * number + 1] for number in torch.randperm(len(self)).tolist()])


def loaders() -> dict[str, DataLoader]:
    samples = torch.arange(float(NUM_SAMPLES)).unsqueeze(1)
    weights = torch.ones(NUM_SAMPLES)
    seeded = torch.Generator().manual_seed(3)
    return {
        "weighted": DataLoader(samples, 2, sampler=WeightedRandomSampler(weights, NUM_SAMPLES, replacement=False)),
        "generator": DataLoader(samples, 2, sampler=SubsetRandomSampler(range(NUM_SAMPLES), generator=seeded)),
        "endless": DataLoader(samples, 2, sampler=Endless()),
        "buckets": DataLoader(samples, batch_size=None, sampler=Buckets()),
        "workers": DataLoader(samples, 2, sampler=SubsetRandomSampler(range(NUM_SAMPLES)), num_workers=1),
    }


class Records(pl.LightningModule):
    """A model that records the samples of each epoch; ranks draw different numbers of random numbers."""

    def __init__(self, differs: bool = True) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.differs = differs
        self.epochs: list[list[int]] = []

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])
        if self.differs and self.global_rank == 0 and not isinstance(self.trainer.train_dataloader.sampler, Buckets):
            next(iter(self.trainer.train_dataloader))  # a single rank may fetch a batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.epochs[-1] += batch.flatten().int().tolist()
        if self.differs:
            torch.rand(1 + self.global_rank)
        return self.net(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def samples_of_epochs(strategy: str) -> dict[str, list[list[int]]]:
    found = {}
    for name, loader in loaders().items():
        module = Records()
        for _ in range(2):
            make_trainer(strategy, max_epochs=2).fit(module, loader)
        found[name] = module.epochs
        if name == "buckets":
            found["epochs"] = [loader.sampler.epochs]
    return found


def samples_with_ddp() -> tuple[dict[str, list[list[int]]], list[list[int]]]:
    return samples_of_epochs("ddp_ext"), samples_under_fabric()


def samples_under_fabric() -> list[list[int]]:
    fabric = Fabric(strategy="ddp_ext", accelerator="cpu", devices=2)
    fabric.launch()
    loader = fabric.setup_dataloaders(loaders()["weighted"])
    epochs = []
    for _ in range(3):
        epochs.append([int(sample) for batch in loader for sample in batch])
        torch.rand(1 + fabric.global_rank)
    return epochs


def assert_each_once(first: dict[str, list[list[int]]], second: dict[str, list[list[int]]]) -> None:
    assert [first.pop("epochs"), second.pop("epochs")] == [[[0, 1, 0, 1]]] * 2
    for name in first:
        assert_once(first[name], second[name])


def assert_once(first: list[list[int]], second: list[list[int]]) -> None:
    for of_first, of_second in zip(first, second, strict=True):
        assert sorted(of_first + of_second) == list(range(NUM_SAMPLES))
    # Samplers without a seed: two epochs have the same order once in 720 times, all of them practically never.
    orders = {(*of_first, *of_second) for of_first, of_second in zip(first, second, strict=True)}
    assert len(orders) > 1, "epochs must have different orders"


def test_all_ranks_use_rank_0s_order_of_a_random_sampler():
    (first, under_fabric), (second, of_other) = run_ranks(samples_with_ddp)
    assert_each_once(first, second)
    assert_once(under_fabric, of_other)


def test_ranks_of_horovod_train_on_each_sample_once():
    first, second = run_horovod("horovodrun", samples_of_epochs, "horovod_ext")
    assert_each_once(first, second)


def samples_of_both() -> list[list[list[int]]]:
    found = []
    for strategy in ("ddp", "ddp_ext"):
        pl.seed_everything(5, verbose=False)
        module = Records(differs=False)
        make_trainer(strategy, max_epochs=2).fit(module, loaders()["weighted"])
        found.append(module.epochs)
        leave_process_group()
    return found


def test_the_order_is_that_of_stock_where_ranks_draw_the_same():
    for stock, ext in run_ranks(samples_of_both):
        assert ext == stock


class Evaluates(pl.LightningModule):
    """A model that evaluates on rank 0 only, and gathers the numbers of samples in the hooks at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.num_samples = 0
        self.of_ranks: list[list[float]] = []
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def forward(self, batch: Any) -> Any:
        self.num_samples += len(batch)
        return 2 * batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch)

    def end(self) -> None:
        self.of_ranks.append(self.all_gather(torch.tensor(float(self.num_samples))).tolist())
        self.num_samples = 0

    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = end

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def evaluate_on_rank_0(strategy: str) -> tuple[list[list[float]], list[Any]]:
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False)
    samples = torch.arange(3.0).unsqueeze(1)

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(torch.ones(4, 1), 2)

        def val_dataloader(self) -> Any:
            return DataLoader(samples if trainer.is_global_zero else samples[:0], 2)

        test_dataloader = predict_dataloader = val_dataloader

    module = Evaluates()
    trainer.fit(module, Data())
    trainer.validate(module, Data(), verbose=False)
    trainer.test(module, Data(), verbose=False)
    # The flag is for the user's loaders. `predict` does not need it if Lightning shards the samples.
    module.allow_zero_length_dataloader_with_multiple_devices = False
    predicted = make_trainer(strategy).predict(
        module, [DataLoader(samples[:1], 2), DataLoader(samples, 2, sampler=SubsetRandomSampler([2]))]
    )
    assert not module.allow_zero_length_dataloader_with_multiple_devices
    return module.of_ranks, [[output.tolist() for output in outputs] for outputs in predicted]


def assert_evaluated(outcomes: list[tuple[list[list[float]], list[Any]]]) -> None:
    for of_ranks, _ in outcomes:
        assert of_ranks == [[3.0, 0.0]] * 3 + [[2.0, 0.0]]
    assert [predicted for _, predicted in outcomes] == [[[[[0.0]]], [[[4.0]]]], [[], []]]


def test_a_rank_without_samples_runs_the_hooks_of_an_evaluation():
    assert_evaluated(run_ranks(evaluate_on_rank_0, "ddp_ext"))


def test_a_rank_of_horovod_without_samples_runs_the_hooks_of_an_evaluation():
    assert_evaluated(run_horovod("horovodrun", evaluate_on_rank_0, "horovod_ext"))


def test_spawned_workers_predict_fewer_samples_than_ranks():
    (predicted,) = make_trainer("ddp_spawn_ext").predict(Evaluates(), DataLoader(torch.ones(1, 1), 2))
    assert predicted.tolist() == [[2.0]]
