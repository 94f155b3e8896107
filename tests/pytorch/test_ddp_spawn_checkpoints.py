"""After a stage of ``ddp_spawn_ext``, the main process saves the same checkpoint as a worker."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_strategies_ext import DDPSpawnStrategy
from lightning_strategies_ext._lightning import trainer_stages
from tests.support.ddp_spawn_trainers import ALONE, Configurable, HasEverything, seeded, spawn_trainer
from tests.support.models import (
    LOADS_EVERYTHING,
    StatefulLoader,
    assert_same_bits,
    dataset,
    loader,
    make_trainer,
    state_of,
)

pytestmark = pytest.mark.processes


class HasState(pl.LightningDataModule):
    """A data module with a counter, and with a loader that saves its position."""

    def __init__(self) -> None:
        super().__init__()
        self.batches_seen = 0

    def train_dataloader(self):
        return StatefulLoader(dataset(), batch_size=4)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.batches_seen += 1
        return batch

    def state_dict(self):
        return {"batches_seen": self.batches_seen}

    def load_state_dict(self, state):
        self.batches_seen = state["batches_seen"]


class SavesInTheEnd(pl.Callback):
    """A callback that records the checkpoint of the training process at the end of the stage."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        trainer.save_checkpoint(self.path)


class StopsInTheMiddle(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 11:
            trainer.should_stop = True


def assert_same(of_main: Any, of_worker: Any, path: str = "checkpoint") -> None:
    """Fails at the first key whose values differ."""
    if isinstance(of_worker, dict):
        assert of_main.keys() == of_worker.keys(), path
        for key, value in of_worker.items():
            assert_same(of_main[key], value, f"{path}.{key}")
    elif isinstance(of_worker, (list, tuple)):
        assert len(of_main) == len(of_worker), path
        for index, (item, expected_item) in enumerate(zip(of_main, of_worker, strict=True)):
            assert_same(item, expected_item, f"{path}[{index}]")
    elif isinstance(of_worker, torch.Tensor):
        assert torch.equal(of_main, of_worker), path
    else:
        assert of_main == of_worker, path


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_the_main_process_saves_what_the_worker_would(start_method, tmp_path):
    model, data = seeded(HasEverything), HasState()
    callbacks = [SavesInTheEnd(tmp_path / "worker.ckpt"), StopsInTheMiddle()]
    trainer = spawn_trainer(f"ddp_{start_method}_ext", max_epochs=2, callbacks=callbacks)
    trainer.fit(model, datamodule=data)
    trainer.save_checkpoint(tmp_path / "main.ckpt")
    of_main, of_worker = (torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("main", "worker"))
    assert of_main["steps_seen"] == of_main["HasState"]["batches_seen"] == 11
    assert of_main["state_dict"]["metrics.mean.weight"] == 11
    assert of_main["loops"]["fit_loop"]["state_dict"]["combined_loader"] == [{"position": 3}]
    assert_same(of_main, of_worker)


def test_a_run_that_continues_from_the_main_process_checkpoint_repeats_no_sample(tmp_path):
    weights = {}
    for strategy in ("auto", "ddp_spawn_ext"):
        model, data = seeded(HasEverything), HasState()
        trainer = make_trainer(strategy, **ALONE, callbacks=[StopsInTheMiddle()])
        trainer.fit(model, datamodule=data)
        trainer.save_checkpoint(tmp_path / "middle.ckpt")
        model, data = HasEverything(), HasState()
        trainer = make_trainer(strategy, **ALONE)
        trainer.fit(model, datamodule=data, ckpt_path=tmp_path / "middle.ckpt", **LOADS_EVERYTHING)
        weights[strategy] = state_of(model)
        assert data.batches_seen == trainer.global_step
    assert_same_bits(weights["ddp_spawn_ext"], weights["auto"])


class LoaderWithoutIterator(StatefulLoader):
    """A loader whose iterator has the position, like torchdata's StatefulDataLoader; Lightning deletes the iterator."""

    def __iter__(self):
        self._iterator = super().__iter__()
        return self._iterator

    def state_dict(self):
        return {"position": 0 if self._iterator is None else self.position}


class FailsLate(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 11:
            raise RuntimeError("on purpose")


@pytest.mark.parametrize("ends_early", [StopsInTheMiddle, FailsLate])
def test_the_position_in_the_training_data_is_saved_without_its_iterator(ends_early, tmp_path):
    trainer = make_trainer("ddp_fork_ext", **ALONE, callbacks=[ends_early()])
    with suppress(RuntimeError):
        trainer.fit(seeded(), LoaderWithoutIterator(dataset(), batch_size=4))
    trainer.save_checkpoint(tmp_path / "middle.ckpt")
    loop = torch.load(tmp_path / "middle.ckpt", weights_only=False)["loops"]["fit_loop"]
    assert loop["epoch_loop.batch_progress"]["current"]["ready"] == 11
    assert loop["state_dict"]["combined_loader"] == [{"position": 11}]


class Fails(HasEverything):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 5:
            raise RuntimeError("on purpose")
        return super().training_step(batch, batch_idx)


def test_a_checkpoint_that_is_saved_on_an_exception_is_complete(tmp_path):
    saved = {}
    for strategy in ("auto", "ddp_spawn_ext"):
        path = tmp_path / strategy
        trainer = make_trainer(
            strategy, **ALONE, enable_checkpointing=True, callbacks=[OnExceptionCheckpoint(path, "failed")]
        )
        with pytest.raises(Exception, match="on purpose"):
            trainer.fit(seeded(Fails), datamodule=HasState())
        saved[strategy] = torch.load(path / "failed.ckpt", weights_only=False)
        del saved[strategy]["callbacks"]  # the keys of callbacks contain paths
    assert saved["auto"]["steps_seen"] == 5
    assert_same(saved["ddp_spawn_ext"], saved["auto"])


class SavesWhenStopped(DDPSpawnStrategy):
    """A strategy whose rank 0 saves a checkpoint when its stage fails."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def announce_failure(self, exception: BaseException) -> None:
        super().announce_failure(exception)
        if self.global_rank == 0:
            torch.save(trainer_stages.dump_checkpoint(self.lightning_module.trainer), self.path)


class RequestsStop(pl.Callback):
    """A callback that sends a SIGTERM to the main process, like a scheduler."""

    def __init__(self) -> None:
        self.main_pid = os.getpid()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 5 and trainer.is_global_zero:
            os.kill(self.main_pid, signal.SIGTERM)
        time.sleep(0.1)


def test_a_checkpoint_that_is_saved_after_a_sigterm_is_complete(tmp_path):
    model, data = seeded(HasEverything), HasState()
    strategy = SavesWhenStopped(tmp_path / "worker.ckpt")
    trainer = spawn_trainer(strategy, max_epochs=20, callbacks=[RequestsStop()])
    with pytest.raises(SIGTERMException):
        trainer.fit(model, datamodule=data)
    assert 5 <= trainer.global_step < 100
    trainer.save_checkpoint(tmp_path / "main.ckpt")
    of_main, of_worker = (torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("main", "worker"))
    assert of_main["global_step"] == of_main["steps_seen"] == of_main["HasState"]["batches_seen"] == trainer.global_step
    assert of_main["state_dict"]["metrics.mean.weight"] == trainer.global_step
    # Before the first step of an epoch, the loader has the position of the end of the previous epoch.
    position = trainer.fit_loop.epoch_loop.batch_progress.current.ready or trainer.num_training_batches
    assert of_main["loops"]["fit_loop"]["state_dict"]["combined_loader"] == [{"position": position}]
    assert_same(of_main, of_worker)


def test_best_weights_of_a_checkpoint_are_those_of_one_process(tmp_path):
    paths = []
    for strategy in ("auto", "ddp_spawn_ext"):
        checkpoint = ModelCheckpoint(tmp_path / strategy, monitor="val_loss")
        trainer = make_trainer(strategy, **ALONE, callbacks=[checkpoint], enable_checkpointing=True)
        trainer.fit(seeded(Configurable), loader(), loader())
        paths.append(checkpoint.best_model_path)
    of_worker, of_main = (torch.load(path, weights_only=False)["state_dict"] for path in paths)
    assert_same_bits(of_main, of_worker)
