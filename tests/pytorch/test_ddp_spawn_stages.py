"""``ddp_spawn_ext`` runs several stages in the same workers, with the results of one process."""

import csv
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from tests.support.ddp_spawn_trainers import Stateful, seeded, spawn_trainer
from tests.support.models import MLP, assert_same_bits, loader, make_trainer, state_of

pytestmark = pytest.mark.processes


def test_validation_between_two_fits_changes_nothing():
    expected = seeded(Stateful)
    one = spawn_trainer(max_epochs=2)
    one.fit(expected, loader())
    model = seeded(Stateful)
    trainer = spawn_trainer(max_epochs=1)
    trainer.fit(model, loader())
    state = torch.get_rng_state()
    (metrics,) = trainer.validate(model, loader(), verbose=False)
    assert metrics["val_loss"] == trainer.callback_metrics["val_loss"].item()
    torch.set_rng_state(state)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader())
    assert trainer.global_step == one.global_step == 16
    assert model.net[0][1].num_batches_tracked == expected.net[0][1].num_batches_tracked


def test_the_bookkeeping_of_two_fits_is_that_of_one_process():
    progress = []
    for strategy, devices, batch_size in (("ddp_spawn_ext", 2, 4), ("auto", 1, 8)):
        trainer = make_trainer(strategy, devices=devices, max_epochs=2)
        model = seeded()
        trainer.fit(model, loader(batch_size=batch_size), loader(batch_size=batch_size))
        trainer.validate(model, loader(batch_size=batch_size), verbose=False)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(model, loader(batch_size=batch_size), loader(batch_size=batch_size))
        progress.append(
            (trainer.global_step, trainer.current_epoch, trainer.fit_loop.state_dict(), trainer.callback_metrics.keys())
        )
    assert progress[0] == progress[1]


class CountsOptimizers(MLP):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]

    def on_train_end(self):
        self.last_lr = self.trainer.optimizers[0].param_groups[0]["lr"]

    def count(self, batch, batch_idx):
        self.log("optimizers", float(len(self.trainer.optimizers) + len(self.trainer.lr_scheduler_configs)))
        self.log("last_lr", self.last_lr)

    validation_step = test_step = count


@pytest.mark.parametrize("strategy", ["ddp_spawn_ext", "ddp_fork_ext"])
def test_later_stages_have_no_optimizers_and_the_main_process_keeps_those_of_the_fit(strategy: str):
    trainer = spawn_trainer(strategy, max_epochs=1)
    trainer.fit(model := seeded(CountsOptimizers), loader())
    (optimizer,), (config,) = trainer.optimizers, trainer.lr_scheduler_configs
    momentum = optimizer.state_dict()["state"][0]["momentum_buffer"].clone()
    for stage in (trainer.validate, trainer.test):
        assert stage(model, loader(), verbose=False) == [{"optimizers": 0.0, "last_lr": pytest.approx(0.05)}]
        assert trainer.optimizers == [optimizer]
        assert trainer.lr_scheduler_configs == [config]
    assert torch.equal(optimizer.state_dict()["state"][0]["momentum_buffer"], momentum)
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())


def test_fit_continues_from_a_checkpoint(tmp_path):
    whole = seeded(Stateful)
    spawn_trainer(max_epochs=3).fit(whole, loader())
    first = seeded(Stateful)
    trainer = spawn_trainer(max_epochs=3, callbacks=[saves := Saves(tmp_path / "epoch0.ckpt")])
    trainer.fit(first, loader())
    assert_same_bits(state_of(first), state_of(whole))
    again = Stateful()
    resumed = spawn_trainer(max_epochs=3)
    resumed.fit(again, loader(), ckpt_path=saves.path)
    assert (resumed.global_step, resumed.current_epoch) == (24, 3)
    assert again.net[0][1].num_batches_tracked == 24


class Saves(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def test_another_module_starts_with_optimizers_of_its_own():
    trainer = spawn_trainer(max_epochs=1)
    trainer.fit(seeded(Stateful), loader())
    other = seeded(Stateful)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(other, loader())
    assert trainer.optimizers[0].state[next(other.parameters())]["step"] == 8


class CountsDescriptors(pl.Callback):
    def __init__(self) -> None:
        self.counts: list[int] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.counts.append(
            min(map(num_descriptors, range(5)))
        )  # threads may open and close descriptors at the same time


def num_descriptors(_: int) -> int:
    time.sleep(0.02)
    return psutil.Process().num_fds()


def test_workers_keep_no_descriptors_of_earlier_stages():
    trainer = spawn_trainer(callbacks=[descriptors := CountsDescriptors()])
    model = MLP()
    for _ in range(5):
        trainer.validate(model, loader(), verbose=False)
    after_first, *_, after_last = descriptors.counts[1:]
    assert after_last <= after_first + 1  # less than one per stage


def test_a_logger_continues_in_the_same_directory(tmp_path):
    trainer = spawn_trainer(max_epochs=1, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    model = MLP()
    trainer.fit(model, loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader())
    assert [path.name for path in (tmp_path / "lightning_logs").iterdir()] == ["version_0"]
    with open(tmp_path / "lightning_logs/version_0/metrics.csv") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(16))


def test_a_seed_that_is_set_between_stages_is_that_of_all_ranks():
    trainer = spawn_trainer(max_epochs=1, callbacks=[draws := Draws()])
    model = MLP()
    trainer.fit(model, loader())
    pl.seed_everything(5, verbose=False)
    expected = torch.rand(1)
    pl.seed_everything(5, verbose=False)
    trainer.test(model, loader(), verbose=False)
    assert draws.values == [expected.item()] * 2


class Draws(pl.Callback):
    values: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.values = trainer.strategy.all_gather(torch.rand(1)).flatten().tolist()
