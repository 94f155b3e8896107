"""After a stage of ``ddp_spawn_ext``, the user's objects have the same state as after a stage in one process."""

import random
import threading
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import SumMetric

from tests.support.ddp_spawn_trainers import ALONE, Node, spawn_trainer
from tests.support.models import (
    MLP,
    loader,
    make_trainer,
)

pytestmark = pytest.mark.processes


class HoldsObjects(pl.Callback):
    def __init__(self) -> None:
        self.node = Node()
        self.tensor = torch.zeros(3)
        self.array = np.zeros(3)
        self.nested = {"deep": [OrderedDict(a=[0]), defaultdict(list), deque([1], maxlen=3), {1}]}
        self.same = self.nested["deep"][0]
        self.metric = SumMetric()
        self.parameter = nn.Parameter(torch.zeros(2))
        self.queue = [Node(), Node()]
        self.random = random.Random(3)

    def on_train_batch_end(self, *args: Any) -> None:
        self.node.values.append(1)
        self.random.random()
        self.tensor += 1
        self.array += 1
        ordered, default, recent, numbers = self.nested["deep"]
        ordered["a"].append(1)
        default["x"].append(2)
        recent.append(len(recent))
        numbers.add(len(numbers) + 1)
        self.metric.update(1.0)
        self.parameter.data += 1
        if len(self.queue) > 1:
            self.queue.pop(0)
        self.queue[0].values.append(5)


@pytest.mark.parametrize(
    ("strategy", "more"),
    [("auto", None), ("ddp_spawn_ext", None), ("ddp_fork_ext", None), ("ddp_fork_ext", lambda: None)],
    ids=["one process", "sent", "sent to forked", "inherited"],
)
def test_objects_that_the_user_holds_are_updated(strategy, more):
    callback = HoldsObjects()
    callback.same["more"] = more
    callback.lock = lock = threading.Lock() if more else None
    node, tensor, array, ordered, metric = (
        callback.node,
        callback.tensor,
        callback.array,
        callback.same,
        callback.metric,
    )
    parameter, popped, kept = callback.parameter, *callback.queue
    default, recent, numbers = callback.nested["deep"][1:]
    make_trainer(strategy, **ALONE, max_epochs=1, limit_train_batches=3, callbacks=[callback]).fit(MLP(), loader())
    assert node is callback.node is node.me
    assert node.values == [1, 1, 1]
    assert tensor is callback.tensor
    assert tensor.tolist() == array.tolist() == [3, 3, 3]
    assert parameter is callback.parameter
    assert parameter.tolist() == [3, 3]
    assert ordered is callback.same is callback.nested["deep"][0]
    assert ordered["a"] == [0, 1, 1, 1]
    assert ordered["more"] is more
    assert callback.lock is lock
    expected = random.Random(3)
    _ = [expected.random() for _ in range(3)]
    assert callback.random.getstate() == expected.getstate()
    assert default == {"x": [2, 2, 2]}
    assert default["new"] == []
    assert list(recent) == [1, 2, 3]
    assert numbers == {1, 2, 3, 4}
    assert metric is callback.metric
    assert metric.compute() == 3
    assert callback.queue == [kept]
    assert (popped.values, kept.values) == ([], [5, 5, 5])


class Slotted:
    """An object with slots only; a stage deletes one of the attributes."""

    __slots__ = ("__hidden", "__weakref__", "steps", "was_there")

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.was_there = True
        self.__hidden = 0

    def count(self) -> int:
        self.__hidden += 1
        return self.__hidden


class SlottedAndMore(Slotted):
    """An object with slots and other attributes; a stage deletes one attribute and creates another."""

    def __init__(self) -> None:
        super().__init__()
        self.goes = 1


@dataclass(slots=True)
class SlottedData:
    steps: int = 0


@dataclass(slots=True, frozen=True)
class Frozen:
    steps: list[int]


class SlottedDict(dict):
    __slots__ = ("steps",)


