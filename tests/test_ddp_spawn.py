"""``ddp_spawn_ext``: after a stage the main process is as if the stage had run in it, and workers stay for the next.

The process that runs these tests is the main process. Weights are compared to the last bit, bookkeeping with
Lightning's own single-process training.
"""

import csv
import gc
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SubsetRandomSampler

from lightning_strategies_ext import DDPSpawnPlugin, DDPSpawnStrategy, DDPStrategy
from tests.models import MLP, WithBatchNorm, assert_same_bits, dataset, loader, make_trainer, state_of
from tests.ranks import REPOSITORY, clean_environment, free_port, kill_tree, run_script, start_script
from tests.test_against_stock import single_process_reference

START_METHODS = ["forkserver", "spawn", "fork"]


class Stateful(WithBatchNorm):
    """Everything that has a state: Adam, a scheduler with a lambda, dropout, batch normalisation."""

    def make_net(self) -> nn.Module:
        return nn.Sequential(super().make_net(), nn.Dropout(0.3))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class History(pl.Callback):
    """Notes what it sees in a list that the caller holds, and what cannot be pickled."""

    def __init__(self, epochs: list[int]) -> None:
        self.epochs = epochs
        self.pids: set[int] = set()
        self.unpicklable: Any = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.epochs.append(trainer.current_epoch)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.pids.add(os.getpid())
        self.unpicklable = open(os.devnull)  # noqa: SIM115


def spawn_trainer(strategy: Any = "ddp_spawn_ext", **kwargs: Any) -> pl.Trainer:
    return make_trainer(strategy, **kwargs)


def seeded(make_model: Any = MLP) -> Any:
    pl.seed_everything(11, verbose=False)
    return make_model()


# --- training, with each way to start workers ---


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
        f"ddp_{how}_ext{variant}"
        for how in ("spawn", "fork", "notebook")
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


# --- what comes back ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A fit with all that has a state, and the checkpoint that rank 0 wrote at its end."""
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


def test_the_main_process_could_have_written_the_last_checkpoint(trained, tmp_path):
    trainer, _, _, directory = trained
    theirs = torch.load(directory / "last.ckpt", weights_only=False)
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    ours = torch.load(tmp_path / "ours.ckpt", weights_only=False)
    assert ours.keys() == theirs.keys()
    assert_same_bits(ours["state_dict"], theirs["state_dict"])
    assert ours["optimizer_states"][0]["param_groups"] == theirs["optimizer_states"][0]["param_groups"]
    for index, state in theirs["optimizer_states"][0]["state"].items():
        assert_same_bits(ours["optimizer_states"][0]["state"][index], state)
    assert ours["lr_schedulers"] == theirs["lr_schedulers"]
    assert ours["global_step"] == theirs["global_step"]
    assert ours["epoch"] == trainer.current_epoch == theirs["epoch"] + 1  # theirs is from before the epoch's end
    assert ours["callbacks"].keys() == theirs["callbacks"].keys()


@pytest.fixture(scope="module")
def trained_alone():
    alone = make_trainer("auto", devices=1, max_epochs=3, log_every_n_steps=1)
    alone.fit(seeded(Stateful), loader(batch_size=8), loader(batch_size=8))
    return alone


def test_progress_is_that_of_single_process_training(trained, trained_alone):
    trainer, _, epochs, _ = trained
    alone = trained_alone
    assert (trainer.global_step, trainer.current_epoch) == (alone.global_step, alone.current_epoch) == (24, 3)
    assert trainer.fit_loop.state_dict() == alone.fit_loop.state_dict()
    assert trainer.state == alone.state
    assert trainer.num_training_batches == alone.num_training_batches
    assert trainer.should_stop == alone.should_stop
    assert epochs == [0, 1, 2]


def test_metrics_come_back(trained, trained_alone):
    trainer = trained[0]
    for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        of_rates = {"lr-Adam"}  # the other Trainer has no monitor
        assert getattr(trainer, name).keys() - of_rates == getattr(trained_alone, name).keys()
    assert {"loss_epoch", "val_loss"} <= trainer.callback_metrics.keys()
    assert trainer.callback_metrics["val_loss"].shape == ()
    with open(Path(trainer.logger.log_dir, "metrics.csv")) as file:
        last = [row["val_loss"] for row in csv.DictReader(file) if row["val_loss"]][-1]
    assert float(last) == pytest.approx(trainer.callback_metrics["val_loss"].item())


