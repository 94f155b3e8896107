"""Numbers of ``dp_ext`` that depend on the size of a batch: weights of logged values, and sums over samples."""

import re

import pytest
import torch
from torchmetrics import (
    MeanMetric,
    SumMetric,
)

from tests.support.dp_training import train
from tests.support.models import MLP, loader, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*log_every_n_steps")


# --- weights ---


WEIGHTS = {
    "samples": lambda model, x, y, i: len(x),
    "elements": lambda model, x, y, i: x.numel(),
    "a part of the samples": lambda model, x, y, i: len(x) / 8,
    "the batch size": lambda model, x, y, i: 8,
    "one": lambda model, x, y, i: 1,
    "a tensor": lambda model, x, y, i: torch.tensor(2.5),
    "the size of each batch": lambda model, x, y, i: model.num_in_batch,  # a hook has set it
    "the batch's index": lambda model, x, y, i: i + 1,
    "some of the samples": lambda model, x, y, i: (y == 0).sum(),
}


class Weighs(MLP):
    """A model that logs means and updates a metric with means, with one kind of weights."""

    def __init__(self, weigh):
        super().__init__()
        self.mean, self.weigh = MeanMetric(), weigh

    def on_train_batch_start(self, batch, batch_idx):
        self.num_in_batch = len(batch[0])

    def training_step(self, batch, batch_idx):
        weight = self.weigh(self, *batch, batch_idx)
        counts = batch[1] == 0 if self.weigh is WEIGHTS["some of the samples"] else torch.ones(len(batch[0]))
        value = (batch[0][:, 0] * counts).sum() / counts.sum().clamp(min=1) + batch_idx
        self.mean.update(value, weight)
        self.log("mean", value, batch_size=weight, on_step=False, on_epoch=True)
        return self.loss(batch)


# If a batch has fewer samples than replicas, the kind of a changing weight is ambiguous: see the next test.
CASES = [
    pytest.param(weigh, num_samples, id=f"{name}: {parts}")
    for name, weigh in WEIGHTS.items()
    for num_samples, parts in ((16, "even"), (13, "uneven"), (17, "fewer than replicas"))
    if not (num_samples == 17 and name == "the batch's index")
]


@pytest.mark.parametrize(("weigh", "num_samples"), CASES)
@pytest.mark.filterwarnings("error:.*weights that")
def test_a_weight_is_that_of_the_batch_or_of_each_part_as_one_device_has_it(weigh, num_samples):
    data = loader(num_samples, batch_size=8)
    results = []
    for strategy, devices in (("dp_ext", 2), ("auto", 1)):
        trainer, model = train(strategy, lambda: Weighs(weigh), data, devices=devices, max_epochs=1)
        results.append((model.mean.compute(), trainer.callback_metrics["mean"]))
    torch.testing.assert_close(*results)


def test_weights_that_may_be_either_warn_in_a_batch_of_fewer_samples_than_replicas():
    model = Weighs(WEIGHTS["the batch's index"])
    with pytest.warns(UserWarning, match=r"MeanMetric is given weights that change.*`len\(x\)`.*`on_train_batch_end`"):
        make_trainer("dp_ext", devices=2, max_epochs=1).fit(model, loader(25, batch_size=8))


def test_weights_that_turn_out_to_be_of_parts_warn():
    model = Weighs(lambda model, x, y, i: 2 if i == 0 else len(x))
    with pytest.warns(UserWarning, match=r"`self.log\('mean', ...\)` was given .* because they were equal.*`len\(x\)`"):
        make_trainer("dp_ext", devices=2, max_epochs=1).fit(model, loader(14, batch_size=7))


# --- sums ---


ADDED = {"samples": lambda x, y, i: len(x), "a count": lambda x, y, i: (y == 0).sum(), "a sum": lambda x, y, i: x.sum()}


class Adds(MLP):
    def __init__(self, value):
        super().__init__()
        self.sum, self.value = SumMetric(), value

    def training_step(self, batch, batch_idx):
        value = self.value(*batch, batch_idx)
        self.sum.update(value)
        self.log("sum", value, reduce_fx="sum", on_step=False, on_epoch=True)
        return self.loss(batch)


@pytest.mark.parametrize("value", ADDED.values(), ids=ADDED.keys())
@pytest.mark.filterwarnings("error:.*and adds them to", "ignore:.*needs to be floating", "ignore:You called `self.log")
def test_sums_of_parts_of_one_size_add_up(value):
    results = []
    for strategy, devices in (("dp_ext", 2), ("auto", 1)):
        trainer, model = train(strategy, lambda: Adds(value), devices=devices, max_epochs=1)
        results.append((model.sum.compute(), trainer.callback_metrics["sum"]))
    torch.testing.assert_close(*results, check_dtype=False)


@pytest.mark.parametrize("value", [1, 0.5, torch.tensor(1)], ids=["an integer", "a fraction", "a tensor"])
@pytest.mark.parametrize("subject", ["SumMetric", r"`self.log\('sum', ...\)`"])
@pytest.mark.filterwarnings("ignore:.*needs to be floating", "ignore:You called `self.log")
def test_a_value_that_counts_once_per_batch_warns_if_replicas_add_it(subject, value):
    model = Adds(lambda x, y, i: value + 0)
    text = subject + r" is given \S+ by each of 2 replicas, and adds them to.*`on_train_batch_end`"
    with pytest.warns(UserWarning, match=text) as caught:
        make_trainer("dp_ext", devices=2, max_epochs=2).fit(model, loader(26, batch_size=8))
    assert len([warning for warning in caught if re.match(text, str(warning.message))]) == 1
