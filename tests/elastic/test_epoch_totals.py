"""Epoch totals: values that are gathered within an epoch and restored have the same result at its end."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchmetrics import MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric, SumMetric
from torchmetrics.classification import MulticlassConfusionMatrix

from lightning_strategies_ext._lightning import logging_state
from lightning_strategies_ext.elastic import epoch_totals
from lightning_strategies_ext.elastic.epoch_totals import EpochTotals
from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes

BATCH = 2  # before this batch, the totals are gathered and restored


class Counts(MLP):
    """A model that logs numbers that differ between the ranks, with each reduction."""

    def __init__(self, restores_totals: bool, logs_late: bool = False) -> None:
        super().__init__()
        self.restores_totals, self.logs_late = restores_totals, logs_late
        self.numbers = random.Random(0)
        self.metrics = MetricCollection([SumMetric(), MaxMetric(), MinMetric(), MeanMetric()])
        self.confusion = MulticlassConfusionMatrix(3)
        self.totals: Any = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.restores_totals and batch_idx == BATCH:
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
        if self.logs_late and (self.global_rank == 0 or batch_idx > BATCH):
            self.log("late", number, on_step=False, on_epoch=True, sync_dist=True)
        labels = torch.tensor([batch_idx % 3, self.global_rank])
        self.confusion.update(labels.flip(0), labels)
        return loss

    def on_train_epoch_end(self) -> None:
        self.confused = self.confusion.compute().tolist()
        self.confusion.reset()


def logged(restores_totals: bool, logs_late: bool = False) -> tuple[dict[str, float], Any, bool]:
    torch.manual_seed(0)
    model = Counts(restores_totals, logs_late)
    trainer = make_trainer("ddp_ext", max_epochs=2)
    trainer.fit(model, loader())
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return values, model.confused, model.totals is not None


def train_both() -> tuple[Any, Any, Any]:
    return logged(restores_totals=False), logged(restores_totals=True), logged(restores_totals=True, logs_late=True)


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_ranks(train_both)


def test_restored_totals_do_not_change_the_results_of_the_epoch(ranks):
    for (values, confused, _), (values_restored, confused_restored, has_totals), _ in ranks:
        assert has_totals
        assert values_restored == pytest.approx(values)
        assert {"sum", "mean", "max", "min", "own", "SumMetric", "MeanMetric"} <= values.keys()
        assert confused_restored == confused


def test_without_the_same_logged_values_on_all_ranks_there_are_no_totals(ranks):
    for (values, *_), _, (values_late, _, has_totals) in ranks:
        assert not has_totals
        assert {name: value for name, value in values_late.items() if name != "late"} == pytest.approx(values)


class SumAndList(Metric):
    """A metric with a summed state and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("items", [], dist_reduce_fx="cat")

    def update(self, value: Any) -> None:
        self.total += value
        self.items.append(value)

    def compute(self) -> Any:
        return self.total


def test_a_metric_whose_states_have_no_common_totals_is_omitted(monkeypatch):
    monkeypatch.setattr(logging_state, "logged_sums", lambda trainer: (None, {}))
    monkeypatch.setattr(logging_state, "logged_reductions", lambda trainer: {})
    module = torch.nn.ModuleDict({"sum": SumMetric(), "both": SumAndList()})
    parts = epoch_totals._parts_of(SimpleNamespace(lightning_module=module))
    assert [part.module for part in parts] == ["sum"]
