"""A TCP connection from each worker on Ray to the main process, in addition to the calls of the actor's methods.

It carries signals to the worker, output from the worker, and the messages of an elastic task (``LinkMessage`` of the
protocol). Each process detects at once that the other has exited, and a worker whose link closes kills itself. The
worker connects. The main process sends a challenge, and the worker proves that it has the secret that it received
through Ray. :class:`.MainLink` is the worker's side.

No worker can connect to a main process outside the cluster (Ray Client), which can only call methods of actors. Its
workers connect to a :class:`.LinkRelayActor` in the cluster, whose methods the main process calls.

Limitations: links are not encrypted, as Ray's own connections are not.
"""

import codecs
import hmac
import json
import math
import secrets
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from lightning_strategies_ext._system.frames import FrameDecoder, encode_frame
from lightning_strategies_ext._system.selector_loop import SelectorLoop
from lightning_strategies_ext.elastic.membership import Member
from lightning_strategies_ext.launch.protocol import (
    JoinedWorld,
    JoinPending,
    LinkMessage,
    LinkMessageToMain,
    LinkMessageToWorker,
    PeerLost,
    RankAssignment,
    ReadyToJoin,
    SendSignal,
    WorkerOutput,
    WorldMembers,
)

#: Seconds to wait until the main process has printed a worker's output.
FLUSH_TIMEOUT_S = 2.0
MAX_RECEIVED_BYTES = 1 << 16
_NUMBER = struct.Struct("!I")
_SECRET_BYTES = 32
#: Length of a challenge, and of its response, in bytes.
_PROOF_BYTES = 32
_CONNECT_TIMEOUT_S = 10.0
#: Time in which a connection has to prove that it belongs to a worker, in seconds.
_PROOF_S = 10.0
#: Number of open connections without a proof; further ones wait in the listener's queue.
_MAX_UNAUTHENTICATED = 64
#: Kinds of frames.
_STDOUT, _STDERR, _JSON = 1, 2, 3
_FROM_FIELDS: dict[str, Callable[..., LinkMessage]] = {
    kind.__name__: kind for kind in (ReadyToJoin, RankAssignment, JoinPending, SendSignal, PeerLost)
}


def encode_message(message: LinkMessage) -> bytes:
    """Returns the frame of a message."""
    if isinstance(message, WorkerOutput):
        return encode_frame(message.data, _STDERR if message.is_error else _STDOUT)
    return encode_frame(json.dumps([type(message).__name__, asdict(message)]).encode(), _JSON)


def decode_message(kind: int, data: bytes) -> LinkMessage:
    """Returns the message in a frame of :func:`encode_message`.

    Data from a link is never unpickled: otherwise a process with access to the network between hosts could run code.

    Args:
        kind: Kind of the frame.
        data: Contents of the frame.

    Raises:
        ValueError: If the frame contains no message.
    """
    if kind in (_STDOUT, _STDERR):
        return WorkerOutput(kind == _STDERR, data)
    name, fields = json.loads(data) if kind == _JSON else (str(kind), {})
    if name == "JoinedWorld":
        return JoinedWorld(Member.from_dict(fields["member"]))
    if name == "WorldMembers":
        return WorldMembers(fields["members"] and [Member.from_dict(member) for member in fields["members"]])
    if name not in _FROM_FIELDS:
        raise ValueError(f"unknown message {name!r}")
    if name == "RankAssignment" and isinstance(fields["store"], list):
        fields["store"] = tuple(fields["store"])
    return _FROM_FIELDS[name](**fields)


def connect_worker(address: tuple[str, int], secret: bytes, number: int) -> socket.socket:
    """Connects a worker, with its number, to a :class:`LinkServer`, and proves that it has the secret of the server.

    Raises:
        OSError: If the main process cannot be reached.
    """
    host, port = address
    try:
        connected = socket.create_connection(address, _CONNECT_TIMEOUT_S)
    except OSError as error:
        raise OSError(f"the main process cannot be reached at {host}:{port} ({error})") from error
    connected.settimeout(None)
    _enable_keepalive(connected)
    challenge = connected.recv(_PROOF_BYTES, socket.MSG_WAITALL)
    if len(challenge) < _PROOF_BYTES:
        raise OSError(f"the main process at {host}:{port} has closed the connection")
    own_number = _NUMBER.pack(number)
    connected.sendall(_proof(secret, challenge, own_number) + own_number)
    return connected


