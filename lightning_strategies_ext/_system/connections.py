"""Connections of this process: stores and their ports, keepalives, the open connections, and their shutdown."""

import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakSet

import psutil
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

#: Environment variables with the secret of a job on several hosts, or with the path of a file that contains it.
SECRET = "LIGHTNING_STRATEGIES_EXT_SECRET"
SECRET_FILE = "LIGHTNING_STRATEGIES_EXT_SECRET_FILE"
#: Seconds after which a host that does not respond is lost, and seconds between keepalives on an idle connection.
HOST_LOSS_TIMEOUT_S = 8
_KEEPALIVE_INTERVAL_S = 2
#: Timeout of requests over a connection that :func:`clone_store` has made.
_STORE_TIMEOUT = timedelta(seconds=30)
#: Seconds that gloo has to read the end of a connection and to close it, and seconds between checks.
_CLOSING_TIMEOUT_S = 0.1
_CLOSING_POLL_S = 0.001
#: Seconds in which the other end can finish a message after this end has been closed.
_SENDING_S = 0.02
#: Without /proc, descriptors below this number are searched for sockets.
_MAX_DESCRIPTORS = 1 << 16
_exempt: "WeakSet[socket.socket]" = WeakSet()
# Sockets that listen at ports of stores that this process may serve later, by port.
_reserved: dict[int, socket.socket] = {}


