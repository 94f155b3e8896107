"""What :mod:`lightning_strategies_ext._lightning` needs of Lightning for elastic training, by behaviour."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_strategies_ext import _lightning
from tests.support.models import MLP, loader, make_trainer, state_of


class BadLuckError(Exception):
    pass


class Disturbed(MLP):
    """Fails once, in training or in validation, and notes what it sees."""

    def __init__(self, fail_at: int | None = None, where: str = "train") -> None:
        super().__init__()
        self.fail_at, self.where = fail_at, where
        self.steps: list[int] = []
        self.validations: list[int] = []

    def fail(self, where: str, step: int) -> None:
        if where == self.where and step == self.fail_at:
            self.fail_at = None
            raise BadLuckError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.fail("train", self.trainer.global_step)
        self.steps.append(self.trainer.global_step)
        loss = self.loss(batch)
        self.log("mean_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.fail("validation", self.trainer.global_step)
        if batch_idx == 0:
            self.validations.append(self.trainer.global_step)


def fit_with_one_restart(model: Disturbed, commit_at: int, *, goes_right_on: bool = True) -> Any:
    trainer = make_trainer(
        "auto", devices=1, max_epochs=2, val_check_interval=4, num_sanity_val_steps=0, limit_val_batches=2
    )
    committed: list[Any] = []
    num_epochs, has_restarted = [], []

    def before_train_step() -> None:
        if has_restarted and has_restarted.pop() and goes_right_on:
            _lightning.end_restart(trainer)
        if trainer.global_step == commit_at and not committed:
            checkpoint = copy.deepcopy(_lightning.dump_checkpoint(trainer))
            committed.append((checkpoint, _lightning.position_of_logging(trainer)))

    def run(train: Callable[[], None]) -> None:
        try:
            train()
        except BadLuckError:
            checkpoint, position = committed[0]
            del model.steps[commit_at:]
            _lightning.leave_evaluation(trainer)
            assert not any(metric.cumulated_batch_size for metric in val_results(trainer))
            _lightning.forget_data(trainer)
            _lightning.restore_checkpoint(trainer, checkpoint)
            _lightning.set_position_of_logging(trainer, position)
            has_restarted.append(True)
            train()

    undo = _lightning.surround_fit(trainer, run, lambda: num_epochs.append(trainer.current_epoch))
    _lightning.intercept_sigterm(trainer, lambda: None, before_train_step)
    trainer.fit(model, loader(num_samples=32), loader(num_samples=8))
    undo()
    assert "run" not in vars(trainer.fit_loop)
    assert "on_advance_start" not in vars(trainer.fit_loop)
    return trainer, num_epochs


def val_results(trainer: Any) -> list[Any]:
    return [
        metric for metric in trainer.fit_loop.epoch_loop.val_loop._results.values() if metric.meta.is_mean_reduction
    ]


@pytest.mark.parametrize(("fail_at", "where"), [(7, "train"), (8, "validation")])
def test_a_fit_that_is_run_again_from_a_checkpoint_in_memory_goes_on_right_before_the_step(fail_at, where):
    torch.manual_seed(1)
    whole = Disturbed()
    trainer, _ = fit_with_one_restart(whole, 4)
    torch.manual_seed(1)
    halves = Disturbed(fail_at, where)
    again, epochs = fit_with_one_restart(halves, 0)  # since these loaders begin anew
    assert halves.steps == whole.steps == list(range(16))
    assert epochs == [0, 0, 1]
    ours, theirs = state_of(halves), state_of(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert again.global_step == trainer.global_step == 16


def test_a_step_right_after_a_validation_is_the_next_thing_after_a_restart():
    model = Disturbed(6)
    trainer, _ = fit_with_one_restart(model, 4)
    assert model.validations == [4, 8, 12, 16]
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 16
    model = Disturbed(6)
    trainer, _ = fit_with_one_restart(model, 4, goes_right_on=False)
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 17  # why `end_restart` is there


def test_training_data_that_are_forgotten_are_loaded_anew():
    trainer = make_trainer("auto", devices=1, max_epochs=2)
    seen = []

    def before_epoch() -> None:
        seen.append(trainer.train_dataloader)
        _lightning.forget_training_data(trainer)
        assert trainer.train_dataloader is None

    undo = _lightning.surround_fit(trainer, lambda train: train(), before_epoch)
    made = []

    class Model(MLP):
        def train_dataloader(self) -> Any:
            made.append(loader(num_samples=8))
            return made[-1]

    trainer.fit(Model())
    undo()
    assert len(made) == 3
    assert len(seen) == 2


def test_the_states_that_loaders_are_about_to_get_can_be_seen_before(tmp_path):
    class Stateful(torch.utils.data.DataLoader):
        def state_dict(self) -> dict[str, Any]:
            return {"at": 3}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            loaded.append(state)

    loaded: list[Any] = []
    announced: list[Any] = []

    class Model(MLP):
        def train_dataloader(self) -> Any:
            announced.append(_lightning.loader_states(self.trainer))
            return Stateful(loader(num_samples=32).dataset, batch_size=4)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2 and not path.exists():
                self.trainer.save_checkpoint(path)

    path = tmp_path / "middle.ckpt"
    make_trainer("auto", devices=1, max_epochs=1).fit(Model())
    assert announced == [[]]
    make_trainer("auto", devices=1, max_epochs=1).fit(Model(), ckpt_path=path)
    assert announced == [[], [{"at": 3}]]
    assert loaded == [{"at": 3}]


def test_random_states_of_all_kinds_come_back():
    states = _lightning.random_states()
    drawn = torch.rand(()).item(), np.random.rand(), random.random()
    _lightning.set_random_states(states)
    assert (torch.rand(()).item(), np.random.rand(), random.random()) == drawn
