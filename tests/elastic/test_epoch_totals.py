"""What ranks have added up, taken together in the middle of an epoch and given to one of them, comes to the same."""

import random
from typing import Any

import pytest
import torch
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, MinMetric, SumMetric
from torchmetrics.classification import MulticlassConfusionMatrix

from lightning_strategies_ext.elastic.epoch_totals import EpochTotals
from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes

BATCH = 2  # before which it is done


class Counts(MLP):
    """Logs numbers that are others on each rank, in every way."""

    def __init__(self, is_taken: bool, is_odd: bool = False) -> None:
        super().__init__()
        self.is_taken, self.is_odd = is_taken, is_odd
        self.numbers = random.Random(0)
        self.metrics = MetricCollection([SumMetric(), MaxMetric(), MinMetric(), MeanMetric()])
        self.confusion = MulticlassConfusionMatrix(3)
        self.totals: Any = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.is_taken and batch_idx == BATCH:
            self.totals = EpochTotals.gather(self.trainer, self.trainer.strategy.collectives)
            if self.totals is not None:
                self.totals.restore(self.trainer, self.global_rank)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        number = torch.tensor([self.numbers.random() for _ in range(2)][self.global_rank]) - 0.5
        for op in ("sum", "mean", "max", "min"):
            self.log(op, number, on_step=False, on_epoch=True, sync_dist=True, reduce_fx=op, batch_size=4)
        self.log("own", number, on_step=False, on_epoch=True)
        self.metrics(number)
        self.log_dict(self.metrics, on_step=False, on_epoch=True)
        if self.is_odd and (self.global_rank == 0 or batch_idx > BATCH):
            self.log("late", number, on_step=False, on_epoch=True, sync_dist=True)
        labels = torch.tensor([batch_idx % 3, self.global_rank])
        self.confusion.update(labels.flip(0), labels)
        return loss

    def on_train_epoch_end(self) -> None:
        self.confused = self.confusion.compute().tolist()
        self.confusion.reset()


def logged(is_taken: bool, is_odd: bool = False) -> tuple[dict[str, float], Any, bool]:
    torch.manual_seed(0)
    model = Counts(is_taken, is_odd)
    trainer = make_trainer("ddp_ext", max_epochs=2)
    trainer.fit(model, loader())
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return values, model.confused, model.totals is not None


def train_both() -> tuple[Any, Any, Any]:
    return logged(is_taken=False), logged(is_taken=True), logged(is_taken=True, is_odd=True)


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_ranks(train_both)


def test_it_comes_to_the_same(ranks):
    for (values, confused, _), (values_taken, confused_taken, were_taken), _ in ranks:
        assert were_taken
        assert values_taken == pytest.approx(values)
        assert {"sum", "mean", "max", "min", "own", "SumMetric", "MeanMetric"} <= values.keys()
        assert confused_taken == confused


def test_where_some_have_logged_what_others_have_not_it_is_not_done(ranks):
    for (values, *_), _, (values_odd, _, were_taken) in ranks:
        assert not were_taken
        assert {name: value for name, value in values_odd.items() if name != "late"} == pytest.approx(values)
