"""A key-value store for ranks of one host, on a Unix socket that accepts only processes of the same user.

torch's ``TCPStore`` authenticates no client: every user of a host can read and overwrite what a store there holds. This
store takes its place where all ranks run on one host. One process serves it in a thread, and each side of a connection
compares the user of the other side with its own. The name of the socket is random, so that no other process can take it
first, and it exists in no file system.
"""

import errno
import logging
import os
import pickle
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_strategies_ext._system.frames import FrameDecoder, FrameTooLongError, encode_frame
from lightning_strategies_ext._system.peers import is_of_this_user, user_of
from lightning_strategies_ext._system.selector_loop import SelectorLoop

log = logging.getLogger(__name__)

#: How often a process tries to connect until the store is served, in seconds.
_RETRY_S = 0.01
#: How long the server accepts no connection after it has run out of descriptors, in seconds.
_PAUSE_S = 1.0
#: Longest time to wait for an answer, in seconds: a socket takes no longer timeout.
_FOREVER_S = 30 * 86400.0
#: Requests that are answered once all keys exist.
_WAITING = ("wait", "multi_get")
_ENDED = "The process that serves the store of these ranks has ended, or has closed the connection."

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
    key = os.getpid(), name
    if key not in _clients:
        _clients[key] = HostStore(name)
    _clients[key].set_timeout(timeout)
    return _clients[key]


