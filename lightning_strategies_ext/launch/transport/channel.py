"""A channel between two processes of one host: objects over a Unix socket, their tensors through segments.

What the sender shares with others (:mod:`.shared_objects`) it shares with the receiver, too.

What it does not promise: more than one thread at a time on either side.
"""

import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any, Protocol

from lightning_strategies_ext.launch.transport.memory_files import (
    MAX_DESCRIPTORS,
    MappedFile,
    MemoryFile,
    MemoryFileCache,
)
from lightning_strategies_ext.launch.transport.pickling import Pickled, SharedObjects, dump
from lightning_strategies_ext.launch.transport.shared_objects import Descriptor, locate

#: A message without tensors and up to this size goes through the socket itself, in bytes.
MAX_INLINE_BYTES = 1 << 16

#: The size of what follows in the socket, how many segments come with it, and how many other descriptors afterwards.
_HEADER = struct.Struct("!QBI")


class TaskChannel(Protocol):
    """What a job can talk to the main process by, on its way."""

    @property
    def socket(self) -> Any:
        """What becomes ready when there is a message."""

    def send(self, obj: Any) -> None:
        """Sends a message.

        Raises:
            OSError: If the main process is gone.
        """

    def receive(self) -> Any:
        """Waits for a message.

        Raises:
            EOFError: If the main process is gone.
        """


class PreparedMessage:
    """A message that was written once and can be sent to several receivers. Close it afterwards.

    Args:
        pickled: The message; its buffers are not needed any more once this returns.
        cache: What was sent before, so that large buffers are not written again which have not changed.
    """

    def __init__(self, pickled: Pickled, cache: MemoryFileCache | None = None) -> None:
        self._files: list[MemoryFile] = []
        self._handles = pickled.handles  # they own the descriptors and names
        found = {number: locate(handle) for number, handle in pickled.handles.items()}
        self._fds = [fd for fd in found.values() if isinstance(fd, int)]
        self._inline = pickled.data
        if not pickled.buffers and len(pickled.data) <= MAX_INLINE_BYTES:
            return
        written = {number: buffer for number, buffer in enumerate(pickled.buffers) if number not in pickled.handles}
        large = {} if cache is None else cache.files_for(written)
        others = [buffer for number, buffer in written.items() if number not in large]
        self._own = MemoryFile.write([pickled.data, *others])
        self._files = list({id(file): file for file in [self._own, *large.values()]}.values())
        places = {number: self._files.index(file) for number, file in large.items()}
        spans = [file.spans for file in self._files]
        names = {number: None if isinstance(where, int) else where for number, where in found.items()}
        self._inline = pickle.dumps((spans, places, names))

    def send(self, channel: "Channel") -> None:
        """Sends it.

        Raises:
            OSError: If the other side is gone.
        """
        header = _HEADER.pack(len(self._inline), len(self._files), len(self._fds))
        sent = socket.send_fds(channel.socket, [header], [file.fd for file in self._files])
        channel.socket.sendall(header[sent:] + self._inline)
        for start in range(0, len(self._fds), MAX_DESCRIPTORS):
            socket.send_fds(channel.socket, [b"d"], self._fds[start : start + MAX_DESCRIPTORS])

    def close(self) -> None:
        """Lets go of the memory that is not kept; what was sent stays valid."""
        if self._files:
            self._own.close()


class ReceivedMessage:
    """A message as it arrived, not looked into yet.

    Args:
        pickled: The message.
        parts: Where its tensors are, and the mappings of that. Owned by this object.

    Attributes:
        received_objects: See :meth:`.SharedObjects.with_message`.
    """

    def __init__(self, pickled: Pickled, parts: Sequence[tuple[MemoryFile, MappedFile]] = ()) -> None:
        self.pickled = pickled
        self.parts = parts
        self.received_objects: dict[int, Any] = {}

    def open(self, shared: SharedObjects | None = None) -> Any:
        """Rebuilds the object; :attr:`received_objects` has then all that is in it.

        Raises:
            Exception: Whatever one of its classes raises, or is missing.
        """
        self.received_objects = {}
        return self.pickled.load(shared, self.received_objects)

    def close(self) -> None:
        """Closes the descriptors; tensors that were rebuilt stay valid."""
        for file, _ in self.parts:
            file.close()


class Channel:
    """One end of a channel.

    Args:
        connected: One of the two sockets of ``socket.socketpair()``; owned by this object.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected

    def send(self, obj: Any) -> None:
        """Sends an object.

        Raises:
            OSError: If the other side is gone.
            Exception: If the object cannot be pickled.
        """
        packed = PreparedMessage(dump(obj, is_return=True))
        try:
            packed.send(self)
        finally:
            packed.close()

    def receive_message(self, *, private: bool = False) -> ReceivedMessage:
        """Waits for a message.

        Args:
            private: Whether its memory has other receivers too, so that writes must stay in this process.

        Raises:
            EOFError: If the other side is gone.
        """
        header, fds, _, _ = socket.recv_fds(self.socket, _HEADER.size, MAX_DESCRIPTORS)
        header += self._receive_exactly(_HEADER.size - len(header))
        size, num_segments, num_descriptors = _HEADER.unpack(header)
        inline = self._receive_exactly(size)
        if not num_segments:
            return ReceivedMessage(Pickled(inline))
        spans, places, names = pickle.loads(inline)
        descriptors = iter(self._receive_descriptors(num_descriptors))
        received = {number: next(descriptors) if name is None else name for number, name in names.items()}
        files = [MemoryFile(fd, own_spans) for fd, own_spans in zip(fds, spans, strict=True)]
        parts = [(file, file.map(private=private)) for file in files]
        (data, *others), *large = [mapping.buffers(file.spans) for file, mapping in parts]
        rest = iter(others)
        buffers: list[Any] = []
        for number in range(len(others) + len(places) + len(received)):
            if number in received:
                buffers.append(received[number])
            else:
                buffers.append(large[places[number] - 1][0] if number in places else next(rest))
        return ReceivedMessage(Pickled(bytes(data), buffers), parts)

    def receive(self, shared: SharedObjects | None = None) -> Any:
        """Waits for an object and rebuilds it.

        Raises:
            EOFError: If the other side is gone.
        """
        message = self.receive_message()
        message.close()
        return message.pickled.load(shared)

    def fileno(self) -> int:
        """The socket's descriptor, to wait on."""
        return self.socket.fileno()

    def close(self) -> None:
        """Closes this end."""
        self.socket.close()

    def _receive_descriptors(self, number: int) -> list[Descriptor]:
        received: list[Descriptor] = []
        while len(received) < number:
            byte, fds, flags, _ = socket.recv_fds(self.socket, 1, MAX_DESCRIPTORS)
            received += [Descriptor(fd) for fd in fds]
            if not byte:
                raise EOFError("the other process is gone")
            if flags & socket.MSG_CTRUNC:
                raise RuntimeError(
                    f"A worker received {number} shared tensors and multiprocessing objects and cannot open them all."
                    " Raise the limit of open files (`ulimit -n`), or share fewer, larger tensors."
                )
        return received

    def _receive_exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self.socket.recv(min(size, 1 << 20))
            if not part:
                raise EOFError("the other process is gone")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)