def test_callbacks_come_back(trained):
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


def test_the_callers_objects_are_the_same_as_before(trained):
    trainer, model, _, _ = trained
    assert trainer.lightning_module is model
    assert model.trainer is trainer
    assert all(callback is trainer.callbacks[i] for i, callback in enumerate(list(trainer.callbacks)))
    (optimizer,) = trainer.optimizers
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in model.parameters()]
    assert trainer.lr_scheduler_configs[0].scheduler.optimizer is optimizer
    with pytest.raises(RuntimeError, match="made in a worker process"):
        trainer.lr_scheduler_configs[0].scheduler.step()


def test_weights_are_written_into_the_users_tensors():
    model = MLP()
    view = next(model.parameters()).detach().view(-1)
    before = view.clone()
    spawn_trainer(max_epochs=1).fit(model, loader())
    assert not torch.equal(view, before)
    assert torch.equal(view, next(model.parameters()).detach().view(-1))


def test_the_generators_go_on_from_rank_0():
    model = seeded(Stateful)
    trainer = spawn_trainer(max_epochs=1, callbacks=[callback := Generators()])
    before = torch.get_rng_state()
    trainer.fit(model, loader())
    assert not torch.equal(before, torch.get_rng_state())
    # Nothing draws between the hook and the end of the stage.
    assert torch.equal(torch.get_rng_state(), callback.states[0])
    assert np.random.get_state()[1].tolist() == callback.states[1]
    assert random.getstate() == callback.states[2]


class Generators(pl.Callback):
    states: Any = None

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        random.random()
        np.random.rand()
        self.states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()


def test_the_scaler_comes_back_and_goes_on():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    trainer = spawn_trainer(plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)], max_epochs=1)
    model = seeded()
    trainer.fit(model, loader())
    assert trainer.precision_plugin.scaler.state_dict()["scale"] == 8 * 2 ** (8 // 3)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader())
    assert trainer.precision_plugin.scaler.state_dict()["scale"] == 8 * 2 ** (16 // 3)


class ListsAttributes(MLP):
    returned_attributes = ("seen",)

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.inner = nn.Module()
        self.inner.total = 0
        self.kept_in_worker = 0

    def training_step(self, batch, batch_idx):
        self.seen.append(batch_idx)
        self.inner.total += 1
        self.kept_in_worker += 1
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


def test_attributes_come_back_that_the_user_lists(caplog):
    model, data = ListsAttributes(), Data()
    seen, vocabulary = model.seen, data.vocabulary
    strategy = DDPSpawnStrategy(
        module_attributes=["inner.total", "no_such_thing"], datamodule_attributes=["vocabulary"]
    )
    trainer = spawn_trainer(strategy, max_epochs=1)
    trainer.fit(model, datamodule=data)
    assert seen is model.seen
    assert seen == list(range(8))
    assert model.inner.total == 8
    assert model.kept_in_worker == 0
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


def test_layers_that_are_made_in_the_worker_come_back():
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


def test_frozen_and_unfrozen_parameters_and_modes_come_back():
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


# --- evaluation and prediction ---


def test_validate_and_test_return_what_one_process_does(tmp_path):
    model = seeded()
    trainer = spawn_trainer()
    (validated,) = trainer.validate(model, loader(), verbose=False)
    (tested,) = trainer.test(model, loader(), verbose=False)
    alone = make_trainer("auto", devices=1)
    assert validated == pytest.approx(alone.validate(model, loader(), verbose=False)[0])
    assert tested == pytest.approx(alone.test(model, loader(), verbose=False)[0])
    assert trainer.callback_metrics["test_loss"].item() == pytest.approx(tested["test_loss"])


def test_weights_that_a_stage_loads_from_a_checkpoint_come_back(tmp_path):
    trained = seeded()
    trainer = spawn_trainer(max_epochs=1)
    trainer.fit(trained, loader())
    trainer.save_checkpoint(tmp_path / "trained.ckpt")
    model = MLP()
    trainer.test(model, loader(), ckpt_path=tmp_path / "trained.ckpt", verbose=False)
    assert_same_bits(state_of(model), state_of(trained))


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [5, 12, 13])
def test_predictions_of_all_ranks_are_those_of_one_process(devices, num_samples):
    model = seeded()
    ours = spawn_trainer(devices=devices).predict(model, loader(num_samples))
    theirs = make_trainer("auto", devices=1).predict(model, loader(num_samples))
    assert [batch.shape for batch in ours] == [batch.shape for batch in theirs]
    for batch, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(batch, expected)


class PredictsIndices(MLP):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return {"x": batch[0][:, 0].clone(), "names": [f"{value:.4f}" for value in batch[0][:, 0]], "none": None}


def first_feature(indices: Any) -> Tensor:
    return dataset().tensors[0][list(indices), 0]


def joined(predictions: list[Any]) -> Tensor:
    return torch.cat([batch["x"] for batch in predictions])


def test_samples_that_a_sampler_repeats_are_dropped():
    """torch's own sampler makes all shares equal: 13 samples on 2 ranks are 14."""
    trainer = spawn_trainer(use_distributed_sampler=False)
    predictions = trainer.predict(PredictsIndices(), datamodule=DealsOut())
    assert torch.equal(joined(predictions), first_feature(range(13)))
    assert predictions[0]["names"] == [f"{value:.4f}" for value in first_feature(range(4))]
    assert predictions[0]["none"] is None


class DealsOut(pl.LightningDataModule):
    def predict_dataloader(self):
        data = first_samples(13).dataset
        return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))


