"""Behavior of Lightning that :mod:`lightning_strategies_ext._lightning.trainer_stages` requires."""

import copy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, LearningRateFinder
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.tuner import Tuner
from lightning_utilities.core.imports import RequirementCache

from lightning_strategies_ext import DDPStrategy
from lightning_strategies_ext._lightning import (
    logging_state,
    trainer_data,
    trainer_logging,
    trainer_signals,
    trainer_stages,
)
from tests.lightning_private.trainers import single_process_trainer
from tests.support.models import MLP, fit, loader, make_trainer, state_of
from tests.support.ranks import run_ranks


class RecordsFailures(DDPStrategy):
    recorded: type[BaseException] | None = None

    def announce_failure(self, exception: BaseException) -> None:
        super().announce_failure(exception)
        self.recorded = type(exception)


def find_learning_rate(directory: Path) -> tuple[bool, bool]:
    """Returns whether a finder ends its trial with the known exception, and whether that counts as a failure."""
    strategy = RecordsFailures()
    trainer = make_trainer(strategy, devices=1, default_root_dir=directory)
    Tuner(trainer).lr_find(TunableMLP(), loader(), num_training=5)
    return strategy.recorded is trainer_stages.TunerExitException, strategy._stage_context.local_collectives is not None


class TunableMLP(MLP):
    lr = 1e-3


@pytest.mark.processes
def test_a_finder_leaves_its_trial_by_an_exception_that_is_no_failure(tmp_path: Path) -> None:
    assert run_ranks(find_learning_rate, tmp_path, world_size=1) == [(True, False)]


