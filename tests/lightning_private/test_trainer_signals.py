"""Behavior of Lightning that :mod:`lightning_strategies_ext._lightning.trainer_signals` requires."""

import logging
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import SIGTERMException
from packaging.version import Version

from lightning_strategies_ext._lightning import trainer_signals
from tests.lightning_private.trainers import Record, in_own_process, single_process_trainer
from tests.support.models import MLP, NUM_CLASSES, loader, make_trainer
from tests.support.ranks import run_ranks
from tests.support.slurm import variables_of_job, variables_of_task


def receive_sigterm_between_register_and_confirm() -> tuple[int, bool, bool]:
    trainer, on_signal = single_process_trainer(), Record()
    confirm = trainer_signals.intercept_sigterm(trainer, on_signal, Record())
    trainer._signal_connector.register_signal_handlers()
    os.kill(os.getpid(), signal.SIGTERM)
    before = trainer.received_sigterm
    confirm()
    return len(on_signal.calls), before, trainer.received_sigterm


@pytest.mark.processes
def test_the_replaced_signal_handler_is_the_one_that_the_trainer_installs() -> None:
    num_signals, received_before_confirm, received_after = in_own_process(receive_sigterm_between_register_and_confirm)
    assert num_signals == 1
    assert not received_before_confirm
    assert received_after


def messages_of_sigterm(is_intercepted: bool) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger(pl.__name__).addHandler(handler)
    trainer = single_process_trainer()
    if is_intercepted:
        trainer_signals.intercept_sigterm(trainer, Record(), Record())
    trainer._signal_connector.register_signal_handlers()
    os.kill(os.getpid(), signal.SIGTERM)
    return [message for message in messages if "SIGTERM" in message]


def messages_of_stock() -> list[str]:
    return messages_of_sigterm(is_intercepted=False)


def messages_of_ext() -> list[str]:
    return messages_of_sigterm(is_intercepted=True)


@pytest.mark.processes
def test_the_message_about_the_signal_is_lightnings() -> None:
    stock, ext = in_own_process(messages_of_stock), in_own_process(messages_of_ext)
    assert ext == stock
    assert len(ext) == 1


def receive_sigterm_after_release() -> tuple[int, bool]:
    trainer, on_signal = single_process_trainer(), Record()
    trainer_signals.intercept_sigterm(trainer, on_signal, Record())
    trainer_signals.release_sigterm(trainer)
    trainer._signal_connector.register_signal_handlers()
    os.kill(os.getpid(), signal.SIGTERM)
    return len(on_signal.calls), trainer.received_sigterm


@pytest.mark.processes
def test_after_release_a_sigterm_is_lightnings_again() -> None:
    assert in_own_process(receive_sigterm_after_release) == (0, True)


def stop_before_the_fourth_step() -> list[tuple[int, int, int]]:
    trainer, seen = single_process_trainer(), []

    def before_train_step() -> None:
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        seen.append((trainer.global_step, batches.ready, batches.completed))
        if trainer.global_step == 3:
            raise SIGTERMException

    trainer_signals.intercept_sigterm(trainer, Record(), before_train_step)
    with pytest.raises(SIGTERMException):
        trainer.fit(MLP(), loader())
    return seen


@pytest.mark.processes
def test_the_stop_agreement_runs_before_each_step_with_complete_progress_counters() -> None:
    assert in_own_process(stop_before_the_fourth_step) == [(step, step, step) for step in range(4)]


