"""Peers: the hosts and processes of ranks."""

import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Protocol

import psutil

_IS_LINUX = sys.platform == "linux"
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_CREDENTIALS = struct.Struct("3i")  # process, user, group
#: User id that the kernel reports for users without an id in the user namespace of the process.
UNMAPPED_USER = 65534


class KeyValueStore(Protocol):
    """The part of a torch store that ranks need to find each other."""

    def set(self, key: str, value: str) -> None:
        """Sets a value."""

    def get(self, key: str) -> bytes:
        """Waits for a value."""


@dataclass(frozen=True)
class Peer:
    """The process of a rank.

    Attributes:
        rank: Global rank.
        host: Identity of its host, which :func:`host_identity` returns.
        pid: Process id on that host.
        start_time: Start time of the process, which :func:`start_time` returns.
        host_name: Name of the host.
        addresses: Addresses of the host's network interfaces, without loopback addresses.
    """

    rank: int
    host: str
    pid: int
    start_time: float
    host_name: str = ""
    addresses: tuple[str, ...] = ()

    @classmethod
    def this_process(cls, rank: int) -> "Peer":
        """Returns the peer for the calling process."""
        interfaces = psutil.net_if_addrs().values()
        addresses = {entry.address for entries in interfaces for entry in entries if entry.family in _INTERNET}
        others = tuple(sorted(address for address in addresses if not is_loopback(address)))
        started = start_time(os.getpid())
        return cls(rank, host_identity(), os.getpid(), started, socket.gethostname(), others)

    def is_running(self) -> bool:
        """Whether the process runs; only meaningful on its own host."""
        return is_running(self.pid, self.start_time)

    def kill(self, exclude_pids: Collection[int] = ()) -> None:
        """Kills the process and its forked children if it runs; only on its own host.

        Args:
            exclude_pids: Ids of processes that are not killed, such as ranks that the process has started.
        """
        if self.is_running():
            kill_with_forked_children(self.pid, exclude_pids)


def start_time(pid: int) -> float:
    """Returns the start time of a process of this host, in a unit of the operating system.

    It distinguishes the process from a later process with the same pid. It is 0.0 if the system does not report it,
    because /proc is missing or hides the process.
    """
    if _IS_LINUX:
        return _read_stat(pid)[1]
    with suppress(psutil.Error):
        return float(psutil.Process(pid).create_time())
    return 0.0


def is_running(pid: int, started: float = 0.0) -> bool:
    """Returns whether a process of this host runs; a zombie process does not run.

    Args:
        pid: Process id.
        started: Start time of the process, which :func:`start_time` has returned.
    """
    if not _IS_LINUX:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            is_same = started in (0.0, process.create_time())
            return is_same and process.status() != psutil.STATUS_ZOMBIE
        return False
    state, start = _read_stat(pid)
    if not state:
        return _exists(pid)
    return state not in "ZX" and started in (0.0, start)


def _read_stat(pid: int) -> tuple[str, float]:
    """Reads the state and the start time of a process from /proc; returns ``""`` and 0.0 without an entry.

    The start time that psutil returns changes when the clock is set.
    """
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], float(fields[19])
    return "", 0.0


def _exists(pid: int) -> bool:
    """Returns whether a process runs that /proc does not show, because /proc is missing or hides the process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of another user
        return True
    with suppress(OSError, AttributeError):  # seccomp may forbid it, and old systems do not have it
        descriptor = os.pidfd_open(pid)
        try:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            return not poller.poll(0)
        finally:
            os.close(descriptor)
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    return True


def kill_with_forked_children(pid: int, exclude_pids: Collection[int] = ()) -> None:
    """Kills a process and its forked children, such as DataLoader workers, which would exit after five seconds.

    Other programs that the process has started, such as a logger's, continue: they may have unsaved data.

    Args:
        pid: Process id.
        exclude_pids: Ids of processes that are not killed.
    """
    forked: list[psutil.Process] = []
    try:
        process = psutil.Process(pid)
        with suppress(psutil.Error, OSError):
            forked = [child for child in process.children() if child.cmdline() == process.cmdline()]
        process.kill()
    except (psutil.Error, OSError):
        if _IS_LINUX:  # /proc may be missing, or hide the process
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    for child in forked:
        with suppress(psutil.Error):
            if child.pid not in exclude_pids:
                child.kill()


def exchange_peers(store: KeyValueStore, rank: int, world_size: int) -> dict[int, Peer]:
    """Returns the peers by rank. Collective: all ranks call it.

    Args:
        store: Store that the ranks share, for this call alone.
        rank: Global rank of this process.
        world_size: Number of ranks.
    """
    store.set(str(rank), json.dumps(asdict(Peer.this_process(rank))))
    return {other: Peer(**json.loads(store.get(str(other)))) for other in range(world_size)}


def is_of_this_user(connection: socket.socket) -> bool:
    """Returns whether the process at the other end of a connected Unix socket belongs to the user of this process.

    On Linux the kernel reports the user of the process that connected, or that called ``listen``. On other systems the
    result is False.
    """
    return user_of(connection) == os.geteuid() and not _may_be_unmapped(os.geteuid())


def user_of(connection: socket.socket) -> int:
    """Returns the user id of the process at the other end of a connected Unix socket; -1 if it is not known."""
    if not hasattr(socket, "SO_PEERCRED"):
        return -1
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def _may_be_unmapped(user: int) -> bool:
    if user != UNMAPPED_USER:
        return False
    with suppress(OSError):
        # In the first user namespace, which maps all ids, it is an ordinary user.
        return Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]
    return True


def is_loopback(address: str) -> bool:
    """Returns whether an address is a loopback address."""
    return ip_address(address.partition("%")[0]).is_loopback


def host_identity() -> str:
    """Returns the identity of this host, or of this container if it has PID or network namespaces of its own."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    for namespace in ("pid", "net"):
        with suppress(OSError):
            parts.append(str(Path("/proc/self/ns", namespace).readlink()))
    return "/".join(parts)