def job_secret() -> bytes:
    """Returns the secret of a job on several hosts, by which its ranks recognize each other; empty if there is none.

    Raises:
        OSError: If the file with the secret cannot be read.
        PermissionError: If other users could read or write the file with the secret.
        ValueError: If the file is empty.
    """
    if not (named := os.environ.get(SECRET_FILE)):
        return os.environ.get(SECRET, "").encode()
    with open(named, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o077:
            raise PermissionError(
                f"{SECRET_FILE}: {named} belongs to user {status.st_uid} with mode {status.st_mode & 0o777:o}; it must"
                f" belong to user {os.geteuid()} with mode 600."
            )
        if secret := file.read().strip():
            return secret
    raise ValueError(f"{SECRET_FILE}: {named} is empty; it must contain the secret.")


def exempt(connection: socket.socket) -> None:
    """Exempts a connection from :func:`shut_down_connections`."""
    _exempt.add(connection)


def enable_keepalive(connection: socket.socket) -> bool:
    """Makes the kernel close a connection whose other host does not respond.

    Args:
        connection: Connection whose other end has buffer space, also while its process is stopped.

    Returns:
        Whether the system detects the loss of the host, also with unacknowledged data.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):  # only Linux has it
        return False
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * HOST_LOSS_TIMEOUT_S)
    return True


def enable_store_keepalive(store: dist.Store) -> None:
    """Makes requests to a store fail soon after the loss of its host, instead of after minutes."""
    if (address := store_address(store)) is None:
        return
    with suppress(OSError):
        endpoints = {found[4][:2] for found in socket.getaddrinfo(*address, type=socket.SOCK_STREAM)}
        for connection in _connections_now() or []:
            # A dual-stack socket shows IPv4 addresses with this prefix.
            if (connection.raddr.ip.removeprefix("::ffff:"), connection.raddr.port) in endpoints:
                with _duplicate_socket(connection) as duplicate:
                    enable_keepalive(duplicate)


def clone_store(store: dist.Store) -> dist.Store:
    """Returns the store over a new connection, so that requests do not queue behind those of the existing connection.

    Args:
        store: Store, with or without prefixes. The returned store has none.
    """
    address = store_address(store)
    if address is None:
        return without_prefixes(store)
    return dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)


def reserve_port(address: str) -> int:
    """Returns a port for a store that this process may serve later; until then no other process can listen there.

    Args:
        address: Address of this host.
    """
    listening = socket.create_server((address, 0))
    port: int = listening.getsockname()[1]
    _reserved[port] = listening
    return port


def release_ports() -> None:
    """Releases the reserved ports that this process does not use."""
    for listening in _reserved.values():
        listening.close()
    _reserved.clear()


def serve_store(
    host: str, port: int = 0, num_clients: int | None = None, timeout: timedelta | None = None
) -> dist.TCPStore:
    """Serves a store at one address of this host; a store that torch serves listens at all addresses.

    Args:
        host: Address or host name.
        port: Port; 0 for a free port.
        num_clients: Number of processes that use the store; the call waits until they have connected. None for no wait.
        timeout: Timeout of requests and of the wait; torch's default if None.

    Raises:
        OSError: If the address does not belong to this host, or another process listens there.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = _reserved.pop(port, None) or socket.create_server(address[:2], family=family)
    port = listening.getsockname()[1]
    fd = listening.detach()  # the store closes it; the libuv store of early torch versions accepts no descriptor
    can_listen = torch.__version__ >= "2.8" and os.environ.get("USE_LIBUV", "1") == "1"
    return dist.TCPStore(
        host,
        port,
        num_clients,
        is_master=True,
        timeout=timeout or default_pg_timeout,
        wait_for_workers=num_clients is not None,
        multi_tenant=True,
        master_listen_fd=fd,
        use_libuv=can_listen,
    )


def store_address(store: dist.Store) -> tuple[str, int] | None:
    """Returns host and port of a store; None for a store without an address, such as one in a file."""
    store = without_prefixes(store)
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None


def without_prefixes(store: dist.Store) -> dist.Store:
    """Returns the store below all prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


@contextmanager
def record_connections(recorded: set[tuple[Any, Any]]) -> Iterator[None]:
    """Records the connections that this process makes in the block, in any thread; none if the system lists none.

    Args:
        recorded: Receives the local and the remote address of each connection.
    """
    before = _connections_now()
    try:
        yield
    finally:
        now = _connections_now()
        if before is not None and now is not None:
            recorded |= {_addresses_of(connection) for connection in now} - {
                _addresses_of(connection) for connection in before
            }


def _connections_now() -> list[Any] | None:
    try:
        found = _tcp_sockets()
    except psutil.Error:  # no error: the connections matter only after a failure
        return None
    return [connection for connection in found if connection.raddr]


def _tcp_sockets() -> list[Any]:
    """Returns the TCP sockets of this process, as psutil describes them."""
    try:
        return list(psutil.Process().net_connections("tcp"))
    except (psutil.Error, OSError):
        if sys.platform != "linux":
            raise
        return list(_tcp_sockets_without_proc())


class _Address(NamedTuple):
    ip: str
    port: int


class _Socket(NamedTuple):
    fd: int
    laddr: tuple[Any, ...]
    raddr: tuple[Any, ...]


def _tcp_sockets_without_proc() -> Iterator[_Socket]:
    for fd in range(min(os.sysconf("SC_OPEN_MAX"), _MAX_DESCRIPTORS)):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as duplicate:
                if duplicate.family not in (socket.AF_INET, socket.AF_INET6) or duplicate.type != socket.SOCK_STREAM:
                    continue
                other: tuple[Any, ...] = ()
                with suppress(OSError):  # a listening socket
                    other = _Address(*duplicate.getpeername()[:2])
                yield _Socket(fd, _Address(*duplicate.getsockname()[:2]), other)


def _addresses_of(connection: Any) -> tuple[Any, Any]:
    return connection.laddr, connection.raddr


def shut_down_connections(matches: Callable[[Any], bool]) -> None:
    """Shuts down connections of this process, so that waits at both ends fail.

    The connections are first shut down for receiving, so that gloo reads their end and closes them, and only then for
    sending. If both directions are shut down at once, a message that gloo sends before it has read the end fails. gloo
    (torch 2.13) then reports the error to pending operations, but not to the operation whose message has failed. That
    operation waits until the timeout of the process group. With both directions at once, 86 of 3400 shutdowns during a
    loop of all-reduces ended in this way; in two steps, 1 of 5600.

    Args:
        matches: Callable that returns whether to shut down a connection, which is as psutil describes it.
    """
    exempt_fds = {connection.fileno() for connection in _exempt}
    duplicates: dict[int, socket.socket] = {}
    with ExitStack() as stack:
        for connection in _tcp_sockets():
            if connection.fd not in exempt_fds and matches(connection):
                with suppress(OSError):
                    duplicate = stack.enter_context(_duplicate_socket(connection))
                    duplicate.shutdown(socket.SHUT_RD)
                    duplicates[connection.fd] = duplicate
        if duplicates:
            _wait_until_closed(duplicates)
            time.sleep(_SENDING_S)
        for duplicate in duplicates.values():
            with suppress(OSError):
                duplicate.shutdown(socket.SHUT_RDWR)


def _wait_until_closed(duplicates: dict[int, socket.socket]) -> None:
    """Waits until the original descriptors of duplicated sockets are closed, for at most :data:`_CLOSING_TIMEOUT_S`."""
    deadline = time.monotonic() + _CLOSING_TIMEOUT_S
    while any(_is_same_file(fd, duplicate) for fd, duplicate in duplicates.items()) and time.monotonic() < deadline:
        time.sleep(_CLOSING_POLL_S)


def _is_same_file(fd: int, duplicate: socket.socket) -> bool:
    try:
        return os.path.sameopenfile(fd, duplicate.fileno())
    except OSError:  # the descriptor is closed
        return False


def _duplicate_socket(connection: Any) -> socket.socket:
    """Returns another socket of a connection, which is as psutil describes it. The caller closes the socket."""
    return socket.socket(fileno=os.dup(connection.fd))
