"""A TCP connection from each worker on Ray to the main process, in addition to the calls of the actor's methods.

It carries signals to the worker, output from the worker, and the messages of an elastic task (``LinkMessage`` of the
protocol). Each process detects at once that the other has exited, and a worker whose link closes kills itself. The
worker connects. The main process sends a challenge, and the worker proves that it has the secret that it received
through Ray.

The contents of a link are not encrypted, as those of Ray's own connections are not.
"""

import codecs
import fcntl
import hmac
import io
import math
import os
import secrets
import signal
import socket
import struct
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_strategies_ext._system.frames import FrameDecoder, encode_frame
from lightning_strategies_ext._system.selector_loop import SelectorLoop
from lightning_strategies_ext.launch.protocol import (
    JoinedWorld,
    LinkMessage,
    LinkMessageToMain,
    LinkMessageToWorker,
    PeerLost,
    ReadyToJoin,
    SendSignal,
    WorkerOutput,
    decode,
    encode,
)

_NUMBER = struct.Struct("!I")
_SECRET_BYTES = 32
#: Length of a challenge, and of its response, in bytes.
_PROOF_BYTES = 32
_CONNECT_S = 10.0
#: Time in which a connection has to prove that it belongs to a worker, in seconds.
_PROOF_S = 10.0
#: Number of open connections without a proof; further ones wait in the listener's queue.
_MAX_UNPROVED = 64
_MAX_RECEIVED_BYTES = 1 << 16
_FLUSH_S = 2.0


