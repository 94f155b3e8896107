"""Changes of module attributes in a step equal those of a step on the whole batch, or raise an error.

The reference is the Trainer with one device on the same batches. Batches have 10 samples, and the last batch has 4.
With three replicas, the parts have different sizes.
"""

import copy
from collections import Counter, defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from tests.support.dp_training import each_mode, train
from tests.support.models import MLP, NUM_CLASSES, NUM_FEATURES, assert_close, loader, make_trainer, state_of

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*log_every_n_steps")


def with_attributes(update, **attributes):
    """Returns a model class that updates its attributes in each training step."""

    class Model(MLP):
        def __init__(self):
            super().__init__()
            for name, value in copy.deepcopy(attributes).items():
                setattr(self, name, value)

        def training_step(self, batch, batch_idx):
            update(self, *batch, batch_idx)
            return self.loss(batch)

    return Model


class Collector(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = []

    def forward(self, values):
        self.rows.append(values.detach())
        return values


def record_batch(model, x, y, i):
    model.steps += 1
    model.state["steps"] += 1
    model.state["nested"]["last"] = i
    model.state["config"] = {"sizes": [1, 2], "shape": (i, x.shape[1:])}
    model.recent.append(i)


def append_rows(model, x, y, i):
    model.lists[i % 2].append(x)
    model.by_name["features"].append(x)
    model.by_key[i % 3].append(y)
    model.pair[0].append(y)


def append_records(model, x, y, i):
    model.records.extend({"label": label} for label in y.tolist())


def record_samples(model, x, y, i):
    for features, label in zip(x, y, strict=True):
        model.by_sample[features.sum().item()] = label
    model.labels.update(y.tolist())


@pytest.mark.parametrize(
    ("update", "attributes"),
    [
        (
            record_batch,
            {"steps": 0, "state": {"steps": 0, "nested": {"last": None}, "config": None}, "recent": deque(maxlen=3)},
        ),
        (append_rows, {"lists": [[], []], "by_name": {"features": []}, "by_key": defaultdict(list), "pair": ([], 1)}),
        (append_records, {"records": []}),
        (record_samples, {"by_sample": {}, "labels": set()}),
        (lambda model, x, y, i: model.collector(x), {"collector": Collector()}),
        (lambda model, x, y, i: setattr(model, "last", [i, np.float32(1), np.ones(2)]), {"last": []}),
    ],
    ids=["the same in all", "rows", "records", "keys of their own", "a submodule's list", "set again"],
)
@each_mode
def test_attributes_have_the_values_of_one_step_on_the_whole_batch(make_strategy, update, attributes):
    make_model = with_attributes(update, **attributes)
    ext, single = train(make_strategy(3), make_model)[1], train("auto", make_model)[1]
    names = attributes.keys()
    if "collector" in names:
        ext, single, names = ext.collector, single.collector, ["rows"]
    for name in names:
        one, other = getattr(ext, name), getattr(single, name)
        assert type(one) is type(other)
        if name in ("lists", "by_name", "by_key", "pair", "rows"):
            one, other = joined(one), joined(other)
        torch.testing.assert_close(comparable(one), comparable(other))


def joined(value):
    if isinstance(value, dict):
        return {key: joined(entry) for key, entry in value.items()}
    if value and isinstance(value[0], torch.Tensor):
        return torch.cat(value)
    return [joined(entry) if isinstance(entry, list) else entry for entry in value]


def comparable(value):
    if isinstance(value, set | deque):
        return sorted(value)
    if isinstance(value, dict):
        return {key: comparable(value[key]) for key in sorted(value, key=str)}
    return [] if value is None else value


def count_labels(model, x, y, i):
    for label in y.tolist():
        model.counts[label] += 1


def remember(model, x, y, i):
    model.memory["last"].mul_(0.5).add_(x.mean(0))


def set_running(model, x, y, i):
    model.running += x.mean(0)


def update_deep(model, x, y, i):
    model.state["a"]["b"][0].add_(1)


def update_in_set(model, x, y, i):
    for tensor in next(iter(model.group))[0], *model.others:
        tensor.add_(1)


def follow_hidden(model, x, y, i):
    with torch.no_grad():
        for average, parameter in zip(model.teacher[0].parameters(), model.net.parameters(), strict=True):
            average.lerp_(parameter, 0.1)


def follow_hidden_data(model, x, y, i):
    for average, parameter in zip(model.teacher["of"][0].parameters(), model.net.parameters(), strict=True):
        average.data.lerp_(parameter.data, 0.1)


def normalize_with_hidden(model, x, y, i):
    model.layers[0](x)


@pytest.mark.parametrize(
    ("update", "attributes", "message"),
    [
        (count_labels, {"counts": Counter()}, r"`self\.counts\[\d\]` of Model differently.*`on_train_batch_end`"),
        (count_labels, {"counts": defaultdict(int)}, r"`self\.counts\[\d\]` of Model differently"),
        (lambda m, x, y, i: m.state.update(loss=x.sum().item()), {"state": {}}, r"`self\.state\['loss'\]`"),
        (lambda m, x, y, i: m.state["of"].update(n=x.sum()), {"state": {"of": {}}}, r"`self\.state\['of'\]\['n'\]`"),
        (lambda m, x, y, i: m.recent.append(x.sum().item()), {"recent": deque()}, r"`self\.recent` of Model"),
        (lambda m, x, y, i: m.seen.discard(int(x.sum()) % 2), {"seen": {0, 1}}, r"`self\.seen` of Model"),
        (
            lambda m, x, y, i: m.lists[0].clear(),
            {"lists": [[1]]},
            r"the list `self\.lists\[0\]`, to which a step may only",
        ),
        (set_running, {"running": torch.zeros(NUM_FEATURES)}, r"`self\.running` of Model in place"),
        (remember, {"memory": {"last": torch.zeros(NUM_FEATURES)}}, r"`self\.memory\['last'\]` of Model in place"),
        (lambda m, x, y, i: m.array.__iadd__(1), {"array": np.zeros(3)}, r"`self\.array` of Model in place"),
        (
            update_deep,
            {"state": {"a": {"b": (torch.zeros(1),)}}},
            r"`self\.state\['a'\]\['b'\]\[0\]` of Model in place",
        ),
        (
            update_in_set,
            {"group": {(torch.zeros(1),)}, "others": ()},
            r"`self\.group\{\.\.\.\}\[0\]` of Model",
        ),
        (follow_hidden, {"teacher": [MLP().net]}, r"`self\.teacher\[0\]\.0\.weight` of Model in place"),
        (
            follow_hidden_data,
            {"teacher": {"of": (MLP().net,)}},
            r"`self\.teacher\['of'\]\[0\]\.\d\.\w+` of Model",
        ),
        (
            normalize_with_hidden,
            {"layers": [nn.BatchNorm1d(NUM_FEATURES)]},
            r"`self\.layers\[0\]\.\w+` of Model in place",
        ),
    ],
    ids=[
        *("a Counter", "a defaultdict", "a dict's value", "a nested dict", "a deque", "a set", "a nested list"),
        *("a tensor", "a tensor in a dict", "an array", "a tensor deep within", "a tensor in a set"),
        *("a module in a list", "a module's .data", "a module's buffers"),
    ],
)
@each_mode
def test_updates_that_differ_from_one_step_on_the_whole_batch_are_refused(make_strategy, update, attributes, message):
    with pytest.raises(RuntimeError, match=message):
        make_trainer(make_strategy(2), 1).fit(with_attributes(update, **attributes)(), loader(10, batch_size=10))


class WithBuffers(MLP):
    """A model that writes to its buffers in each step."""

    def __init__(self, update):
        super().__init__()
        self.update = update
        self.register_buffer("queue", torch.full((16,), -1.0))
        self.register_buffer("cached", None, persistent=False)
        self.register_buffer("running_mean", torch.zeros(NUM_FEATURES))
        self.register_buffer("center", torch.zeros(NUM_FEATURES))
        self.register_buffer("counts", torch.zeros(NUM_CLASSES, dtype=torch.int64))

    def training_step(self, batch, batch_idx):
        self.update(self, *batch, batch_idx)
        return self.loss(batch)


def enqueue(model, x, y, i):
    model.queue[: len(x)] = x[:, 0]


def enqueue_again(model, x, y, i):
    model.queue = torch.cat([x[:, 0], model.queue])[:16]


def enqueue_columns(model, x, y, i):
    model.queue = torch.zeros(2, 16) if i == 0 else model.queue
    columns = torch.arange(14, 14 + len(x)) % 16
    model.queue[:, columns] = x[:, :2].T


def count(model, x, y, i):
    model.counts += y.bincount(minlength=NUM_CLASSES)


def keep_running(model, x, y, i):
    model.running_mean[: len(x)] = x[0, 0]
    model.center = model.center.lerp(x.mean(0), 0.1)
    if model.cached is None or len(model.cached) != len(x):
        model.cached = torch.eye(len(x))


@pytest.mark.parametrize(
    ("update", "name"),
    [(enqueue, "queue"), (enqueue_again, "queue"), (enqueue_columns, "queue"), (count, "counts")],
)
@each_mode
def test_a_queue_or_count_in_a_buffer_is_refused(make_strategy, update, name):
    with pytest.raises(RuntimeError, match=rf"the buffer `self\.{name}` of WithBuffers differently.*`running_`"):
        make_trainer(make_strategy(2), 1).fit(WithBuffers(update), loader(10, batch_size=10))


@each_mode
def test_buffers_of_running_statistics_and_caches_are_the_first_replicas(make_strategy):
    model = train(make_strategy(3), lambda: WithBuffers(keep_running), max_epochs=1)[1]
    center = torch.zeros(NUM_FEATURES)
    for x, _ in loader(64, batch_size=10):
        center.lerp_(x[: -(-len(x) // 3)].mean(0), 0.1)
    torch.testing.assert_close(model.center, center)
    assert model.running_mean[0] == x[0, 0]
    assert model.cached.shape == (2, 2)


def cache_by_attribute(model, x, y, i):
    if model.cached is None or len(model.cached) != len(x):
        model.cached = torch.eye(len(x))


def test_the_error_for_an_attribute_sized_by_the_part_names_alternatives():
    model = with_attributes(cache_by_attribute, cached=None)()
    text = r"`self\.cached` of Model.*size depends on the batch in a buffer, in a dict.*`functools\.lru_cache`"
    with pytest.raises(RuntimeError, match=text):
        make_trainer("dp_ext", 2).fit(model, loader(9, batch_size=9))


@pytest.mark.parametrize(
    ("update", "subject"),
    [
        (lambda model, x, y, i: setattr(model, "seen", model.seen + len(x)), r"`self\.seen` has grown by 5 "),
        (lambda model, x, y, i: model.state.update(n=model.state["n"] + x.numel()), r"`self\.state\['n'\]` has grown"),
    ],
)
def test_a_number_that_may_count_samples_warns(update, subject):
    model = with_attributes(update, seen=0, state={"n": 0})()
    with pytest.warns(
        UserWarning, match=subject + r".*it counts the samples of only one replica.*`on_train_batch_end`"
    ):
        make_trainer("dp_ext", devices=2, max_epochs=1).fit(model, loader(10, batch_size=10))


class HidesModules(MLP):
    """A model with modules in lists: a constant module, its layers, and itself; and a list of its parameters."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(NUM_FEATURES, momentum=None)
        self.teacher = [copy.deepcopy(self.net), nn.Embedding(10, 2, max_norm=0.1), nn.BatchNorm1d(NUM_FEATURES).eval()]
        self.layers = {"all": [*self.net, nn.Sequential(self.norm)], "self": (self,)}
        self.trained = [list(self.parameters())]
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.norm(torch.eye(NUM_FEATURES))  # in training mode
        self.teacher[1](batch[1])
        loss = self.loss(batch) + (self.net(batch[0]) - self.teacher[0](self.teacher[2](batch[0]))).square().mean()
        for optimizer in (self.optimizers(), self.optimizers()):
            self.manual_backward(loss, retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            loss = self.loss(batch)


@each_mode
def test_modules_in_lists_that_a_step_does_not_change_are_accepted(make_strategy):
    assert_close(state_of(train(make_strategy(3), HidesModules)[1]), state_of(train("auto", HidesModules)[1]))


# --- metrics that are not submodules ---


class HidesMetrics(MLP):
    def __init__(self):
        super().__init__()
        self.named = {"accuracy": MulticlassAccuracy(NUM_CLASSES), "deeper": {"auroc": MulticlassAUROC(NUM_CLASSES)}}
        self.listed = [MeanMetric(), MulticlassAUROC(NUM_CLASSES)]
        self.pair = (MulticlassAccuracy(NUM_CLASSES, average="micro"), "name")
        self.values = []

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.log("accuracy", self.named["accuracy"](logits, batch[1]))
        self.named["deeper"]["auroc"].update(logits, batch[1])
        self.listed[0].update(loss)
        self.log("auroc", self.listed[1](logits, batch[1]))
        self.log("micro", self.pair[0](logits, batch[1]))
        return loss

    def on_train_epoch_end(self):
        metrics = [*self.listed, self.named["accuracy"], self.named["deeper"]["auroc"], self.pair[0]]
        self.values += [metric.compute() for metric in metrics]


@each_mode
def test_metrics_in_dicts_lists_and_tuples_are_updated_once(make_strategy):
    ext, single = train(make_strategy(3), HidesMetrics), train("auto", HidesMetrics)
    torch.testing.assert_close(ext[1].values, single[1].values)
    assert_close(ext[0].callback_metrics, single[0].callback_metrics)
    assert type(ext[1].named["accuracy"]) is MulticlassAccuracy
