"""Behavior of Lightning that :mod:`lightning_strategies_ext._lightning.logging_state` requires."""

from typing import Any

import pytest
import torch
import torchmetrics

from lightning_strategies_ext._lightning import logging_state, trainer_logging
from tests.support.models import MLP, fit, loader, make_trainer


class LogsBothWays(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("per_step", 1.0, on_step=True, on_epoch=False)
        self.log("per_epoch", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="sum")
        return self.loss(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        (metric,) = logging_state.logged_per_epoch(self.trainer)
        self.states = {name: state.clone() for name, state in metric.metric_state.items()}


def test_values_logged_per_epoch_are_summed_in_metric_states() -> None:
    model = LogsBothWays()
    make_trainer("auto", devices=1, max_epochs=1).fit(model, loader(num_samples=16, batch_size=4))
    assert model.states["value"].item() == 0 + 1 + 2 + 3


class Continues(LogsBothWays):
    def __init__(self, sums: Any) -> None:
        super().__init__()
        self.sums = sums

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            logging_state.set_logged_sums(self.trainer, self.sums)

    def on_train_batch_end(self, *args: Any) -> None:
        self.sums = logging_state.logged_sums(self.trainer)


class AddsMore(MLP):
    """A model that adds ten to the results after the first batch, and adds a new result."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            position, sums = logging_state.logged_sums(self.trainer)
            states = {"value": sums["training_step.per_epoch"]["value"] + 10.0}
            more = {"training_step.per_epoch": states, "training_step.late": {"value": torch.tensor(5.0)}}
            logging_state.add_logged_sums(self.trainer, (position, more))
            self.merging = logging_state.logged_reductions(self.trainer)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx > 1:
            self.log("late", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        for op in ("max", "min", "mean", "sum"):
            self.log(op, 1.0, on_epoch=True, sync_dist=True, reduce_fx=op)
        self.log("per_epoch", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="sum")
        return self.loss(batch)


@pytest.mark.forked
def test_logged_sums_can_be_set_within_an_epoch_and_have_a_merge_operation() -> None:
    trainer = make_trainer("ddp_ext", devices=1, max_epochs=1)
    model = AddsMore()
    trainer.fit(model, loader(num_samples=16, batch_size=4))
    assert trainer.callback_metrics["per_epoch"].item() == 6.0 + 10.0
    assert trainer.callback_metrics["late"].item() == 5.0 + 2.0
    ops = {"max": "max", "min": "min", "mean": "sum", "sum": "sum"}
    assert model.merging == {f"training_step.{name}": op for name, op in ops.items()}


def test_the_logged_sums_of_another_process_are_continued() -> None:
    sums: Any = ((False, None), {})
    for expected in (6.0, 12.0):
        trainer = make_trainer("auto", devices=1, max_epochs=1)
        trainer_logging.prepare_logging(trainer, None)
        model = Continues(sums)
        trainer.fit(model, loader(num_samples=16, batch_size=4))
        assert trainer.callback_metrics["per_epoch"].item() == expected
        sums = model.sums
    assert list(sums[1]) == ["training_step.per_epoch"]


class EvaluatesTwice(MLP):
    """Takes back what its second step logs, with a key that is new."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def validation_step(self, batch, batch_idx):
        self.log("loss", torch.tensor(float(batch_idx)))
        known = logging_state.current_results(self.trainer)
        if batch_idx == 1:
            self.mean.update(2.0)
            self.log("new", torch.tensor(3.0))
            self.log("metric", self.mean, on_step=True, on_epoch=True)
            for metric in logging_state.current_results(self.trainer)[len(known) :]:
                logging_state.drop_values(metric)
                assert metric._forward_cache is None


def test_a_new_key_of_a_step_without_effect_has_no_value() -> None:
    trainer = make_trainer("auto", devices=1)
    trainer_logging.prepare_logging(trainer, None)
    model = EvaluatesTwice()
    (values,) = trainer.validate(model, loader(num_samples=8, batch_size=4), verbose=False)
    assert values == {"loss": 0.5, "metric_epoch": 2.0}
    assert logging_state.current_results(trainer) == []


def test_the_connector_has_the_position_and_the_values() -> None:
    trainer, _ = fit("auto", MLP, devices=1, max_epochs=1)
    attributes = vars(logging_state.logger_connector(trainer))
    assert attributes["_callback_metrics"].keys() == trainer.callback_metrics.keys()
    assert {"_first_loop_iter", "_current_fx", "_logged_metrics", "_progress_bar_metrics"} <= attributes.keys()
