"""Hosts on one Linux machine: network namespaces, each with a host name, joined by virtual cables. Needs root."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TypeVar

import psutil

_NETWORK = "10.113.97"
_numbers = count()


class NoHostsError(Exception):
    """Raised if this machine permits no network namespaces; the message has the reason."""


@dataclass
class Host:
    """A network namespace, which stands for a host.

    Attributes:
        name: Name of the host, and of the namespace.
        address: Address of its interface, ``eth0``.
        names: File with the names and addresses of all hosts.
    """

    name: str
    address: str
    names: Path

    def enter(self) -> list[str]:
        """Prefix of a command that runs on the host."""
        # `ip netns exec` gives the command separate mounts, so that other processes do not use these names.
        name_it = f"hostname {self.name} && mount --bind '{self.names}' /etc/hosts && exec \"$@\""
        return [*f"ip netns exec {self.name} unshare --uts sh -c".split(), name_it, "sh"]

    def set_cable(self, state: str) -> None:
        """Connects the host to the network ("up") or disconnects it ("down")."""
        run(*f"ip -n {self.name} link set eth0 {state}".split())

    def set_rate(self, megabits: float) -> None:
        """Limits the rate at which the host sends, in megabits per second."""
        # A burst of 2 ms, and at most 50 ms in the queue; packets of the kernel have up to 64 KiB.
        burst = max(round(megabits * 1e6 / 8 * 0.002), 70_000)
        run(
            *f"ip netns exec {self.name} tc qdisc replace dev eth0 root tbf".split(),
            *f"rate {megabits}mbit burst {burst} latency 50ms".split(),
        )

    def pids(self) -> list[int]:
        """Returns the processes on the host."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def kill_all(self) -> None:
        """Kills all processes on the host."""
        for pid in self.pids():
            try:
                psutil.Process(pid).kill()
            except psutil.NoSuchProcess:
                continue


H = TypeVar("H", bound=Host)


@contextmanager
def hosts(
    number: int,
    directory: Path,
    kind: type[H] = Host,  # type: ignore[assignment]
    delay_ms: float = 0.0,
) -> Iterator[list[H]]:
    """Creates connected hosts, for the duration of the context.

    Args:
        number: Number of hosts. Two hosts are connected directly, more hosts by a switch.
        directory: Directory of the file with their names.
        kind: Class of the hosts.
        delay_ms: Milliseconds that each packet takes longer: two hosts are then connected by
            :mod:`benchmarks.delay_relay`.

    Raises:
        NoHostsError: If this machine permits no network namespaces.
        ValueError: If packets of more than two hosts are delayed.
    """
    if delay_ms and number != 2:
        raise ValueError(f"`delay_ms={delay_ms}` requires two hosts, got `number={number}`.")
    missing = [tool for tool in ("ip", "unshare", "hostname", "mount") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        raise NoHostsError(f"a second host requires root{''.join(f', {tool}' for tool in missing)}")
    names, prefix = directory / "hosts", f"lse-{os.getpid()}-{next(_numbers)}"
    made = [kind(f"{prefix}-{index}", address_of(index), names) for index in range(number)]
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in made))
    switch, relay = f"{prefix}-switch", ExitStack()
    try:
        try:
            for host in made:
                run("ip", "netns", "add", host.name)
            if delay_ms:
                relay.enter_context(_delay(made, delay_ms))
            else:
                _join(made, switch)
            for host in made:
                run(*f"ip -n {host.name} address add {host.address}/24 dev eth0".split())
                run(*f"ip -n {host.name} link set lo up".split())
                host.set_cable("up")
                run(*host.enter(), "true")
        except subprocess.CalledProcessError as error:
            raise NoHostsError(
                f"cannot create a second host: `{' '.join(error.cmd)}` failed: {error.stderr.strip()}"
            ) from error
        yield made
    finally:
        for host in made:
            host.kill_all()
        relay.close()
        for name in [host.name for host in made] + [switch]:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def address_of(index: int) -> str:
    """Returns the address of a host."""
    return f"{_NETWORK}.{index + 1}"


@contextmanager
def _delay(made: Sequence[Host], delay_ms: float) -> Iterator[None]:
    first, second = (host.name for host in made)
    command = [sys.executable, "-m", "benchmarks.delay_relay", str(delay_ms), first, second]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise subprocess.CalledProcessError(process.wait(), command, stderr=process.communicate()[1])
            yield
        finally:
            process.kill()


def _join(made: Sequence[Host], switch: str) -> None:
    if len(made) == 2:
        first, second = (host.name for host in made)
        run(*f"ip link add eth0 netns {first} type veth peer name eth0 netns {second}".split())
        return
    run("ip", "netns", "add", switch)
    run(*f"ip -n {switch} link add switch type bridge".split())
    run(*f"ip -n {switch} link set switch up".split())
    for index, host in enumerate(made):
        run(*f"ip link add eth0 netns {host.name} type veth peer name port{index} netns {switch}".split())
        run(*f"ip -n {switch} link set port{index} master switch up".split())


def run(*command: str) -> str:
    """Runs a program that must succeed, and returns its output."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
