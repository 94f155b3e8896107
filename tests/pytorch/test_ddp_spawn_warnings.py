"""``ddp_spawn_ext`` warns once about each attribute that it does not return from a stage."""

import threading
import weakref
from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.support.ddp_spawn_trainers import spawn_trainer
from tests.support.models import MLP, loader

pytestmark = pytest.mark.processes


class Averages(pl.Callback):
    """A callback that creates an attribute that cannot be pickled at the start of the stage."""

    def __init__(self) -> None:
        self.average = None
        self.steps = 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.average = [weakref.ref(parameter) for parameter in pl_module.parameters()]

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps += 1


class HasLockFromSetup(MLP):
    def setup(self, stage):
        self.net[1].guard = self.guard = threading.Lock()


class Changing(pl.Callback):
    """A callback that pickles a copy of its list."""

    def __init__(self, history: Any = None) -> None:
        self.history = history
        self.steps = 0

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if self.history is not None:
            state["history"] = list(self.history)
        return state

    def on_train_batch_end(self, *args: Any) -> None:
        self.history = [] if self.history is None else self.history
        self.history.append(1)
        self.steps += 1


class HasLoader(pl.Callback):
    """Callback with attributes that stay in the worker, and attributes that are returned."""

    def __init__(self) -> None:
        self.loader = None
        self.both: dict[str, Any] = {"steps": 0}
        self.steps = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.loader = self.both["loader"] = trainer.train_dataloader

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps += 1
        self.both["steps"] += 1


def test_an_attribute_that_cannot_be_returned_does_not_affect_the_others(caplog):
    history: list[int] = []
    callbacks = [new := Changing(), changing := Changing(history), has_loader := HasLoader()]
    spawn_trainer(max_epochs=1, limit_train_batches=2, callbacks=callbacks).fit(MLP(), loader())
    assert (new.history, new.steps, changing.steps) == ([1, 1], 2, 2)
    assert changing.history is history
    assert history == [1, 1]
    assert (has_loader.steps, has_loader.loader, has_loader.both) == (2, None, {"steps": 0})
    (message,) = [record.getMessage() for record in caplog.records if "was not returned" in record.getMessage()]
    assert message.startswith("`both` of the callback HasLoader")


class Data(pl.LightningDataModule):
    def setup(self, stage):
        self.dataset = loader().dataset
        self.guard = threading.Lock()

    def train_dataloader(self):
        return loader()

    def test_dataloader(self):
        return loader()


@pytest.mark.parametrize("strategy", ["ddp_spawn_ext", "ddp_fork_ext"])
def test_each_attribute_that_cannot_be_returned_is_named_once(strategy, caplog):
    callback, model, data = Averages(), HasLockFromSetup(), Data()
    trainer = spawn_trainer(strategy, max_epochs=1, limit_train_batches=2, callbacks=[callback])
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data, verbose=False)
    assert (callback.average, callback.steps) == (None, 2)
    messages = [record.getMessage() for record in caplog.records if "was not returned" in record.getMessage()]
    parts = Counter(message.partition(" was not returned")[0] for message in messages)
    assert parts == {
        "`average` of the callback Averages": 1,
        "`guard` of the LightningModule HasLockFromSetup": 1,
        "`net.1.guard` of the LightningModule HasLockFromSetup": 1,
        "`guard` of the datamodule Data": 1,
    }
    assert any("weakref" in message for message in messages)


class Collects(pl.Callback):
    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.result = None
        self.batches = 0

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.rows.append(outputs)
        self.batches += 1

    def on_predict_epoch_end(self, *args: Any) -> None:
        self.result = torch.cat(self.rows)


class Counts(pl.Callback):
    def __init__(self) -> None:
        self.total = torch.zeros(2)
        self.last = {"batch": -1}

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.total += 1
        self.mask = torch.ones(4, 4)
        self.last["batch"] = batch_idx


def test_results_that_a_callback_collects_in_predict_are_reported_as_rank_0s(caplog):
    trainer, model = spawn_trainer(devices=2, callbacks=[collects := Collects(), Counts()]), MLP()
    trainer.predict(model, loader(num_samples=16), return_predictions=False)
    trainer.predict(model, loader(num_samples=16), return_predictions=False)
    assert 0 < len(collects.result) <= 16
    messages = [record.getMessage() for record in caplog.records if "rank 0" in record.getMessage()]
    assert len(messages) == 2
    assert "`rows` of the callback Collects" in messages[0]
    assert "`result` of the callback Collects" in messages[1]
