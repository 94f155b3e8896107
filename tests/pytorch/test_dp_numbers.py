"""Numbers that a step computes from its part of the batch: metrics and logs use those of the batch, or reject them.

The reference is the Trainer with one device on the same batches. Batches have 10 samples, and the last batch has 4.
With three replicas, the parts have different sizes.
"""

import warnings

import pytest
import torch
from torch import nn
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
    MinMetric,
    PearsonCorrCoef,
    SumMetric,
)
from torchmetrics.aggregation import RunningMean, RunningSum
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import BLEUScore
from torchmetrics.wrappers import BootStrapper, MinMaxMetric

from tests.support.dp_training import assert_trains_alike, each_mode, train
from tests.support.models import MLP, NUM_CLASSES, assert_close, loader, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*log_every_n_steps")


class Squared(Metric):
    """A user's metric whose update accepts sums and counts."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, total, count):
        self.total += total
        self.count += count

    def compute(self):
        return self.total / self.count


class Scaled(Squared):
    """A metric whose update accepts rows, a numeric setting, and a flag."""

    def update(self, values, scale=1.0, *, negated=False):
        if negated:
            values = -values
        self.total += scale * values.sum()
        self.count += len(values)


class Averages(Squared):
    """A metric whose arguments are means, which the strategy cannot detect."""

    def update(self, mean):
        self.total += mean
        self.count += 1


class Keeps(Metric):
    """A metric that stores its arguments."""

    def __init__(self):
        super().__init__()
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, value):
        self.values.append(torch.as_tensor(value).reshape(1))

    def compute(self):
        return torch.cat(self.values).mean()


class Decays(Metric):
    """A metric whose state depends on the order of updates."""

    full_state_update = True

    def __init__(self):
        super().__init__()
        self.add_state("value", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, value):
        self.value = 0.9 * self.value + value

    def compute(self):
        return self.value


UPDATES = {
    "SumMetric: a sum": (SumMetric, lambda m, x, y: m.update(x.sum())),
    "SumMetric: a count": (SumMetric, lambda m, x, y: m.update(len(x))),
    "SumMetric: an integer tensor": (SumMetric, lambda m, x, y: m.update((y == 0).sum())),
    "SumMetric: a Python float": (SumMetric, lambda m, x, y: m.update(x.sum().item())),
    "SumMetric: by its name": (SumMetric, lambda m, x, y: m.update(value=x.sum())),
    "SumMetric: forward": (SumMetric, lambda m, x, y: m(x.sum())),
    "MaxMetric": (MaxMetric, lambda m, x, y: m.update(x.max())),
    "MaxMetric: forward": (MaxMetric, lambda m, x, y: m(x.max())),
    "MinMetric": (MinMetric, lambda m, x, y: m.update(x.min().item())),
    "MeanMetric: a mean": (MeanMetric, lambda m, x, y: m.update(x.mean())),
    "MeanMetric: forward": (MeanMetric, lambda m, x, y: m(x.mean())),
    "MeanMetric: a mean and its samples": (MeanMetric, lambda m, x, y: m.update(x.mean(), len(x))),
    "MeanMetric: a weight by name": (MeanMetric, lambda m, x, y: m.update(x.mean().item(), weight=float(len(x)))),
    "MeanMetric: another count": (MeanMetric, lambda m, x, y: m(x[y == 0, 0].mean(), (y == 0).sum())),
    "MeanMetric: the requested batch size": (MeanMetric, lambda m, x, y: m.update(x.mean(), weight=10)),
    "MeanMetric: a constant weight": (MeanMetric, lambda m, x, y: m.update(x.mean(), weight=0.5)),
    "MeanMetric: a weight for all rows": (MeanMetric, lambda m, x, y: m.update(x, 0.5)),
    "MeanMetric: rows and the number of samples": (MeanMetric, lambda m, x, y: m.update(x, len(x))),
    "MeanMetric: rows and that number as a float": (MeanMetric, lambda m, x, y: m(x[:, 0], weight=float(len(x)))),
    "MeanMetric: rows and another count": (MeanMetric, lambda m, x, y: m.update(x[:, 0], (y == 0).sum())),
    "MeanMetric: rows and the requested batch size": (MeanMetric, lambda m, x, y: m.update(x, 10)),
    "a window of sums": (lambda: RunningSum(2), lambda m, x, y: m.update(x.sum())),
    "a window of means": (lambda: RunningMean(2), lambda m, x, y: m(x.mean())),
    "extremes": (lambda: MinMaxMetric(SumMetric()), lambda m, x, y: m(x.sum())["raw"]),
    "a collection": (
        lambda: MetricCollection([MaxMetric(), MinMaxMetric(MaxMetric())]),
        lambda m, x, y: m.update(x.max()),
    ),
    "a collection: forward": (
        lambda: MetricCollection({"mean": MeanMetric(), "window": RunningMean(2)}),
        lambda m, x, y: m(x.mean()),
    ),
    "a collection that shares states": (
        lambda: MetricCollection({"one": SumMetric(), "other": SumMetric()}),
        lambda m, x, y: m.update(x.sum()),
    ),
    "arguments of a collection's members": (
        lambda: MetricCollection([MulticlassAccuracy(NUM_CLASSES), SumMetric()]),
        lambda m, x, y: m.update(preds=x[:, :3], target=y, value=x.sum()),
    ),
    "a user's metric of sums": (Squared, lambda m, x, y: m.update(x.sum(), len(x))),
    "a user's metric of sums: forward": (Squared, lambda m, x, y: m(x.sum(), count=x.numel())),
    "rows and a setting": (Scaled, lambda m, x, y: m.update(x[:, 0], 0.25)),
    "rows and a flag": (Scaled, lambda m, x, y: m.update(x[:, 0], negated=True)),
    "rows that are not summed, and a setting": (PearsonCorrCoef, lambda m, x, y: m.update(x[:, 0], x[:, 1])),
    "texts, two for each sample": (
        BLEUScore,
        lambda m, x, y: m.update([f"a b c d {i}" for i in (*y, *y)], [[f"a b c d {i}"] for i in (*y, *(y + 1))]),
    ),
    "compute in the step": (SumMetric, lambda m, x, y: (m.update(x.sum()), m.compute())[1]),
    "rows": (MeanSquaredError, lambda m, x, y: m(x[:, 0].contiguous(), y.float())),
}


class UpdatesAll(MLP):
    """A model that updates metrics in several ways in each step, and stores the values."""

    def __init__(self):
        super().__init__()
        self.metrics = torch.nn.ModuleList(make_metric() for make_metric, _ in UPDATES.values())
        self.of_steps = {name: [] for name in UPDATES}
        self.of_epochs = {name: [] for name in UPDATES}

    def training_step(self, batch, batch_idx):
        values = {
            name: update(metric, *batch)
            for metric, (name, (_, update)) in zip(self.metrics, UPDATES.items(), strict=True)
        }
        return {"loss": self.loss(batch), "values": [values]}

    validation_step = training_step

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for name, value in outputs["values"][0].items():
            self.of_steps[name].append(value)

    def on_train_epoch_end(self):
        for name, metric in zip(UPDATES, self.metrics, strict=True):
            self.of_epochs[name].append(metric.compute())
            metric.reset()

    on_validation_epoch_start = on_validation_epoch_end = on_train_epoch_end


@pytest.fixture(scope="module")
def trained():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [train(strategy, UpdatesAll, devices=devices)[1] for strategy, devices in (("dp_ext", 3), ("auto", 1))]


@pytest.mark.parametrize("name", UPDATES)
def test_metrics_that_are_given_numbers_are_those_of_the_whole_batch(trained, name):
    ext, single = trained
    torch.testing.assert_close(ext.of_epochs[name], single.of_epochs[name], equal_nan=True)
    torch.testing.assert_close(ext.of_steps[name], single.of_steps[name], equal_nan=True)


def steps_with(make_metric, update):
    class Model(MLP):
        def __init__(self):
            super().__init__()
            self.metric = make_metric()

        def training_step(self, batch, batch_idx):
            update(self.metric, *batch)
            return self.loss(batch)

    return Model()


@pytest.mark.parametrize(
    ("make_metric", "update", "message"),
    [
        (
            CatMetric,
            lambda m, x, y: m.update(x.mean()),
            "CatMetric is given a number .*cannot be computed from its states",
        ),
        (MeanMetric, lambda m, x, y: m.update((y == 0).sum()), "MeanMetric is given .* an integer is not a mean"),
        (Keeps, lambda m, x, y: m(x.mean()), "Keeps is given"),
        (Decays, lambda m, x, y: m.update(x.mean()), "Decays is given .*`on_train_batch_end`"),
        (PearsonCorrCoef, lambda m, x, y: m.update(x[:, 0].sum(), x[:, 1].sum()), "PearsonCorrCoef is given"),
        (
            lambda: BootStrapper(SumMetric(), num_bootstraps=2),
            lambda m, x, y: m.update(x.sum()),
            "BootStrapper is given .*the values that it passes to the metrics inside it are not known",
        ),
        (SumMetric, lambda m, x, y: m.update(*[x.sum()][len(x) - 2 :]), "metric with different arguments"),
    ],
    ids=["a list", "a mean of counts", "a user's list", "an order", "moments", "an unknown wrapper", "other arguments"],
)
def test_numbers_that_a_metric_cannot_put_together_are_refused(make_metric, update, message):
    with pytest.raises(ValueError, match=message):
        make_trainer("dp_ext", devices=2).fit(steps_with(make_metric, update), loader(5, batch_size=5))


def test_a_metric_that_may_take_means_for_sums_warns_where_parts_differ_in_size():
    model = steps_with(Averages, lambda m, x, y: m.update(x.mean()))
    with pytest.warns(UserWarning, match=r"Averages is given .* differ in size \(4, 3, 3 samples, for 3 replicas\)"):
        make_trainer("dp_ext", devices=3, max_epochs=1).fit(model, loader(10, batch_size=10))


# --- losses that are means over tokens or classes ---


def token_loss(model, x, y, i):
    """Returns a mean over the samples of a class, of which the replicas have different numbers."""
    return nn.functional.cross_entropy(model.net(x), y, ignore_index=2)


def two_terms(model, x, y, i):
    return token_loss(model, x, y, i) + 0.1 * model.net(x).square().mean()


class OfTokens(MLP):
    """A model that logs its loss with the number of tokens as `batch_size`."""

    def __init__(self, loss, is_automatic=True):
        super().__init__()
        self.own_loss, self.automatic_optimization = loss, is_automatic

    def training_step(self, batch, batch_idx):
        loss = self.own_loss(self, *batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("tokens", loss.detach(), batch_size=int((batch[1] != 2).sum()))
        if self.automatic_optimization:
            return {"loss": loss}
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        return None


@pytest.mark.parametrize("is_automatic", [True, False], ids=["automatic", "manual"])
@pytest.mark.filterwarnings("error:.*`scatter`")
@each_mode
def test_a_mean_over_tokens_trains_and_logs_that_of_the_whole_batch(make_strategy, is_automatic):
    assert_trains_alike(make_strategy(3), lambda: OfTokens(token_loss, is_automatic), max_epochs=1)


@pytest.mark.parametrize("is_automatic", [True, False], ids=["automatic", "manual"])
def test_a_loss_that_may_be_a_mean_over_tokens_warns_once_and_names_scatter(is_automatic):
    trainer = make_trainer("dp_ext", devices=2, max_epochs=2)
    with pytest.warns(UserWarning, match=r"logs with `batch_size` .* in parts of 4, 4 samples.*`scatter`") as caught:
        trainer.fit(OfTokens(two_terms, is_automatic), loader(32, batch_size=8))
    assert len([warning for warning in caught if "`scatter`" in str(warning.message)]) == 1


@pytest.mark.filterwarnings("error:.*`scatter`")
def test_a_mean_over_samples_does_not_warn_in_parts_of_different_sizes():
    class Plain(MLP):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch) + 0.1 * self.net(batch[0]).square().mean()
            self.log("loss", loss, batch_size=len(batch[0]))
            self.log("constant", loss.detach(), batch_size=8)
            return loss

    assert_trains_alike("dp_ext", Plain, devices=3, data=loader(21, batch_size=8))


# --- logged numbers ---


class Logs(MLP):
    def training_step(self, batch, batch_idx):
        features, labels = batch
        loss = self.loss(batch)
        both = {"on_step": True, "on_epoch": True}
        self.log("mean", loss, **both)
        self.log("sum", features.sum(), reduce_fx="sum", **both)
        self.log("count", (labels == 0).sum(), reduce_fx="sum", **both)
        self.log("samples", len(features), reduce_fx=torch.sum, **both)
        self.log("largest", features.max(), reduce_fx="max", **both)
        self.log("smallest", features.min().item(), reduce_fx=torch.min, **both)
        self.log("longest", labels.max(), reduce_fx="max", **both)
        self.log("setting", 3, **both)
        self.log("own weight", features[labels == 0, 0].sum() / max(1, n := int((labels == 0).sum())), batch_size=n)
        self.log("requested batch size", loss, batch_size=10, **both)
        self.log_dict({"in a dict": loss}, batch_size=10, **both)
        return loss


@pytest.mark.filterwarnings("ignore:You called `self.log", "ignore:.*needs to be floating")
@each_mode
def test_numbers_are_combined_by_reduce_fx(make_strategy):
    ext, single = train(make_strategy(3), Logs, max_epochs=1)[0], train("auto", Logs, max_epochs=1)[0]
    assert_close(ext.callback_metrics, single.callback_metrics)
    assert_close(ext.logged_metrics, single.logged_metrics)


class LogsCounts(MLP):
    def training_step(self, batch, batch_idx):
        self.log("zeros", (batch[1] == 0).sum())
        return self.loss(batch)


def test_a_mean_of_different_counts_is_refused():
    with pytest.raises(
        ValueError, match=r"`self.log\('zeros', ...\)`: replicas log different integers.*`reduce_fx=\"sum"
    ):
        make_trainer("dp_ext", devices=2).fit(LogsCounts(), loader(batch_size=15))