class SignalAtStep(Callback):
    """A callback that sends this process a SIGTERM in the middle of a training step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def fit_with_a_signal_in_the_third_step() -> tuple[int, bool]:
    trainer = make_trainer("ddp_ext", devices=1, callbacks=[SignalAtStep(2)])
    with pytest.raises(SIGTERMException):
        trainer.fit(MLP(), loader())
    return trainer.global_step, trainer.received_sigterm


@pytest.mark.processes
def test_the_trainer_installs_its_handlers_after_the_strategy_was_set_up() -> None:
    assert in_own_process(fit_with_a_signal_in_the_third_step) == (3, True)


def test_release_sigterm_restores_all_methods_and_is_a_no_op_when_repeated() -> None:
    trainer = single_process_trainer()
    objects = trainer._signal_connector, trainer.fit_loop.epoch_loop
    before = [dict(vars(owner)) for owner in objects]
    trainer_signals.intercept_sigterm(trainer, Record(), Record())
    assert [dict(vars(owner)) for owner in objects] != before
    for _ in range(2):
        trainer_signals.release_sigterm(trainer)
        assert [dict(vars(owner)) for owner in objects] == before
    assert callable(trainer._signal_connector._sigterm_notifier_fn)
    assert callable(trainer.fit_loop.epoch_loop.advance)


def count_broadcasts_of_lightnings_ddp() -> int:
    trainer = make_trainer("ddp", max_epochs=1, limit_train_batches=3)
    broadcast = Record()
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = broadcast
    trainer.fit(MLP(), loader())
    return len(broadcast.calls)


@pytest.mark.processes
def test_lightning_runs_the_removed_broadcast_in_every_training_step() -> None:
    if Version(lightning.__version__) < Version("2.5.3"):
        pytest.skip("Lightning before 2.5.3 has no broadcast per step")
    assert run_ranks(count_broadcasts_of_lightnings_ddp) == [3, 3]


def test_a_recorded_sigterm_is_one_that_the_trainer_has_received() -> None:
    trainer = make_trainer("auto", devices=1)
    assert not trainer.received_sigterm
    trainer_signals.mark_sigterm_received(trainer)
    assert trainer.received_sigterm


def receive_sigusr1() -> tuple[list[int], list[int], list[bool]]:
    os.environ.update({**variables_of_job(1, 1), **variables_of_task(0, 1)})
    os.environ["PATH"] = ""  # without SLURM
    received, progress = [], []
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_trainer("ddp", devices=1, default_root_dir=directory, max_epochs=1, accumulate_grad_batches=2)

        def before_train_step() -> None:
            progress.append(trainer_signals.is_accumulating(trainer))
            if len(progress) == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
            if len(progress) == 5:
                requeue()

        trainer_signals.intercept_sigterm(trainer, lambda: None, before_train_step)
        requeue = trainer_signals.intercept_requeueing(trainer, lambda: received.append(trainer.global_step))
        trainer.fit(MLP(), loader(num_samples=24))
        saved = [torch.load(path, weights_only=False)["global_step"] for path in Path(directory).glob("hpc_ckpt_*")]
    assert "_slurm_sigusr_handler_fn" in vars(trainer._signal_connector)
    trainer_signals.release_sigterm(trainer)
    assert "_slurm_sigusr_handler_fn" not in vars(trainer._signal_connector)
    return received, saved, progress


@pytest.mark.processes
def test_the_handler_for_a_requeue_is_replaced_and_what_it_does_can_be_done_later() -> None:
    assert in_own_process(receive_sigusr1) == ([1], [2], [False, True, False, True, False, True])


def test_without_requeueing_no_handler_is_replaced() -> None:
    trainer = make_trainer("ddp", devices=1)
    assert trainer_signals.intercept_requeueing(trainer, lambda: None) is None
    assert "_slurm_sigusr_handler_fn" not in vars(trainer._signal_connector)


class SavesInValidation(MLP):
    """A model that saves a checkpoint in the middle of a validation, with the state before the validation."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.validated: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(batch_idx)
        if batch_idx == 2 and not self.file.exists():
            with trainer_signals._as_before_validation(self.trainer):
                self.trainer.save_checkpoint(self.file)
        self.log("val_loss", float(batch_idx))


def test_from_a_checkpoint_of_a_validation_the_whole_of_it_is_run_again(tmp_path: Path) -> None:
    for num_times in (1, 2):
        trainer = single_process_trainer(num_sanity_val_steps=0, enable_checkpointing=False)
        model = SavesInValidation(tmp_path / "in_validation.ckpt")
        ckpt_path = model.file if model.file.exists() else None
        trainer.fit(model, loader(), loader(num_samples=20), ckpt_path=ckpt_path)
        assert model.validated == list(range(5)), num_times
        assert trainer.callback_metrics["val_loss"] == 2


class Owner:
    """An owner of a step record, which is the record itself."""

    point = 100

    def __init__(self, agrees_at: int) -> None:
        self.position, self.is_agreeing, self.agrees_at = (7, 0), False, agrees_at
        self.seen: list[tuple[int, int]] = []

    @property
    def step_record(self) -> "Owner":
        self.is_agreeing = len(self.seen) >= 1 or self.position[1] + self.point == self.agrees_at
        return self

    def after_train_step(self) -> None:
        self.seen.append(self.position)


def test_the_end_of_a_step_is_recorded_unless_should_stop_is_set() -> None:
    trainer, owner = single_process_trainer(limit_train_batches=4), Owner(agrees_at=300)

    def before_train_step() -> None:
        assert owner.position == (7, trainer.global_step * 100)

    trainer_signals.intercept_sigterm(trainer, Record(), before_train_step, owner)
    trainer.fit(MLP(), loader())
    assert owner.seen == [(7, 300), (7, 400)]
    trainer, owner = single_process_trainer(callbacks=[StopsInTheSecondStep()]), Owner(agrees_at=0)
    trainer_signals.intercept_sigterm(trainer, Record(), Record(), owner)
    trainer.fit(MLP(), loader())
    assert trainer.global_step == 2
    assert owner.seen == [(7, 100)]


class StopsInTheSecondStep(Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.global_step == 1


def test_the_last_epoch_of_weight_averaging_is_without_training() -> None:
    found: list[bool] = []

    class RecordEpochs(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            found.append(trainer_signals.is_without_training(trainer))

    module = MLP()
    module.net.append(torch.nn.BatchNorm1d(NUM_CLASSES))  # without batch normalization, there is no such epoch
    averaging = StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1, annealing_epochs=1)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=3,
        limit_train_batches=1,
        callbacks=[averaging, RecordEpochs()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader())
    assert found == [False, False, False, True]
