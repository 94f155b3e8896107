"""Code that runs on a Ray cluster: a worker's actor, its link to the main process, and the actor that relays links.

Each call of the method ``handle`` of a worker answers one message of the main process. Tasks and replies are small
pickles with separate buffers (pickle protocol 5). Ray writes each buffer once to its object store, without pickling it;
a reader on the same host gets views of the buffers.
"""

import fcntl
import gc
import importlib
import io
import os
import pickle
import queue
import signal
import socket
import struct
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import psutil
from typing_extensions import override

from lightning_strategies_ext._system.connections import release_ports, reserve_port
from lightning_strategies_ext._system.frames import FrameDecoder
from lightning_strategies_ext._system.selector_loop import SelectorLoop
from lightning_strategies_ext.launch.processes.worker_main import WorkerService, WorkerSession
from lightning_strategies_ext.launch.protocol import (
    LinkMessage,
    LinkMessageToMain,
    PeerLost,
    RunTask,
    SendSignal,
    TaskFailed,
    TensorChunk,
    WorkerHostInfo,
    WorkerOutput,
    WorkerSetup,
)
from lightning_strategies_ext.launch.ray.worker_link import (
    FLUSH_TIMEOUT_S,
    MAX_RECEIVED_BYTES,
    LinkServer,
    WorkerLink,
    connect_worker,
    decode_message,
    encode_message,
)
from lightning_strategies_ext.launch.transport.channel import ReceivedMessage
from lightning_strategies_ext.launch.transport.memory_files import MemoryFile
from lightning_strategies_ext.launch.transport.pickling import Pickled, dump, use_remote_main

#: Seconds that a call of :meth:`LinkRelayActor.events` waits for an event.
_EVENTS_TIMEOUT_S = 5.0
_MAX_EVENTS = 1000
#: Number of a worker, and the data that its link has received; None if the link is closed.
Event = tuple[int, bytes | None]


@dataclass
class RayPayload:
    """A pickled object that is sent through Ray.

    Attributes:
        data: The pickle.
        buffers: Memory that the pickle refers to; read-only at the receiver.
    """

    data: bytes
    buffers: list[Any] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        # Ray's own views of its memory, which a Ray Client server forwards, cannot be pickled.
        raw = [buffer.raw() if isinstance(buffer, pickle.PickleBuffer) else buffer for buffer in self.buffers]
        return {"data": self.data, "buffers": [pickle.PickleBuffer(buffer) for buffer in raw]}

    def load(self, *, is_only_read: bool) -> Any:
        """Rebuilds the object.

        Args:
            is_only_read: Whether the object is only read and not kept, so that its buffers are not copied.
        """
        buffers = [_view(buffer) if is_only_read else bytearray(buffer) for buffer in self.buffers]
        return Pickled(self.data, buffers).load()

    def to_received_message(self) -> ReceivedMessage:
        """Returns a copy in memory of this worker, like a channel's message, so that changes in it can be detected."""
        if not self.buffers:
            return ReceivedMessage(Pickled(self.data))
        file = MemoryFile.write([self.data, *self.buffers])
        data, *buffers = file.map(private=True)
        return ReceivedMessage(Pickled(bytes(data), buffers), [file])


