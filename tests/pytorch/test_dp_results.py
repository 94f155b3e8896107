"""Results of ``dp_ext``: logged values, metrics, outputs, and attributes are those of the whole batch.

The reference is the Trainer with one device on the same batches.
"""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, PearsonCorrCoef, SpearmanCorrCoef, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score, MulticlassRecall
from torchmetrics.wrappers import MinMaxMetric, Running

from tests.support.dp_training import each_mode, train
from tests.support.models import MLP, NUM_CLASSES, assert_close, loader, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*log_every_n_steps")


def assert_logs_alike(make_strategy, make_model, **kwargs):
    ext, model = train(make_strategy(3), make_model, **kwargs)
    single, expected = train("auto", make_model, **kwargs)
    for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        assert_close(getattr(ext, name), getattr(single, name))
    return model, expected


# --- self.log ---


class LogsWithManyArguments(MLP):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        features = batch[0]
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("positional", loss, True, True, False, True)
        self.log("sum", features.sum(), reduce_fx="sum", on_epoch=True)
        self.log("smallest", features.min(), reduce_fx=torch.min, on_epoch=True)
        self.log("largest", features.max(), reduce_fx="max", on_epoch=True)
        self.log("number", 3)
        self.log("whole", torch.tensor(3), on_epoch=True)
        self.log("step", float(batch_idx))
        self.log("of one element", loss.reshape(1))
        self.log("weighted", features[:, 0].mean(), batch_size=len(features), on_epoch=True)
        self.log("with graph", loss, enable_graph=True)
        for _ in range(2):
            self.log("twice", loss, on_epoch=True)
        self.log_dict({"a": loss * 2, "b": loss * 3}, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)
        self.log("val_size", float(len(batch[0])), reduce_fx="sum")


@pytest.mark.filterwarnings("ignore:You called `self.log.'whole'", "ignore:.*needs to be floating")
@each_mode
def test_logged_values_are_those_of_the_whole_batch(make_strategy):
    model, _ = assert_logs_alike(make_strategy, LogsWithManyArguments)
    assert {"both_step", "both_epoch"} <= model.trainer.progress_bar_metrics.keys()


@each_mode
def test_several_dataloaders_log_under_their_names(make_strategy):
    class Validates(MLP):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("val_loss", self.loss(batch) * (1 + dataloader_idx))

        test_step = validation_step

    def results(strategy):
        pl.seed_everything(11, verbose=False)
        trainer, model = make_trainer(strategy, 1), Validates()
        loaders = [loader(21, batch_size=10), loader(8, batch_size=5)]
        return [trainer.validate(model, loaders, verbose=False), trainer.test(model, loaders, verbose=False)]

    torch.testing.assert_close(results(make_strategy(3)), results("auto"))


class LogsInSome(MLP):
    """A model that logs only in replicas whose part contains a certain class."""

    def training_step(self, batch, batch_idx):
        if (batch[1] == 0).any():
            zeros = batch[1] == 0
            self.log("zero", batch[0][zeros].mean(), batch_size=int(zeros.sum()), on_epoch=True, on_step=False)
        return self.loss(batch)


def test_a_value_that_some_replicas_log_is_reduced_over_those_replicas():
    model, _ = assert_logs_alike(lambda num: "dp_ext", LogsInSome, max_epochs=1)
    assert "zero" in model.trainer.callback_metrics


class LogsInBackward(MLP):
    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        logits.register_hook(lambda gradient: self.log("gradient", gradient.sum(), reduce_fx="sum", on_epoch=True))
        return nn.functional.cross_entropy(logits * 2, batch[1])


def test_values_that_a_hook_logs_in_the_backward_pass_are_not_lost():
    trainer, _ = train("dp_ext", LogsInBackward, devices=3, max_epochs=1)
    reference, _ = train("auto", LogsInBackward, max_epochs=1)
    assert "gradient_epoch" in trainer.callback_metrics
    assert_close(trainer.callback_metrics, reference.callback_metrics)


# --- torchmetrics ---


