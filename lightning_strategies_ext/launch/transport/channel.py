"""Channel between two processes of one host: objects over a Unix socket, their tensors in memory files.

Objects that the sender shares with other processes (:mod:`.reducers`) are shared with the receiver too.

Limitations: only one thread at a time may use each endpoint.
"""

import io
import pickle
import socket
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Protocol

from lightning_strategies_ext._system.frames import HEADER_NUM_BYTES, decode_header, encode_frame
from lightning_strategies_ext.launch.transport.memory_files import MAX_DESCRIPTORS, MemoryFile, MemoryFileCache
from lightning_strategies_ext.launch.transport.pickling import Pickled, dump
from lightning_strategies_ext.launch.transport.reducers import Descriptor, locate

#: Maximum size in bytes of a message without tensors that is sent through the socket itself.
MAX_INLINE_BYTES = 1 << 16


class TaskChannel(Protocol):
    """Connection of a running task to the main process."""

    @property
    def socket(self) -> Any:
        """Object to wait on, which is ready when a message has arrived."""

    def send(self, obj: Any) -> None:
        """Sends a message.

        Raises:
            OSError: If the main process has exited.
        """

    def receive(self) -> Any:
        """Waits for a message and returns it.

        Raises:
            EOFError: If the main process has exited.
        """


class PreparedMessage:
    """A message that is written once and can be sent to several receivers. Close it afterwards.

    Args:
        pickled: The message; its buffers are not needed after the constructor returns.
        cache: Memory files of earlier messages, so that large buffers that have not changed are not written again.
    """

    def __init__(self, pickled: Pickled, cache: MemoryFileCache | None = None) -> None:
        self._files: list[MemoryFile] = []
        self._handles = pickled.handles  # the handles own the descriptors and names
        self._fds: list[int] = []
        self._inline = pickled.data
        if not pickled.buffers and len(pickled.data) <= MAX_INLINE_BYTES:
            return
        located = {number: locate(handle) for number, handle in pickled.handles.items()}
        self._fds = [location for location in located.values() if isinstance(location, int)]
        written = {number: buffer for number, buffer in enumerate(pickled.buffers) if number not in pickled.handles}
        cached = {} if cache is None else cache.files_for(written)
        small = [number for number in written if number not in cached]
        own = MemoryFile.write([pickled.data, *(written[number] for number in small)])
        self._files = list({id(file): file for file in [own, *cached.values()]}.values())
        # Location of each buffer: a file and its span there; the names of shared memory; None for a descriptor.
        locations: dict[int, Any] = {number: (0, span) for span, number in enumerate(small, 1)}
        locations.update((number, (self._files.index(file), 0)) for number, file in cached.items())
        locations.update(
            (number, None if isinstance(location, int) else location) for number, location in located.items()
        )
        spans = [file.spans for file in self._files]
        self._inline = pickle.dumps((spans, [locations[number] for number in range(len(pickled.buffers))]))

    def send(self, channel: "Channel") -> None:
        """Sends the message.

        Raises:
            OSError: If the other process has closed the channel or exited.
        """
        # The kind of the frame is the number of memory files, whose descriptors are sent with its first bytes.
        frame = encode_frame(self._inline, kind=len(self._files))
        sent = socket.send_fds(channel.socket, [frame[:HEADER_NUM_BYTES]], [file.fd for file in self._files])
        channel.socket.sendall(frame[sent:])
        for start in range(0, len(self._fds), MAX_DESCRIPTORS):
            socket.send_fds(channel.socket, [b"d"], self._fds[start : start + MAX_DESCRIPTORS])

    def close(self) -> None:
        """Closes the memory that is not in the cache; sent messages stay valid."""
        if self._files:
            self._files[0].close()


class ReceivedMessage:
    """A received message that is not unpickled yet.

    Args:
        pickled: The message.
        files: Mapped memory files that hold the message's tensors; owned by this object.

    Attributes:
        received_objects: Objects of the message after :meth:`open`, see :attr:`.SharedObjects.in_message`.
    """

    def __init__(self, pickled: Pickled, files: Sequence[MemoryFile] = ()) -> None:
        self.pickled = pickled
        self.files = files
        self.received_objects: dict[int, Any] = {}

    def open(self) -> Any:
        """Rebuilds the object, and sets :attr:`received_objects`.

        Raises:
            UnreadableTaskError: If the object cannot be rebuilt.
        """
        self.received_objects = {}
        try:
            return self.pickled.load(received_objects=self.received_objects)
        except (MemoryError, OSError):
            raise
        except Exception as error:
            raise UnreadableTaskError.from_error(self.pickled, error) from error

    def close(self) -> None:
        """Closes the descriptors; rebuilt tensors stay valid."""
        for file in self.files:
            file.close()


