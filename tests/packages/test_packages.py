"""Packages that others wrote for Lightning train as with Lightning's own strategies: to the same results.

``make matrix CORNERS=packages`` installs them and runs this, which is no part of ``make test``.
"""

import json
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import REPOSITORY, run_command

PROGRAMS = {
    "finetuning": "finetuning_scheduler",
    "forecasting": "pytorch_forecasting",
    "geometric": "torch_geometric",
    "hydra_sweep": "hydra",
    "mlflow_autolog": "mlflow",
    "optuna_search": "optuna_integration",
    "stateful_loader": "torchdata",
    "transformers_bert": "transformers",
}
#: A script that ranks run again would search once in each of them.
SEARCHES = "optuna_search"
ARGUMENTS = {"hydra_sweep": ("--multirun", "+lr=0.05,0.1")}
#: A batch of graphs is one graph: `dp_ext` says that it cannot split it.
SPLITS = sorted(PROGRAMS.keys() - {"geometric"})
#: Lightning's leaves what is unfrozen out of its exchange, so that ranks' weights drift apart.
UNFREEZES = "finetuning"

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[Any]]:
    @cache
    def results(program: str, strategy: str) -> list[Any]:
        directory = tmp_path_factory.mktemp(f"{program}-{strategy}")
        return run_program(program, strategy, directory)

    return results


def run_program(program: str, strategy: str, directory: Path) -> list[Any]:
    if find_spec(PROGRAMS[program]) is None:
        pytest.skip(f"{PROGRAMS[program]} is not installed: `make matrix CORNERS=packages` does that")
    path = Path(__file__).parent / "programs" / f"{program}.py"
    environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "STRATEGY": strategy}
    command = (sys.executable, str(path), *ARGUMENTS.get(program, ()))
    result = run_command(*command, env=environment, cwd=directory, timeout_s=280)
    assert result.returncode == 0, result.stdout
    said = [json.loads(line.partition("RESULT ")[2]) for line in result.stdout.splitlines() if "RESULT " in line]
    assert said, result.stdout
    return said


@pytest.mark.parametrize(
    ("program", "strategy"),
    [
        *((program, "ddp_ext") for program in sorted(PROGRAMS.keys() - {SEARCHES})),
        *((program, "ddp_spawn_ext") for program in sorted(PROGRAMS)),
    ],
)
def test_results_are_those_of_lightnings_ddp(program: str, strategy: str, results_of: Any) -> None:
    reference = "ddp_spawn" if program == SEARCHES else "ddp"
    ours, theirs = results_of(program, strategy), results_of(program, reference)
    left_out = {"weights"} if program == UNFREEZES else set()
    for result, expected in zip(ours, theirs, strict=True):
        assert {name: result[name] for name in result.keys() - left_out} == {
            name: expected[name] for name in expected.keys() - left_out
        }


@pytest.mark.parametrize("program", SPLITS)
def test_with_dp_they_are_those_of_one_device(program: str, results_of: Any) -> None:
    ours, theirs = results_of(program, "dp_ext"), results_of(program, "auto")
    assert len(ours) == len(theirs)
    for result, expected in zip(ours, theirs, strict=True):
        assert result.keys() == expected.keys()
        for name, value in result.items():
            assert_close(value, expected[name], name)


def assert_close(ours: Any, theirs: Any, name: str) -> None:
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert_close(value, theirs[key], f"{name}.{key}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs)
        for value, other in zip(ours, theirs, strict=True):
            assert_close(value, other, name)
    else:
        assert ours == (pytest.approx(theirs, rel=1e-3, abs=1e-3) if isinstance(theirs, float) else theirs), name
