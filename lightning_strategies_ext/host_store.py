"""A key-value store for ranks of one host, on a Unix socket that accepts only processes of the same user.

torch's ``TCPStore`` authenticates no client: every user of a host can read and overwrite what a store there holds. This
store takes its place where all ranks run on one host. One process serves it in a thread, and each side of a connection
compares the user of the other side with its own. The name of the socket is random, so that no other process can take it
first, and it exists in no file system.
"""

import logging
import os
import pickle
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_strategies_ext._system.frames import FrameDecoder, FrameTooLongError
from lightning_strategies_ext._system.peers import is_of_this_user, user_of
from lightning_strategies_ext.host_store_server import WAITING, StoreServer, address, encode

log = logging.getLogger(__name__)

#: How often a process tries to connect until the store is served, in seconds.
_RETRY_S = 0.01
#: Longest time to wait for a reply, in seconds: a socket takes no longer timeout.
_MAX_TIMEOUT_S = 30 * 86400.0
_CLOSED_MESSAGE = "The process that serves the store of these ranks has ended, or has closed the connection."

# The servers of this process, and its clients, by name. torch holds clients from C++, where a reference does not keep
# the Python part of an object alive.
_servers: dict[str, "StoreServer"] = {}
_clients: dict[tuple[int, str], "HostStore"] = {}


def is_available() -> bool:
    """Returns whether the system has Unix sockets without a file that report the user at the other end: Linux."""
    return sys.platform == "linux"


def new_name() -> str:
    """Returns a name for a store that no other process can guess."""
    return secrets.token_hex(16)


def serve(name: str | None = None) -> "HostStore":
    """Serves a store in a thread of this process until the process ends.

    Args:
        name: The name of the store. None: the one store of this process, with a random name.

    Returns:
        A client of the store.
    """
    for served, server in _servers.items():
        if server.pid == os.getpid() and name in (None, served):
            return connect(served)
    name = name or new_name()
    _servers[name] = StoreServer(name)
    return connect(name)


def connect(name: str, timeout: timedelta = default_pg_timeout) -> "HostStore":
    """Returns this process's client of a store, which need not be served yet.

    Args:
        name: The name of the store.
        timeout: How long requests wait for the server and for keys.
    """
    key = os.getpid(), name
    if key not in _clients:
        _clients[key] = HostStore(name)
    _clients[key].set_timeout(timeout)
    return _clients[key]


