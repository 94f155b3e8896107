"""``ddp_spawn_ext``: after a stage, the main process has the state as if it had run the stage.

The process of the tests is the main process. Weights must be bitwise identical; the state of the Trainer is compared
with Lightning's training in one process.
"""

import csv
import os
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.nn import functional

from lightning_strategies_ext import DDPSpawnStrategy, DDPStrategy
from tests.pytorch.test_against_stock import single_process_reference
from tests.support.ddp_spawn_trainers import Stateful, seeded, spawn_trainer
from tests.support.models import MLP, NUM_CLASSES, assert_same_bits, dataset, loader, make_trainer, state_of
from tests.support.ranks import run_ranks

START_METHODS = ["forkserver", "spawn", "fork"]


class History(pl.Callback):
    """A callback that records epochs in a list of the caller, and has an attribute that cannot be pickled."""

    def __init__(self, epochs: list[int]) -> None:
        self.epochs = epochs
        self.pids: set[int] = set()
        self.unpicklable: Any = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.epochs.append(trainer.current_epoch)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.pids.add(os.getpid())
        self.unpicklable = open(os.devnull)  # noqa: SIM115


# --- training, with each way to start workers ---


@pytest.mark.processes
@pytest.mark.parametrize("start_method", START_METHODS)
def test_the_weights_are_those_of_ddp_on_the_whole_batch(start_method):
    model = seeded()
    trainer = spawn_trainer(DDPSpawnStrategy(start_method=start_method))
    trainer.fit(model, loader(batch_size=4))
    for name, tensor in single_process_reference().items():
        torch.testing.assert_close(state_of(model)[name], tensor)


@pytest.mark.parametrize(
    "name",
    [
        f"ddp_{start_method}_ext{variant}"
        for start_method in ("spawn", "fork", "notebook")
        for variant in ("", "_find_unused_parameters_true", "_find_unused_parameters_false")
    ],
)
def test_every_name_makes_the_strategy(name):
    strategy = make_trainer(name).strategy
    assert type(strategy) is DDPSpawnStrategy
    assert isinstance(strategy, DDPStrategy)
    start_method = strategy._start_method
    assert start_method == ("forkserver" if "spawn" in name else "fork")
    assert strategy._ddp_kwargs.get("find_unused_parameters") == (name.endswith("true") if "unused" in name else None)