class _WritableView:
    """Memory that NumPy treats as writable: torch warns about read-only memory, even if it is never written to."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        address, _ = np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"]
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (memoryview(buffer).nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _view(buffer: Any) -> Any:
    array: Any = np.asarray(_WritableView(buffer))
    return memoryview(array)


@dataclass
class ActorReply:
    """A worker's reply.

    Attributes:
        payload: The pickled reply.
        is_only_read: Whether the object is only read, see :meth:`RayPayload.load`.
        num_output_bytes: Number of bytes of output that the worker has sent over its link before.
    """

    payload: RayPayload
    is_only_read: bool
    num_output_bytes: int


class WorkerActor:
    """A worker. Ray calls its methods one after the other in the main thread, which receives signals.

    The arguments are those of :class:`MainLink`.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, number: int) -> None:
        gc.disable()  # as in `worker_main.command`
        self._link = MainLink(address, secret, number)
        self._service: WorkerService | None = None
        self._remaining_replies: Iterator[Any] = iter(())

    def info(self, paths: Sequence[str], modules: Sequence[str], packages: Sequence[str]) -> WorkerHostInfo:
        """Imports the modules that tasks need, and returns information about the worker.

        Args:
            paths: Module search path of the main process. Those that exist here are appended to the worker's.
            modules: Names of the modules to import.
            packages: Names of the packages whose versions are returned.
        """
        import ray

        sys.path.extend(path for path in paths if path not in sys.path and os.path.exists(path))
        for module in modules:
            importlib.import_module(module)
        host = ray.get_runtime_context().get_node_id()
        address = ray.util.get_node_ip_address()
        interfaces = psutil.net_if_addrs().items()
        interface = next((name for name, found in interfaces if any(each.address == address for each in found)), None)
        return WorkerHostInfo(os.getpid(), host, address, interface, reserve_port(address), versions(packages))

    def start(self, start: WorkerSetup) -> TaskFailed | None:
        """Prepares the worker for tasks; returns the failure if that fails, else None."""
        use_remote_main()
        info = start.rank_info
        if info is None or info.rank > 0 or info.num_nodes == 1:  # this rank serves no store at the port
            release_ports()
        _restore_signal_handling()
        self._service = WorkerService(WorkerSession(start, self._link))
        return self._service.set_up(start)

    def handle(self, message: Any, task: RayPayload | None = None) -> ActorReply:
        """Handles a message of the main process, and returns the reply. A :class:`.RunTask` comes with its task."""
        assert self._service is not None
        self.finish_reply()
        if isinstance(message, RunTask):
            assert task is not None
        self._remaining_replies = self._service.handle(message, (task or RayPayload(b"")).to_received_message)
        del task
        reply = next(self._remaining_replies)
        try:
            pickled = dump(reply, is_return=True)
        except Exception as exception:
            reply = self._service.fail_unsent_result(exception)
            pickled = dump(reply, is_return=True)
        payload = RayPayload(pickled.data, pickled.buffers)
        return ActorReply(payload, isinstance(reply, TensorChunk), self._link.flush())

    def finish_reply(self) -> None:
        """Completes the handling of the last message after its reply; exits if the worker is finished."""
        for _ in self._remaining_replies:
            pass
        if self._service is not None and self._service.is_finished:
            self.end()

    def end(self) -> None:
        """Shuts down the worker and exits."""
        import ray

        self._remaining_replies = iter(())
        self._service = None
        gc.collect()  # shuts down DataLoader workers
        self._link.flush()
        ray.actor.exit_actor()


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Returns the versions of packages by name, and imports them."""
    return {name: str(getattr(importlib.import_module(name), "__version__", "?")) for name in packages}


def _restore_signal_handling() -> None:
    """Makes this process handle the link's signals as a worker without Ray does, and ignore a terminal's Ctrl-C.

    Ray starts workers with SIGINT blocked. Its handler of SIGTERM exits, and Lightning would call it in addition to its
    own.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])


