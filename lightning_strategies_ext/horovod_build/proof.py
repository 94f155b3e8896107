"""Proves that the installed Horovod works: two processes on this host add their ranks up.

Only the loopback interface is used, so a firewall, a VPN or a missing name server says nothing about Horovod.
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
from lightning_strategies_ext.horovod_build.requirements import said_by_mpirun

#: What the ranks print when the sum is right; see :mod:`.proof_rank`.
EXPECTED = tuple(f"rank {rank} of 2: the sum is 3" for rank in range(2))
_TIMEOUT_S = 60.0
_GRACE_S = 3.0


class ProofError(Exception):
    """Two ranks did not reduce; the message holds their output."""


@dataclass(frozen=True)
class Launcher:
    """A way to start two ranks.

    Attributes:
        name: What the user would type.
        command: The whole command, without the program that the ranks run.
        environment: Variables beside those of the tool environment.
    """

    name: str
    command: list[str]
    environment: dict[str, str]


def launchers(environment: dict[str, str], with_mpi: bool) -> Iterator[Launcher]:
    """The ways that are proved: Horovod's own launcher, and MPI's for a build with MPI."""
    loopback = loopback_interface() or "lo"
    horovodrun = os.path.join(sysconfig.get_path("scripts"), "horovodrun")
    yield Launcher("horovodrun -np 2 --gloo", [horovodrun, "-np", "2", "--gloo", "--network-interfaces", loopback], {})
    if with_mpi:
        if "Open" in (said_by_mpirun(environment) or ""):
            # Two slots are claimed by name, since a host with one processor offers one. Containers often run as root.
            options = ["--host", "localhost:2", "--bind-to", "none"]
            variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            variables["OMPI_MCA_btl_tcp_if_include"] = loopback
            yield Launcher("mpirun -np 2", ["mpirun", "-np", "2", *options], variables)
        else:
            yield Launcher("mpirun -np 2", ["mpirun", "-np", "2", "-hosts", "localhost", "-iface", loopback], {})


def prove(launcher: Launcher, environment: dict[str, str], timeout_s: float = _TIMEOUT_S) -> None:
    """Runs an all-reduce of two ranks.

    Raises:
        ProofError: If it takes too long, a rank fails or the sum is wrong.
    """
    program = [sys.executable, str(Path(__file__).with_name("proof_rank.py"))]
    # What this process got from a launcher or a cluster must not make the ranks believe that they are others.
    foreign = ("HOROVOD_", "OMPI_", "PMI", "PRTE")
    kept = {name: value for name, value in environment.items() if not name.startswith(foreign)}
    try:
        process = subprocess.Popen(
            [*launcher.command, *program],
            env={**kept, "OMP_NUM_THREADS": "1", **launcher.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise ProofError(f"{launcher.name} could not be started: {error}") from error
    try:
        output, _ = process.communicate(timeout=timeout_s)
        ended = f"ended with exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        _end(process)
        output, ended = process.communicate()[0], f"took more than {timeout_s:.0f} s"
    finally:
        _end(process)
    if process.returncode != 0 or any(line not in output for line in EXPECTED):
        raise ProofError(f"An all-reduce of two ranks through {launcher.name} {ended}. Its output:\n{output.strip()}")


def _end(process: "subprocess.Popen[str]") -> None:
    """Ends a launcher and all that it started, also ranks that it put into sessions of their own."""
    if process.poll() is not None:
        return
    descendants = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    psutil.wait_procs(descendants, timeout=_GRACE_S)
    for victim in descendants:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            continue
    process.kill()
