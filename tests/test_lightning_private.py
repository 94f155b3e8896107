"""What :mod:`lightning_strategies_ext._lightning` needs of Lightning, by behaviour: a new release fails here first."""

import ast
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.fabric import Fabric
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import DataParallelStrategy as FabricDataParallelStrategy
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import ParallelStrategy as LightningParallelStrategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from packaging.version import Version

from lightning_strategies_ext import DDPStrategy, _lightning
from lightning_strategies_ext.launch.launchers import ScriptLauncher, WorkerLauncher
from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import REPOSITORY, run_ranks


class Record:
    """Callables that count their calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> None:
        self.calls.append(args)


def single_process_trainer(**kwargs: Any) -> pl.Trainer:
    return make_trainer("auto", devices=1, max_epochs=1, **kwargs)


def in_own_process(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function(*args)`` returns in a process that may get signals and exit."""
    return run_ranks(function, *args, world_size=1)[0]


# --- intercept_sigterm, release_sigterm ---


def receive_sigterm_between_register_and_confirm() -> tuple[int, bool, bool]:
    trainer, on_signal = single_process_trainer(), Record()
    confirm = _lightning.intercept_sigterm(trainer, on_signal, Record())
    trainer._signal_connector.register_signal_handlers()
    os.kill(os.getpid(), signal.SIGTERM)
    before = trainer.received_sigterm
    confirm()
    return len(on_signal.calls), before, trainer.received_sigterm


def test_the_signal_handler_that_the_trainer_installs_is_the_one_that_we_replace() -> None:
    num_signals, received_before_confirm, received_after = in_own_process(receive_sigterm_between_register_and_confirm)
    assert num_signals == 1
    assert not received_before_confirm
    assert received_after


def receive_sigterm_after_release() -> tuple[int, bool]:
    trainer, on_signal = single_process_trainer(), Record()
    _lightning.intercept_sigterm(trainer, on_signal, Record())
    _lightning.release_sigterm(trainer)
    trainer._signal_connector.register_signal_handlers()
    os.kill(os.getpid(), signal.SIGTERM)
    return len(on_signal.calls), trainer.received_sigterm


def test_after_release_a_sigterm_is_lightnings_again() -> None:
    assert in_own_process(receive_sigterm_after_release) == (0, True)


def stop_before_the_fourth_step() -> list[tuple[int, int, int]]:
    trainer, seen = single_process_trainer(), []

    def before_train_step() -> None:
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        seen.append((trainer.global_step, batches.ready, batches.completed))
        if trainer.global_step == 3:
            raise SIGTERMException

    _lightning.intercept_sigterm(trainer, Record(), before_train_step)
    with pytest.raises(SIGTERMException):
        trainer.fit(MLP(), loader())
    return seen


def test_the_agreement_is_asked_before_each_training_step_where_every_progress_counter_is_complete() -> None:
    assert in_own_process(stop_before_the_fourth_step) == [(step, step, step) for step in range(4)]


class SignalAtStep(Callback):
    """Sends this process a SIGTERM in the middle of a training step."""

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


def test_the_trainer_installs_its_handlers_after_the_strategy_was_set_up() -> None:
    assert in_own_process(fit_with_a_signal_in_the_third_step) == (3, True)


def test_release_leaves_the_classes_own_methods_and_is_harmless_when_there_is_nothing_to_release() -> None:
    trainer = single_process_trainer()
    objects = trainer._signal_connector, trainer.fit_loop.epoch_loop
    before = [dict(vars(owner)) for owner in objects]
    _lightning.intercept_sigterm(trainer, Record(), Record())
    assert [dict(vars(owner)) for owner in objects] != before
    for _ in range(2):
        _lightning.release_sigterm(trainer)
        assert [dict(vars(owner)) for owner in objects] == before
    assert callable(trainer._signal_connector._sigterm_notifier_fn)
    assert callable(trainer.fit_loop.epoch_loop.advance)


def count_broadcasts_of_lightnings_ddp() -> int:
    trainer = make_trainer("ddp", max_epochs=1, limit_train_batches=3)
    broadcast = Record()
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = broadcast
    trainer.fit(MLP(), loader())
    return len(broadcast.calls)


def test_the_broadcast_that_we_take_out_is_what_lightning_runs_in_every_training_step() -> None:
    if Version(lightning.__version__) < Version("2.5.3"):
        pytest.skip("Lightning before 2.5.3 has no broadcast per step to take out")
    assert run_ranks(count_broadcasts_of_lightnings_ddp) == [3, 3]


# --- skip_needless_moves ---


