"""The server of a host store: its values, and the thread that serves them, see :mod:`.host_store`."""

import errno
import logging
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from lightning_strategies_ext._system.frames import FrameDecoder, FrameTooLongError, encode_frame
from lightning_strategies_ext._system.peers import is_of_this_user
from lightning_strategies_ext._system.selector_loop import SelectorLoop

log = logging.getLogger(__name__)

#: How long the server accepts no connection after it has run out of descriptors, in seconds.
_PAUSE_S = 1.0
#: Requests that are answered once all keys exist.
WAITING = ("wait", "multi_get")


def address(name: str) -> str:
    """Returns the address of the socket of a store."""
    return f"\0lightning_strategies_ext/store/{name}"


def encode(message: Any) -> bytes:
    """Returns the frame of a request or a reply."""
    return encode_frame(pickle.dumps(message))


class _Connection:
    """The server's end of a connection.

    Attributes:
        waits_for: The keys that the client waits for, and whether it gets their values.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
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
            chunk = self.socket.recv(1 << 16)
        except BlockingIOError:
            return
        if not chunk:
            raise EOFError
        for _, request in self._decoder.decode(chunk):
            yield pickle.loads(request)

    def reply(self, is_done: bool, value: Any) -> None:
        """Adds a reply to what :meth:`send` sends; one that no client would accept becomes an error."""
        try:
            self._unsent += encode((is_done, value))
        except FrameTooLongError as error:
            self._unsent += encode((False, str(error)))

    def send(self) -> bool:
        """Sends what the client has room for; returns whether that was all.

        Raises:
            OSError: If the connection is broken.
        """
        with suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        return not self._unsent


class StoreServer:
    """The values of a store, and the thread that serves them.

    No client delays another: a client that does not read its reply gets the rest of it later.
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
        self._listening.bind(address(name))
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
            self._close_connection(connection)
        return False

    def _accept(self) -> bool:
        try:
            connected, _ = self._listening.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                if not self._has_warned:
                    log.warning("The store of these ranks cannot accept a connection: %s. Raise `ulimit -n`.", error)
                    self._has_warned = True
                self._loop.pause(self._listening, _PAUSE_S)
            return False
        if not is_of_this_user(connected):
            connected.close()
            return False
        connected.setblocking(False)
        self._connections[connected] = connection = _Connection(connected)
        self._loop.add(connected, partial(self._serve, connection))
        return False

    def _handle(self, connection: _Connection, operation: str, args: Any) -> None:
        if operation in WAITING:
            connection.waits_for = args[0], operation == "multi_get"
            self._reply_to_waiting(connection)
            return
        try:
            connection.reply(True, self._operations[operation](*args))
        except Exception as error:  # the request is wrong, such as `add` to a value that is no number
            connection.reply(False, str(error))
        for other in list(self._connections.values()):
            self._reply_to_waiting(other)

    def _reply_to_waiting(self, connection: _Connection) -> None:
        if connection.waits_for is None or not self._check(connection.waits_for[0]):
            return
        (keys, with_values), connection.waits_for = connection.waits_for, None
        connection.reply(True, [self._values[key] for key in keys] if with_values else None)
        try:
            self._send(connection)
        except OSError:
            self._close_connection(connection)

    def _send(self, connection: _Connection) -> None:
        self._loop.wait_for_writable(connection.socket, is_waiting=not connection.send())

    def _close_connection(self, connection: _Connection) -> None:
        if self._connections.pop(connection.socket, None) is not None:
            self._loop.remove(connection.socket)
            connection.socket.close()

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