class WithMetrics(MLP):
    """A model with metrics whose states are sums, lists, running moments; a window; a collection; a list of metrics."""

    def __init__(self):
        super().__init__()
        task = {"num_classes": NUM_CLASSES}
        self.accuracy = MulticlassAccuracy(**task)
        self.auroc = MulticlassAUROC(**task)
        self.pearson = PearsonCorrCoef()
        self.spearman = SpearmanCorrCoef()
        self.mean_loss = MeanMetric()
        self.largest = MaxMetric()
        self.count = SumMetric()
        self.window = Running(SumMetric(), window=3)
        self.extremes = MinMaxMetric(MulticlassAccuracy(**task))
        self.collection = MetricCollection([MulticlassRecall(**task), MulticlassF1Score(**task)])
        self.listed = nn.ModuleList([MulticlassAccuracy(**task), MulticlassAccuracy(average="micro", **task)])
        self.computed = []

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        value = self.accuracy(logits, batch[1])
        self.log("value", value)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.auroc.update(logits, batch[1])
        self.pearson.update(logits[:, 0], batch[0][:, 0])
        self.spearman.update(logits[:, 0], batch[0][:, 0])
        self.mean_loss.update(loss.detach())
        self.largest.update(batch[0])
        self.count.update(len(batch[0]))
        self.window.update(batch[0].sum(dim=1))
        self.log_dict(self.collection(logits, batch[1]))
        self.log_dict({f"{index}": metric for index, metric in enumerate(self.listed)}, on_step=False, on_epoch=True)
        for metric in self.listed:
            metric.update(logits, batch[1])
        self.extremes.update(logits, batch[1])
        if batch_idx == 2:
            self.log("so far", self.count.compute())
            self.count.reset()
        return loss

    def on_train_epoch_end(self):
        metrics = (self.auroc, self.pearson, self.spearman, self.mean_loss, self.largest, self.count, self.window)
        for metric in (*metrics, self.extremes, self.collection):
            self.computed.append(metric.compute())
            metric.reset()


@pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef`")
@each_mode
def test_metrics_have_the_state_of_the_whole_batch(make_strategy):
    ext, single = assert_logs_alike(make_strategy, WithMetrics)
    assert len(ext.computed) == 18
    torch.testing.assert_close(ext.computed, single.computed, rtol=1e-4, atol=1e-5)


class LogsACollection(MLP):
    def __init__(self):
        super().__init__()
        task = {"num_classes": NUM_CLASSES}
        self.metrics = MetricCollection(
            {"accuracy": MulticlassAccuracy(**task), "recall": MulticlassRecall(**task)}, prefix="val_"
        )

    def validation_step(self, batch, batch_idx):
        self.metrics.update(self.net(batch[0]), batch[1])
        self.metrics["accuracy"].update(self.net(batch[0]), batch[1])
        self.log_dict(self.metrics)


@each_mode
def test_a_logged_collection_and_its_members_are_updated_once(make_strategy):
    # An update of a single member of a collection with compute groups has unexpected results, which must equal the
    # results in one process.
    assert_logs_alike(make_strategy, LogsACollection)


# --- outputs of steps ---


@dataclass
class Prediction:
    scores: torch.Tensor
    labels: list


class Predicts(MLP):
    def predict_step(self, batch, batch_idx):
        scores = self.net(batch[0])
        labels = [f"class {index}" for index in scores.argmax(dim=1).tolist()]
        return {
            "scores": scores,
            "nested": [scores + 1, (scores.sum(dim=1), OrderedDict(loss=self.loss(batch), note="same"))],
            "labels": labels,
            "entries": [{"score": score} for score in scores],
            "object": Prediction(scores, labels),
            "nothing": None,
            "number": 0.5,
        }


@each_mode
def test_predictions_are_those_of_the_whole_batch_in_order(make_strategy):
    def predictions(strategy):
        pl.seed_everything(11, verbose=False)
        return make_trainer(strategy, 1).predict(Predicts(), loader(23, batch_size=10))

    ext, single = predictions(make_strategy(3)), predictions("auto")
    assert len(ext) == len(single) == 3
    for ext_batch, batch in zip(ext, single, strict=True):
        ext_object, other = ext_batch.pop("object"), batch.pop("object")
        torch.testing.assert_close(ext_object.scores, other.scores)
        assert ext_object.labels == other.labels
        assert type(ext_batch["nested"][1][1]) is OrderedDict
        assert ext_batch["nested"][1][1].pop("note") == batch["nested"][1][1].pop("note") == "same"
        assert ext_batch.pop("labels") == batch.pop("labels")
        torch.testing.assert_close(ext_batch, batch)


class MakesClasses(MLP):
    """A model whose step creates a class for its outputs, like some libraries."""

    def predict_step(self, batch, batch_idx):
        if not hasattr(self, "output"):
            self.output = namedtuple("Output", ["logits", "index"])
        return self.output(self.net(batch[0]), torch.arange(len(batch[0])))


@each_mode
def test_a_class_that_each_replica_creates_is_one_class(make_strategy):
    model = MakesClasses()
    batches = make_trainer(make_strategy(2), 1).predict(model, loader(16, batch_size=8))
    expected = make_trainer("auto", 1).predict(model, loader(16, batch_size=8))
    for ext, single in zip(batches, expected, strict=True):
        assert type(ext) is model.output
        torch.testing.assert_close(ext.logits, single.logits)
        assert ext.index.tolist() == [*range(4)] * 2


class ReturnsMuch(MLP):
    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        return {
            "loss": self.loss(batch).reshape(1),
            "logits": logits.detach(),
            "error": (logits.argmax(1) != batch[1]).float().mean(),
            "hits": (logits.argmax(1) == batch[1]).sum(),
        }

    def validation_step(self, batch, batch_idx):
        return self.loss(batch), "text", None, len(batch[0])


@each_mode
def test_callbacks_see_outputs_of_the_whole_batch(make_strategy):
    class RecordsOutputs(pl.Callback):
        def __init__(self):
            self.outputs = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            hits = outputs.pop("hits")
            self.outputs.append(({**outputs, "loss": outputs["loss"].reshape(())}, hits.sum()))

        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.outputs.append((outputs[0], outputs[1], outputs[2], torch.as_tensor(outputs[3]).sum()))

    seen = []
    for strategy in (make_strategy(3), "auto"):
        callback = RecordsOutputs()
        train(strategy, ReturnsMuch, callbacks=[callback])
        seen.append(callback.outputs)
    assert len(seen[0]) == 2 * (7 + 3)
    for ext, single in zip(*seen, strict=True):
        for one, other in zip(ext, single, strict=True):
            if isinstance(one, (torch.Tensor, dict)):
                torch.testing.assert_close(one, other)
            else:
                assert one == other


class SkipsSteps(MLP):
    def training_step(self, batch, batch_idx):
        return None if batch_idx % 2 else self.loss(batch)


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_a_step_that_all_replicas_skip_is_skipped():
    ext, single = train("dp_ext", SkipsSteps, devices=3)[1], train("auto", SkipsSteps)[1]
    assert_close(ext.state_dict(), single.state_dict())


# --- attributes that steps set ---


class Collects(MLP):
    """A model with the pattern of Lightning's migration guide, and a counter."""

    def __init__(self):
        super().__init__()
        self.outputs, self.labels, self.counter, self.name_of_batch = [], [], 0, ""
        self.collected = []

    def training_step(self, batch, batch_idx):
        self.outputs.append(self.net(batch[0]).detach())
        self.labels.append(batch[1])
        self.counter += 1
        self.name_of_batch = f"batch {batch_idx}"
        return self.loss(batch)

    def on_train_epoch_end(self):
        self.collected.append((torch.cat(self.outputs), torch.cat(self.labels)))
        self.outputs.clear()
        self.labels = []


@each_mode
def test_lists_get_what_replicas_append_in_order_and_equal_attributes_are_kept(make_strategy):
    ext, single = train(make_strategy(3), Collects)[1], train("auto", Collects)[1]
    torch.testing.assert_close(ext.collected, single.collected)
    assert (ext.counter, ext.name_of_batch) == (single.counter, single.name_of_batch) == (14, "batch 6")


class Prints(MLP):
    def training_step(self, batch, batch_idx):
        self.print(f"batch {batch_idx}")
        return self.loss(batch)


def test_the_output_of_a_module_is_printed_once(capsys):
    train("dp_ext", Prints, devices=3, max_epochs=1)
    assert capsys.readouterr().out.count("batch 0") == 1
