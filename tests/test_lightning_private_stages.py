"""What :mod:`lightning_strategies_ext._lightning` needs of Lightning's modules and stages, by behaviour."""

import os
import signal
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DataParallelStrategy as FabricDataParallelStrategy
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.trainer.states import TrainerFn

from lightning_strategies_ext import _lightning
from tests.support.models import MLP, StatefulLoader, dataset, fit, loader, make_trainer
from tests.support.ranks import run_ranks
from tests.support.slurm import variables_of_job, variables_of_task


def single_process_trainer(**kwargs: Any) -> pl.Trainer:
    return make_trainer("auto", devices=1, max_epochs=1, **kwargs)


def in_own_process(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function(*args)`` returns in a process that may get signals and exit."""
    return run_ranks(function, *args, world_size=1)[0]


# --- replicas ---


def test_the_device_that_a_module_says_can_be_set_alone() -> None:
    module = MLP()
    _lightning.set_device(module, torch.device("meta"))
    assert module.device == torch.device("meta")
    assert module.net[0].weight.device == torch.device("cpu")
    _lightning.set_device(module.net, torch.device("meta"))  # has none: nothing happens
    assert "_device" not in vars(module.net)


class Recorder(torch.nn.Module):
    """What a strategy wraps a module with: it asks what is called, and calls that."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.called: list[str | None] = []

    def forward(self, *args: Any) -> Any:
        self.called.append(_lightning.take_redirection(self.module))
        return getattr(self.module, self.called[-1] or "forward")(*args)


def test_the_method_that_fabric_wants_called_is_found_and_forward_is_itself_again(monkeypatch) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    monkeypatch.setattr(fabric.strategy, "setup_module", Recorder)
    module = MLP()
    module.forward = lambda features: module.net(features)  # one of the user's own is none of Fabric's
    model = fabric.setup(module)
    recorder = model._forward_module
    model.mark_forward_method("loss")
    batch = next(iter(loader()))
    assert torch.equal(model.loss(batch), module.loss(batch))
    assert torch.equal(model.predict_step(batch, 0), module.net(batch[0]))
    assert torch.equal(model(batch[0]), module.net(batch[0]))
    assert recorder.called == ["loss", "predict_step", None]


def test_fabric_asks_a_control_of_this_class_to_leave_out_the_exchange_of_gradients() -> None:
    fabric = Fabric(strategy=FabricDataParallelStrategy(), accelerator="cpu", devices=1)
    asked = []

    class Control(_lightning.BackwardSyncControl):
        def no_backward_sync(self, module: torch.nn.Module, enabled: bool = True) -> Any:
            asked.append(enabled)
            return nullcontext()

    fabric.strategy._backward_sync_control = Control()
    model = fabric.setup(MLP())
    with fabric.no_backward_sync(model), fabric.no_backward_sync(model, enabled=False):
        assert asked == [True, False]


# --- what comes back from workers ---


def test_all_loops_are_found() -> None:
    trainer = make_trainer("auto", devices=1)
    loops = _lightning.loops_of(trainer)
    for loop in (trainer.fit_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        assert loop in loops
    epoch_loop = trainer.fit_loop.epoch_loop
    for loop in (epoch_loop, epoch_loop.val_loop, epoch_loop.automatic_optimization, epoch_loop.manual_optimization):
        assert loop in loops
    assert len({id(loop) for loop in loops}) == len(loops)


def test_the_metrics_are_in_the_connector_that_we_name() -> None:
    trainer, _ = fit("auto", devices=1)
    metrics, others = _lightning.connectors_of(trainer)
    kept = [value for value in vars(metrics).values() if isinstance(value, dict)]
    for logged in (trainer.callback_metrics, trainer.logged_metrics):
        assert logged
        assert any(logged is value for value in kept)
    assert metrics not in others
    assert all(hasattr(other, "trainer") for other in others if hasattr(other, "trainer"))
    assert len(others) >= 5


def test_the_data_of_a_stage_are_where_we_look() -> None:
    trainer = make_trainer("auto", devices=1)
    train, val = loader(), loader()
    trainer.fit(MLP(), train, val)
    data = _lightning.data_of(trainer)
    assert any(item is train for item in data)
    assert any(item is val for item in data)


def test_results_of_a_stage_are_recognised() -> None:
    trainer, _ = fit("auto", devices=1)
    bound = [name for name, value in vars(trainer.fit_loop.epoch_loop).items() if _lightning.is_bound_to_stage(value)]
    assert len(bound) == 1


def test_a_layer_sync_that_is_set_is_the_one_that_the_strategy_has() -> None:
    strategy = make_trainer("ddp_ext").strategy
    plugin = TorchSyncBatchNorm()
    _lightning.set_layer_sync(strategy, plugin)
    assert _lightning.layer_sync(strategy) is plugin


def test_the_positions_of_loaders_are_those_of_a_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer("auto", devices=1, max_epochs=1, limit_train_batches=3)
    assert _lightning.states_of_loaders(trainer) == []
    trainer.fit(MLP(), StatefulLoader(dataset(), batch_size=4))
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    checkpoint = torch.load(tmp_path / "end.ckpt", weights_only=False)
    states = checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert _lightning.states_of_loaders(trainer) == states == [{"position": 3}]


class Fails(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise ValueError("bad luck")


def test_a_trainer_that_is_torn_down_has_given_back_its_signal_handlers_and_loaders() -> None:
    trainer = make_trainer("auto", devices=1)
    handler = signal.getsignal(signal.SIGTERM)
    trainer.state.fn, trainer.training, model = TrainerFn.FITTING, True, Fails()
    trainer.strategy.connect(model)
    with pytest.raises(ValueError, match="bad luck"):
        trainer._fit_impl(model, loader())  # as a worker does it: nothing around it handles the exception
    assert signal.getsignal(signal.SIGTERM) != handler
    assert trainer.fit_loop._data_fetcher is not None
    _lightning.tear_down(trainer)
    assert signal.getsignal(signal.SIGTERM) == handler
    assert trainer.fit_loop._data_fetcher is None


def test_a_sigterm_that_is_noted_is_one_that_the_trainer_has_received() -> None:
    trainer = make_trainer("auto", devices=1)
    assert not trainer.received_sigterm
    _lightning.note_sigterm(trainer)
    assert trainer.received_sigterm


def receive_sigusr1() -> tuple[list[int], list[int], list[bool]]:
    os.environ.update({**variables_of_job(1, 1), **variables_of_task(0, 1)})
    os.environ["PATH"] = ""  # where there is no SLURM
    received, progress = [], []
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_trainer("ddp", devices=1, default_root_dir=directory, max_epochs=1, accumulate_grad_batches=2)

        def before_train_step() -> None:
            progress.append(_lightning.is_accumulating(trainer))
            if len(progress) == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
            if len(progress) == 5:
                requeue()

        _lightning.intercept_sigterm(trainer, lambda: None, before_train_step)
        requeue = _lightning.intercept_requeueing(trainer, lambda: received.append(trainer.global_step))
        trainer.fit(MLP(), loader(num_samples=24))
        saved = [torch.load(path, weights_only=False)["global_step"] for path in Path(directory).glob("hpc_ckpt_*")]
    assert "_slurm_sigusr_handler_fn" in vars(trainer._signal_connector)
    _lightning.release_sigterm(trainer)
    assert "_slurm_sigusr_handler_fn" not in vars(trainer._signal_connector)
    return received, saved, progress


def test_the_handler_for_a_requeue_is_replaced_and_what_it_does_can_be_done_later() -> None:
    assert in_own_process(receive_sigusr1) == ([1], [2], [False, True, False, True, False, True])


def test_where_lightning_has_no_job_queued_again_nothing_is_replaced() -> None:
    trainer = make_trainer("ddp", devices=1)
    assert _lightning.intercept_requeueing(trainer, lambda: None) is None
    assert "_slurm_sigusr_handler_fn" not in vars(trainer._signal_connector)


class SavesInValidation(MLP):
    """Saves in the middle of a validation, as if it were the start; or goes on from there."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.validated: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(batch_idx)
        if batch_idx == 2 and not self.file.exists():
            with _lightning._as_before_validation(self.trainer):
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
