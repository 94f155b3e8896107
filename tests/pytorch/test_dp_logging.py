"""Values that steps log equal those of one device on the whole batch, at the time of the call."""

import pytest
import torch
from torchmetrics import MeanMetric, MetricCollection, MinMetric, SumMetric

from tests.support.dp_training import each_mode, train
from tests.support.models import MLP, assert_close, loader

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*log_every_n_steps")


def logging(log):
    """Returns a model class whose training step calls a function that logs."""

    class Model(MLP):
        def __init__(self):
            super().__init__()
            self.mean = MeanMetric()
            self.several = MetricCollection({"total": SumMetric(), "least": MinMetric()})

        def training_step(self, batch, batch_idx):
            log(self, *batch)
            return self.loss(batch)

    return Model


def log_and_overwrite(model, x, y):
    mean = x.mean()
    model.log("mean", mean)
    mean.zero_()


def log_and_overwrite_with_graph(model, x, y):
    mean = x.mean() * model.net[0].weight.mean()
    model.log("mean", mean, enable_graph=True)
    with torch.no_grad():
        mean.zero_()


def log_sums_of_the_batch(model, x, y):
    model.log("mean", model.mean(x.flatten()), reduce_fx="sum", on_step=False, on_epoch=True)
    model.log_dict(model.several(x.flatten()), reduce_fx="sum", on_step=False, on_epoch=True)


def log_changed_values_of_the_batch(model, x, y):
    value = model.mean(x.flatten())
    value += x.mean()
    model.log("mean", value, on_step=False, on_epoch=True)


def log_under_other_names(model, x, y):
    model.log("total", x.sum(), reduce_fx="SUM")
    model.log("largest", x.max(), reduce_fx="Max")
    model.log("average", x.mean(), reduce_fx="avg", batch_size=10, on_step=False, on_epoch=True)


CASES = [
    log_and_overwrite,
    log_and_overwrite_with_graph,
    log_sums_of_the_batch,
    log_changed_values_of_the_batch,
    log_under_other_names,
]


@pytest.mark.parametrize("log", CASES, ids=lambda log: log.__name__)
@each_mode
def test_logged_values_equal_those_of_one_device(make_strategy, log, recwarn):
    data = loader(25, batch_size=10)  # the last batch has parts of different sizes
    ext, single = (train(strategy, logging(log), data)[0] for strategy in (make_strategy(2), "auto"))
    assert not [warning for warning in recwarn if "and adds them" in str(warning.message)]
    assert_close(ext.callback_metrics, single.callback_metrics)
