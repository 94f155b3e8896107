"""Exchange log: detects ranks that exchange gradients of different batches, and reports the first difference."""

import random
import time
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_strategies_ext import DDPStrategy, HorovodStrategy, RankFailedError
from lightning_strategies_ext.failure.exchange_log import HISTORY, ExchangeLog, describe_difference
from lightning_strategies_ext.failure.rank_status import RankStatus
from tests.pytorch.test_skipped_backward import Skips
from tests.support.horovod_ranks import run_horovod
from tests.support.models import make_trainer
from tests.support.ranks import run_ranks


def log_of(batches: list[int]) -> ExchangeLog:
    log = ExchangeLog()
    for batch in batches:
        log.record(batch)
    return log


def epochs(number: int, length: int) -> list[int]:
    return [batch for _ in range(number) for batch in range(1, length + 1)]


@pytest.mark.parametrize("batches", [[], [1], epochs(3, 10), [4, 8, 12, 13], [1, 1, 2, 2, 3, 3]])
def test_equal_exchanges_do_not_differ_at_any_moment(batches: list[int]) -> None:
    whole = log_of(batches)
    for count in range(len(batches) + 1):
        part = log_of(batches[:count])
        assert whole.first_difference(part.summary(0)) is None
        assert part.first_difference(whole.summary(0)) is None


def test_the_first_difference_is_found_by_the_rank_that_has_made_more_exchanges() -> None:
    batches = epochs(2, 100)
    first, second = log_of([*batches[:30], *batches[31:]]), log_of([*batches[:50], *batches[51:], 1])
    assert second.first_difference(first.summary(0)) == (30, 30, 31)
    assert first.first_difference(second.summary(0)) is None


def test_random_exchanges_differ_where_they_differ_first() -> None:
    draw = random.Random(1)
    for _ in range(300):
        one = [draw.randint(1, 3) for _ in range(draw.randint(1, 8))]
        other = [draw.randint(1, 3) for _ in range(draw.randint(1, len(one)))]
        index = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
        found = log_of(one).first_difference(log_of(other).summary(0))
        assert found == (None if index is None else (index, one[index] - 1, other[index] - 1)), (one, other)


def test_exchanges_older_than_the_history_are_forgotten() -> None:
    long, short = log_of(epochs(1, HISTORY + 10)), log_of([7])
    assert long.first_difference(short.summary(0)) is None


def test_the_status_of_a_rank_contains_the_summary() -> None:
    summary = log_of(epochs(3, 5)).summary(2)
    status = RankStatus.load(RankStatus(1, exchanges=summary).dump(100_000))
    assert status.exchanges is not None
    assert log_of([*epochs(3, 4), 9, 9, 9]).first_difference(status.exchanges) == (4, 0, 4)


def test_the_text_names_ranks_in_order() -> None:
    assert describe_difference(3, 0, (7, 5, 6)).startswith(
        "in gradient exchange 7, rank 0 exchanged gradients of batch 6, and rank 3 of batch 5."
    )


def test_the_text_names_a_batch_without_gradients() -> None:
    difference = log_of([1, 2, -3]).first_difference(log_of([1, 2, 3]).summary(0))
    assert difference is not None
    assert describe_difference(1, 0, difference).startswith(
        "in gradient exchange 2, rank 0 exchanged gradients of batch 2, and rank 1 zeros, because batch 2 has no"
    )


class SkipsOnce(LightningModule):
    """Rank 1 skips batch 2 of an endless training, which only the failure monitors can end."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if self.global_rank == 0 or batch_idx != 2:
            self.manual_backward(self.weight.sum())
        optimizer.step()
        time.sleep(0.01)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1.0)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.arange(2_000_000), batch_size=1)


def skip(model_class: type[LightningModule], strategy_name: str, *args: Any) -> str:
    strategy: Any = HorovodStrategy() if strategy_name == "horovod" else DDPStrategy(process_group_backend="gloo")
    with pytest.raises(RankFailedError) as caught:
        make_trainer(strategy, max_epochs=1).fit(model_class(*args))
    return str(caught.value)


@pytest.mark.processes
@pytest.mark.parametrize("engine", ["gloo", "horovod"])
def test_a_skipped_backward_pass_ends_the_training_soon(engine: str) -> None:
    runs_horovod = engine == "horovod"
    texts = run_horovod("horovodrun", skip, SkipsOnce, engine) if runs_horovod else run_ranks(skip, SkipsOnce, engine)
    for text in texts:
        assert "in gradient exchange 2, rank 0 exchanged gradients of batch 2, and rank 1 of batch 3" in text


@pytest.mark.processes
@pytest.mark.parametrize("is_manual", [False, True], ids=["zero", "manual"])
def test_totals_are_compared_before_on_train_end(is_manual: bool) -> None:
    for text in run_ranks(skip, Skips, "gloo", is_manual):
        assert "in gradient exchange 2, rank 0 exchanged gradients of batch 2, and rank 1 of batch 3" in text


class LacksLoss(Skips):
    """Rank 1 has no loss in one batch of each epoch, and no rank in another."""

    def __init__(self, batch: int) -> None:
        super().__init__(is_manual=False)
        self.without_loss = batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        is_missing = batch_idx == 1 or (batch_idx == self.without_loss and self.global_rank == 1)
        return torch.zeros((), requires_grad=True) if is_missing else (self.weight * 2.0).sum()


def weight_without_losses() -> float:
    model = LacksLoss(batch=1)
    make_trainer(HorovodStrategy(), max_epochs=2).fit(model)
    return model.weight.item()


@pytest.mark.processes
@pytest.mark.parametrize("batch", [2, 5], ids=["early", "last"])
def test_horovods_ranks_detect_a_loss_without_parameters(batch: int) -> None:
    for text in run_horovod("horovodrun", skip, LacksLoss, "horovod", batch):
        assert f"in gradient exchange {batch}, rank 0 exchanged gradients of batch {batch}, and rank 1 zeros" in text


@pytest.mark.processes
def test_a_batch_without_a_loss_on_all_horovods_ranks_is_no_error() -> None:
    assert run_horovod("horovodrun", weight_without_losses) == [-20.0, -20.0]
