"""``examples/hosts``: training on two hosts with torchrun and with SLURM; here, both hosts are this machine.

``tests/pytorch/test_several_hosts.py`` uses hosts with different network addresses.
"""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.examples import EXAMPLE_ENVIRONMENT, EXAMPLES, LIMIT_S, number, rows
from tests.support.ranks import REPOSITORY, free_port, run_command, run_script
from tests.support.slurm import sbatch

pytestmark = pytest.mark.processes

BATCH_SCRIPT = EXAMPLES / "hosts/digits.slurm"
ON_TWO_HOSTS = ("--num-nodes", "2", "--devices", "1")


def check_table(output: str) -> None:
    assert rows(output)["processes"] == ["2"]
    assert number(output, "accuracy on 360 held-out images") > 0.9


def test_torchrun_with_an_agent_for_each_host(tmp_path: Path) -> None:
    where = ("--rdzv-backend", "c10d", "--rdzv-id", "digits", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    torchrun = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--local-addr", "127.0.0.1")
    digits = (EXAMPLES / "digits.py", *ON_TWO_HOSTS, "--epochs", "4", "--dir", tmp_path)

    def run_agent(_: int) -> subprocess.CompletedProcess[str]:
        environment = {**EXAMPLE_ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"}
        return run_script(*torchrun, *where, *digits, env=environment, timeout_s=LIMIT_S)

    with ThreadPoolExecutor(2) as hosts:
        results = list(hosts.map(run_agent, range(2)))
    output = "".join(result.stdout for result in results)
    assert [result.returncode for result in results] == [0, 0], output
    check_table(output)  # one of the ranks prints it
    assert (tmp_path / "digits.ckpt").is_file()


def test_slurm(tmp_path: Path) -> None:
    assert run_command("bash", "-n", BATCH_SCRIPT).returncode == 0
    programs = tmp_path / "programs"
    programs.mkdir()
    result = sbatch(
        *(BATCH_SCRIPT, "--epochs", "4", "--dir", tmp_path),
        submitted_from=REPOSITORY,
        programs=programs,
        env=EXAMPLE_ENVIRONMENT,
    )
    assert result.returncode == 0, result.stdout
    check_table(result.stdout)
    assert (tmp_path / "digits.ckpt").is_file()
