"""Commands that start ranks of Horovod on this host; tests use them, too."""

import sys
from pathlib import Path

BIN = Path(sys.executable).parent
#: Names of this machine, as hosts with one slot each: after the exit of a rank, the elastic driver starts no more ranks
#: on the host of that name.
FIRST, SECOND, THIRD = "localhost", "127.0.0.1", "127.1"
_HOROVODRUN = [BIN / "horovodrun", "-np", "{n}", "--gloo", "--network-interfaces", "lo"]
LAUNCHERS = {
    "horovodrun": _HOROVODRUN,
    "horovodrun on two hosts": [*_HOROVODRUN, "-H", f"{FIRST}:1,{SECOND}:1"],
    "mpirun": [
        *(BIN / "mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "{n}", "--bind-to", "none"),
        *("--mca", "btl", "self,sm", "--mca", "pml", "ob1", "--mca", "btl_sm_backing_directory", "{directory}"),
    ],
    "python": [],
}


def start_of(launcher: str, num_ranks: int, directory: str = "") -> list[str]:
    """Returns the first part of a command that starts ranks. Ranks of ``mpirun`` share files of a directory."""
    return [str(part).format(n=num_ranks, directory=directory) for part in LAUNCHERS[launcher]]


def count_ranks(hosts: tuple[str, ...]) -> int:
    """Returns the number of ranks on hosts such as ``"localhost"`` or ``"localhost:2"``."""
    return sum(int(host.partition(":")[2] or 1) for host in hosts)


def variables_of_rank(
    host: int, local_rank: int, num_hosts: int, num_local_ranks: int, address: str, port: int
) -> dict[str, str]:
    """Returns the environment variables of ``horovodrun --gloo`` for a rank, with equally many ranks on each host.

    Args:
        host: Index of the host.
        local_rank: Local rank.
        num_hosts: Number of hosts.
        num_local_ranks: Number of ranks per host.
        address: Address of the first host, on which :data:`RENDEZVOUS` runs.
        port: Port of the rendezvous server.
    """
    numbers = {
        "RANK": host * num_local_ranks + local_rank,
        "SIZE": num_hosts * num_local_ranks,
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": num_local_ranks,
        "CROSS_RANK": host,
        "CROSS_SIZE": num_hosts,
    }
    names = {
        "HOSTNAME": f"host{host}",
        "GLOO_RENDEZVOUS_ADDR": address,
        "GLOO_RENDEZVOUS_PORT": port,
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_IFACE": "eth0",
    }
    return {f"HOROVOD_{name}": str(value) for name, value in {**numbers, **names}.items()}


#: Program of Horovod's rendezvous server; its arguments are the number of hosts and of ranks per host. It prints its
#: port, and exits when its input is closed.
RENDEZVOUS = """
import sys

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

num_hosts, num_local_ranks = map(int, sys.argv[1:])
server = RendezvousServer()
port = server.start()
hosts = ",".join(f"host{host}:{num_local_ranks}" for host in range(num_hosts))
server.init(get_host_assignments(parse_hosts(hosts), num_hosts * num_local_ranks))
print(port, flush=True)
sys.stdin.read()
"""


def elastic_horovodrun(
    directory: Path, hosts: tuple[str, ...], min_ranks: int, *arguments: str, interface: str = "lo"
) -> list[str]:
    """Returns the command, up to the script, that starts a rank on each host of the file ``hosts`` in a directory.

    Args:
        directory: The directory; this function writes the file.
        hosts: Hosts at the start, with one rank each, or with the number of ranks after a colon.
        min_ranks: Value of ``--min-np``.
        arguments: Further arguments of ``horovodrun``.
        interface: Network interface of the ranks and the driver.
    """
    discovery = directory / "discover.sh"
    discovery.write_text(f"#!/bin/sh\ncat {directory}/hosts\n")
    discovery.chmod(0o755)
    (directory / "hosts").write_text("".join(f"{host}\n" if ":" in host else f"{host}:1\n" for host in hosts))
    numbers = ["-np", str(count_ranks(hosts)), "--min-np", str(min_ranks), "--max-np", "4"]
    discover = ["--host-discovery-script", str(discovery), "--network-interfaces", interface, "--gloo"]
    return [str(BIN / "horovodrun"), *numbers, *discover, *arguments]