class HostStore(dist.Store):
    """A client of a store that a process of this host serves.

    Each thread has a connection of its own, so that a thread that waits for a key delays no other thread. A request and
    its answer have at most 64 MiB.

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
        limit: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]  # not in the stubs
        deadline = time.monotonic() + min(limit.total_seconds(), _FOREVER_S)
        try:
            request = _encode((operation, args))
        except FrameTooLongError as error:
            raise dist.DistStoreError(f"`{operation}`: {error} Store several smaller values.") from error
        connection = self._connection(deadline, limit)
        try:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            connection.sendall(request)
            is_done, answer = _receive(connection)
        except TimeoutError as error:
            self._drop()
            seconds = f"{limit.total_seconds():g} s"
            if operation in _WAITING:
                raise dist.DistStoreError(f"Timed out after {seconds} waiting for the keys {args[0]}.") from error
            raise dist.DistStoreError(f"The process that serves the store did not respond within {seconds}.") from error
        except (OSError, EOFError) as error:
            self._drop()
            raise dist.DistNetworkError(_ENDED) from error
        except BaseException:  # an answer may be under way
            self._drop()
            raise
        if not is_done:
            raise dist.DistStoreError(f"`{operation}` failed in the store of these ranks: {answer}")
        return answer

    def _connection(self, deadline: float, limit: timedelta) -> socket.socket:
        own = self._of_thread
        if getattr(own, "pid", None) == os.getpid():
            connected: socket.socket = own.connection
            return connected
        while True:
            connection = _ClientSocket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.setblocking(False)  # the queue of the other end may be full, and never accepted
            try:
                connection.connect(_address(self.name))
                break
            except OSError as error:
                connection.close()
                if self._has_connected and not isinstance(error, BlockingIOError):
                    raise dist.DistNetworkError(_ENDED) from error
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

    def _drop(self) -> None:
        if getattr(self._of_thread, "pid", None) is not None:
            self._of_thread.connection.close()
            self._of_thread.pid = None


class _ClientSocket(socket.socket):
    """The connection of one thread. It ends with the thread or the store, without the warning of a plain socket."""

    def __del__(self) -> None:
        with suppress(AttributeError):  # it could not be created
            self.close()


class _Connection:
    """The server's end of a connection.

    Attributes:
        waits_for: The keys that the client waits for, and whether it gets their values.
    """

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.waits_for: tuple[list[str], bool] | None = None
        self._decoder = FrameDecoder()
        self._unsent = bytearray()

    def requests(self) -> Iterator[tuple[str, Any]]:
        """Yields the requests that are complete with what has arrived.

        Raises:
            EOFError: If the client has closed the connection.
            OSError: If the connection is broken.
            FrameTooLongError: If the client announces a request that is too long.
        """
        try:
            chunk = self.end.recv(1 << 16)
        except BlockingIOError:
            return
        if not chunk:
            raise EOFError
        for _, request in self._decoder.decode(chunk):
            yield pickle.loads(request)

    def answer(self, is_done: bool, value: Any) -> None:
        """Adds an answer to what :meth:`send` sends; one that no client would accept becomes an error."""
        try:
            self._unsent += _encode((is_done, value))
        except FrameTooLongError as error:
            self._unsent += _encode((False, str(error)))

    def send(self) -> bool:
        """Sends what the client has room for; returns whether that was all.

        Raises:
            OSError: If the connection is broken.
        """
        with suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self.end.send(self._unsent)]
        return not self._unsent


class _Server:
    """The values of a store, and the thread that serves them.

    No client delays another: a client that does not read its answer gets the rest of it later.
    """

    def __init__(self, name: str) -> None:
        self.pid = os.getpid()
        self._values: dict[str, bytes] = {}
        self._operations: dict[str, Callable[..., Any]] = {
            "set": self._set,
            "add": self._add,
            "compare_set": self._compare_set,
            "check": self._check,
            "append": self._append,
            "multi_set": self._multi_set,
            "delete_key": self._delete_key,
            "num_keys": self._values.__len__,
            "list_keys": lambda: list(self._values),
        }
        self._connections: dict[socket.socket, _Connection] = {}
        self._has_warned = False
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(_address(name))
        self._listening.listen(1024)
        self._listening.setblocking(False)
        self._loop = SelectorLoop()
        self._loop.add(self._listening, self._accept)
        threading.Thread(target=self._run, name="lightning-strategies-ext host store", daemon=True).start()

    def close(self) -> None:
        """Closes all sockets, so that clients fail at once."""
        for each in (self._listening, *self._connections):
            each.close()
        self._loop.close()

    def _run(self) -> None:
        try:
            while True:
                self._loop.wait()
        finally:
            self.close()

    def _serve(self, connection: _Connection) -> bool:
        try:
            for operation, args in connection.requests():
                self._handle(connection, operation, args)
            self._send(connection)
        except Exception:  # a client has exited, or has sent something other than a request; the others continue
            self._drop(connection)
        return False

    def _accept(self) -> bool:
        try:
            end, _ = self._listening.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                if not self._has_warned:
                    log.warning("The store of these ranks cannot accept a connection: %s. Raise `ulimit -n`.", error)
                    self._has_warned = True
                self._loop.pause(self._listening, _PAUSE_S)
            return False
        if not is_of_this_user(end):
            end.close()
            return False
        end.setblocking(False)
        self._connections[end] = connection = _Connection(end)
        self._loop.add(end, partial(self._serve, connection))
        return False

    def _handle(self, connection: _Connection, operation: str, args: Any) -> None:
        if operation in _WAITING:
            connection.waits_for = args[0], operation == "multi_get"
            self._answer_waiting(connection)
            return
        try:
            connection.answer(True, self._operations[operation](*args))
        except Exception as error:  # the request is wrong, such as `add` to a value that is no number
            connection.answer(False, str(error))
        for other in list(self._connections.values()):
            self._answer_waiting(other)

    def _answer_waiting(self, connection: _Connection) -> None:
        if connection.waits_for is None or not self._check(connection.waits_for[0]):
            return
        (keys, with_values), connection.waits_for = connection.waits_for, None
        connection.answer(True, [self._values[key] for key in keys] if with_values else None)
        try:
            self._send(connection)
        except OSError:
            self._drop(connection)

    def _send(self, connection: _Connection) -> None:
        self._loop.wait_for_room(connection.end, is_waiting=not connection.send())

    def _drop(self, connection: _Connection) -> None:
        if self._connections.pop(connection.end, None) is not None:
            self._loop.remove(connection.end)
            connection.end.close()

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


def _address(name: str) -> str:
    return f"\0lightning_strategies_ext/store/{name}"


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _encode(message: Any) -> bytes:
    return encode_frame(pickle.dumps(message))


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
        client._drop()


if hasattr(os, "register_at_fork"):  # Windows forks nothing
    os.register_at_fork(after_in_child=_close_inherited)