class Fetches(Callback):
    """A callback that records the order in which batches are fetched, begin, and end, and the steps of loggers."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.steps: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.seen.append("batch")

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen.append("end")
        self.steps.append(trainer_logging.logger_step(trainer))


def test_a_function_runs_before_each_fetch_of_a_batch_until_it_is_removed() -> None:
    fetches = Fetches()
    trainer = make_trainer("auto", devices=1, max_epochs=2, callbacks=[fetches], accumulate_grad_batches=2)
    undo = trainer_stages.wrap_before_fetch(trainer, lambda step: fetches.seen.append(f"fetch {step}"))
    trainer.fit(MLP(), loader(num_samples=16, batch_size=4))
    assert fetches.seen == [event for step in fetches.steps for event in (f"fetch {step}", "batch", "end")]
    assert fetches.steps == [0, 0, 1, 1, 2, 2, 3, 3]
    undo()
    undo()
    assert "_on_before_fetch" not in vars(trainer.fit_loop.epoch_loop)


def test_hooks_of_a_callback_can_be_left_out_and_are_called_again() -> None:
    fetches = Fetches()
    trainer = make_trainer("auto", devices=1, max_epochs=1, callbacks=[fetches])
    trainer_stages.set_hooks_enabled(fetches, ["on_train_batch_start"], False)
    trainer.fit(MLP(), loader(num_samples=8, batch_size=4))
    assert fetches.seen == ["end"] * 2
    trainer_stages.set_hooks_enabled(fetches, ["on_train_batch_start"], True)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(MLP(), loader(num_samples=8, batch_size=4))
    assert fetches.seen[2:] == ["batch", "end"] * 2


class InjectedError(Exception):
    pass


class FailsAtStep(MLP):
    """A model that fails once, in training or in validation, and records the steps."""

    def __init__(self, fail_at: int | None = None, where: str = "train") -> None:
        super().__init__()
        self.fail_at, self.where = fail_at, where
        self.steps: list[int] = []
        self.validations: list[int] = []

    def fail(self, where: str, step: int) -> None:
        if where == self.where and step == self.fail_at:
            self.fail_at = None
            raise InjectedError

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


def fit_with_one_restart(model: FailsAtStep, commit_at: int, *, is_same_process: bool = True) -> Any:
    trainer = make_trainer(
        "auto", devices=1, max_epochs=2, val_check_interval=4, num_sanity_val_steps=0, limit_val_batches=2
    )
    committed: list[Any] = []
    num_epochs, has_restarted = [], []

    def before_train_step() -> None:
        if has_restarted and has_restarted.pop() and is_same_process:
            trainer_stages.finish_restart(trainer)
        if trainer.global_step == commit_at and not committed:
            checkpoint = copy.deepcopy(trainer_stages.dump_checkpoint(trainer))
            committed.append((checkpoint, logging_state.logging_position(trainer)))

    def run(train: Callable[[], None]) -> None:
        try:
            train()
        except InjectedError:
            checkpoint, position = committed[0]
            del model.steps[commit_at:]
            trainer_stages.leave_evaluation(trainer)
            assert not any(metric.cumulated_batch_size for metric in val_results(trainer))
            trainer_data.reset_loaders(trainer)
            trainer_stages.restore_checkpoint(trainer, checkpoint)
            logging_state.set_logging_position(trainer, position)
            has_restarted.append(True)
            train()

    undo = trainer_stages.wrap_fit_loop(trainer, run, never, lambda: num_epochs.append(trainer.current_epoch))
    trainer_signals.intercept_sigterm(trainer, lambda: None, before_train_step)
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
def test_fit_restarted_from_a_checkpoint_in_memory_continues_before_the_failed_step(fail_at, where):
    torch.manual_seed(1)
    whole = FailsAtStep()
    trainer, _ = fit_with_one_restart(whole, 4)
    torch.manual_seed(1)
    halves = FailsAtStep(fail_at, where)
    again, epochs = fit_with_one_restart(halves, 0)  # because these loaders start from the first batch
    assert halves.steps == whole.steps == list(range(16))
    assert epochs == [0, 0, 1]
    found, expected = state_of(halves), state_of(whole)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert again.global_step == trainer.global_step == 16


def test_a_restart_after_a_validation_continues_with_the_next_step():
    model = FailsAtStep(6)
    trainer, _ = fit_with_one_restart(model, 4)
    assert model.validations == [4, 8, 12, 16]
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 16
    model = FailsAtStep(6)
    trainer, _ = fit_with_one_restart(model, 4, is_same_process=False)
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 17  # the reason for `finish_restart`


def never(train: Callable[[], None]) -> None:
    raise AssertionError("no callback has run the loop")


class Found(MLP):
    lr = 0.05

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


def test_a_finder_runs_the_loop_as_a_trial_unless_trials_are_skipped() -> None:
    for is_skipped in (False, True):
        finder = LearningRateFinder(num_training_steps=8, early_stop_threshold=None)
        scheduler = GradientAccumulationScheduler({0: 1, 1: 3})
        trainer = make_trainer("auto", devices=1, max_epochs=2, callbacks=[finder, scheduler])
        model, runs = Found(), []

        def run(train: Callable[[], None], runs: list[str] = runs) -> None:
            runs.append("run")
            train()

        def run_trial(train: Callable[[], None], runs: list[str] = runs) -> None:
            runs.append("trial")
            train()

        undo = trainer_stages.wrap_fit_loop(trainer, run, run_trial, lambda: None)
        allow = trainer_stages.skip_trials(trainer.callbacks) if is_skipped else None
        before = trainer_stages.settings_of(trainer)
        trainer.fit(model, loader(num_samples=64))
        assert runs == (["run"] if is_skipped else ["trial", "run"])
        assert trainer_stages.found_by_trials(trainer) == {"lr": model.lr}
        assert trainer_stages.settings_of(trainer)["accumulate_grad_batches"] == 3
        trainer_stages.apply_settings(trainer, before)
        assert trainer.accumulate_grad_batches == 1
        undo()
        assert "_run_stage" not in vars(trainer)
        if allow is not None:
            allow()
            assert "lr_find" not in vars(finder)


class RecordsStarts(MLP):
    """A model that records the number of training batches in ``on_train_start``."""

    def __init__(self) -> None:
        super().__init__()
        self.starts: list[int] = []

    def on_train_start(self) -> None:
        self.starts.append(len(self.trainer.train_dataloader))


def test_training_is_started_before_the_loop_runs() -> None:
    trainer, model = make_trainer("auto", devices=1, max_epochs=1), RecordsStarts()

    def run(train: Callable[[], None]) -> None:
        trainer_stages.start_training(trainer)
        assert model.starts == [4]
        trainer_data.reset_loaders(trainer)
        train()
        assert model.starts == [4, 4]
        assert trainer.global_step == 4

    undo = trainer_stages.wrap_fit_loop(trainer, run, never, lambda: None)
    trainer.fit(model, loader(num_samples=16))
    undo()


def test_the_batch_progress_and_a_call_before_the_hooks_at_the_end_of_training() -> None:
    class Ends(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            found.append(("step", trainer_stages.batch_progress_of(self.trainer).ready))
            return super().training_step(batch, batch_idx)

        def on_train_end(self) -> None:
            found.append("end")

    found: list[Any] = []
    trainer = single_process_trainer(limit_train_batches=2)
    undo = trainer_stages.before_train_end(trainer, lambda: found.append("before"))
    trainer.fit(Ends(), loader())
    assert found == [("step", 1), ("step", 2), "before", "end"]
    undo()
    found.clear()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Ends(), loader())
    assert found == [("step", 1), ("step", 2), "end"]


def test_all_loops_are_found() -> None:
    trainer = make_trainer("auto", devices=1)
    loops = trainer_stages.loops_of(trainer)
    for loop in (trainer.fit_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        assert loop in loops
    epoch_loop = trainer.fit_loop.epoch_loop
    for loop in (epoch_loop, epoch_loop.val_loop, epoch_loop.automatic_optimization, epoch_loop.manual_optimization):
        assert loop in loops
    assert len({id(loop) for loop in loops}) == len(loops)


def test_the_metrics_are_in_the_named_connector() -> None:
    trainer, _ = fit("auto", devices=1)
    metrics, others = trainer_stages.connectors_of(trainer)
    dicts = [value for value in vars(metrics).values() if isinstance(value, dict)]
    for logged in (trainer.callback_metrics, trainer.logged_metrics):
        assert logged
        assert any(logged is value for value in dicts)
    assert metrics not in others
    assert all(hasattr(other, "trainer") for other in others if hasattr(other, "trainer"))
    assert len(others) >= 5


class Fails(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise ValueError("bad luck")


def test_teardown_restores_the_signal_handlers_and_releases_the_loaders() -> None:
    trainer = make_trainer("auto", devices=1)
    handler = signal.getsignal(signal.SIGTERM)
    trainer.state.fn, trainer.training, model = TrainerFn.FITTING, True, Fails()
    trainer.strategy.connect(model)
    with pytest.raises(ValueError, match="bad luck"):
        trainer._fit_impl(model, loader())  # as in a worker: no caller handles the exception
    assert signal.getsignal(signal.SIGTERM) != handler
    assert trainer.fit_loop._data_fetcher is not None
    trainer_stages.tear_down(trainer)
    assert signal.getsignal(signal.SIGTERM) == handler
    assert trainer.fit_loop._data_fetcher is None


class CommitsAt(Callback):
    """A callback that records a commit, and the settings of the Trainer, after the given batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.recorded: tuple[dict[str, Any], dict[str, Any]] | None = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            self.recorded = trainer_stages.dump_commit(trainer), trainer_stages.settings_of(trainer)