def _proof(secret: bytes, challenge: bytes, number: bytes) -> bytes:
    """Returns the response to a challenge, which proves that the sender has the secret."""
    return hmac.digest(secret, challenge + number, "sha256")


def _enable_keepalive(connected: socket.socket) -> None:
    """Enables TCP keepalive, so that the connection is closed within half a minute if the other host is lost."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, name):  # the last option is for unacknowledged data
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class WorkerLink:
    """Main process's side of the link to a worker.

    Args:
        on_update: Callable that another thread calls when a message has arrived, and when the link is closed.

    Attributes:
        connection: Connection of the worker; None until it has connected, and after the link was closed.
        closed: Event that is set when the link is closed.
        messages: Received messages, the oldest first.
    """

    def __init__(self, on_update: Callable[[], None]) -> None:
        self.connection: socket.socket | _RelayedSocket | None = None
        self.closed = threading.Event()
        self.messages: deque[ReadyToJoin | JoinedWorld] = deque()
        self._on_update = on_update
        self._num_bytes = 0
        self._received = threading.Condition()
        self._frames = FrameDecoder()
        self._decoders = {is_error: codecs.getincrementaldecoder("utf-8")("replace") for is_error in (False, True)}

    def send(self, message: LinkMessageToWorker) -> None:
        """Sends the worker a message, if the link is connected."""
        self.send_bytes(encode_message(message))

    def send_bytes(self, data: bytes) -> None:
        """Sends the worker bytes, if the link is connected."""
        # In one call and without a lock, because signal handlers send too: they run before or after the call.
        connection = self.connection
        if connection is not None:
            with suppress(OSError):
                connection.sendall(data)

    def receive(self, data: bytes) -> None:
        """Handles received data: prints output, and stores messages.

        Raises:
            ValueError: If the data contains no message of a worker.
        """
        num_bytes = 0
        for frame in self._frames.decode(data):
            message = decode_message(*frame)
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

    def wait_for_output(self, num_bytes: int) -> None:
        """Waits at most two seconds until this many bytes of output are printed, or the link is closed."""
        with self._received:
            self._received.wait_for(lambda: self._num_bytes >= num_bytes or self.closed.is_set(), FLUSH_TIMEOUT_S)

    def close(self) -> None:
        """Closes the link. A second call is a no-op."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if not self.closed.is_set():
            self.closed.set()
            with self._received:
                self._received.notify_all()
            self._on_update()


@dataclass
class _Unauthenticated:
    """State of a connection that has not proved that it belongs to a worker: its challenge, deadline, and response."""

    challenge: bytes
    deadline: float
    received: bytes = b""


