"""Exchanges of ``self.log(..., sync_dist=True)``: how many there are, when, and with which ranks."""

from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_strategies_ext import DDPStrategy
from lightning_strategies_ext.torch_distributed.collectives import TorchCollectives
from tests.pytorch.test_logged_values import OPERATIONS
from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes


class CountExchanges(pl.Callback):
    """Counts the exchanges of logged values, and all reductions, in each part of a stage."""

    def __init__(self) -> None:
        self.part = "start"
        self.counts: dict[str, Counter[str]] = {}
        for name in ("start_all_gather", "_all_reduce"):
            self.count_calls(name)

    def count_calls(self, name: str) -> None:
        method = getattr(TorchCollectives, name)

        def count_and_call(collectives: Any, *args: Any) -> Any:
            self.counts.setdefault(self.part, Counter())[name] += 1
            return method(collectives, *args)

        setattr(TorchCollectives, name, count_and_call)

    def on_train_batch_start(self, *args: Any) -> None:
        self.part = "training step"

    def on_train_epoch_end(self, *args: Any) -> None:
        self.part = "end of training epoch"

    def on_validation_batch_start(self, *args: Any) -> None:
        self.part = "validation step"

    def on_validation_epoch_end(self, *args: Any) -> None:
        self.part = "end of validation"


