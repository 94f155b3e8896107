"""Channel between two processes of one host: objects over a Unix socket, their tensors in memory files.

Objects that the sender shares with other processes (:mod:`.shared_objects`) are shared with the receiver too.

Limitations: only one thread at a time may use each endpoint.
"""

import pickle
import socket
from collections.abc import Sequence
from typing import Any, Protocol

from lightning_strategies_ext._system.frames import HEADER_NUM_BYTES, decode_header, encode_frame
from lightning_strategies_ext.launch.transport.memory_files import (
    MAX_DESCRIPTORS,
    MappedFile,
    MemoryFile,
    MemoryFileCache,
)
from lightning_strategies_ext.launch.transport.pickling import Pickled, SharedObjects, dump
from lightning_strategies_ext.launch.transport.shared_objects import Descriptor, locate

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
        self._handles = pickled.handles  # they own the descriptors and names
        locations = {number: locate(handle) for number, handle in pickled.handles.items()}
        self._fds = [fd for fd in locations.values() if isinstance(fd, int)]
        self._inline = pickled.data
        if not pickled.buffers and len(pickled.data) <= MAX_INLINE_BYTES:
            return
        written = {number: buffer for number, buffer in enumerate(pickled.buffers) if number not in pickled.handles}
        large = {} if cache is None else cache.files_for(written)
        small = [buffer for number, buffer in written.items() if number not in large]
        self._own = MemoryFile.write([pickled.data, *small])
        self._files = list({id(file): file for file in [self._own, *large.values()]}.values())
        file_indices = {number: self._files.index(file) for number, file in large.items()}
        spans = [file.spans for file in self._files]
        names = {number: None if isinstance(found, int) else found for number, found in locations.items()}
        self._inline = pickle.dumps((spans, file_indices, names))

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
            self._own.close()


class ReceivedMessage:
    """A received message that is not unpickled yet.

    Args:
        pickled: The message.
        parts: Memory files that hold the message's tensors, each with its mapping; owned by this object.

    Attributes:
        received_objects: Objects of the message after :meth:`open`, see :meth:`.SharedObjects.with_message`.
    """

    def __init__(self, pickled: Pickled, parts: Sequence[tuple[MemoryFile, MappedFile]] = ()) -> None:
        self.pickled = pickled
        self.parts = parts
        self.received_objects: dict[int, Any] = {}

    def open(self, shared: SharedObjects | None = None) -> Any:
        """Rebuilds the object, and sets :attr:`received_objects`.

        Raises:
            Exception: If one of its classes raises, or is missing.
        """
        self.received_objects = {}
        return self.pickled.load(shared, self.received_objects)

    def close(self) -> None:
        """Closes the descriptors; rebuilt tensors stay valid."""
        for file, _ in self.parts:
            file.close()


class Channel:
    """One endpoint of a channel.

    Args:
        connected: One of the two sockets of ``socket.socketpair()``; owned by this object.
    """

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
        spans, file_indices, names = pickle.loads(inline)
        descriptors = iter(self._receive_descriptors(sum(name is None for name in names.values())))
        received = {number: next(descriptors) if name is None else name for number, name in names.items()}
        files = [MemoryFile(fd, own_spans) for fd, own_spans in zip(fds, spans, strict=True)]
        parts = [(file, file.map(private=private)) for file in files]
        (data, *small), *large = [mapping.buffers(file.spans) for file, mapping in parts]
        rest = iter(small)
        buffers: list[Any] = []
        for number in range(len(small) + len(file_indices) + len(received)):
            if number in received:
                buffers.append(received[number])
            else:
                buffers.append(large[file_indices[number] - 1][0] if number in file_indices else next(rest))
        return ReceivedMessage(Pickled(bytes(data), buffers), parts)

    def receive(self, shared: SharedObjects | None = None) -> Any:
        """Waits for an object and rebuilds it.

        Raises:
            EOFError: If the other process has closed the channel or exited.
        """
        message = self.receive_message()
        message.close()
        return message.pickled.load(shared)

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