def first_samples(num_samples: int) -> DataLoader:
    return DataLoader(torch.utils.data.Subset(dataset(), range(num_samples)), batch_size=4)


def test_every_rank_may_have_seen_everything():
    trainer = spawn_trainer(use_distributed_sampler=False)
    predictions = trainer.predict(PredictsIndices(), first_samples(13))
    assert torch.equal(joined(predictions), first_feature(range(13)))


def test_a_samplers_order_is_kept():
    indices = [5, 3, 60, 1, 7, 9, 2]
    trainer = spawn_trainer()
    predictions = trainer.predict(PredictsIndices(), loader(sampler=InOrder(indices), batch_size=3))
    assert torch.equal(joined(predictions), first_feature(indices))
    assert [len(batch["names"]) for batch in predictions] == [3, 3, 1]


class InOrder(SubsetRandomSampler):
    def __iter__(self) -> Any:
        return iter(self.indices)


def test_several_dataloaders_and_a_limit():
    trainer = spawn_trainer(limit_predict_batches=2)
    first, second = trainer.predict(PredictsIndices(), [first_samples(13), first_samples(5)])
    assert torch.equal(joined(first), first_feature(range(13)))
    assert torch.equal(joined(second), first_feature(range(5)))
    (limited,) = (trainer.predict(PredictsIndices(), loader(64)),)
    assert torch.equal(joined(limited), first_feature(range(16)))


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return iter(
            [dataset()[index] for index in range(rank * 4, 24, world_size * 4) for index in range(index, index + 4)]
        )


def test_predictions_on_a_stream_come_back_batch_by_batch():
    predictions = spawn_trainer().predict(PredictsIndices(), DataLoader(Stream(), batch_size=4))
    assert torch.equal(joined(predictions), first_feature(range(24)))


def test_predictions_that_are_not_wanted_do_not_come_back():
    assert spawn_trainer().predict(MLP(), loader(), return_predictions=False) is None


# --- stage after stage ---


def test_two_fits_are_one_long_fit():
    whole, halves = seeded(Stateful), None
    one = spawn_trainer(max_epochs=4)
    one.fit(whole, loader(), loader())
    halves = seeded(Stateful)
    two = spawn_trainer(max_epochs=2)
    two.fit(halves, loader(), loader())
    pids = two.strategy.launcher.pids
    two.fit_loop.max_epochs = 4
    two.fit(halves, loader(), loader())
    assert two.strategy.launcher.pids == pids
    assert_same_bits(state_of(halves), state_of(whole))
    assert (two.global_step, two.current_epoch) == (one.global_step, one.current_epoch) == (32, 4)
    assert two.lr_scheduler_configs[0].scheduler.last_epoch == one.lr_scheduler_configs[0].scheduler.last_epoch


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


