"""A key-value store for ranks of one host, on a Unix socket that accepts only processes of the same user.

torch's ``TCPStore`` authenticates no client: every user of a host can read and overwrite what a store there holds. This
store takes its place where all ranks run on one host. One process serves it in a thread, and each side of a connection
compares the user of the other side with its own. The name of the socket is random, so that no other process can take it
first, and it exists in no file system.
"""

import os
import pickle
import secrets
import selectors
import socket
import struct
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

from lightning_strategies_ext.peers import is_of_this_user, user_of

_LENGTH = struct.Struct("!I")
#: How often a process tries to connect until the store is served, in seconds.
_RETRY_S = 0.01
#: How long the server waits for a client to read an answer, in seconds.
_SEND_S = 5.0
#: Longest time to wait for an answer, in seconds: a socket takes no longer timeout.
_FOREVER_S = 30 * 86400.0

# The servers of this process, and its clients, by name. torch holds clients from C++, where a reference does not keep
# the Python part of an object alive.
_servers: dict[str, "_Server"] = {}
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
    _servers[name] = _Server(name)
    return connect(name)


def connect(name: str, timeout: timedelta = default_pg_timeout) -> "HostStore":
    """Returns this process's client of a store, which need not be served yet.

    Args:
        name: The name of the store.
        timeout: How long requests wait for the server and for keys.
    """
    client = _clients.setdefault((os.getpid(), name), HostStore(name))
    client.set_timeout(timeout)
    return client


class HostStore(dist.Store):
    """A client of a store that a process of this host serves.

    Each thread has a connection of its own, so that a thread that waits for a key delays no other thread.

    Args:
        name: The name of the store.

    Attributes:
        name: The name of the store.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._of_thread = threading.local()
        self._has_connected = False

    @override
    def set(self, key: str, value: str | bytes) -> None:
        """Sets the value of a key."""
        self._ask("set", key, _bytes(value))

    @override
    def get(self, key: str) -> bytes:
        """Waits for a key and returns its value."""
        return self.multi_get([key])[0]

    @override
    def add(self, key: str, value: int) -> int:
        """Adds to a counter, which starts at 0, and returns the sum."""
        return int(self._ask("add", key, value))

    @override
    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Sets a value if the key has the expected one, or does not exist and the expected value is empty."""
        return bytes(self._ask("compare_set", key, _bytes(expected_value), _bytes(desired_value)))

    @override
    def check(self, keys: list[str]) -> bool:
        """Returns whether all keys exist."""
        return bool(self._ask("check", keys))

    @override
    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys exist.

        Raises:
            torch.distributed.DistStoreError: If they do not exist in time.
        """
        self._ask("wait", keys, timeout=timeout)

    def append(self, key: str, value: str | bytes) -> None:
        """Appends to the value of a key."""
        self._ask("append", key, _bytes(value))

    @override
    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Waits for keys and returns their values."""
        return list(self._ask("multi_get", keys))

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        """Sets the values of several keys."""
        self._ask("multi_set", keys, [_bytes(value) for value in values])

    @override
    def delete_key(self, key: str) -> bool:
        """Deletes a key; returns whether it existed."""
        return bool(self._ask("delete_key", key))

    @override
    def num_keys(self) -> int:
        """Returns the number of keys."""
        return int(self._ask("num_keys"))

    def list_keys(self) -> list[str]:
        """Returns all keys."""
        return list(self._ask("list_keys"))

    def has_extended_api(self) -> bool:
        """Returns True: the store has ``append``, ``multi_get``, and ``multi_set``."""
        return True

    def clone(self) -> "HostStore":
        """Returns the store itself, whose requests do not wait for each other."""
        return self

    # The names by which torch calls some of these methods from C++ (read in 2.5 to 2.13).
    getNumKeys = num_keys  # noqa: N815
    deleteKey = delete_key  # noqa: N815

    def _ask(self, operation: str, *args: Any, timeout: timedelta | None = None) -> Any:
        limit: timedelta = timeout or self.timeout  # type: ignore[attr-defined]  # not in torch's stubs
        deadline = time.monotonic() + min(limit.total_seconds(), _FOREVER_S)
        connection = self._connection(deadline, limit)
        try:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            _send(connection, (operation, args))
            return _receive(connection)
        except TimeoutError as error:
            self._drop()
            raise dist.DistStoreError(
                f"Timed out after {limit.total_seconds():g} s waiting for the keys {args[0]} (`{operation}`)."
            ) from error
        except (OSError, EOFError) as error:
            self._drop()
            raise dist.DistNetworkError("The process that serves the store of these ranks has ended.") from error
        except BaseException:  # an answer may be under way
            self._drop()
            raise

    def _connection(self, deadline: float, limit: timedelta) -> socket.socket:
        own = self._of_thread
        if getattr(own, "pid", None) == os.getpid():
            connected: socket.socket = own.connection
            return connected
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(_address(self.name))
                break
            except OSError as error:
                connection.close()
                if self._has_connected:
                    message = "The process that serves the store of these ranks has ended."
                    raise dist.DistNetworkError(message) from error
                if time.monotonic() > deadline:
                    message = f"The store of these ranks was not served within {limit.total_seconds():g} s."
                    raise dist.DistStoreError(f"{message} Did rank 0 start?") from error
                time.sleep(_RETRY_S)
        if not is_of_this_user(connection):
            other = user_of(connection)
            connection.close()
            raise dist.DistNetworkError(
                f"The store of these ranks is served by user {other}, and this process belongs to user {os.geteuid()}."
                " All ranks of a host must belong to the same user."
            )
        own.connection, own.pid, self._has_connected = connection, os.getpid(), True
        return connection

    def _drop(self) -> None:
        self._of_thread.connection.close()
        self._of_thread.pid = None


