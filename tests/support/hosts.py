"""Two hosts on one Linux machine: two network namespaces joined by a virtual cable, each with a host name of its own.

That needs root.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tests.support import warm
from tests.support.ranks import REPOSITORY, clean_environment, kill_tree

# One thread each: with more, sums of floats come in another order and the last bits differ.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
#: Of the two hosts.
ADDRESSES = "10.113.97.1", "10.113.97.2"


_numbers = count()


class NoHostsError(Exception):
    """They cannot be had here; the text says why."""


@dataclass
class Host:
    """A network namespace, which stands for a host; ``names`` is its file of host names and their addresses."""

    name: str
    address: str
    names: Path

    def start(self, *command: str | Path, log: Path, **env: str) -> subprocess.Popen[bytes]:
        """Starts a program on the host, forked as in :mod:`tests.support.warm`; its output goes to the file ``log``."""
        with log.open("wb") as output:
            return subprocess.Popen(
                [*self.enter(), warm.python(), *map(str, command)],
                env={**clean_environment(), **ONE_THREAD, "PYTHONPATH": str(REPOSITORY), **env},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def enter(self) -> list[str]:
        """What stands before a command to run it on the host."""
        # `ip netns exec` gives the command mounts of its own, so that nobody else sees these names.
        name_it = f"hostname {self.name} && mount --bind '{self.names}' /etc/hosts && exec \"$@\""
        return [*f"ip netns exec {self.name} unshare --uts sh -c".split(), name_it, "sh"]

    def set_cable(self, state: str) -> None:
        """Plugs the cable in ("up") or pulls it ("down")."""
        run(*f"ip -n {self.name} link set eth0 {state}".split())

    def kill_all(self) -> None:
        """Kills whatever runs on the host."""
        remaining = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        for pid in remaining.stdout.split():
            kill_tree(int(pid))


@contextmanager
def two_hosts(directory: Path) -> Iterator[list[Host]]:
    """Two hosts that reach each other, until the block ends.

    Args:
        directory: For the file of their names.

    Raises:
        NoHostsError: If they cannot be had.
    """
    missing = [tool for tool in ("ip", "unshare", "hostname", "mount") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        raise NoHostsError(f"no second host: it takes root and {', '.join(missing) or 'nothing else'} to make one here")
    names, prefix = directory / "hosts", f"lse-{os.getpid()}-{next(_numbers)}"
    hosts = [Host(f"{prefix}-{index}", address, names) for index, address in enumerate(ADDRESSES)]
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts))
    try:
        try:
            for host in hosts:
                run("ip", "netns", "add", host.name)
            first, second = (host.name for host in hosts)
            run(*f"ip link add eth0 netns {first} type veth peer name eth0 netns {second}".split())
            for host in hosts:
                run(*f"ip -n {host.name} address add {host.address}/24 dev eth0".split())
                run(*f"ip -n {host.name} link set lo up".split())
                host.set_cable("up")
                run(*host.enter(), "true")
        except subprocess.CalledProcessError as error:
            raise NoHostsError(f"no second host: `{' '.join(error.cmd)}` failed: {error.stderr.strip()}") from error
        yield hosts
    finally:
        for host in hosts:
            host.kill_all()
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True)


def run(*command: str) -> None:
    """Runs a program that must succeed."""
    subprocess.run(command, check=True, capture_output=True, text=True)
