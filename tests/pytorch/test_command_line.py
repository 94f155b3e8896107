"""LightningCLI supports all arguments of the strategy classes as options, in the help, and in YAML.

test_discovery.py tests the names of strategies on the command line.
"""

import inspect
import re
import sys
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser, lazy_instance
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext import (
    DDPRayElasticStrategy,
    DDPRayStrategy,
    DDPSpawnElasticStrategy,
    DDPSpawnPlugin,
    DDPSpawnStrategy,
    DDPStrategy,
    HorovodStrategy,
)
from lightning_strategies_ext.fabric.ddp import DDPStrategy as FabricDDPStrategy
from tests.support.ranks import run_script

pytestmark = pytest.mark.processes

DDP_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(DistributedDataParallel).parameters.items()
    if name not in ("module", "device_ids", "output_device")  # decided by the strategy
}


@pytest.mark.parametrize("strategy_class", [DDPStrategy, DDPSpawnStrategy, DDPSpawnPlugin, FabricDDPStrategy])
def test_every_argument_of_the_installed_ddp_is_offered_with_its_default_but_one(strategy_class: type) -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(strategy_class, "strategy")
    offered = vars(parser.get_defaults().strategy)
    excluded = {"module", "device_ids", "output_device", "device", "kwargs", "ddp_kwargs"} & offered.keys()
    assert excluded == set()
    assert {name: offered.get(name, "missing") for name in DDP_DEFAULTS} == {
        **DDP_DEFAULTS,
        "gradient_as_bucket_view": True,
    }


@pytest.mark.parametrize("strategy_class", [DDPStrategy, DDPSpawnStrategy, DDPSpawnPlugin])
def test_a_lazy_instance_takes_arguments_of_ddp_and_refuses_others(strategy_class: type) -> None:
    strategy = lazy_instance(strategy_class, find_unused_parameters=True)
    assert isinstance(strategy, strategy_class)
    with pytest.raises(ValueError, match="find_unused_params"):
        lazy_instance(strategy_class, find_unused_params=True)


@pytest.mark.parametrize(
    "strategy_class",
    [DDPStrategy, DDPSpawnStrategy, DDPSpawnElasticStrategy, DDPRayStrategy, DDPRayElasticStrategy, HorovodStrategy],
)
def test_a_class_path_selects_the_strategy_with_its_arguments(
    strategy_class: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py"])
    name = f"lightning_strategies_ext.{strategy_class.__name__}"
    options = ["--trainer.accelerator=cpu", "--trainer.devices=2", f"--trainer.strategy={name}"]
    cli = LightningCLI(BoringModel, run=False, args=[*options, "--trainer.strategy.hang_timeout=17"])
    assert type(cli.trainer.strategy) is strategy_class
    assert cli.trainer.strategy._hang_timeout_s == 17


# --- from the command line to the model ---

SCRIPT = """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

class Model(BoringModel):
    def on_train_end(self):
        if self.trainer.is_global_zero:
            ddp = self.trainer.strategy.model
            print("in DDP:", ddp.find_unused_parameters, ddp.gradient_as_bucket_view, ddp.bucket_bytes_cap, flush=True)

if __name__ == "__main__":
    LightningCLI(Model, BoringDataModule)
"""
QUIET = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
TRAINER = [
    *(f"--trainer.{name}=false" for name in QUIET),
    *("--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.max_steps=2", "--trainer.limit_val_batches=0"),
]


def fit(directory: Path, *options: str) -> str:
    script = directory / "script.py"
    script.write_text(SCRIPT)
    result = run_script(script, "fit", *options, cwd=directory)
    assert result.returncode == 0, result.stdout
    return result.stdout


def strategy_options(strategy: str, **values: object) -> list[str]:
    named = [f"--trainer.strategy.{name}={value}" for name, value in values.items()]
    return [f"--trainer.strategy=lightning_strategies_ext.{strategy}", *named]


@pytest.mark.parametrize("strategy", ["DDPStrategy", "DDPSpawnStrategy"])
def test_options_reach_ddp_and_omitted_options_keep_the_default(strategy: str, tmp_path: Path) -> None:
    options = strategy_options(strategy, find_unused_parameters="true", bucket_cap_mb=3)
    assert f"in DDP: True True {3 * 2**20}" in fit(tmp_path, *TRAINER, *options)


def output_of(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[str, str]:
    """Returns standard output and standard error of a command line that exits before the training."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "argv", ["script.py", "fit", *options])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit):
            LightningCLI(BoringModel, BoringDataModule)
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_a_printed_config_trains_as_the_options_that_it_was_printed_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = strategy_options("DDPStrategy", find_unused_parameters="true", gradient_as_bucket_view="false")
    printed, _ = output_of(capsys, *TRAINER, *options, "--print_config")
    assert yaml.safe_load(printed)["trainer"]["strategy"]["init_args"].keys() >= DDP_DEFAULTS.keys()
    config = tmp_path / "printed.yaml"  # LightningCLI saves its own configuration in config.yaml
    config.write_text(printed)
    assert "in DDP: True False" in fit(tmp_path, f"--config={config}")


def test_help_describes_the_arguments_of_ddp(capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = output_of(capsys, "--trainer.strategy.help=lightning_strategies_ext.DDPStrategy")
    assert [name for name in DDP_DEFAULTS if f".{name} " not in text] == []
    assert re.search(r"\.gradient_as_bucket_view [^-]*default: True", text), text


def test_an_option_that_neither_the_strategy_nor_ddp_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    _, error = output_of(capsys, *TRAINER, *strategy_options("DDPStrategy", find_unused_params="true"))
    assert "find_unused_params" in error


OPTIMIZER_BY_OPTION = """
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

class Model(BoringModel):
    configure_optimizers = LightningModule.configure_optimizers  # LightningCLI then creates an optimizer

if __name__ == "__main__":
    cli = LightningCLI(Model, BoringDataModule)
    [optimizer] = cli.trainer.optimizers
    [group] = optimizer.param_groups
    is_of_model = all(one is other for one, other in zip(group["params"], cli.model.parameters()))
    print("trained:", type(optimizer).__name__, group["lr"], cli.trainer.global_step, is_of_model)
"""


@pytest.mark.parametrize("strategy", ["ddp_spawn_ext", "ddp_fork_ext"])
def test_an_optimizer_that_is_an_option_reaches_the_workers(strategy: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(OPTIMIZER_BY_OPTION)
    options = ("--optimizer=Adam", "--optimizer.lr=0.125", f"--trainer.strategy={strategy}")
    result = run_script(script, "fit", *TRAINER, *options, cwd=tmp_path)
    assert "trained: Adam 0.125 2 True" in result.stdout, result.stdout
