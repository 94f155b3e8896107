"""Frames: messages with a kind and a length, for connections that carry a stream of bytes."""

import struct
from collections.abc import Iterator

#: Largest length of a frame. A longer one means that the other end does not follow the protocol.
MAX_NUM_BYTES = 64 << 20
_HEADER = struct.Struct("!BI")
HEADER_NUM_BYTES = _HEADER.size


class FrameTooLongError(ValueError):
    """A frame is longer than the receiver accepts."""


def encode_frame(data: bytes, kind: int = 0) -> bytes:
    """Returns a frame.

    Args:
        data: Contents of the frame.
        kind: Number from 0 to 255 by which the receiver distinguishes contents.

    Raises:
        FrameTooLongError: If no receiver would accept the frame.
    """
    _check_length(len(data))
    return _HEADER.pack(kind, len(data)) + data


class FrameDecoder:
    """Decodes frames from the bytes of a connection, which arrive in pieces of any size."""

    def __init__(self) -> None:
        self._received = bytearray()

    def decode(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yields the kind and the contents of each frame that is complete with ``data``.

        Raises:
            FrameTooLongError: If a frame announces more than :data:`MAX_NUM_BYTES`, before they are received.
        """
        self._received += data
        while len(self._received) >= _HEADER.size:
            kind, length = decode_header(self._received[: _HEADER.size])
            end = _HEADER.size + length
            if len(self._received) < end:
                return
            contents = bytes(self._received[_HEADER.size : end])
            del self._received[:end]
            yield kind, contents


def decode_header(header: bytes | bytearray) -> tuple[int, int]:
    """Returns the kind of a frame, and the length of its contents, which follow the header.

    Args:
        header: The first :data:`HEADER_NUM_BYTES` bytes of the frame.

    Raises:
        FrameTooLongError: If the length is more than :data:`MAX_NUM_BYTES`.
    """
    kind, length = _HEADER.unpack(header)
    _check_length(length)
    return kind, length


def _check_length(length: int) -> None:
    if length > MAX_NUM_BYTES:
        raise FrameTooLongError(f"A message of {length:,} bytes is longer than the maximum of {MAX_NUM_BYTES:,} bytes.")
