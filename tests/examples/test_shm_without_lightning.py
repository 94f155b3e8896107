"""``examples/shm_without_lightning.py``: torch's DDP trains over ``shm`` without Lightning."""

import os
from pathlib import Path

import pytest

from tests.support.examples import EXAMPLE_ENVIRONMENT, EXAMPLES, LIMIT_S, number, rows
from tests.support.ranks import run_script

pytestmark = pytest.mark.processes

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")


def run_without_lightning(backend: str, directory: Path) -> str:
    for name in ("lightning", "pytorch_lightning", "lightning_fabric"):
        (directory / name).mkdir(exist_ok=True)
        (directory / name / "__init__.py").write_text("raise AssertionError('Lightning is imported')\n")
    path = f"{directory}{os.pathsep}{EXAMPLE_ENVIRONMENT['PYTHONPATH']}"
    environment = {**EXAMPLE_ENVIRONMENT, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    script = (EXAMPLES / "shm_without_lightning.py", "--backend", backend, "--epochs", "10")
    result = run_script(*TORCHRUN, *script, env=environment, timeout_s=LIMIT_S)
    assert result.returncode == 0, result.stdout
    assert rows(result.stdout)["process group"] == [backend]
    return result.stdout


def test_the_example_trains_the_bits_of_gloo_and_imports_no_lightning(tmp_path: Path) -> None:
    over_shm = run_without_lightning("shm", tmp_path)
    over_gloo = run_without_lightning("gloo", tmp_path)
    assert rows(over_shm)["Lightning was imported"] == ["no"]
    assert rows(over_shm)["ranks"] == ["2"]
    assert number(over_shm, "accuracy on held-out images") > 0.9
    assert rows(over_shm)["fingerprint of the weights"] == rows(over_gloo)["fingerprint of the weights"]


def test_without_torchrun_the_error_contains_the_command() -> None:
    result = run_script(EXAMPLES / "shm_without_lightning.py", env=EXAMPLE_ENVIRONMENT)
    assert result.returncode == 2
    assert "torchrun --nproc-per-node 2 examples/shm_without_lightning.py" in result.stdout