class Channel:
    """One endpoint of a channel, which owns one of the two sockets of ``socket.socketpair()``."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected

    def send(self, obj: Any) -> None:
        """Sends an object.

        Raises:
            OSError: If the other process has closed the channel or exited.
            Exception: If the object cannot be pickled.
        """
        message = PreparedMessage(dump(obj, is_return=True))
        try:
            message.send(self)
        finally:
            message.close()

    def receive_message(self, *, private: bool = False) -> ReceivedMessage:
        """Waits for a message and returns it.

        Args:
            private: Whether its memory has other receivers too, so that writes must stay in this process.

        Raises:
            EOFError: If the other process has closed the channel or exited.
            RuntimeError: If this process cannot open the memory files.
        """
        header, fds, flags, _ = socket.recv_fds(self.socket, HEADER_NUM_BYTES, MAX_DESCRIPTORS)
        if flags & socket.MSG_CTRUNC:
            raise RuntimeError("The memory of a message cannot be opened. Raise the limit of open files (`ulimit -n`).")
        num_files, length = decode_header(header + self._receive_exactly(HEADER_NUM_BYTES - len(header)))
        inline = self._receive_exactly(length)
        if not num_files:
            return ReceivedMessage(Pickled(inline))
        spans, locations = pickle.loads(inline)
        files = [MemoryFile(fd, file_spans) for fd, file_spans in zip(fds, spans, strict=True)]
        mapped = [file.map(private=private) for file in files]
        descriptors = iter(self._receive_descriptors(locations.count(None)))
        buffers: list[Any] = []
        for location in locations:
            if location is None:
                buffers.append(next(descriptors))
            elif isinstance(location[0], bytes):
                buffers.append(location)
            else:
                file, span = location
                buffers.append(mapped[file][span])
        return ReceivedMessage(Pickled(bytes(mapped[0][0]), buffers), files)

    def receive(self) -> Any:
        """Waits for an object and rebuilds it.

        Raises:
            EOFError: If the other process has closed the channel or exited.
        """
        message = self.receive_message()
        message.close()
        return message.pickled.load()

    def fileno(self) -> int:
        """Returns the socket's descriptor, to wait on."""
        return self.socket.fileno()

    def close(self) -> None:
        """Closes this endpoint."""
        self.socket.close()

    def _receive_descriptors(self, number: int) -> list[Descriptor]:
        received: list[Descriptor] = []
        while len(received) < number:
            byte, fds, flags, _ = socket.recv_fds(self.socket, 1, MAX_DESCRIPTORS)
            received += [Descriptor(fd) for fd in fds]
            if not byte:
                raise EOFError("the other process has closed the channel or exited")
            if flags & socket.MSG_CTRUNC:
                raise RuntimeError(
                    f"A worker received {number} shared tensors and multiprocessing objects, more than it can open."
                    " Raise the limit of open files (`ulimit -n`), or share fewer, larger tensors."
                )
        return received

    def _receive_exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self.socket.recv(min(size, 1 << 20))
            if not part:
                raise EOFError("the other process has closed the channel or exited")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


# --- which part of a task cannot be rebuilt ---

# Classes of objects that the user knows, by name, because this package does not import Lightning.
_ROOTS = {
    "LightningModule": "the LightningModule",
    "LightningDataModule": "the datamodule",
    "Callback": "the callback",
    "Logger": "the logger",
    "Profiler": "the profiler",
    "DataLoader": "the loader",
    "Dataset": "the dataset",
    "Strategy": "the strategy",
    "Trainer": "the Trainer",
}
_MODULE_REGISTRIES = ("_modules", "_parameters", "_buffers")


class UnreadableTaskError(TypeError):
    """A worker cannot rebuild its task. The message names the part by the names that the user knows."""

    @classmethod
    def from_error(cls, pickled: Pickled, error: Exception) -> "UnreadableTaskError":
        """Returns the error for a task whose unpickling has raised ``error``."""
        name = "An object that the workers need"
        with suppress(Exception):
            name = _find_unreadable(pickled) or name
        return cls(
            f"{name} cannot be rebuilt in the worker processes: {type(error).__name__}: {error}. Make sure that pickle"
            " can rebuild it in another process, and that importing its module defines or registers all that it needs"
            " (`setup` runs in the workers too), or use `strategy='ddp_fork_ext'`, whose workers inherit the main"
            " process's objects."
        )


def _find_unreadable(pickled: Pickled) -> str | None:
    # pickle's unpickler in Python (CPython 3.10 to 3.14) keeps its stack when it fails: the objects and dictionaries
    # that are not complete yet, each dictionary with the items before the one that failed.
    unpickler: Any = pickle._Unpickler(io.BytesIO(pickled.data), buffers=pickled.buffers)
    with suppress(Exception):
        unpickler.load()
        return None
    root: str | None = None
    path: list[str] = []
    levels = [*unpickler.metastack, unpickler.stack]
    for before, level in pairwise([[], *levels]):
        start = 0
        if before and isinstance(before[-1], dict):
            # Names and values alternate; the parts of the incomplete value follow the last name.
            while start + 2 < len(level) and isinstance(level[start + 2], str):
                start += 2
            path += map(str, level[start : start + 1])
            start += 1
        for previous, part in pairwise([None, *level[start:]]):
            if isinstance(previous, dict) and isinstance(part, str):
                path.append(part)
            elif (name := _root_name(part)) is not None:
                root, path = name, []
    names = ".".join(name for name in path if name not in _MODULE_REGISTRIES)
    if root is None:
        return None
    return f"`{names}` of {root}" if names else root[0].upper() + root[1:]


def _root_name(obj: Any) -> str | None:
    for kind in type(obj).__mro__:
        if kind.__name__ in _ROOTS:
            return f"{_ROOTS[kind.__name__]} {type(obj).__name__}".replace("the Trainer Trainer", "the Trainer")
    return None
