"""A line from each worker to the main process, for what cannot wait until a method of the actor returns.

Signals go to the worker, output comes from it, and each learns at once that the other is gone: a worker whose line
breaks ends. It is a TCP connection that the worker makes, with a secret that it got by way of Ray.

What it does not promise: that nobody on the network between them reads along; that is as with Ray's own connections.
"""

import codecs
import fcntl
import hmac
import io
import os
import secrets
import selectors
import signal
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_HEADER = struct.Struct("!BI")  # which stream, how many bytes follow
_NUMBER = struct.Struct("!I")
_SECRET_BYTES = 32
_CONNECT_S = 10.0
_HELLO_S = 2.0
_MOST_BYTES = 1 << 16
_FLUSH_S = 2.0


def watch_peer(connected: socket.socket) -> None:
    """Lets a connection break within half a minute when the other host is gone without a word."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


# --- in the main process ---


class Line:
    """A worker's line, in the main process.

    Args:
        on_close: Called, in another thread, when the worker is gone.

    Attributes:
        closed: Set then.
    """

    def __init__(self, on_close: Callable[[], None]) -> None:
        self.closed = threading.Event()
        self._on_close = on_close
        self._connected: socket.socket | None = None
        self._num_bytes = 0
        self._heard = threading.Condition()
        self._waiting = b""
        self._decoders = {stream: codecs.getincrementaldecoder("utf-8")("replace") for stream in (1, 2)}

    def signal(self, signum: int) -> None:
        """Sends the worker a signal, if it is there."""
        if self._connected is not None:
            with suppress(OSError):
                self._connected.send(bytes([signum]))

    def wait_until_heard(self, num_bytes: int) -> None:
        """Waits until so much output has come and is shown, not for long if the line is broken."""
        with self._heard:
            self._heard.wait_for(lambda: self._num_bytes >= num_bytes or self.closed.is_set(), _FLUSH_S)

    def connect(self, connected: socket.socket) -> None:
        """Begins."""
        self._connected = connected

    def hear(self, data: bytes) -> None:
        """Takes what has come and shows it."""
        self._waiting += data
        num_bytes = 0
        while len(self._waiting) >= _HEADER.size:
            stream, size = _HEADER.unpack_from(self._waiting)
            end = _HEADER.size + size
            if len(self._waiting) < end:
                break
            self._show(stream, self._waiting[_HEADER.size : end])
            self._waiting = self._waiting[end:]
            num_bytes += size
        if num_bytes:
            with self._heard:
                self._num_bytes += num_bytes
                self._heard.notify_all()

    def _show(self, stream: int, data: bytes) -> None:
        shown = sys.stderr if stream == 2 else sys.stdout
        with suppress(Exception):  # the user's stream; it may be closed
            shown.write(self._decoders[stream].decode(data))
            shown.flush()

    def close(self) -> None:
        """Ends it. A second call does no harm."""
        if self._connected is not None:
            self._connected.close()
            self._connected = None
        if not self.closed.is_set():
            self.closed.set()
            with self._heard:
                self._heard.notify_all()
            self._on_close()


class Switchboard:
    """Where the lines of a pool's workers end.

    Args:
        address: Of this host, as workers reach it.
    """

    def __init__(self, address: str) -> None:
        self._listening = socket.create_server((address, 0))
        self.address = address, self._listening.getsockname()[1]
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self._lines: dict[int, Line] = {}
        self._ours, self._theirs = socket.socketpair()
        threading.Thread(target=self._serve, daemon=True, name="lightning-strategies-ext lines").start()

    def expect(self, number: int, on_close: Callable[[], None]) -> Line:
        """The line of a worker that is about to be started.

        Args:
            number: Which tells it from the others.
            on_close: See :class:`Line`.
        """
        line = self._lines[number] = Line(on_close)
        return line

    def close(self) -> None:
        """Ends all lines."""
        with suppress(OSError):
            self._ours.send(b"x")

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listening, selectors.EVENT_READ)
            selector.register(self._theirs, selectors.EVENT_READ)
            is_open = True
            while is_open:
                for key, _ in selector.select():
                    if key.fileobj is self._theirs:
                        is_open = False
                    elif key.fileobj is self._listening:
                        self._accept(selector)
                    else:
                        self._hear(selector, key)
        for line in self._lines.values():
            line.close()
        for ours in (self._listening, self._ours, self._theirs):
            ours.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with suppress(OSError):
            connected, _ = self._listening.accept()
            try:
                connected.settimeout(_HELLO_S)
                hello = _received(connected, _SECRET_BYTES + _NUMBER.size)
                (number,) = _NUMBER.unpack(hello[_SECRET_BYTES:])
                if not hmac.compare_digest(hello[:_SECRET_BYTES], self.secret) or number not in self._lines:
                    raise OSError("a stranger")
                connected.settimeout(None)
                watch_peer(connected)
                self._lines[number].connect(connected)
                selector.register(connected, selectors.EVENT_READ, self._lines[number])
            except OSError:
                connected.close()

    def _hear(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        connected, line = key.fileobj, key.data
        assert isinstance(connected, socket.socket)
        data = b""
        with suppress(OSError):
            data = connected.recv(_MOST_BYTES)
        if data:
            line.hear(data)
        else:
            selector.unregister(connected)
            line.close()


# --- in a worker ---


class MainLine:
    """The line, in the worker: from here on, what the process prints goes over it.

    Args:
        address: Of the main process.
        secret: Which says that the worker belongs to it.
        number: Which worker this is.

    Raises:
        OSError: If the main process cannot be reached.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, number: int) -> None:
        try:
            self._connected = socket.create_connection(address, _CONNECT_S)
        except OSError as error:
            host, port = address
            raise OSError(f"the main process cannot be reached at {host}:{port} ({error})") from error
        self._connected.settimeout(None)
        watch_peer(self._connected)
        self._connected.sendall(secret + _NUMBER.pack(number))
        self._num_bytes = 0
        self._sending = threading.Lock()
        self._pipes: dict[int, int] = {}
        for stream in (1, 2):
            read, write = os.pipe()
            os.dup2(write, stream)
            os.close(write)
            self._pipes[stream] = read
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), "utf-8", "replace", line_buffering=True)
        sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), "utf-8", "replace", line_buffering=True)
        for target in (self._obey, self._say):
            threading.Thread(target=target, daemon=True, name="lightning-strategies-ext line").start()

    def flush(self) -> int:
        """Waits until all that was printed is on its way; returns how much that is so far, in bytes."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the user may have put another in its place
                stream.flush()
        deadline = time.monotonic() + _FLUSH_S
        while time.monotonic() < deadline:
            with self._sending:
                if not any(map(_num_bytes_in, self._pipes.values())):
                    break
            time.sleep(0.001)
        return self._num_bytes

    def _obey(self) -> None:
        while True:
            try:
                signums = self._connected.recv(16)
            except OSError:
                signums = b""
            if not signums:  # the main process is gone
                os.kill(os.getpid(), signal.SIGKILL)
            for signum in signums:
                os.kill(os.getpid(), signum)

    def _say(self) -> None:
        with selectors.DefaultSelector() as selector:
            for stream, pipe in self._pipes.items():
                selector.register(pipe, selectors.EVENT_READ, stream)
            while True:
                for key, _ in selector.select():
                    with self._sending:
                        data = os.read(key.fd, _MOST_BYTES)
                        with suppress(OSError):  # the other thread notices
                            self._connected.sendall(_HEADER.pack(key.data, len(data)) + data)
                        self._num_bytes += len(data)


def _num_bytes_in(pipe: int) -> int:
    size = struct.pack("i", 0)
    return int(struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, size))[0])


def _received(connected: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connected.recv(size - len(data))
        if not part:
            raise OSError("closed")
        data += part
    return data