@pytest.mark.processes
def test_workers_get_the_globals_of_the_main_process(tmp_path, monkeypatch):
    strategy = DDPSpawnStrategy(parallel_devices=[torch.device("cpu")] * 2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOR_THE_WORKERS", "1")
    assert strategy.spawn(globals_of_this_process) == (str(tmp_path), "1", torch.float32, "highest")
    monkeypatch.delenv("FOR_THE_WORKERS")
    monkeypatch.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    try:
        assert strategy.spawn(globals_of_this_process) == ("/", None, torch.float64, "high")
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")


def globals_of_this_process() -> tuple[Any, ...]:
    return (
        os.getcwd(),
        os.environ.get("FOR_THE_WORKERS"),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
    )


_retained: list[Any] = []


def use_workers(start_method: str) -> None:
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    strategy = DDPSpawnStrategy(parallel_devices=[torch.device("cpu")] * 2, start_method=start_method)
    assert strategy.spawn(os.getpid) != os.getpid()
    _retained.append(
        strategy
    )  # keeps the strategy until exit, like reference cycles of a Trainer; a collected strategy terminates its workers


@pytest.mark.processes
@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_main_process_that_multiprocessing_has_started_ends_with_its_workers(start_method):
    run_ranks(use_workers, start_method, world_size=1)  # kills a process that does not exit within ten seconds


# --- results that are returned ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Provides a ``fit`` with all kinds of states, and the checkpoint that rank 0 has written at its end."""
    directory = tmp_path_factory.mktemp("trained")
    epochs: list[int] = []
    callbacks = [
        History(epochs),
        ModelCheckpoint(directory, monitor="val_loss", save_last=True, save_top_k=2),
        EarlyStopping("val_loss", patience=50),
        LearningRateMonitor("step"),
    ]
    model = seeded(Stateful)
    logger = CSVLogger(directory)
    trainer = spawn_trainer(
        callbacks=callbacks, enable_checkpointing=True, logger=logger, log_every_n_steps=1, max_epochs=3
    )
    trainer.fit(model, loader(), loader())
    return trainer, model, epochs, directory


@pytest.mark.processes
def test_the_main_process_could_have_written_the_last_checkpoint(trained, tmp_path):
    trainer, _, _, directory = trained
    of_worker = torch.load(directory / "last.ckpt", weights_only=False)
    trainer.save_checkpoint(tmp_path / "main.ckpt")
    of_main = torch.load(tmp_path / "main.ckpt", weights_only=False)
    assert of_main.keys() == of_worker.keys()
    assert_same_bits(of_main["state_dict"], of_worker["state_dict"])
    assert of_main["optimizer_states"][0]["param_groups"] == of_worker["optimizer_states"][0]["param_groups"]
    for index, state in of_worker["optimizer_states"][0]["state"].items():
        assert_same_bits(of_main["optimizer_states"][0]["state"][index], state)
    assert of_main["lr_schedulers"] == of_worker["lr_schedulers"]
    assert of_main["global_step"] == of_worker["global_step"]
    assert (
        of_main["epoch"] == trainer.current_epoch == of_worker["epoch"] + 1
    )  # Lightning's checkpoint is from before the end of the epoch
    assert of_main["callbacks"].keys() == of_worker["callbacks"].keys()


@pytest.fixture(scope="module")
def trained_alone():
    alone = make_trainer("auto", devices=1, max_epochs=3, log_every_n_steps=1)
    alone.fit(seeded(Stateful), loader(batch_size=8), loader(batch_size=8))
    return alone


@pytest.mark.processes
def test_progress_is_that_of_single_process_training(trained, trained_alone):
    trainer, _, epochs, _ = trained
    alone = trained_alone
    assert (trainer.global_step, trainer.current_epoch) == (alone.global_step, alone.current_epoch) == (24, 3)
    assert trainer.fit_loop.state_dict() == alone.fit_loop.state_dict()
    assert trainer.state == alone.state
    assert trainer.num_training_batches == alone.num_training_batches
    assert trainer.should_stop == alone.should_stop
    assert epochs == [0, 1, 2]


@pytest.mark.processes
def test_metrics_are_returned(trained, trained_alone):
    trainer = trained[0]
    for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        of_rates = {"lr-Adam"}  # the reference Trainer has no monitor
        assert getattr(trainer, name).keys() - of_rates == getattr(trained_alone, name).keys()
    assert {"loss_epoch", "val_loss"} <= trainer.callback_metrics.keys()
    assert trainer.callback_metrics["val_loss"].shape == ()
    with open(Path(trainer.logger.log_dir, "metrics.csv")) as file:
        last = [row["val_loss"] for row in csv.DictReader(file) if row["val_loss"]][-1]
    assert float(last) == pytest.approx(trainer.callback_metrics["val_loss"].item())


@pytest.mark.processes
def test_callbacks_are_returned(trained):
    trainer, _, _, directory = trained
    history, checkpoint, stopping, rates = (
        next(callback for callback in trainer.callbacks if isinstance(callback, kind))
        for kind in (History, ModelCheckpoint, EarlyStopping, LearningRateMonitor)
    )
    assert os.getpid() not in history.pids
    assert history.pids == {trainer.strategy.launcher.pids[0]}
    assert history.unpicklable is None
    assert Path(checkpoint.best_model_path).exists()
    assert len(checkpoint.best_k_models) == 2
    assert checkpoint.best_model_score == min(checkpoint.best_k_models.values())
    assert checkpoint.last_model_path == str(directory / "last.ckpt")
    assert stopping.best_score == checkpoint.best_model_score
    assert [round(rate, 6) for rate in rates.lrs["lr-Adam"][:3]] == [0.01, 0.009, 0.0081]


@pytest.mark.processes
def test_the_callers_objects_are_the_same_as_before(trained):
    trainer, model, _, _ = trained
    assert trainer.lightning_module is model
    assert model.trainer is trainer
    assert all(callback is trainer.callbacks[i] for i, callback in enumerate(list(trainer.callbacks)))
    (optimizer,) = trainer.optimizers
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in model.parameters()]
    assert trainer.lr_scheduler_configs[0].scheduler.optimizer is optimizer
    with pytest.raises(RuntimeError, match="created in a worker process"):
        trainer.lr_scheduler_configs[0].scheduler.step()


@pytest.mark.processes
def test_weights_are_written_into_the_users_tensors():
    model = MLP()
    view = next(model.parameters()).detach().view(-1)
    before = view.clone()
    spawn_trainer(max_epochs=1).fit(model, loader())
    assert not torch.equal(view, before)
    assert torch.equal(view, next(model.parameters()).detach().view(-1))


