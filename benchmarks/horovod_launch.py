"""Commands that start ranks of Horovod's on this host; tests use them too."""

import sys
from pathlib import Path

BIN = Path(sys.executable).parent
#: Names of this machine, as hosts of which each has one slot: when a rank dies, the elastic driver wants no more ranks
#: on the host of that name.
FIRST, SECOND, THIRD = "localhost", "127.0.0.1", "127.1"
LAUNCHERS = {
    "horovodrun": [BIN / "horovodrun", "-np", "{n}", "--gloo", "--network-interfaces", "lo"],
    "mpirun": [
        *(BIN / "mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "{n}", "--bind-to", "none"),
        *("--mca", "btl", "self,sm", "--mca", "pml", "ob1", "--mca", "btl_sm_backing_directory", "{directory}"),
    ],
    "python": [],
}


def start_of(launcher: str, num_ranks: int, directory: str = "") -> list[str]:
    """The beginning of a command that starts ranks. Those of ``mpirun`` share memory through files in a directory."""
    return [str(part).format(n=num_ranks, directory=directory) for part in LAUNCHERS[launcher]]


def count_ranks(hosts: tuple[str, ...]) -> int:
    """How many ranks there are on hosts like ``"localhost"`` or ``"localhost:2"``."""
    return sum(int(host.partition(":")[2] or 1) for host in hosts)


def elastic_horovodrun(directory: Path, hosts: tuple[str, ...], min_ranks: int, *arguments: str) -> list[str]:
    """The command, up to the script, that starts a rank on each host which the file ``hosts`` in a directory names."""
    discovery = directory / "discover.sh"
    discovery.write_text(f"#!/bin/sh\ncat {directory}/hosts\n")
    discovery.chmod(0o755)
    (directory / "hosts").write_text("".join(f"{host}\n" if ":" in host else f"{host}:1\n" for host in hosts))
    numbers = ["-np", str(count_ranks(hosts)), "--min-np", str(min_ranks), "--max-np", "4"]
    discover = ["--host-discovery-script", str(discovery), "--network-interfaces", "lo", "--gloo"]
    return [str(BIN / "horovodrun"), *numbers, *discover, *arguments]