class MainLink:
    """Worker's side of the link to the main process: redirects the output of this process, and receives signals.

    It is the :class:`.TaskChannel` of an elastic task.

    Args:
        address: Address and port of the link server.
        secret: Secret that proves that the worker belongs to the main process.
        number: Number of this worker.

    Attributes:
        socket: Socket that is readable when there is a message for the task.
        on_peer_loss: Callable that another thread calls when another worker has exited, with the number of their
            world, before messages about the next world arrive.

    Raises:
        OSError: If the main process cannot be reached.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, number: int) -> None:
        self._connected = connect_worker(address, secret, number)
        # DataLoader workers must not keep the connection open after this process has exited.
        os.register_at_fork(after_in_child=self._connected.close)
        self._num_bytes = 0
        self._sending = threading.Lock()
        self._messages: deque[LinkMessage] = deque()
        self.socket, self._wakeup = socket.socketpair()
        self.on_peer_loss: Callable[[int], None] = lambda world: None
        self._pipes: dict[int, int] = {}
        for stream in (1, 2):
            self._pipes[stream], write = os.pipe()
            os.dup2(write, stream)
            os.close(write)
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), "utf-8", "replace", line_buffering=True)
        sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), "utf-8", "replace", line_buffering=True)
        for target in (self._receive, self._forward_output):
            threading.Thread(target=target, daemon=True, name="lightning-strategies-ext link").start()

    def send(self, message: LinkMessageToMain) -> None:
        """Sends a message.

        Raises:
            OSError: If the main process has exited.
        """
        with self._sending:
            self._connected.sendall(encode_message(message))

    def receive(self) -> LinkMessage:
        """Waits for a message for the task."""
        self.socket.recv(1)
        return self._messages.popleft()

    def flush(self) -> int:
        """Waits at most two seconds until all output is sent; returns the number of bytes sent so far."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the user may have replaced the stream
                stream.flush()
        deadline = time.monotonic() + FLUSH_TIMEOUT_S
        while time.monotonic() < deadline:
            with self._sending:
                if not any(map(_num_bytes_in, self._pipes.values())):
                    break
            time.sleep(0.001)
        return self._num_bytes

    def _receive(self) -> None:
        frames = FrameDecoder()
        while True:
            messages: list[LinkMessage] | None = None
            with suppress(OSError, ValueError):
                data = self._connected.recv(MAX_RECEIVED_BYTES)
                messages = [decode_message(*frame) for frame in frames.decode(data)] if data else None
            if messages is None:  # the main process has exited, or does not follow the protocol
                os.kill(os.getpid(), signal.SIGKILL)
            for message in messages or ():
                if isinstance(message, SendSignal):
                    os.kill(os.getpid(), message.signum)
                elif isinstance(message, PeerLost):
                    self.on_peer_loss(message.world_number)
                else:
                    self._messages.append(message)
                    self._wakeup.send(b"!")

    def _forward_output(self) -> None:
        loop = SelectorLoop()
        for stream, pipe in self._pipes.items():
            loop.add(pipe, partial(self._forward, pipe, is_error=stream == 2))
        loop.wait()

    def _forward(self, pipe: int, *, is_error: bool) -> bool:
        with self._sending:
            data = os.read(pipe, MAX_RECEIVED_BYTES)
            with suppress(OSError):  # the other thread detects it
                self._connected.sendall(encode_message(WorkerOutput(is_error, data)))
            self._num_bytes += len(data)
        return False


def _num_bytes_in(pipe: int) -> int:
    size = struct.pack("i", 0)
    return int(struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, size))[0])


class LinkRelayActor:
    """A link server in the cluster for a main process outside of it, which calls the methods concurrently.

    Args:
        timeout_s: Seconds after which a main process that requests no events counts as exited. The relay then exits,
            which closes the links and so terminates the workers.
    """

    def __init__(self, timeout_s: float) -> None:
        import ray

        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._link_server = LinkServer(ray.util.get_node_ip_address())
        self._timeout_s = timeout_s
        self._last_call_at = time.monotonic()
        threading.Thread(target=self._exit_after_timeout, daemon=True, name="lightning-strategies-ext relay").start()

    def endpoint(self) -> tuple[tuple[str, int], bytes]:
        """Returns the address and port that workers connect to, and the secret that they prove to have."""
        return self._link_server.address, self._link_server.secret

    def expect(self, number: int) -> None:
        """Creates the link of a worker that is about to be started."""
        self._link_server.links[number] = _RelayedLink(number, self._events)

    def events(self) -> list[Event]:
        """Returns new events, after a short wait if there are none."""
        self._last_call_at = time.monotonic()
        found: list[Event] = []
        with suppress(queue.Empty):
            found.append(self._events.get(timeout=_EVENTS_TIMEOUT_S))
            while len(found) < _MAX_EVENTS:
                found.append(self._events.get_nowait())
        return found

    def send_bytes(self, number: int, data: bytes) -> None:
        """Sends bytes to a worker."""
        self._link_server.links[number].send_bytes(data)

    def _exit_after_timeout(self) -> None:
        while time.monotonic() - self._last_call_at < self._timeout_s:
            time.sleep(1)
        os._exit(1)


class _RelayedLink(WorkerLink):
    """Link of the relay, which forwards received data as events."""

    def __init__(self, number: int, events: "queue.SimpleQueue[Event]") -> None:
        super().__init__(lambda: events.put((number, None)))
        self._number = number
        self._events = events

    @override
    def receive(self, data: bytes) -> None:
        self._events.put((self._number, data))
