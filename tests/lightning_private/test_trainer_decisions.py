"""Behavior of Lightning that :mod:`lightning_strategies_ext._lightning.trainer_decisions` requires."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

from lightning_strategies_ext._lightning import trainer_decisions
from tests.lightning_private.trainers import single_process_trainer
from tests.support.models import MLP, loader, make_trainer

REPLACED = {
    "_monitor_candidates",
    "_validate_condition_metric",
    "_run_early_stopping_check",
    "_get_monitor_value",
}


class Rank0:
    """A simulated rank 0 whose values are all 5.0; it records the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str | None, list[str], bool]] = []

    def __call__(
        self, reader: str, monitor: str | None, others: Sequence[str], values: Mapping[str, Any]
    ) -> dict[str, Any]:
        self.calls.append((reader, monitor, [*others], monitor in values))
        return {**values, **{name: torch.tensor(5.0) for name in (monitor, *others)}}


class OnPlateau(MLP):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler, "monitor": "val_loss"}}


def train(rank_0: Rank0, directory: Path) -> Any:
    """Trains for an epoch with the change; returns the model, the checkpoint, early stopping, and metrics."""
    checkpoint = ModelCheckpoint(directory, "{epoch}-{loss:.1f}", monitor="val_loss")
    stopping = EarlyStopping("val_loss")
    trainer = single_process_trainer(enable_checkpointing=True, callbacks=[checkpoint, stopping])
    owners = checkpoint, stopping, trainer.fit_loop.epoch_loop
    undos = trainer_decisions.share_monitored_values(trainer, rank_0)
    assert all(REPLACED & {*vars(owner)} for owner in owners)
    model = OnPlateau()
    trainer.fit(model, loader(), loader())
    for undo in undos * 2:
        undo()
    assert not any(REPLACED & {*vars(owner)} for owner in owners)
    return model, checkpoint, stopping, trainer.callback_metrics


def test_decisions_read_the_shared_value_and_the_user_reads_the_local_one(tmp_path: Path) -> None:
    rank_0 = Rank0()
    model, checkpoint, stopping, metrics = train(rank_0, tmp_path)
    assert (model.scheduler.best, checkpoint.best_model_score, stopping.best_score) == (5, 5, 5)
    assert Path(checkpoint.best_model_path).name == "epoch=0-loss=5.0.ckpt"
    assert 0 < metrics["val_loss"] < 2
    assert sorted(rank_0.calls) == [
        ("EarlyStopping", "val_loss", [], True),
        ("ModelCheckpoint", "val_loss", ["loss"], True),
        ("ReduceLROnPlateau", "val_loss", [], True),
    ]


def test_a_value_that_only_rank_0_has_is_read_and_removed_afterwards() -> None:
    trainer = single_process_trainer(callbacks=[EarlyStopping("auc", mode="max")])
    trainer_decisions.share_monitored_values(trainer, Rank0())
    trainer.fit(MLP(), loader(), loader())
    assert trainer.early_stopping_callback.best_score == 5
    assert "auc" not in trainer.callback_metrics


def test_the_function_after_an_epoch_runs_when_the_schedulers_have_stepped() -> None:
    rates: list[tuple[int, float]] = []
    trainer = make_trainer("auto", devices=1, max_epochs=2)
    model = Decays()
    undo = trainer_decisions.call_after_epoch(
        trainer, lambda: rates.append((trainer.current_epoch, model.optimizers().param_groups[0]["lr"]))
    )
    trainer.fit(model, loader())
    assert rates == [(1, 0.1 / 2), (2, 0.1 / 4)]
    undo()
    assert "on_advance_end" not in vars(trainer.fit_loop)


class Decays(MLP):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class SetsShouldStop(Callback):
    def __init__(self, hook: str) -> None:
        self.hook = hook

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop |= self.hook == "on_train_start"

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop |= self.hook == "on_validation_end"

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop |= self.hook == "on_train_epoch_end"


@pytest.mark.parametrize("hook", ["on_train_start", "on_validation_end", "on_train_epoch_end"])
def test_a_stop_that_a_hook_has_set_can_be_revoked_at_a_point(hook: str) -> None:
    trainer = single_process_trainer(callbacks=[SetsShouldStop(hook)], val_check_interval=2, num_sanity_val_steps=0)
    taken_back = []

    def at_point() -> None:
        taken_back.append(trainer.should_stop)
        trainer.should_stop = False

    undos = trainer_decisions.call_at_points(trainer, at_point)
    trainer.fit(MLP(), loader(16), loader(8))
    assert trainer.global_step == 4
    # before the first step, after two validations, and after the epoch
    assert taken_back == [hook == "on_train_start", *[hook == "on_validation_end"] * 2, hook == "on_train_epoch_end"]
    for undo in undos:
        undo()
    assert not {"on_run_start", "on_advance_end"} & {*vars(trainer.fit_loop)}
    assert "run" not in vars(trainer.fit_loop.epoch_loop.val_loop)
