"""A second ``fit`` with ``ddp_spawn_ext`` equals a second ``fit`` in one process, and uses changes of the user."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.tuner import Tuner

from tests.support.ddp_spawn_trainers import ALONE, Configurable, seeded
from tests.support.models import (
    MLP,
    assert_same_bits,
    loader,
    make_trainer,
    state_of,
)

pytestmark = pytest.mark.processes


class KeepsOptimizer(MLP):
    """A model that returns the same optimizer and scheduler in each fit."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.5)

    def configure_optimizers(self):
        return [self.optimizer], [{"scheduler": self.scheduler, "interval": "step"}]


def one_cycle(optimizer: Any, module: Any) -> Any:
    steps = module.trainer.estimated_stepping_batches
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=int(steps))


def cosine(optimizer: Any, module: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def nothing(model: Any) -> None:
    pass


def change_rate(model: Any) -> None:
    model.lr = 1e-4


def change_decay(model: Any) -> None:
    model.weight_decay = 0.5


def change_optimizer(model: Any) -> None:
    model.kind = torch.optim.RMSprop


def change_schedule(model: Any) -> None:
    model.make_scheduler = cosine


def change_held_rate(model: Any) -> None:
    model.optimizer.param_groups[0]["lr"] = 1e-4


def use_one_cycle(model: Any) -> None:
    model.make_scheduler = one_cycle


def fit_twice(trainer: pl.Trainer, make_model: Any, first: Any, change: Any) -> Any:
    model = seeded(make_model)
    first(model)
    trainer.fit(model, loader())
    change(model)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, loader())
    return model


SECOND_FITS = [
    (Configurable, nothing, nothing),
    (Configurable, nothing, change_rate),
    (Configurable, nothing, change_decay),
    (Configurable, nothing, change_optimizer),
    (Configurable, nothing, change_schedule),
    (Configurable, use_one_cycle, change_schedule),
    (KeepsOptimizer, nothing, nothing),
    (KeepsOptimizer, nothing, change_held_rate),
]


@pytest.mark.parametrize(
    ("make_model", "first", "change"),
    SECOND_FITS,
    ids=lambda part: part.__name__,
)
def test_a_second_fit_is_that_of_one_process(make_model, first, change):
    trainers = [make_trainer(strategy, **ALONE, max_epochs=1) for strategy in ("auto", "ddp_spawn_ext")]
    stock, ext = (fit_twice(trainer, make_model, first, change) for trainer in trainers)
    assert_same_bits(state_of(ext), state_of(stock))
    (stock_optimizer,), (ext_optimizer,) = trainers[0].optimizers, trainers[1].optimizers
    assert ext_optimizer.state_dict()["param_groups"] == stock_optimizer.state_dict()["param_groups"]
    if make_model is KeepsOptimizer:
        assert ext_optimizer is ext.optimizer
        assert trainers[1].lr_scheduler_configs[0].scheduler is ext.scheduler
        assert ext.scheduler.state_dict() == stock.scheduler.state_dict()
        assert ext_optimizer.state[next(ext.parameters())]["step"] == 48


def test_a_second_one_cycle_schedule_has_its_own_steps():
    models = []
    for strategy in ("auto", "ddp_spawn_ext"):
        model = seeded(Configurable)
        use_one_cycle(model)
        for _ in range(2):  # as in k-fold training: a Trainer per fold, with one model
            make_trainer(strategy, **ALONE, max_epochs=1).fit(model, loader())
        models.append(state_of(model))
    assert_same_bits(models[1], models[0])


def test_a_rate_that_is_set_after_lr_find_is_the_one_that_trains():
    found = {}
    for strategy in ("auto", "ddp_spawn_ext"):
        model = seeded(Configurable)
        trainer = make_trainer(strategy, **ALONE, max_epochs=1)
        finder = Tuner(trainer).lr_find(model, loader(), num_training=40)
        suggestion = finder.suggestion()
        assert model.lr == suggestion != 0.01
        model.lr = 0.05
        trainer.fit(model, loader())
        assert trainer.optimizers[0].param_groups[0]["lr"] == 0.05
        found[strategy] = suggestion, state_of(model)
    assert found["ddp_spawn_ext"][0] == found["auto"][0]
    assert_same_bits(found["ddp_spawn_ext"][1], found["auto"][1])
