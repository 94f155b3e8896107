"""A channel between two processes of one host: objects over a Unix socket, their tensors through segments.

What it does not promise: more than one thread at a time on either side.
"""

import pickle
import socket
import struct
from typing import Any

from lightning_strategies_ext.launch.messages import Pickled, Shared, dump
from lightning_strategies_ext.launch.segments import Mapping, Segment

#: A message without tensors and up to this size goes through the socket itself, in bytes.
MAX_INLINE_BYTES = 1 << 16

_HEADER = struct.Struct("!Q?")  # size of what follows in the socket, and whether a segment comes with it


class Packed:
    """A message that was written once and can be sent to several receivers. Close it afterwards.

    Args:
        pickled: The message; its buffers are not needed any more once this returns.
    """

    def __init__(self, pickled: Pickled) -> None:
        self._segment: Segment | None = None
        if pickled.buffers or len(pickled.data) > MAX_INLINE_BYTES:
            self._segment = Segment.write([pickled.data, *pickled.buffers])
            self._inline = pickle.dumps(self._segment.spans)
        else:
            self._inline = pickled.data

    def send(self, channel: "Channel") -> None:
        """Sends it.

        Raises:
            OSError: If the other side is gone.
        """
        header = _HEADER.pack(len(self._inline), self._segment is not None)
        fds = [] if self._segment is None else [self._segment.fd]
        sent = socket.send_fds(channel.socket, [header], fds)
        channel.socket.sendall(header[sent:] + self._inline)

    def close(self) -> None:
        """Lets go of the memory; what was sent stays valid."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None


class Envelope:
    """A message as it arrived, not looked into yet.

    Args:
        pickled: The message.
        segment: Where its tensors are; None if it has none. Owned by this object.
        mapping: The mapping of that segment.

    Attributes:
        found: See :meth:`.Shared.with_message`.
    """

    def __init__(self, pickled: Pickled, segment: Segment | None = None, mapping: Mapping | None = None) -> None:
        self.pickled = pickled
        self.segment = segment
        self.mapping = mapping
        self.found: dict[int, Any] = {}

    def open(self, shared: Shared | None = None) -> Any:
        """Rebuilds the object; :attr:`found` has then all that is in it.

        Raises:
            Exception: Whatever one of its classes raises, or is missing.
        """
        self.found = {}
        return self.pickled.load(shared, self.found)

    def close(self) -> None:
        """Closes the segment's descriptor; tensors that were rebuilt stay valid."""
        if self.segment is not None:
            self.segment.close()


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
        packed = Packed(dump(obj, returning=True))
        try:
            packed.send(self)
        finally:
            packed.close()

    def receive_envelope(self, *, private: bool = False) -> Envelope:
        """Waits for a message.

        Args:
            private: Whether its memory has other receivers too, so that writes must stay in this process.

        Raises:
            EOFError: If the other side is gone.
        """
        header, fds, _, _ = socket.recv_fds(self.socket, _HEADER.size, 1)
        header += self._receive_exactly(_HEADER.size - len(header))
        size, has_segment = _HEADER.unpack(header)
        inline = self._receive_exactly(size)
        if not has_segment:
            return Envelope(Pickled(inline))
        segment = Segment(fds[0], pickle.loads(inline))
        mapping = segment.map(private=private)
        data, *buffers = mapping.buffers(segment.spans)
        return Envelope(Pickled(bytes(data), buffers), segment, mapping)

    def receive(self, shared: Shared | None = None) -> Any:
        """Waits for an object and rebuilds it.

        Raises:
            EOFError: If the other side is gone.
        """
        envelope = self.receive_envelope()
        envelope.close()
        return envelope.pickled.load(shared)

    def fileno(self) -> int:
        """The socket's descriptor, to wait on."""
        return self.socket.fileno()

    def close(self) -> None:
        """Closes this end."""
        self.socket.close()

    def _receive_exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self.socket.recv(min(size, 1 << 20))
            if not part:
                raise EOFError("the other process is gone")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)