class Restoring:
    """An object with ``__setstate__``."""

    __slots__ = ("restored", "steps")

    def __init__(self) -> None:
        self.steps = 0

    def __setstate__(self, state: Any) -> None:
        self.steps = state[1]["steps"]
        self.restored = True


class Named(namedtuple("Named", "steps")):
    pass


class HoldsSlotted(pl.Callback):
    def __init__(self) -> None:
        self.objects = Slotted(), SlottedAndMore(), SlottedData(), Frozen([]), SlottedDict(), Restoring(), Named([])

    def on_train_batch_end(self, *args: Any) -> None:
        slotted, more, counts, frozen, dictionary, restoring, named = self.objects
        for obj in (slotted, more):
            obj.steps.append(obj.count())
            if hasattr(obj, "was_there"):
                del obj.was_there
        vars(more).pop("goes", None)
        more.comes = 2
        counts.steps += 1
        frozen.steps.append(1)
        dictionary.steps = dictionary["steps"] = dictionary.get("steps", 0) + 1
        restoring.steps += 1
        named.steps.append(1)


@pytest.mark.parametrize("strategy", ["auto", "ddp_spawn_ext", "ddp_fork_ext"])
def test_objects_with_slots_that_the_user_holds_are_updated(strategy):
    callback = HoldsSlotted()
    before = slotted, more, counts, frozen, dictionary, restoring, named = callback.objects
    lists = slotted.steps, more.steps, frozen.steps, named.steps
    make_trainer(strategy, **ALONE, max_epochs=1, limit_train_batches=3, callbacks=[callback]).fit(MLP(), loader())
    assert all(now is then for now, then in zip(callback.objects, before, strict=True))
    now = slotted.steps, more.steps, frozen.steps, named.steps
    assert all(one is other for one, other in zip(now, lists, strict=True))
    assert now == ([1, 2, 3], [1, 2, 3], [1, 1, 1], [1, 1, 1])
    assert (slotted.count(), more.count()) == (4, 4)
    assert not hasattr(slotted, "was_there")
    assert not hasattr(more, "was_there")
    assert vars(more) == {"comes": 2}
    assert (counts.steps, dictionary.steps, dictionary["steps"], restoring.steps) == (3, 3, 3, 3)
    assert hasattr(restoring, "restored") is (strategy != "auto")


class HoldsData(MLP):
    """Large unchanged objects must not be sent back."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = torch.randn(1000, 100)
        self.table = np.random.rand(1000, 100)
        self.counts = torch.zeros(4)

    def training_step(self, batch, batch_idx):
        self.counts += 1
        return super().training_step(batch, batch_idx)


class Counts(pl.Callback):
    def __init__(self, samples: torch.Tensor) -> None:
        self.samples = samples


def test_unchanged_data_keeps_its_address():
    model = HoldsData()
    samples, before = model.samples, model.samples.clone()
    addresses = samples.data_ptr(), model.table.ctypes.data
    trainer = spawn_trainer(max_epochs=1, limit_train_batches=2, callbacks=[callback := Counts(samples)])
    trainer.fit(model, loader())
    assert (model.samples.data_ptr(), model.table.ctypes.data) == addresses
    assert model.samples is samples is callback.samples
    assert torch.equal(samples, before)
    assert model.counts.tolist() == [2.0] * 4


class SwapsData(MLP):
    """A model that assigns the memory of unchanged tensors to its layer and to a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.zeros(3), torch.ones(3)
        self.best = torch.full((16,), 5.0)

    def on_train_end(self):
        self.first.data, self.second.data = self.second.data, self.first.data
        self.net[0].bias.data = self.best.data


def test_tensors_that_were_given_the_memory_of_others_are_returned():
    model = SwapsData()
    first, bias = model.first, model.net[0].bias
    spawn_trainer(max_epochs=1, limit_train_batches=2).fit(model, loader())
    assert first is model.first
    assert (first.tolist(), model.second.tolist()) == ([1.0] * 3, [0.0] * 3)
    assert bias is model.net[0].bias
    assert bias.tolist() == [5.0] * 16