def enable_worker_keepalive(connected: socket.socket) -> None:
    """Enables TCP keepalive, so that the connection is closed within half a minute if the other host is lost."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # the same for unacknowledged data
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _frame(message: LinkMessage) -> bytes:
    kind, data = encode(message)
    return encode_frame(data, kind)


# --- in the main process ---


class WorkerLink:
    """Main process's side of the link to a worker.

    Args:
        on_update: Callable that another thread calls when a message has arrived, and when the link is closed.

    Attributes:
        closed: Event that is set when the link is closed.
        messages: Received messages, the oldest first.
    """

    def __init__(self, on_update: Callable[[], None]) -> None:
        self.closed = threading.Event()
        self.messages: deque[ReadyToJoin | JoinedWorld] = deque()
        self._on_update = on_update
        self._connected: socket.socket | None = None
        self._num_bytes = 0
        self._received = threading.Condition()
        self._frames = FrameDecoder()
        self._decoders = {is_error: codecs.getincrementaldecoder("utf-8")("replace") for is_error in (False, True)}

    @property
    def is_connected(self) -> bool:
        """Whether the worker has connected, and the link is not closed."""
        return self._connected is not None

    def send(self, message: LinkMessageToWorker) -> None:
        """Sends the worker a message, if the link is connected."""
        # In one call and without a lock, because signal handlers send too: they run before or after the call.
        connected = self._connected
        if connected is not None:
            with suppress(OSError):
                connected.sendall(_frame(message))

    def wait_for_output(self, num_bytes: int) -> None:
        """Waits at most two seconds until this many bytes of output are printed, or the link is closed."""
        with self._received:
            self._received.wait_for(lambda: self._num_bytes >= num_bytes or self.closed.is_set(), _FLUSH_S)

    def connect(self, connected: socket.socket) -> None:
        """Sets the connection of the worker."""
        self._connected = connected

    def receive(self, data: bytes) -> None:
        """Handles received data: prints output, and stores messages.

        Raises:
            ValueError: If the data contains no message of a worker.
        """
        num_bytes = 0
        for frame in self._frames.decode(data):
            message = decode(*frame)
            if isinstance(message, WorkerOutput):
                self._print(message)
                num_bytes += len(message.data)
            elif isinstance(message, LinkMessageToMain):
                self.messages.append(message)
                self._on_update()
            else:
                raise ValueError(f"a worker has sent {message}")
        if num_bytes:
            with self._received:
                self._num_bytes += num_bytes
                self._received.notify_all()

    def _print(self, output: WorkerOutput) -> None:
        target = sys.stderr if output.is_error else sys.stdout
        with suppress(Exception):  # the user may have closed the stream
            target.write(self._decoders[output.is_error].decode(output.data))
            target.flush()

    def close(self) -> None:
        """Closes the link. A second call is a no-op."""
        if self._connected is not None:
            self._connected.close()
            self._connected = None
        if not self.closed.is_set():
            self.closed.set()
            with self._received:
                self._received.notify_all()
            self._on_update()


@dataclass
class _Unproved:
    """State of a connection that has not proved that it belongs to a worker.

    Attributes:
        challenge: Bytes that the connection received.
        deadline: Time until which it may send the proof, on the monotonic clock, in seconds.
        received: Bytes that it has sent.
    """

    challenge: bytes
    deadline: float
    received: bytes = b""


class LinkServer:
    """Server to which the workers of a pool connect.

    Args:
        address: Address at which workers reach this host.
    """

    def __init__(self, address: str) -> None:
        self._listening = socket.create_server((address, 0))
        self.address = address, self._listening.getsockname()[1]
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self._links: dict[int, WorkerLink] = {}
        self._unproved: dict[Any, _Unproved] = {}
        self._loop = SelectorLoop()
        self._is_open = True
        threading.Thread(target=self._serve, daemon=True, name="lightning-strategies-ext links").start()

    def expect(self, number: int, on_update: Callable[[], None]) -> WorkerLink:
        """Creates the link of a worker that is about to be started, with a number that no earlier worker has had."""
        link = self._links[number] = WorkerLink(on_update)
        return link

    def close(self) -> None:
        """Closes all links."""
        self._is_open = False
        self._loop.wake()

    def _serve(self) -> None:
        self._listening.setblocking(False)
        self._loop.add(self._listening, self._accept)
        while self._is_open:
            self._loop.wait(_PROOF_S if self._unproved else math.inf)
            now = time.monotonic()
            for connected in [end for end, state in self._unproved.items() if now > state.deadline]:
                self._end_proof(connected)
                connected.close()
        for link in self._links.values():
            link.close()
        for end in (self._listening, *self._unproved):
            end.close()
        self._loop.close()

    def _accept(self) -> bool:
        """Accepts a connection and sends a challenge. Stops accepting while too many connections lack a proof."""
        with suppress(OSError):
            connected, _ = self._listening.accept()
            connected.setblocking(False)
            challenge = secrets.token_bytes(_PROOF_BYTES)
            connected.send(challenge)
            self._unproved[connected] = _Unproved(challenge, time.monotonic() + _PROOF_S)
            self._loop.add(connected, partial(self._take_proof, connected))
            if len(self._unproved) == _MAX_UNPROVED:
                self._loop.remove(self._listening)
        return True  # the connection has a deadline

    def _take_proof(self, connected: Any) -> bool:
        """Receives a proof, and makes the connection that of the worker, if it is the worker's first connection."""
        state, part = self._unproved[connected], b""
        with suppress(OSError):
            part = connected.recv(_PROOF_BYTES + _NUMBER.size - len(state.received))
        state.received += part
        if part and len(state.received) < _PROOF_BYTES + _NUMBER.size:
            return False
        self._end_proof(connected)
        link = self._link_of(state)
        if link is None:
            connected.close()
            return False
        connected.setblocking(True)
        enable_worker_keepalive(connected)
        link.connect(connected)
        self._loop.add(connected, partial(self._receive, connected, link))
        return False

    def _end_proof(self, connected: Any) -> None:
        if len(self._unproved) == _MAX_UNPROVED:
            self._loop.add(self._listening, self._accept)
        self._loop.remove(connected)
        del self._unproved[connected]

    def _link_of(self, state: _Unproved) -> WorkerLink | None:
        """Returns the link that a connection has proved to belong to; None without a proof or an unconnected link."""
        proof, number = state.received[:_PROOF_BYTES], state.received[_PROOF_BYTES:]
        # The secret itself is accepted as a proof, too; workers of this version do not send it.
        expected = (_proof(self.secret, state.challenge, number), self.secret)
        if len(number) < _NUMBER.size or not any(hmac.compare_digest(proof, valid) for valid in expected):
            return None
        link = self._links.get(*_NUMBER.unpack(number))
        return None if link is None or link.is_connected or link.closed.is_set() else link

    def _receive(self, connected: socket.socket, link: WorkerLink) -> bool:
        data = b""
        with suppress(OSError):
            data = connected.recv(_MAX_RECEIVED_BYTES)
        with suppress(ValueError):  # no worker sends such data: the link is closed
            if data:
                link.receive(data)
                return False
        self._loop.remove(connected)
        link.close()
        return False