@pytest.mark.processes
def test_the_random_generators_continue_from_rank_0():
    model = seeded(Stateful)
    trainer = spawn_trainer(max_epochs=1, callbacks=[callback := Generators()])
    before = torch.get_rng_state()
    trainer.fit(model, loader())
    assert not torch.equal(before, torch.get_rng_state())
    # No random numbers are drawn between the hook and the end of the stage.
    assert torch.equal(torch.get_rng_state(), callback.states[0])
    assert np.random.get_state()[1].tolist() == callback.states[1]
    assert random.getstate() == callback.states[2]


class Generators(pl.Callback):
    states: Any = None

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        random.random()
        np.random.rand()
        self.states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()


@pytest.mark.processes
def test_the_scaler_is_returned_and_training_continues_with_it():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    trainer = spawn_trainer(plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)], max_epochs=1)
    model = seeded()
    trainer.fit(model, loader())
    assert trainer.precision_plugin.scaler.state_dict()["scale"] == 8 * 2 ** (8 // 3)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader())
    assert trainer.precision_plugin.scaler.state_dict()["scale"] == 8 * 2 ** (16 // 3)


class Remembers(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.seen_again = {"the same": self.seen}
        self.inner = nn.Module()
        self.inner.total = 0
        self.average = torch.zeros(NUM_CLASSES)
        self.file = open(os.devnull)  # noqa: SIM115
        self.temporary = 1

    def __getstate__(self):
        return {**vars(self), "file": None}

    def training_step(self, batch, batch_idx):
        self.seen.append(batch_idx)
        self.inner.total += 1
        self.average += 1
        self.new = "from the worker"
        vars(self).pop("temporary", None)
        return super().training_step(batch, batch_idx)


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.vocabulary: dict[str, int] = {}

    def setup(self, stage):
        self.vocabulary[stage] = len(self.vocabulary)

    def train_dataloader(self):
        return loader()

    def test_dataloader(self):
        return loader()

    def predict_dataloader(self):
        return loader(num_samples=13)


@pytest.mark.processes
def test_attributes_of_the_module_and_the_datamodule_are_returned():
    model, data = Remembers(), Data()
    seen, vocabulary, average, file = model.seen, data.vocabulary, model.average, model.file
    trainer = spawn_trainer(max_epochs=1)
    trainer.fit(model, datamodule=data)
    assert seen is model.seen is model.seen_again["the same"]
    assert seen == list(range(8))
    assert model.inner.total == 8
    assert average is model.average
    assert average.tolist() == [8.0] * NUM_CLASSES
    assert model.new == "from the worker"
    assert not hasattr(model, "temporary")
    assert model.file is file
    assert vocabulary is data.vocabulary
    assert vocabulary == {"fit": 0}
    assert trainer.datamodule is data
    trainer.test(model, datamodule=data, verbose=False)
    assert vocabulary == {"fit": 0, "test": 1}


class BuildsLayersLate(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten())

    def configure_model(self):
        if len(self.net) == 1:
            self.net.append(self.make_net())
            self.net.append(nn.Identity())
            self.register_parameter("scale", nn.Parameter(torch.ones(1)))
            self.register_buffer("steps", torch.zeros(1))
            self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def on_train_batch_end(self, *args):
        self.steps += 1
        self.scratch += 2

    def loss(self, batch):
        return functional.cross_entropy(self.net(batch[0]) * self.scale, batch[1])


@pytest.mark.processes
def test_layers_that_are_created_in_the_worker_are_returned():
    model = seeded(BuildsLayersLate)
    trainer = spawn_trainer(max_epochs=1)
    trainer.fit(model, loader())
    assert model.scale != 1
    assert (model.steps.item(), model.scratch.item()) == (8, 16)
    assert "steps" in model.state_dict()
    assert "scratch" not in model.state_dict()
    assert isinstance(model.net[2], nn.Identity)
    assert [id(p) for p in trainer.optimizers[0].param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    value = trainer.validate(model, loader(), verbose=False)[0]["val_loss"]
    expected = model.loss(dataset().tensors)
    assert value == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.processes
def test_frozen_and_unfrozen_parameters_and_modes_are_returned():
    model = MLP()
    model.net[0].requires_grad_(False)
    spawn_trainer(max_epochs=1, callbacks=[Unfreezes()]).fit(model, loader())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not model.net[2].training
    assert model.net[0].training


class Unfreezes(pl.Callback):
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.net[0].requires_grad_(True)
        pl_module.net[2].eval()
