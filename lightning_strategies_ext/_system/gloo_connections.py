"""Restricts gloo's connections, which gloo does not authenticate, to the ranks of a job.

gloo connects the ranks of a process group with each other while the group is created, and keeps the port at which a
rank listened open afterwards.
"""

import os
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import psutil

_INTERFACE = "GLOO_SOCKET_IFNAME"
_ESTABLISHED = "01"


class _Loop(NamedTuple):
    """Descriptors of one event loop of gloo.

    Attributes:
        epoll: Descriptor of its ``epoll``.
        listener: Socket at which this rank listens.
        pairs: Connections with the other ranks.
    """

    epoll: int
    listener: int
    pairs: list[int]


@contextmanager
def restrict_gloo(*, is_one_host: bool) -> Iterator[None]:
    """Restricts the gloo process groups that this process creates in the block.

    - If all ranks are on one host, they connect over the loopback interface, unless ``GLOO_SOCKET_IFNAME`` is set.
    - After the block, this rank no longer listens: other processes could use up its descriptors.
    - Each connection with a process of this host leads to a process of this user.

    The last two need Linux and ``/proc``.

    Args:
        is_one_host: Whether all ranks are on this host.

    Raises:
        PermissionError: If a connection leads to a process of another user, which has taken the place of a rank.
    """
    before = set(_gloo_loops())
    named = os.environ.get(_INTERFACE)
    if is_one_host and named is None and (interface := loopback_interface()) is not None:
        os.environ[_INTERFACE] = interface
    try:
        yield
    finally:
        if named is None:
            os.environ.pop(_INTERFACE, None)
    loops = _gloo_loops()
    for loop in [loops[listener] for listener in loops.keys() - before]:
        _close_listener(loop)
        for pair in loop.pairs:
            _check_user(pair)


def loopback_interface() -> str | None:
    """Returns the name of the interface with the address 127.0.0.1, such as ``lo``; None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.family == socket.AF_INET and address.address == "127.0.0.1" for address in addresses):
            return str(name)
    return None


def _gloo_loops() -> dict[str, _Loop]:
    """Returns the event loops of gloo in this process by the inode of the listener; empty without ``/proc``.

    A loop of gloo polls one listening TCP socket, a pipe, and TCP connections.
    """
    loops = {}
    for fd, target in _descriptors():
        if target == "anon_inode:[eventpoll]" and (loop := _gloo_loop(fd)) is not None:
            with suppress(OSError):
                loops[os.readlink(f"/proc/self/fd/{loop.listener}")] = loop
    return loops


def _descriptors() -> Iterator[tuple[int, str]]:
    try:
        fds = os.listdir("/proc/self/fd")
    except OSError:
        return
    for fd in fds:
        with suppress(OSError):  # closed by another thread
            yield int(fd), os.readlink(f"/proc/self/fd/{fd}")


def _gloo_loop(epoll_fd: int) -> _Loop | None:
    listeners: list[int] = []
    pairs: list[int] = []
    try:
        with open(f"/proc/self/fdinfo/{epoll_fd}") as file:
            polled = [int(line.split()[1]) for line in file if line.startswith("tfd:")]
        for fd in polled:
            kind = os.readlink(f"/proc/self/fd/{fd}").partition(":")[0]
            if kind == "pipe":
                continue
            if kind != "socket":
                return None
            with _duplicate(fd) as duplicate:
                if duplicate.family not in (socket.AF_INET, socket.AF_INET6) or duplicate.type != socket.SOCK_STREAM:
                    return None
                is_listening = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                (listeners if is_listening else pairs).append(fd)
    except OSError:  # closed by another thread
        return None
    return _Loop(epoll_fd, listeners[0], pairs) if len(listeners) == 1 else None


def _close_listener(loop: _Loop) -> None:
    """Closes a listener. Its descriptor, which gloo unregisters and closes later, becomes an idle eventfd."""
    placeholder = os.eventfd(0)
    os.dup2(placeholder, loop.listener, inheritable=False)
    os.close(placeholder)
    with select.epoll.fromfd(os.dup(loop.epoll)) as epoll:
        epoll.register(loop.listener, 0)


def _check_user(pair: int) -> None:
    with _duplicate(pair) as duplicate:
        try:
            own, other = duplicate.getsockname(), duplicate.getpeername()
        except OSError:  # the other rank has exited
            return
        user = _user_of(duplicate.family, other, own)
    if user is not None and user != os.geteuid():
        raise PermissionError(
            f"The connection from {own[0]}:{own[1]} to {other[0]}:{other[1]} leads to a process of user {user}"
            f" instead of user {os.geteuid()}: while gloo connected the ranks, a process of another user took the"
            " address of a rank. Restart the job. If this happens again, run the job in its own network namespace (a"
            " container)."
        )


def _user_of(family: int, local: tuple[str, int], remote: tuple[str, int]) -> int | None:
    """Returns the user of the process at one end of a connection; None if that end is not on this host."""
    expected = [_as_in_proc(family, local), _as_in_proc(family, remote), _ESTABLISHED]
    with suppress(OSError), open("/proc/net/tcp" if family == socket.AF_INET else "/proc/net/tcp6") as file:
        for line in file:
            fields = line.split()
            if fields[1:4] == expected:
                return int(fields[7])
    return None


def _as_in_proc(family: int, address: tuple[str, int]) -> str:
    binary = socket.inet_pton(family, address[0].partition("%")[0])
    words = struct.unpack(f"={len(binary) // 4}I", binary)
    return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"


def _duplicate(fd: int) -> socket.socket:
    """Returns another socket object for a descriptor. The caller closes it."""
    return socket.socket(fileno=os.dup(fd))