def test_fit_goes_on_from_a_checkpoint(tmp_path):
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


class ChangesOptimizer(MLP):
    def configure_optimizers(self):
        kind = torch.optim.Adam if self.trainer.current_epoch == 0 else torch.optim.RMSprop
        return kind(self.parameters(), lr=0.01)


def test_other_optimizers_than_before_start_anew_and_it_is_said(capfd):
    model = ChangesOptimizer()
    trainer = spawn_trainer(max_epochs=1)
    trainer.fit(model, loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader())
    assert type(trainer.optimizers[0]) is torch.optim.RMSprop
    assert "they start anew" in capfd.readouterr().err


class CountsDescriptors(pl.Callback):
    def __init__(self) -> None:
        self.counts: list[int] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.counts.append(psutil.Process().num_fds())


def test_workers_keep_nothing_of_the_stages_before():
    trainer = spawn_trainer(callbacks=[descriptors := CountsDescriptors()])
    model = MLP()
    for _ in range(4):
        trainer.validate(model, loader(), verbose=False)
    assert len(set(descriptors.counts[1:])) == 1


def test_a_logger_goes_on_in_the_same_place(tmp_path):
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


# --- the API of Lightning 1.5 ---


def test_the_plugin_takes_its_arguments_in_their_old_order(tmp_path):
    devices = [torch.device("cpu")] * 2
    plugin = DDPSpawnPlugin(devices, 3, None, None, True)
    assert plugin.parallel_devices == devices
    assert plugin.num_processes == 2
    assert plugin.num_nodes == 3
    assert plugin.sync_batchnorm
    assert isinstance(plugin, DDPSpawnStrategy)
    trainer = spawn_trainer(DDPSpawnPlugin(devices, find_unused_parameters=True), max_epochs=1)
    trainer.fit(MLP(), loader())
    assert trainer.global_step == 8
    assert not trainer.strategy.sync_batchnorm


def test_sync_batchnorm_of_the_plugin_is_that_of_the_trainer():
    trainer = spawn_trainer(DDPSpawnPlugin(sync_batchnorm=True))
    with pytest.raises(ValueError, match="needs GPUs"):
        trainer.fit(WithBatchNorm(), loader())
    assert make_trainer("ddp_spawn_ext", sync_batchnorm=True).strategy.sync_batchnorm


class Queues(DDPSpawnStrategy):
    def add_to_queue(self, trainer, queue):
        super().add_to_queue(trainer, queue)
        queue.put({"pid": os.getpid(), "weights": trainer.lightning_module.net[0].weight})

    def get_from_queue(self, trainer, queue):
        super().get_from_queue(trainer, queue)
        self.got = queue.get()
        assert queue.empty()

    def post_dispatch(self, trainer):
        self.stages = [*getattr(self, "stages", ()), (os.getpid(), trainer.state.fn.value, self.got["pid"])]


def test_a_strategy_can_bring_back_more():
    strategy = Queues()
    trainer = spawn_trainer(strategy, max_epochs=1)
    model = MLP()
    trainer.fit(model, loader())
    assert torch.equal(strategy.got["weights"], model.net[0].weight)
    trainer.test(model, loader(), verbose=False)
    worker = strategy.launcher.pids[0]
    assert strategy.stages == [(os.getpid(), "fit", worker), (os.getpid(), "test", worker)]


class QueuesByModule(MLP):
    def add_to_queue(self, queue):
        queue.put(torch.arange(3))

    def get_from_queue(self, queue):
        self.got = queue.get()


class QueuesByModuleWithTrainer(MLP):
    def add_to_queue(self, trainer, queue):
        queue.put(trainer.global_step)

    def get_from_queue(self, trainer, queue):
        self.got = torch.tensor([queue.get()] * 3) // 8 * trainer.global_step


