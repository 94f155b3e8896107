"""Smoke test of the installed Horovod: an all-reduce of two processes on this host.

The test uses only the loopback interface, so that a firewall, a VPN, or a missing name server does not affect it.
"""

import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from lightning_strategies_ext._system.gloo_connections import loopback_interface
from lightning_strategies_ext.horovod_build.requirements import mpirun_version_output

#: Output of the ranks if the sum is correct, see :mod:`.smoke_test_rank`.
EXPECTED = tuple(f"rank {rank} of 2: the sum is 3" for rank in range(2))
_TIMEOUT_S = 60.0
_GRACE_S = 3.0


class SmokeTestError(Exception):
    """Raised if the smoke test fails. The message contains the output of the ranks."""


@dataclass(frozen=True)
class SmokeTestLauncher:
    """Launcher that starts two ranks.

    Attributes:
        name: Short command for messages.
        command: Command without the program of the ranks.
        environment: Variables in addition to the tool environment.
    """

    name: str
    command: list[str]
    environment: dict[str, str]


def launchers(environment: dict[str, str], with_mpi: bool) -> Iterator[SmokeTestLauncher]:
    """Yields the launchers to test: ``horovodrun``, and ``mpirun`` for a build with MPI."""
    loopback = loopback_interface() or "lo"
    horovodrun = os.path.join(sysconfig.get_path("scripts"), "horovodrun")
    yield SmokeTestLauncher(
        "horovodrun -np 2 --gloo", [horovodrun, "-np", "2", "--gloo", "--network-interfaces", loopback], {}
    )
    if with_mpi:
        if "Open" in (mpirun_version_output(environment) or ""):
            # Request two slots, because a host with one processor has one slot. Containers often run as root.
            options = ["--host", "localhost:2", "--bind-to", "none"]
            variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            variables["OMPI_MCA_btl_tcp_if_include"] = loopback
            yield SmokeTestLauncher("mpirun -np 2", ["mpirun", "-np", "2", *options], variables)
        else:
            yield SmokeTestLauncher(
                "mpirun -np 2", ["mpirun", "-np", "2", "-hosts", "localhost", "-iface", loopback], {}
            )


def run_smoke_test(launcher: SmokeTestLauncher, environment: dict[str, str], timeout_s: float = _TIMEOUT_S) -> None:
    """Runs an all-reduce of two ranks.

    Args:
        launcher: Launcher of the ranks.
        environment: Tool environment.
        timeout_s: Timeout in seconds.

    Raises:
        SmokeTestError: If the timeout expires, a rank fails, or the sum is wrong.
    """
    program = [sys.executable, str(Path(__file__).with_name("smoke_test_rank.py"))]
    # Drop variables of launchers and clusters, which would give the ranks wrong rank numbers.
    removed_prefixes = ("HOROVOD_", "OMPI_", "PMI", "PRTE")
    inherited = {name: value for name, value in environment.items() if not name.startswith(removed_prefixes)}
    try:
        process = subprocess.Popen(
            [*launcher.command, *program],
            env={**inherited, "OMP_NUM_THREADS": "1", **launcher.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise SmokeTestError(f"{launcher.name} could not be started: {error}") from error
    try:
        output, _ = process.communicate(timeout=timeout_s)
        outcome = f"exited with exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        _terminate(process)
        output, outcome = process.communicate()[0], f"took more than {timeout_s:.0f} s"
    finally:
        _terminate(process)
    if process.returncode != 0 or any(line not in output for line in EXPECTED):
        raise SmokeTestError(
            f"An all-reduce of two ranks through {launcher.name} {outcome}. Its output:\n{output.strip()}"
        )


def _terminate(process: "subprocess.Popen[str]") -> None:
    """Terminates a launcher and its descendants, including ranks in other sessions."""
    if process.poll() is not None:
        return
    descendants = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    psutil.wait_procs(descendants, timeout=_GRACE_S)
    for descendant in descendants:
        try:
            descendant.kill()
        except psutil.NoSuchProcess:
            continue
    process.kill()