# --- in a worker ---


class MainLink:
    """Worker's side of the link to the main process. Redirects the output of this process to the link.

    Args:
        address: Address and port of the link server.
        secret: Secret that proves that the worker belongs to the main process.
        number: Number of this worker.

    Attributes:
        channel: Channel for the messages of a running task.

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
        enable_worker_keepalive(self._connected)
        own_number = _NUMBER.pack(number)
        self._connected.sendall(_proof(secret, _received(self._connected, _PROOF_BYTES), own_number) + own_number)
        # DataLoader workers must not keep the connection open after this process has exited.
        os.register_at_fork(after_in_child=self._connected.close)
        self._num_bytes = 0
        self._sending = threading.Lock()
        self.channel = LinkChannel(self._send_message)
        self._pipes: dict[int, int] = {}
        for stream in (1, 2):
            read, write = os.pipe()
            os.dup2(write, stream)
            os.close(write)
            self._pipes[stream] = read
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), "utf-8", "replace", line_buffering=True)
        sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), "utf-8", "replace", line_buffering=True)
        for target in (self._run_commands, self._forward_output):
            threading.Thread(target=target, daemon=True, name="lightning-strategies-ext link").start()

    def flush(self) -> int:
        """Waits at most two seconds until all output is sent; returns the number of bytes sent so far."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the user may have replaced the stream
                stream.flush()
        deadline = time.monotonic() + _FLUSH_S
        while time.monotonic() < deadline:
            with self._sending:
                if not any(map(_num_bytes_in, self._pipes.values())):
                    break
            time.sleep(0.001)
        return self._num_bytes

    def _run_commands(self) -> None:
        frames = FrameDecoder()
        while True:
            messages: list[LinkMessage] | None = None
            with suppress(OSError, ValueError):
                data = self._connected.recv(_MAX_RECEIVED_BYTES)
                messages = [decode(*frame) for frame in frames.decode(data)] if data else None
            if messages is None:  # the main process has exited, or does not follow the protocol
                os.kill(os.getpid(), signal.SIGKILL)
            for message in messages or ():
                if isinstance(message, SendSignal):
                    os.kill(os.getpid(), message.signum)
                elif isinstance(message, PeerLost):
                    self.channel.on_peer_loss(message.world_number)
                else:
                    self.channel.put(message)

    def _send_message(self, message: LinkMessageToMain) -> None:
        with self._sending:
            self._connected.sendall(_frame(message))

    def _forward_output(self) -> None:
        loop = SelectorLoop()
        for stream, pipe in self._pipes.items():
            loop.add(pipe, partial(self._forward, pipe, is_error=stream == 2))
        loop.wait()

    def _forward(self, pipe: int, *, is_error: bool) -> bool:
        with self._sending:
            data = os.read(pipe, _MAX_RECEIVED_BYTES)
            with suppress(OSError):  # the other thread detects it
                self._connected.sendall(_frame(WorkerOutput(is_error, data)))
            self._num_bytes += len(data)
        return False


class LinkChannel:
    """A :class:`.TaskChannel` over the link, for :class:`.WorkerMembership`.

    Args:
        send: Callable that sends a message to the main process.

    Attributes:
        socket: Socket that is readable when there is a message.
        on_peer_loss: Callable that another thread calls when another worker has exited, with the number of their
            world, before messages about the next world arrive.
    """

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send_to_main = send
        self._received: deque[LinkMessage] = deque()
        self.socket, self._wakeup_fd = socket.socketpair()
        self.on_peer_loss: Callable[[int], None] = lambda world: None

    def put(self, message: LinkMessage) -> None:
        """Adds a received message. Any thread may call it."""
        self._received.append(message)
        self._wakeup_fd.send(b"!")

    def send(self, message: Any) -> None:
        """Sends a message.

        Raises:
            OSError: If the main process has exited.
        """
        self._send_to_main(message)

    def receive(self) -> Any:
        """Waits for a message."""
        self.socket.recv(1)
        return self._received.popleft()


def _proof(secret: bytes, challenge: bytes, number: bytes) -> bytes:
    """Returns the response to a challenge, which proves that the sender has the secret."""
    return hmac.digest(secret, challenge + number, "sha256")


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
