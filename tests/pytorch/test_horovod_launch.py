"""Ranks of ``horovod_ext`` that ``fit`` starts itself."""

import os
import re
import subprocess
import sys

import pytest
import torch

from benchmarks.horovod_commands import start_of
from lightning_strategies_ext import HorovodStrategy
from lightning_strategies_ext.horovod.launch_info import LaunchInfo, launcher_variables
from tests.pytorch.test_horovod import reference
from tests.support.examples import EXAMPLE_ENVIRONMENT
from tests.support.horovod_ranks import run_horovod, try_horovod
from tests.support.models import (
    assert_close,
    fit,
    weights_after,
)
from tests.support.ranks import LONG_CYCLE, REPOSITORY, run_script

pytestmark = pytest.mark.processes


def test_fit_starts_its_own_ranks():
    for weights in run_horovod("python", partial_weights):
        assert_close(weights, reference()["weights"]["plain"])


@pytest.mark.forked  # some of the variables remain set
@pytest.mark.parametrize(("of_user", "expected"), [(None, "1800"), ("7", "7")])
def test_ranks_wait_for_one_that_is_slow_to_start(monkeypatch, of_user, expected):
    """With Horovod's timeout of 30 s, the first rank would abort while other ranks import torch from a slow disk."""
    monkeypatch.delenv("HOROVOD_GLOO_TIMEOUT_SECONDS", raising=False)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "1")
    if of_user is not None:
        monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", of_user)
    with launcher_variables(LaunchInfo("python", 0, 2, 0, 2)):
        assert os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] == expected
    assert os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS") == of_user


def test_ranks_that_a_script_starts_afterwards_find_each_other():
    """With the variables of the script, each rank would be the only rank of a separate job."""
    assert run_horovod("python", ranks_that_are_started_afterwards, num_ranks=1) == [["0 of 2", "1 of 2"]]


def ranks_that_are_started_afterwards() -> list[str]:
    fit("horovod_ext", max_epochs=1, devices=1)
    program = (
        "from tests.support.models import fit",
        "strategy = fit('horovod_ext', max_epochs=1, devices=1)[0].strategy",
        "print(f'\\nseen: {strategy.global_rank} of {strategy.world_size}')",
    )
    command = [*start_of("horovodrun", num_ranks=2), sys.executable, "-c", "; ".join(program)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sorted(re.findall(r"seen: (\d of \d)", output))


def partial_weights() -> dict[str, torch.Tensor]:
    return weights_after("horovod_ext")


def test_the_old_name_works_and_the_log_names_its_provider():
    output, outcomes = try_horovod("horovodrun", old_name)
    assert [outcomes[rank] for rank in sorted(outcomes)] == [True, True]
    assert output.count("is provided by lightning-strategies-ext") == 1


def old_name() -> bool:
    return type(fit("horovod", max_epochs=1)[0].strategy) is HorovodStrategy


@pytest.mark.parametrize("name", ["digits", "fabric_digits"])
def test_the_examples_train(name, tmp_path):
    where = ["--dir", tmp_path] if name == "digits" else ["--checkpoint", tmp_path / "digits.ckpt"]
    result = run_script(
        REPOSITORY / f"examples/{name}.py", "--strategy", "horovod_ext", "--epochs", "4", *where,
        env=EXAMPLE_ENVIRONMENT | LONG_CYCLE,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    [row] = [line for line in result.stdout.splitlines() if "held-out images" in line]
    assert float(row.replace("│", " ").split()[-1]) > 0.9
    assert list(tmp_path.iterdir()) == [tmp_path / "digits.ckpt"]
