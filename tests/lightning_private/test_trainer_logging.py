"""Behavior of Lightning that :mod:`lightning_strategies_ext._lightning.trainer_logging` requires."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric

from lightning_strategies_ext._lightning import logging_state, trainer_logging
from tests.lightning_private.trainers import in_own_process, single_process_trainer
from tests.support.models import MLP, fit, loader, make_trainer


class LogsTensorsAndMetrics(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.mean(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("mean", self.mean)
        return loss


def count_moves_of_logged_values(is_skipping: bool) -> tuple[int, dict[str, float], str]:
    move, num_moves = _ResultMetric.to, 0

    def move_and_count(metric: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_moves
        num_moves += metric.is_tensor
        return move(metric, *args, **kwargs)

    _ResultMetric.to = move_and_count
    pl.seed_everything(5, verbose=False)
    trainer = single_process_trainer()
    if is_skipping:
        trainer_logging.prepare_logging(trainer, None)
    trainer.fit(LogsTensorsAndMetrics(), loader(), loader())
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    num_moves_in_fit = num_moves
    loss = trainer.fit_loop.epoch_loop._results["training_step.loss"].to(torch.device("meta"))
    return num_moves_in_fit, logged, loss.value.device.type


@pytest.mark.processes
def test_needless_moves_of_logged_values_can_be_skipped_without_another_change() -> None:
    (num_moves, logged, _), (num_remaining, same_logged, device) = (
        in_own_process(count_moves_of_logged_values, is_skipping) for is_skipping in (False, True)
    )
    num_steps = 2 * len(loader())  # training and validation, with one logged tensor each
    assert num_moves >= num_steps
    assert num_remaining < 3  # less than one per step
    assert device == "meta"
    assert logged == same_logged
    assert {"loss_step", "loss_epoch", "mean", "val_loss"} <= logged.keys()


class RecordsExchanges:
    """An exchange with an identical result for all values of an epoch."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.pending: dict[str, Any] = {}
        self.is_in_flight, self.is_shadowed = False, None
        self.epochs: list[tuple[list[str], bool]] = []
        self.computed: list[tuple[str, type, str, bool]] = []

    def finish(self, *, waits_for_gpu: bool = False) -> None:
        self.is_in_flight = False

    def reduce_epoch(self, metrics: Any, *, is_final: bool) -> None:
        self.epochs.append(([metric.label for metric in metrics], is_final))
        for metric in metrics:
            metric.set_epoch_value(torch.tensor(7.0))

    def compute_metrics(self, metrics: Any, *, is_final: bool) -> None:
        self.computed += [(metric.label, type(metric.value), metric.location, is_final) for metric in metrics]
        for metric in metrics:
            metric.compute()

    def reduce_evaluation(self, results: Any, update_epoch_metrics: Any) -> None:
        results.reduce_epoch(is_final=True)

    def find_location(self) -> str:
        return "train.py:1"


class LogsForExchange(MLP):
    """A model that logs a key with ``sync_dist=True``, whose step values wait for the exchange, and a key without."""

    def __init__(self) -> None:
        super().__init__()
        self.exchange, self.metric = RecordsExchanges(), torchmetrics.SumMetric()

    def on_train_start(self) -> None:
        trainer_logging.prepare_logging(self.trainer, self.exchange)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("both", float(batch_idx), on_step=True, on_epoch=True, sync_dist=True)
        self.log("own", float(batch_idx), on_step=True, on_epoch=True)
        return self.loss(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        metrics = [*self.exchange.pending.values()]
        assert [(metric.label, metric.op, metric.hook) for metric in metrics] == [("both", "mean", "training_step")]
        self.last = trainer_logging.step_values(metrics)
        trainer_logging.set_step_values(metrics, [torch.tensor(5.0)])
        self.exchange.pending.clear()

    def on_train_epoch_end(self) -> None:
        self.log("late", 1.0, sync_dist=True)
        self.metric.update(4.0)
        self.log("metric", self.metric)


@pytest.mark.forked
def test_values_of_a_step_and_of_an_epoch_are_exchanged_together() -> None:
    model = LogsForExchange()
    trainer = make_trainer("ddp_ext", devices=1, max_epochs=1)
    trainer.fit(model, loader(num_samples=16, batch_size=4))
    assert model.last == [torch.tensor(3.0)]
    assert model.exchange.epochs == [(["both"], True), (["late"], True)]
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert metrics["both_step"] == 5.0
    assert metrics["both_epoch"] == metrics["late"] == 7.0
    assert metrics["own_epoch"] == 1.5
    assert model.exchange.computed == [("metric", torchmetrics.SumMetric, "train.py:1", True)]
    assert metrics["metric"] == 4.0


@pytest.mark.forked
def test_a_metric_that_only_another_rank_has_logged_is_added() -> None:
    model = LogsForExchange()
    trainer = make_trainer("ddp_ext", devices=1, max_epochs=1)
    trainer.fit(model, loader(num_samples=16, batch_size=4))
    results = trainer.fit_loop.epoch_loop._results
    (metric,) = (metric for metric in results.values() if metric.meta.name == "metric")
    results.clear()
    results.add_metric(metric.settings)
    (added,) = results.missing_metrics()
    assert added.value is model.metric


@pytest.mark.forked
def test_a_synchronized_key_is_kept_after_a_reset() -> None:
    trainer = make_trainer("ddp_ext", devices=1, max_epochs=1)
    trainer.fit(LogsForExchange(), loader(num_samples=16, batch_size=4))
    results = trainer.fit_loop.epoch_loop._results
    for metric in results.values():
        metric.reset()
        logging_state.retain_key(metric)
    assert [metric.label for _, metric in results.valid_items()] == ["both", "late"]


def test_results_of_a_stage_are_recognized() -> None:
    trainer, _ = fit("auto", devices=1)
    values = vars(trainer.fit_loop.epoch_loop).values()
    assert sum(trainer_logging.is_bound_to_stage(value) for value in values) == 1


def test_values_of_a_step_are_read_and_replaced_where_lightning_keeps_them() -> None:
    class Replaces(LogsTensorsAndMetrics):
        def on_train_batch_end(self, *_: Any) -> None:
            metric = self.trainer.fit_loop.epoch_loop._results["training_step.loss"]
            value = trainer_logging.step_values([metric])[0]
            trainer_logging.set_step_values([metric], [value + 1])
            seen.append((value.item() + 1, self.trainer.callback_metrics["loss_step"].item()))

    seen: list[tuple[float, float]] = []
    trainer = single_process_trainer(limit_train_batches=2)
    trainer_logging.prepare_logging(trainer, None)
    trainer.fit(Replaces(), loader())
    assert len(seen) == 2
    assert all(replaced == pytest.approx(read) for replaced, read in seen)