def test_a_module_can_bring_back_more():
    for make_model, expected in ((QueuesByModule, [0, 1, 2]), (QueuesByModuleWithTrainer, [8, 8, 8])):
        model = make_model()
        spawn_trainer(max_epochs=1).fit(model, loader())
        assert model.got.tolist() == expected


class Calls(DDPSpawnStrategy):
    def collective(self, value, *, scale):
        self.barrier("here")
        reduced = self.reduce(torch.tensor([value + self.local_rank]), reduce_op="sum")
        name = self.broadcast(f"rank {self.global_rank}", src=1)
        return {
            "reduced": reduced * scale,
            "name": name,
            "world": (self.world_size, self.num_processes, self.num_nodes),
        }


def test_spawn_runs_a_function_without_a_trainer():
    strategy = Calls(parallel_devices=[torch.device("cpu")] * 2)
    result = strategy.spawn(strategy.collective, 10, scale=2)
    assert result == {"reduced": torch.tensor([42]), "name": "rank 1", "world": (2, 2, 1)}
    pids = strategy.launcher.pids
    assert strategy.spawn(strategy.collective, 10, scale=2, return_result=False) is None
    assert strategy.launcher.pids == pids
    with pytest.raises(ValueError, match="parallel_devices"):
        DDPSpawnStrategy().spawn(len, [])


def test_communication_hooks_work_in_workers():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_wrapper

    model, plain = seeded(), seeded()
    strategy = DDPSpawnStrategy(ddp_comm_hook=allreduce_hook, ddp_comm_wrapper=fp16_compress_wrapper)
    spawn_trainer(strategy, max_epochs=1).fit(model, loader())
    spawn_trainer(max_epochs=1).fit(plain, loader())
    assert not torch.equal(model.net[0].weight, plain.net[0].weight)
    torch.testing.assert_close(model.net[0].weight, plain.net[0].weight, atol=1e-2, rtol=1e-2)


# --- scripts ---


class NotesStart(pl.Callback):
    """Writes a file when training is under way."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 5 and trainer.is_global_zero:
            self.path.touch()


TRAIN_UNTIL_SIGTERM = """
import sys
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tests.models import MLP, loader, make_trainer, state_of
from tests.test_ddp_spawn import NotesStart

if __name__ == "__main__":
    model = MLP()
    before = state_of(model)["net.0.weight"]
    trainer = make_trainer("ddp_spawn_ext", max_epochs=-1, callbacks=[NotesStart(sys.argv[1])])
    try:
        trainer.fit(model, loader())
    except SIGTERMException:
        is_trained = (before != model.net[0].weight).any().item()
        print("stopped", trainer.global_step >= 5, trainer.received_sigterm, is_trained)
"""


def test_a_sigterm_to_the_main_process_stops_all_ranks_and_the_state_comes_back(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN_UNTIL_SIGTERM)
    process = start_script(script, tmp_path / "started")
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "started").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        output, _ = process.communicate(timeout=30)
    finally:
        kill_tree(process.pid)
    assert "stopped True True True" in output, output
    assert process.returncode == 0


FIT_AND_PREDICT = """
import torch
from tests.models import dataset, loader, make_trainer
from tests.test_ddp_spawn import PredictsIndices, first_feature, joined

if __name__ == "__main__":
    trainer = make_trainer("ddp_spawn_ext", **{kwargs})
    model = PredictsIndices()
    trainer.fit(model, loader())
    assert trainer.global_step == 16
    predictions = joined(trainer.predict(model, loader()))
    assert torch.equal(predictions, first_feature(range(64))), predictions
    print("node", trainer.node_rank, "weights", model.net[0].weight.sum().item(), "of", trainer.world_size)
