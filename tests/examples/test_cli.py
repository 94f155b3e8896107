"""``examples/cli``: LightningCLI trains with the strategy of a YAML file, given by name or with arguments."""

from pathlib import Path

import pytest
import yaml

from tests.support.examples import EXAMPLES, number, rows, run_example

pytestmark = pytest.mark.processes

BY_NAME = ("--config", EXAMPLES / "cli/ddp_ext.yaml")
WITH_ARGUMENTS = ("--config", EXAMPLES / "cli/arguments.yaml")


def test_the_strategy_by_its_name_and_the_checkpoint_that_it_leaves(tmp_path: Path) -> None:
    output = run_example("cli/main.py", "fit", *BY_NAME, "--trainer.max_epochs=8", directory=tmp_path)
    assert rows(output)["strategy"] == ["DDPStrategy"]
    assert rows(output)["processes"] == ["2"]
    assert number(output, "held_out_accuracy") > 0.93
    checkpoint = tmp_path / "checkpoints/tumors.ckpt"
    output = run_example("cli/main.py", "test", *BY_NAME, f"--ckpt_path={checkpoint}", directory=tmp_path)
    assert number(output, "test_accuracy") > 0.93


def test_the_strategy_with_arguments(tmp_path: Path) -> None:
    output = run_example("cli/main.py", "fit", *BY_NAME, *WITH_ARGUMENTS, "--trainer.max_epochs=8", directory=tmp_path)
    assert rows(output)["processes"] == ["2"]
    assert number(output, "held_out_accuracy") > 0.93
    [saved] = tmp_path.glob("lightning_logs/version_*/config.yaml")
    strategy = yaml.safe_load(saved.read_text())["trainer"]["strategy"]
    assert strategy["class_path"].startswith("lightning_strategies_ext.")
    assert strategy["init_args"]["static_graph"] is True
    assert strategy["init_args"]["ddp_comm_hook"].endswith("bf16_compress_hook")
    assert strategy["init_args"]["timeout"] == "0:05:00"


def test_the_command_line_selects_another_strategy(tmp_path: Path) -> None:
    options = ("--trainer.strategy=ddp_spawn_ext", "--trainer.max_epochs=2")
    output = run_example("cli/main.py", "fit", *BY_NAME, *options, directory=tmp_path)
    assert rows(output)["strategy"] == ["DDPSpawnStrategy"]
    assert rows(output)["processes"] == ["2"]