@pytest.mark.skipif(not RequirementCache("lightning>=2.6"), reason="Lightning 2.5 has no WeightAveraging")
def test_a_commit_has_what_the_states_of_callbacks_lack() -> None:
    averaging: Any = callbacks.EMAWeightAveraging(update_starting_at_epoch=0)
    commits = CommitsAt(2)
    trainer = single_process_trainer(callbacks=[averaging, commits], limit_train_batches=4)
    trainer.fit(MLP(), loader())
    assert commits.recorded is not None
    _, settings = commits.recorded
    before = settings["callbacks"][trainer.callbacks.index(averaging)]
    assert before.keys() == {"_latest_update_epoch"}
    assert before["_latest_update_epoch"] != averaging._latest_update_epoch
    trainer_stages.apply_settings(trainer, settings)
    assert averaging._latest_update_epoch == before["_latest_update_epoch"]


def test_a_commit_has_no_state_of_spike_detection_which_cannot_be_loaded(tmp_path: Path) -> None:
    spikes: Any = SpikeDetection(warmup=1, exclude_batches_path=str(tmp_path / "excluded.json"))
    commits = CommitsAt(2)
    trainer = single_process_trainer(callbacks=[spikes, commits], limit_train_batches=4)
    trainer.fit(MLP(), loader())
    assert commits.recorded is not None
    commit, settings = commits.recorded
    assert spikes.state_key not in commit["callbacks"]
    recorded = settings["callbacks"][trainer.callbacks.index(spikes)]
    assert {"running_mean", "bad_batches"} <= recorded.keys()