class _Server:
    """The values of a store, and the thread that serves them."""

    def __init__(self, name: str) -> None:
        self.pid = os.getpid()
        self._values: dict[str, bytes] = {}
        self._received: dict[socket.socket, bytearray] = {}
        self._waiting: dict[socket.socket, tuple[list[str], bool]] = {}  # for which keys, and whether for their values
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(_address(name))
        self._listening.listen(1024)
        self._listening.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        threading.Thread(target=self._run, name="lightning-strategies-ext host store", daemon=True).start()

    def _run(self) -> None:
        while True:
            for ready, _ in self._selector.select():
                if ready.fileobj is self._listening:
                    self._accept()
                else:
                    assert isinstance(ready.fileobj, socket.socket)
                    self._read(ready.fileobj)

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listening.accept()
            if not is_of_this_user(connection):
                connection.close()
                return
            connection.settimeout(_SEND_S)
            self._received[connection] = bytearray()
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        received = self._received[connection]
        try:
            if not (chunk := connection.recv(1 << 16)):
                raise EOFError
            received += chunk
            while (request := _taken_from(received)) is not None:
                operation, args = pickle.loads(request)
                if operation in ("wait", "multi_get"):
                    self._waiting[connection] = args[0], operation == "multi_get"
                else:
                    _send(connection, getattr(self, f"_{operation}")(*args))
        except (OSError, EOFError):
            self._drop(connection)
        for waiting, (keys, with_values) in list(self._waiting.items()):
            if self._check(keys):
                del self._waiting[waiting]
                try:
                    _send(waiting, [self._values[key] for key in keys] if with_values else None)
                except OSError:
                    self._drop(waiting)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._waiting.pop(connection, None)
        del self._received[connection]
        connection.close()

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def _add(self, key: str, value: int) -> int:
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        return total

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        if key in self._values:
            if self._values[key] == expected:
                self._values[key] = desired
        elif not expected:
            self._values[key] = desired
        else:
            return expected
        return self._values[key]

    def _check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def _append(self, key: str, value: bytes) -> None:
        self._values[key] = self._values.get(key, b"") + value

    def _multi_set(self, keys: list[str], values: list[bytes]) -> None:
        self._values.update(zip(keys, values, strict=True))

    def _delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def _num_keys(self) -> int:
        return len(self._values)

    def _list_keys(self) -> list[str]:
        return list(self._values)


def _address(name: str) -> str:
    return f"\0lightning_strategies_ext/store/{name}"


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _send(connection: socket.socket, message: Any) -> None:
    data = pickle.dumps(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _receive(connection: socket.socket) -> Any:
    received = bytearray()
    while (message := _taken_from(received)) is None:
        if not (chunk := connection.recv(1 << 16)):
            raise EOFError
        received += chunk
    return pickle.loads(message)


def _taken_from(received: bytearray) -> bytes | None:
    """Takes the first whole message from what was received."""
    if len(received) < _LENGTH.size:
        return None
    end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
    if len(received) < end:
        return None
    message = bytes(received[_LENGTH.size : end])
    del received[:end]
    return message
