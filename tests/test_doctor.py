"""The doctor: the command that lists strategies and reports which cannot run, and why."""

import json
import os
import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments import MPIEnvironment

from lightning_strategies_ext import __main__, doctor
from lightning_strategies_ext.registry import FABRIC, STRATEGIES
from tests.support.ranks import REPOSITORY, run_script
from tests.support.virtual_environments import PACKAGE, Environment


def findings_of(environment: Environment, *command: str, returncode: int) -> tuple[dict[str, str], dict[str, dict]]:
    """Returns the doctor's JSON: the environment, and strategies by name."""
    result = environment.run("-m", PACKAGE, *command, "--json")
    assert result.returncode == returncode, result.stdout + result.stderr
    found = json.loads(result.stdout)
    return found["environment"], {strategy["name"]: strategy for strategy in found["strategies"]}


@pytest.mark.processes
def test_the_command_line_knows_every_strategy_its_engine_and_that_it_can_run(wheel_install: Environment) -> None:
    environment, shown = findings_of(wheel_install, returncode=0)
    assert list(shown) == [strategy.name for strategy in STRATEGIES]
    for strategy in STRATEGIES:
        found = shown[strategy.name]
        assert found["front_ends"] == (["Trainer", "Fabric"] if FABRIC in strategy.classes else ["Trainer"])
        assert found["engine"] == strategy.engine
        if strategy.name == "ddp_elastic_ext":  # not an error
            assert "torchrun --standalone" in found["problem"]
        elif strategy.name == "ddp_ray_ext" and found["problem"]:
            assert "pip install 'ray>=2.60,<3'" in found["problem"]
        elif strategy.engine == "Horovod" and found["problem"]:
            command = "install-horovod" if "not installed" in found["problem"] else "--host-discovery-script"
            assert command in found["problem"]
        else:
            assert found["problem"] is None
        assert not found["is_error"]
    assert environment["torch"].startswith(torch.__version__)
    assert "compiled native library" in environment["shm"]  # the wheel contains its source
    assert "there is no launcher" in environment["ranks here"]


@pytest.mark.processes
def test_the_printed_table_fits_in_80_columns_with_a_row_for_each_group() -> None:
    result = run_script("-m", PACKAGE, env={"COLUMNS": "80"})
    assert max(map(len, result.stdout.splitlines())) <= 80
    rows = [re.split("│", line)[1].strip() for line in result.stdout.splitlines() if "│" in line]
    families = [
        "ddp_ext*",
        "ddp_spawn_ext*",
        "ddp_fork_ext*",
        "ddp_notebook_ext*",
        "ddp_spawn_elastic_ext",
        "ddp_ray_ext",
        "ddp_ray_elastic_ext",
        "ddp_elastic_ext",
    ]
    assert rows == [*families, "dp_ext", "horovod_ext", "horovod_elastic_ext", "dp", "horovod"]
    assert "is served by" not in result.stdout


@pytest.mark.processes
def test_ranks_of_a_launcher_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    # A script that has trained with Horovod starts the launcher that starts this process.
    monkeypatch.setenv("LIGHTNING_STRATEGIES_EXT_HOROVOD_PARENT_PID", str(os.getpid()))
    names = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
    result = run_script("-m", PACKAGE, "--json", env=dict(zip(names, "0101", strict=True)))
    assert json.loads(result.stdout)["environment"]["ranks here"] == "started by horovodrun"


@pytest.mark.processes
def test_a_failing_detection_of_mpi_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise RuntimeError("cannot load MPI library")  # like mpi4py without MPI

    monkeypatch.setattr(MPIEnvironment, "detect", staticmethod(fail))
    launcher_text = doctor.environment_info()["ranks here"]
    assert launcher_text == "unknown, because Lightning's MPIEnvironment fails: cannot load MPI library"


@pytest.mark.processes
def test_the_doctor_reports_that_lightning_cannot_be_imported_and_all_other_facts(tmp_path: Path) -> None:
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning" / "__init__.py").write_text("raise RuntimeError('a dependency of it is broken')")
    broken = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    result = run_script("-m", PACKAGE, "--json", env=broken)
    assert result.returncode == 1
    found = json.loads(result.stdout)
    assert found["environment"]["torch"].startswith(torch.__version__)
    assert "GiB free" in found["environment"]["/dev/shm"]
    reason = "`import lightning` fails (RuntimeError: a dependency of it is broken). Reinstall it."
    assert {strategy["problem"] for strategy in found["strategies"]} == {reason}
    assert len(found["strategies"]) == len(STRATEGIES)
    shown = run_script("-m", PACKAGE, env={**broken, "COLUMNS": "400"}).stdout
    assert shown.count(reason) == 1
    assert "Traceback" not in shown


def test_the_console_command_is_the_same_program() -> None:
    (command,) = entry_points(group="console_scripts", name="lightning-strategies-ext")
    assert command.load() is __main__.main