class LogsTensorsAndMetrics(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.mean(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("mean", self.mean)
        return loss


def count_moves_of_logged_values(is_skipping: bool) -> tuple[int, dict[str, float], str]:
    move, num_moves = _ResultMetric.to, 0

    def move_and_count(metric: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_moves
        num_moves += metric.is_tensor
        return move(metric, *args, **kwargs)

    _ResultMetric.to = move_and_count
    pl.seed_everything(5, verbose=False)
    trainer = single_process_trainer()
    if is_skipping:
        _lightning.skip_needless_moves(trainer)
    trainer.fit(LogsTensorsAndMetrics(), loader(), loader())
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    num_moves_in_fit = num_moves
    loss = trainer.fit_loop.epoch_loop._results["training_step.loss"].to(torch.device("meta"))
    return num_moves_in_fit, logged, loss.value.device.type


def test_lightning_moves_each_logged_value_to_where_it_is_until_we_stop_it_and_nothing_else_changes() -> None:
    (num_moves, logged, _), (num_left, same_logged, device) = (
        in_own_process(count_moves_of_logged_values, is_skipping) for is_skipping in (False, True)
    )
    num_steps = 2 * len(loader())  # training and validation, with one logged tensor each
    assert num_moves >= num_steps
    assert num_left < 3  # not one in each step
    assert device == "meta"
    assert logged == same_logged
    assert {"loss_step", "loss_epoch", "mean", "val_loss"} <= logged.keys()


# --- the launcher classes ---


def test_the_trainer_starts_scripts_with_the_launcher_class_that_ours_is_made_of() -> None:
    assert type(make_trainer("ddp").strategy.launcher) is _lightning.SubprocessScriptLauncher
    assert type(make_trainer("ddp_ext").strategy.launcher) is ScriptLauncher
    assert issubclass(ScriptLauncher, _lightning.SubprocessScriptLauncher)


def test_a_launcher_of_workers_is_one_that_the_trainer_lets_predict() -> None:
    launcher = make_trainer("ddp_spawn_ext").strategy.launcher
    assert type(launcher) is WorkerLauncher
    assert isinstance(launcher, _lightning.Launcher)
    assert isinstance(make_trainer("ddp_fork").strategy.launcher, _lightning.Launcher)
    # The class whose instances may not return predictions.
    assert not isinstance(launcher, type(make_trainer("ddp_fork").strategy.launcher))


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("ddp", _lightning.FabricSubprocessScriptLauncher),
        ("ddp_fork", _lightning.FabricMultiProcessingLauncher),
    ],
)
def test_fabric_starts_processes_with_the_launcher_classes_that_we_name(name: str, launcher: type) -> None:
    for strategy in (name, f"{name}_ext"):
        assert isinstance(Fabric(strategy=strategy, accelerator="cpu", devices=2).strategy.launcher, launcher)


def start_scripts(kind: type) -> list[str]:
    called = []

    class Launcher(kind):
        def _call_children_scripts(self) -> None:
            called.append("called")

    class StartsOthers(LightningEnvironment):
        creates_processes_externally = False

    launcher = Launcher(StartsOthers(), 1, 1)
    launcher.launch(lambda: None)
    _lightning.call_children_scripts(launcher)
    return called


@pytest.mark.parametrize("kind", [_lightning.SubprocessScriptLauncher, _lightning.FabricSubprocessScriptLauncher])
def test_call_children_scripts_is_how_both_launchers_start_scripts(kind: type) -> None:
    assert in_own_process(start_scripts, kind) == ["called"] * 2


def threads_of_one_of_two() -> list[Any]:
    os.environ.pop("OMP_NUM_THREADS", None)
    _lightning.set_num_threads_if_needed(num_processes=2)
    return [os.environ["OMP_NUM_THREADS"], torch.get_num_threads()]


def test_set_num_threads_if_needed_shares_the_cores() -> None:
    variable, num_threads = in_own_process(threads_of_one_of_two)
    assert int(variable) == num_threads == max(1, len(os.sched_getaffinity(0)) // 2)


class CtrlC(Callback):
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        raise KeyboardInterrupt


def fit_until_ctrl_c() -> list[tuple[Any, ...]]:
    trainer = make_trainer("ddp_ext", devices=1, callbacks=[CtrlC()])
    trainer.strategy.launcher.kill = kill = Record()
    with pytest.raises(SystemExit):
        trainer.fit(MLP(), loader())
    return kill.calls


def test_on_ctrl_c_the_trainer_tells_our_script_launcher_to_end_the_other_ranks() -> None:
    assert in_own_process(fit_until_ctrl_c) == [(signal.SIGKILL,)]


def test_the_prediction_loop_knows_that_lightnings_worker_processes_cannot_return_predictions() -> None:
    with pytest.raises(MisconfigurationException, match="return_predictions"):
        make_trainer("ddp_fork").predict_loop.return_predictions = True
    for name in ("ddp_ext", "ddp_fork_ext"):
        make_trainer(name).predict_loop.return_predictions = True


# --- the small ones ---


def test_move_optimizers_moves_their_state_but_not_the_step_count() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.Adam([parameter])
    optimizer.step()
    _lightning.move_optimizers(iter([optimizer]), torch.device("meta"))
    devices = {name: tensor.device.type for name, tensor in optimizer.state[parameter].items()}
    assert devices == {"exp_avg": "meta", "exp_avg_sq": "meta", "step": "cpu"}


def test_layer_sync_is_what_the_trainer_was_asked_for() -> None:
    assert isinstance(_lightning.layer_sync(make_trainer("ddp_ext", sync_batchnorm=True).strategy), LayerSync)
    assert _lightning.layer_sync(make_trainer("ddp_ext").strategy) is None


def test_trainer_of_answers_where_the_public_property_raises() -> None:
    module, trainer = MLP(), single_process_trainer()
    assert _lightning.trainer_of(module) is None
    with pytest.raises(RuntimeError, match="not attached"):
        _ = module.trainer
    module.trainer = trainer
    assert _lightning.trainer_of(module) is trainer


class NotesFailures(DDPStrategy):
    noted: type[BaseException] | None = None

    def note_failure(self, exception: BaseException) -> None:
        super().note_failure(exception)
        self.noted = type(exception)


def find_learning_rate(directory: Path) -> tuple[bool, bool]:
    """Whether a finder leaves its trial by the exception we know, and whether the strategy takes it for a failure."""
    strategy = NotesFailures()
    trainer = make_trainer(strategy, devices=1, default_root_dir=directory)
    Tuner(trainer).lr_find(TunableMLP(), loader(), num_training=5)
    return strategy.noted is _lightning.TunerExitException, strategy._world.alone is not None


class TunableMLP(MLP):
    lr = 1e-3


def test_a_finder_leaves_its_trial_by_an_exception_that_is_no_failure(tmp_path: Path) -> None:
    assert run_ranks(find_learning_rate, tmp_path, world_size=1) == [(True, False)]


# --- where private names may stand ---


def test_a_strategy_has_no_way_to_write_checkpoints_until_it_is_asked_for_one() -> None:
    strategy = LightningDDPStrategy()
    given = _lightning.checkpoint_io_of(strategy, TorchCheckpointIO)
    assert strategy.checkpoint_io is given
    assert _lightning.checkpoint_io_of(strategy, AsyncCheckpointIO) is given


def test_who_hands_checkpoints_on_gets_one_to_hand_them_to_unless_the_user_gave_one() -> None:
    strategy, around = LightningDDPStrategy(), AsyncCheckpointIO()
    _lightning.set_checkpoint_io(strategy, around)
    assert _lightning.checkpoint_io_of(strategy, TorchCheckpointIO) is strategy.checkpoint_io is around
    given = around.checkpoint_io
    assert isinstance(given, TorchCheckpointIO)
    _lightning.checkpoint_io_of(strategy, TorchCheckpointIO)
    assert around.checkpoint_io is given


def test_every_name_of_the_module_has_its_test() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_lightning_private*.py"))
    assert [name for name in _lightning.__all__ if f"_lightning.{name}" not in tests] == []


OVERRIDDEN = [
    (LightningDDPStrategy, "_configure_launcher"),
    (LightningDDPStrategy, "_setup_model"),
    (FabricDDPStrategy, "_configure_launcher"),
    (FabricDDPStrategy, "_setup_distributed"),
    (FabricDDPStrategy, "_set_world_ranks"),
    (FabricDataParallelStrategy, "_configure_launcher"),
    (LightningParallelStrategy, "__getstate__"),
    (LightningParallelStrategy, "_configure_launcher"),
    (LightningParallelStrategy, "_setup_model"),
]


@pytest.mark.parametrize(("owner", "name"), OVERRIDDEN, ids=lambda value: getattr(value, "__module__", value))
def test_the_methods_that_our_strategies_override_or_call_are_still_lightnings(owner: type, name: str) -> None:
    assert callable(getattr(owner, name, None))


def test_no_other_module_of_ours_imports_a_private_name_of_lightnings() -> None:
    package = REPOSITORY / "lightning_strategies_ext"
    found = {
        f"{path.relative_to(package)}: {name}"
        for path in package.rglob("*.py")
        if path.name != "_lightning.py"
        for name in imports_from_lightning(path)
        if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    }
    assert found == set()


def imports_from_lightning(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return [name for name in names if name.split(".")[0] == "lightning"]