class LogsMany(MLP):
    def __init__(self, is_synchronized: bool) -> None:
        super().__init__()
        self.is_synchronized = is_synchronized

    def log_many(self, **settings: Any) -> None:
        for key in range(20):
            op = OPERATIONS[key % len(OPERATIONS)]
            self.log(f"key_{key}", float(key), sync_dist=self.is_synchronized, reduce_fx=op, **settings)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_many(on_step=True, on_epoch=True)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_many(on_step=False, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        for key in range(5):
            self.log(f"end_{key}", 1.0, sync_dist=self.is_synchronized)


def count_exchanges(is_synchronized: bool) -> dict[str, Counter[str]]:
    counts = CountExchanges()
    trainer = make_trainer("ddp_ext", callbacks=[counts], max_epochs=1)
    trainer.fit(LogsMany(is_synchronized), loader(32), loader(32))
    counts.counts.pop("start")
    return counts.counts


def test_twenty_values_take_one_exchange_per_step_and_one_at_the_end_of_an_epoch() -> None:
    num_steps, once = 4, Counter(start_all_gather=1)
    for counts in run_ranks(count_exchanges, True):
        assert counts.pop("training step") == Counter(start_all_gather=num_steps)
        assert counts.pop("validation step") == once  # before the hooks at the end of the epoch
        # The values that hooks have logged, and those of the training epoch.
        assert counts.pop("end of validation") == Counter(start_all_gather=2)
        assert sum(counts.values(), Counter()) == Counter()


def test_nothing_is_exchanged_without_sync_dist() -> None:
    for counts in run_ranks(count_exchanges, False):
        assert sum(counts.values(), Counter()) == Counter()


class ReadsInHook(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rank", float(self.global_rank), sync_dist=True)
        self.in_hook = self.trainer.callback_metrics["rank"].item()
        return self.loss(batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.after_hook = self.trainer.callback_metrics["rank"].item()


def read_in_hook() -> tuple[float, float]:
    model = ReadsInHook()
    make_trainer("ddp_ext", max_epochs=1).fit(model, loader(16))
    return model.in_hook, model.after_hook


def test_a_read_in_the_hook_gives_the_own_value_and_a_later_read_the_reduced_value() -> None:
    assert run_ranks(read_in_hook) == [(0.0, 0.5), (1.0, 0.5)]


class ReadsOnRankZero(pl.Callback):
    """Like a progress bar, which only rank 0 has: reads after some values of a hook have been logged."""

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        module.log("before", float(trainer.global_rank), sync_dist=True)
        if trainer.is_global_zero:
            self.read = trainer.callback_metrics["before"].item()


class LogsAtEnd(MLP):
    def on_train_epoch_end(self) -> None:
        self.log("after", 3.0 * self.global_rank, sync_dist=True)


def read_on_rank_zero() -> tuple[Any, float, float]:
    reads = ReadsOnRankZero()
    trainer = make_trainer("ddp_ext", callbacks=[reads], max_epochs=2)
    trainer.fit(LogsAtEnd(), loader(16))
    metrics = trainer.callback_metrics
    return getattr(reads, "read", None), metrics["before"].item(), metrics["after"].item()


def test_one_rank_may_read_before_all_values_of_a_hook_are_logged() -> None:
    assert run_ranks(read_on_rank_zero) == [(0.5, 0.5, 1.5), (None, 0.5, 1.5)]


class CountsSamples(MLP):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        features = batch[0]
        self.log("mean", features.mean(), sync_dist=True, batch_size=len(features))
        self.log("max", features.max(), sync_dist=True, reduce_fx="max")


class RankBatches(DataLoader):
    """Samples of one rank: the given number of ones, plus its rank."""

    def __init__(self, num_samples: int, rank: int) -> None:
        samples = [(torch.tensor(1.0 + rank), 0)] * num_samples
        super().__init__(samples, batch_size=2)


def evaluate_uneven(*num_samples: tuple[int, ...]) -> dict[str, float]:
    trainer = make_trainer("ddp_ext", use_distributed_sampler=False)
    model = CountsSamples()
    model.allow_zero_length_dataloader_with_multiple_devices = True
    loaders = [RankBatches(number, trainer.global_rank) for number in num_samples[trainer.global_rank]]
    trainer.validate(model, loaders, verbose=False)
    return {key: value.item() for key, value in trainer.callback_metrics.items()}


def test_a_mean_is_that_of_all_samples_of_all_ranks() -> None:
    # Three and four samples: Lightning divides by the mean number, which it rounds down to three.
    assert run_ranks(evaluate_uneven, (3,), (4,)) == [{"mean": pytest.approx(11 / 7), "max": 2.0}] * 2


@pytest.mark.parametrize(
    "num_samples", [((0,), (3,)), ((0, 0), (2, 4)), ((2, 0, 1), (0, 4, 2)), ((0, 2, 0), (1, 1, 1))]
)
def test_a_rank_without_batches_receives_the_values_of_other_ranks(num_samples: Any) -> None:
    expected = {}
    for index, numbers in enumerate(zip(*num_samples, strict=True)):
        suffix = f"/dataloader_idx_{index}" if len(num_samples[0]) > 1 else ""
        mean = sum(number * (1.0 + rank) for rank, number in enumerate(numbers)) / sum(numbers)
        expected[f"mean{suffix}"] = pytest.approx(mean)
        expected[f"max{suffix}"] = max(1.0 + rank for rank, number in enumerate(numbers) if number)
    for metrics in run_ranks(evaluate_uneven, *num_samples):
        assert metrics == expected


class LogsInLastBatch(MLP):
    """Rank 0 has two batches, rank 1 has four, and a key is logged in the fourth only."""

    def train_dataloader(self) -> DataLoader:
        return loader((8, 16)[self.trainer.global_rank])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("each", 1.0 + self.global_rank, sync_dist=True, on_step=True, on_epoch=True, batch_size=1)
        if batch_idx == 3:
            self.log("late", 1.0 + self.global_rank, sync_dist=True, on_step=False, on_epoch=True)
        return self.loss(batch)


def log_in_last_batch() -> dict[str, float]:
    trainer = make_trainer(DDPStrategy(uneven_inputs="join"), max_epochs=2, use_distributed_sampler=False)
    trainer.fit(LogsInLastBatch())
    return {key: value.item() for key, value in trainer.callback_metrics.items()}


def test_a_key_that_only_a_rank_with_more_batches_logs_has_the_value_of_that_rank() -> None:
    each = (2 * 1.0 + 4 * 2.0) / 6
    expected = {"late": 2.0, "each_step": 2.0, "each_epoch": pytest.approx(each), "each": pytest.approx(each)}
    assert run_ranks(log_in_last_batch) == [expected] * 2


class OwnReduce(DDPStrategy):
    num_calls = 0

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return super().reduce(tensor, *args, **kwargs)


def reduce_by_subclass() -> int:
    strategy = OwnReduce()
    make_trainer(strategy, max_epochs=1).fit(LogsMany(True), loader(8))
    return strategy.num_calls


def test_a_subclass_that_overrides_reduce_reduces_each_value() -> None:
    assert min(run_ranks(reduce_by_subclass)) >= 2 * 20
