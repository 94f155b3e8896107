"""Behavior of Lightning that :mod:`lightning_strategies_ext._lightning.launching` requires."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_strategies_ext._lightning import launching
from lightning_strategies_ext.launch.script_launcher import ScriptLauncher
from lightning_strategies_ext.launch.worker_launcher import WorkerLauncher
from tests.lightning_private.trainers import Record, in_own_process
from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import run_script

HYDRA = """
import hydra
from lightning_strategies_ext._lightning import launching

@hydra.main(version_base=None)
def main(config):
    print(*launching.hydra_command(1)[0])

main()
"""


def test_script_launcher_derives_from_the_launcher_class_of_the_trainer() -> None:
    assert type(make_trainer("ddp").strategy.launcher) is launching.SubprocessScriptLauncher
    assert type(make_trainer("ddp_ext").strategy.launcher) is ScriptLauncher
    assert issubclass(ScriptLauncher, launching.SubprocessScriptLauncher)


def test_a_launcher_of_workers_is_one_that_the_trainer_lets_predict() -> None:
    launcher = make_trainer("ddp_spawn_ext").strategy.launcher
    assert type(launcher) is WorkerLauncher
    assert isinstance(launcher, launching.Launcher)
    assert isinstance(make_trainer("ddp_fork").strategy.launcher, launching.Launcher)
    # Instances of this class must not return predictions.
    assert not isinstance(launcher, type(make_trainer("ddp_fork").strategy.launcher))


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("ddp", launching.FabricSubprocessScriptLauncher),
        ("ddp_fork", launching.FabricMultiProcessingLauncher),
    ],
)
def test_fabric_starts_processes_with_the_imported_launcher_classes(name: str, launcher: type) -> None:
    for strategy in (name, f"{name}_ext"):
        assert isinstance(Fabric(strategy=strategy, accelerator="cpu", devices=2).strategy.launcher, launcher)


def test_hydra_command_is_none_for_other_scripts_and_else_that_of_lightning(tmp_path: Path) -> None:
    assert launching.hydra_command(1) is None
    pytest.importorskip("hydra")
    script = tmp_path / "script.py"
    script.write_text(HYDRA)
    result = run_script(script, "+lr=0.1", cwd=tmp_path)
    assert f"{script} +lr=0.1" in result.stdout
    assert "hydra.output_subdir=null" in result.stdout


def threads_of_one_of_two() -> list[Any]:
    os.environ.pop("OMP_NUM_THREADS", None)
    launching.set_num_threads_if_needed(num_processes=2)
    return [os.environ["OMP_NUM_THREADS"], torch.get_num_threads()]


def test_set_rank_zero_only_rank_restricts_decorated_functions_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    for decorator in (rank_zero_only, fabric_rank_zero_only):
        monkeypatch.setattr(decorator, "rank", 0)
    for rank in (1, 0):
        launching.set_rank_zero_only_rank(rank)
        rank_zero_only(done.append)(("pytorch", rank))
        fabric_rank_zero_only(done.append)(("fabric", rank))
    assert done == [("pytorch", 0), ("fabric", 0)]


@pytest.mark.processes
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


@pytest.mark.processes
def test_on_ctrl_c_the_trainer_makes_our_script_launcher_end_the_other_ranks() -> None:
    assert in_own_process(fit_until_ctrl_c) == [(signal.SIGKILL,)]


def test_return_predictions_is_refused_for_lightnings_worker_processes_only() -> None:
    with pytest.raises(MisconfigurationException, match="return_predictions"):
        make_trainer("ddp_fork").predict_loop.return_predictions = True
    for name in ("ddp_ext", "ddp_fork_ext"):
        make_trainer(name).predict_loop.return_predictions = True