class HostStore(dist.Store):
    """A client of a store that a process of this host serves.

    Each thread has a connection of its own, so that a thread that waits for a key delays no other thread. A request and
    its reply have at most 64 MiB.

    Args:
        name: The name of the store.

    Attributes:
        name: The name of the store.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._thread_local = threading.local()
        self._has_connected = False

    @override
    def set(self, key: str, value: str | bytes) -> None:
        """Sets the value of a key."""
        self._request("set", key, _bytes(value))

    @override
    def get(self, key: str) -> bytes:
        """Waits for a key and returns its value."""
        return self.multi_get([key])[0]

    @override
    def add(self, key: str, value: int) -> int:
        """Adds to a counter, which starts at 0, and returns the sum."""
        return int(self._request("add", key, value))

    @override
    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Sets a value if the key has the expected one, or does not exist and the expected value is empty."""
        return bytes(self._request("compare_set", key, _bytes(expected_value), _bytes(desired_value)))

    @override
    def check(self, keys: list[str]) -> bool:
        """Returns whether all keys exist."""
        return bool(self._request("check", keys))

    @override
    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys exist.

        Raises:
            torch.distributed.DistStoreError: If they do not exist in time.
        """
        self._request("wait", keys, timeout=timeout)

    def append(self, key: str, value: str | bytes) -> None:
        """Appends to the value of a key."""
        self._request("append", key, _bytes(value))

    @override
    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Waits for keys and returns their values."""
        return list(self._request("multi_get", keys))

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        """Sets the values of several keys."""
        self._request("multi_set", keys, [_bytes(value) for value in values])

    @override
    def delete_key(self, key: str) -> bool:
        """Deletes a key; returns whether it existed."""
        return bool(self._request("delete_key", key))

    @override
    def num_keys(self) -> int:
        """Returns the number of keys."""
        return int(self._request("num_keys"))

    def list_keys(self) -> list[str]:
        """Returns all keys."""
        return list(self._request("list_keys"))

    def has_extended_api(self) -> bool:
        """Returns True: the store has ``append``, ``multi_get``, and ``multi_set``."""
        return True

    def clone(self) -> "HostStore":
        """Returns the store itself, whose requests do not wait for each other."""
        return self

    # The names by which torch calls some of these methods from C++ (read in 2.5 to 2.13).
    getNumKeys = num_keys  # noqa: N815
    deleteKey = delete_key  # noqa: N815

    def _request(self, operation: str, *args: Any, timeout: timedelta | None = None) -> Any:
        limit: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]  # not in the stubs
        deadline = time.monotonic() + min(limit.total_seconds(), _MAX_TIMEOUT_S)
        try:
            request = encode((operation, args))
        except FrameTooLongError as error:
            raise dist.DistStoreError(f"`{operation}`: {error} Store several smaller values.") from error
        connection = self._connection(deadline, limit)
        try:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            connection.sendall(request)
            is_done, reply = _receive(connection)
        except TimeoutError as error:
            self._close_connection()
            seconds = f"{limit.total_seconds():g} s"
            if operation in WAITING:
                raise dist.DistStoreError(f"Timed out after {seconds} waiting for the keys {args[0]}.") from error
            raise dist.DistStoreError(f"The process that serves the store did not respond within {seconds}.") from error
        except (OSError, EOFError) as error:
            self._close_connection()
            raise dist.DistNetworkError(_CLOSED_MESSAGE) from error
        except BaseException:  # a reply may be in transit
            self._close_connection()
            raise
        if not is_done:
            raise dist.DistStoreError(f"`{operation}` failed in the store of these ranks: {reply}")
        return reply

    def _connection(self, deadline: float, limit: timedelta) -> socket.socket:
        own = self._thread_local
        if getattr(own, "pid", None) == os.getpid():
            connected: socket.socket = own.connection
            return connected
        while True:
            connection = _ClientSocket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.setblocking(False)  # the queue of the other end may be full, and never accepted
            try:
                connection.connect(address(self.name))
                break
            except OSError as error:
                connection.close()
                if self._has_connected and not isinstance(error, BlockingIOError):
                    raise dist.DistNetworkError(_CLOSED_MESSAGE) from error
                if time.monotonic() > deadline:
                    message = f"No process served the store of these ranks within {limit.total_seconds():g} s."
                    raise dist.DistStoreError(f"{message} Check the output of rank 0.") from error
                time.sleep(_RETRY_S)
        if not is_of_this_user(connection):
            other = user_of(connection)
            connection.close()
            raise dist.DistNetworkError(
                f"The store of these ranks is served by user {other}, but this process belongs to user"
                f" {os.geteuid()}. Start all ranks of a host as the same user."
            )
        own.connection, own.pid, self._has_connected = connection, os.getpid(), True
        return connection

    def _close_connection(self) -> None:
        if getattr(self._thread_local, "pid", None) is not None:
            self._thread_local.connection.close()
            self._thread_local.pid = None


class _ClientSocket(socket.socket):
    """The connection of one thread. It ends with the thread or the store, without the warning of a plain socket."""

    def __del__(self) -> None:
        with suppress(AttributeError):  # it could not be created
            self.close()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _receive(connection: socket.socket) -> Any:
    decoder = FrameDecoder()
    while chunk := connection.recv(1 << 16):
        for _, message in decoder.decode(chunk):
            return pickle.loads(message)
    raise EOFError


def _close_inherited() -> None:
    # A forked process, such as a worker of a loader, would keep connections open after this process has ended.
    for server in _servers.values():
        server.close()
    _servers.clear()
    for client in _clients.values():
        client._close_connection()


if hasattr(os, "register_at_fork"):  # Windows forks nothing
    os.register_at_fork(after_in_child=_close_inherited)