class LinkServer:
    """Server to which the workers of a pool connect.

    Args:
        host: Address at which workers reach this host.

    Attributes:
        address: Address and port that workers connect to.
        secret: Secret that workers prove to have.
        links: Links by the number of their worker; numbers are never reused.
    """

    def __init__(self, host: str) -> None:
        self._listening = socket.create_server((host, 0))
        self.address = host, self._listening.getsockname()[1]
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self.links: dict[int, WorkerLink] = {}
        self._unauthenticated: dict[Any, _Unauthenticated] = {}
        self._loop = SelectorLoop()
        self._is_open = True
        threading.Thread(target=self._serve, daemon=True, name="lightning-strategies-ext links").start()

    def expect(self, number: int, on_update: Callable[[], None]) -> WorkerLink:
        """Creates the link of a worker that is about to be started."""
        link = self.links[number] = WorkerLink(on_update)
        return link

    def close(self) -> None:
        """Closes all links."""
        self._is_open = False
        self._loop.wake()

    def _serve(self) -> None:
        self._listening.setblocking(False)
        self._loop.add(self._listening, self._accept)
        while self._is_open:
            self._loop.wait(_PROOF_S if self._unauthenticated else math.inf)
            now = time.monotonic()
            for connected in [end for end, state in self._unauthenticated.items() if now > state.deadline]:
                self._end_proof(connected)
                connected.close()
        for link in self.links.values():
            link.close()
        for end in (self._listening, *self._unauthenticated):
            end.close()
        self._loop.close()

    def _accept(self) -> bool:
        """Accepts a connection and sends a challenge. Stops accepting while too many connections lack a proof."""
        with suppress(OSError):
            connected, _ = self._listening.accept()
            connected.setblocking(False)
            challenge = secrets.token_bytes(_PROOF_BYTES)
            connected.send(challenge)
            self._unauthenticated[connected] = _Unauthenticated(challenge, time.monotonic() + _PROOF_S)
            self._loop.add(connected, partial(self._take_proof, connected))
            if len(self._unauthenticated) == _MAX_UNAUTHENTICATED:
                self._loop.remove(self._listening)
        return True  # the connection has a deadline

    def _take_proof(self, connected: Any) -> bool:
        """Receives a proof. If it is valid and the worker's link is not connected, the link gets this connection."""
        state, part = self._unauthenticated[connected], b""
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
        _enable_keepalive(connected)
        link.connection = connected
        self._loop.add(connected, partial(self._receive, connected, link))
        return False

    def _end_proof(self, connected: Any) -> None:
        if len(self._unauthenticated) == _MAX_UNAUTHENTICATED:
            self._loop.add(self._listening, self._accept)
        self._loop.remove(connected)
        del self._unauthenticated[connected]

    def _link_of(self, state: _Unauthenticated) -> WorkerLink | None:
        """Returns the unconnected link of the worker that has sent a proof; None without a link or a valid proof."""
        proof, number = state.received[:_PROOF_BYTES], state.received[_PROOF_BYTES:]
        if len(number) < _NUMBER.size or not hmac.compare_digest(proof, _proof(self.secret, state.challenge, number)):
            return None
        link = self.links.get(*_NUMBER.unpack(number))
        return None if link is None or link.connection is not None or link.closed.is_set() else link

    def _receive(self, connected: socket.socket, link: WorkerLink) -> bool:
        data = b""
        with suppress(OSError):
            data = connected.recv(MAX_RECEIVED_BYTES)
        with suppress(ValueError):  # no worker sends such data: the link is closed
            if data:
                link.receive(data)
                return False
        self._loop.remove(connected)
        link.close()
        return False


# --- of a main process outside the cluster ---


class RelayedLinkServer:
    """A :class:`LinkServer` in the cluster, as the main process outside uses it.

    Args:
        relay: Ray's handle of the :class:`.LinkRelayActor`, which this object kills.
    """

    def __init__(self, relay: Any) -> None:
        import ray

        self._relay = relay
        self.address, self.secret = ray.get(relay.endpoint.remote())
        self.links: dict[int, WorkerLink] = {}
        self._is_open = True
        threading.Thread(target=self._receive, daemon=True, name="lightning-strategies-ext links").start()

    def expect(self, number: int, on_update: Callable[[], None]) -> WorkerLink:
        """Creates the link of a worker, like :meth:`LinkServer.expect`."""
        import ray

        link = self.links[number] = WorkerLink(on_update)
        ray.get(self._relay.expect.remote(number))
        link.connection = _RelayedSocket(self._relay, number)
        return link

    def close(self) -> None:
        """Closes all links, and kills the relay."""
        import ray

        self._is_open = False
        with suppress(Exception):  # Ray may have exited
            ray.kill(self._relay)
        self._close_links()

    def _close_links(self) -> None:
        for link in list(self.links.values()):
            link.close()

    def _receive(self) -> None:
        import ray

        try:
            while self._is_open:
                for number, data in ray.get(self._relay.events.remote()):
                    if data is None:
                        self.links[number].close()
                    else:
                        self.links[number].receive(data)
        except Exception:  # the relay or the cluster has exited, or the connection is lost
            self._close_links()


class _RelayedSocket:
    """The part of a socket that a :class:`WorkerLink` uses; sends through the relay."""

    def __init__(self, relay: Any, number: int) -> None:
        self._relay = relay
        self._number = number

    def sendall(self, data: bytes) -> None:
        try:
            self._relay.send_bytes.remote(self._number, data)
        except Exception as error:
            raise OSError("the cluster is unavailable") from error

    def close(self) -> None:
        """A no-op: the relay closes the connection."""