"""


def test_two_hosts_share_the_work_and_each_has_the_results(tmp_path):
    """Two main processes, as on two hosts; both have all predictions."""
    script = tmp_path / "train.py"
    script.write_text(FIT_AND_PREDICT.replace("{kwargs}", "{'num_nodes': 2, 'devices': 1}"))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    hosts = [start_script(script, env={**place, "NODE_RANK": str(rank)}) for rank in range(2)]
    try:
        outputs = [host.communicate(timeout=90)[0] for host in hosts]
    finally:
        for host in hosts:
            kill_tree(host.pid)
    lines = [next((line for line in output.splitlines() if line.startswith("node ")), output) for output in outputs]
    assert [line.split()[1] for line in lines] == ["0", "1"], outputs
    assert lines[0].split()[2:] == lines[1].split()[2:]
    assert lines[0].endswith("of 2")


def test_a_tiny_dev_shm_is_no_obstacle(tmp_path):
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("mounting a small /dev/shm needs root and unshare")
    script = tmp_path / "train.py"
    script.write_text(FIT_AND_PREDICT.replace("{kwargs}", "{'devices': 2}"))
    command = f"mount -t tmpfs -o size=64k tmpfs /dev/shm && exec {sys.executable} {script}"
    environment = {**clean_environment(), "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command], env=environment, capture_output=True, text=True, timeout=90
    )
    assert "node 0" in result.stdout, result.stdout + result.stderr


def test_the_example_knows_its_accuracy_without_reading_a_checkpoint(tmp_path):
    result = run_script(
        REPOSITORY / "examples/digits.py", "--strategy", "ddp_spawn_ext", "--dir", tmp_path, "--epochs", "6",
        env={"COLUMNS": "120"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    [row] = [line for line in result.stdout.splitlines() if "held-out images" in line]
    assert float(row.split("│")[2]) >= 0.97
    [row] = [line for line in result.stdout.splitlines() if "images per second" in line]
    assert float(row.split("│")[2].replace(",", "")) > 0


# --- memory ---


class Large(MLP):
    """128 MB that no step changes, unless asked to."""

    def __init__(self, changes: bool = False) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(32 << 20))
        self.changes = changes

    def validation_step(self, batch, batch_idx):
        assert self.table.sum() == self.table.numel()
        return super().validation_step(batch, batch_idx)

    def on_train_end(self):
        if self.changes:
            self.table.mul_(3)


class PrivateMemory(pl.Callback):
    """What a worker alone holds, in bytes: pages that it shares with nobody."""

    num_bytes = 0

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        memory = psutil.Process().memory_full_info()
        self.num_bytes = int(trainer.strategy.reduce(torch.tensor(memory.uss), reduce_op="max"))


def test_a_large_model_that_is_only_read_is_not_copied_into_each_worker():
    small, large = PrivateMemory(), PrivateMemory()
    spawn_trainer(callbacks=[small]).validate(MLP(), loader(), verbose=False)
    spawn_trainer(callbacks=[large]).validate(Large(), loader(), verbose=False)
    assert small.num_bytes > 0
    assert large.num_bytes - small.num_bytes < 32 << 20


def test_bringing_back_a_large_model_takes_little_more_memory_than_the_model():
    model = Large(changes=True)
    trainer = spawn_trainer(max_epochs=1)
    trainer.validate(MLP(), loader(), verbose=False)
    gc.collect()
    address = model.table.data_ptr()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = psutil.Process().memory_info().rss
    trainer.fit(model, loader())
    status = Path("/proc/self/status").read_text()
    peak = 1024 * int(status.split("VmHWM:")[1].split()[0])
    assert model.table.data_ptr() == address
    assert torch.equal(model.table, torch.full_like(model.table, 3))
    assert peak - before < 1.2 * model.table.nbytes


def test_without_shared_memory_results_come_through_a_file_and_it_is_said_once(monkeypatch, caplog, tmp_path):
    import tempfile

    from lightning_strategies_ext.launch import segments

    monkeypatch.delattr(os, "memfd_create")  # as on a system that has none; forked workers have none either
    monkeypatch.setattr(segments, "_has_told_of_files", False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, expected = seeded(), seeded()
    trainer = spawn_trainer("ddp_fork_ext", max_epochs=1)
    trainer.fit(model, loader())
    predictions = trainer.predict(model, loader(13))
    trainer.strategy.launcher.close()
    assert caplog.text.count(f"through files in {tmp_path}") == 1
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    other = spawn_trainer(max_epochs=1)
    other.fit(expected, loader())
    assert_same_bits(state_of(model), state_of(expected))
    for ours, theirs in zip(predictions, other.predict(expected, loader(13)), strict=True):
        assert torch.equal(ours, theirs)
