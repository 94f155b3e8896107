"""Segments: memory that one process fills and others map, without a name that could stay behind.

A segment is an anonymous memory file (``memfd_create``), reached only through file descriptors, which are passed over
a socket. When the last descriptor and mapping are gone, so is the memory, however the processes ended; the size of
``/dev/shm`` does not matter. Where there is none, or it has no space left, an unlinked temporary file takes its place.
"""

import errno
import logging
import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_ALIGNMENT = 64  # bytes: a cache line, and more than any dtype needs
_MAX_WRITE_BYTES = 1 << 30  # Linux writes at most 2 GiB a call
_has_told_of_files = False


class Segment:
    """A filled segment, as its writer or its receiver holds it.

    Args:
        fd: Its file descriptor, owned by this object.
        spans: (offset, size) of each buffer in it, in bytes.
    """

    def __init__(self, fd: int, spans: Sequence[tuple[int, int]]) -> None:
        self.fd = fd
        self.spans = list(spans)

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return sum(self.spans[-1]) if self.spans else 0

    @classmethod
    def write(cls, buffers: Sequence[Any]) -> "Segment":
        """Writes buffers one after the other into a new segment, once each.

        Raises:
            OSError: If neither memory nor a temporary file has the space.
        """
        try:
            return cls._write_to(_create_memory(), buffers)
        except OSError as error:
            _tell_of_files_once(error)
            with tempfile.TemporaryFile() as file:
                return cls._write_to(os.dup(file.fileno()), buffers)

    @classmethod
    def _write_to(cls, fd: int, buffers: Sequence[Any]) -> "Segment":
        spans = []
        end = 0
        try:
            for buffer in buffers:
                with memoryview(buffer) as view, view.cast("B") as data:
                    start = -(-end // _ALIGNMENT) * _ALIGNMENT
                    os.lseek(fd, start, os.SEEK_SET)
                    written = 0
                    while written < data.nbytes:
                        written += os.write(fd, data[written : written + _MAX_WRITE_BYTES])
                    end = start + data.nbytes
                    spans.append((start, data.nbytes))
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, spans)

    def map(self, *, private: bool) -> "Mapping":
        """Maps the segment; the mapping outlives the segment's descriptor.

        Args:
            private: Whether writes stay in this process (pages are copied when they are written to). For a segment that
                others map too.
        """
        return Mapping(mmap.mmap(self.fd, self.num_bytes, access=mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE))

    def close(self) -> None:
        """Closes the descriptor; mappings stay. A second call does no harm."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Mapping:
    """A mapped segment. The memory lives as long as any view of it.

    Args:
        memory: The mapping.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    def buffers(self, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Views of the given (offset, size) pieces, in bytes."""
        view = memoryview(self._memory)
        return [view[start : start + size] for start, size in spans]

    def as_tensor(self) -> Tensor:
        """All of it, as bytes."""
        return torch.frombuffer(self._memory, dtype=torch.uint8)


class Received:
    """What a process received in a segment that others have mapped as well, to tell what it changed.

    Args:
        segment: The segment; once it is closed, nothing can be told any more.
        mapping: This process's private mapping of it.
    """

    def __init__(self, segment: Segment, mapping: Mapping) -> None:
        self._segment = segment
        self._memory = mapping.as_tensor()
        self._address = self._memory.data_ptr()
        self._original: Tensor | None = None

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Whether a tensor is one that was received, with the values it had; False when in doubt."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.numel() == 0:
            return False
        storage = tensor.untyped_storage()
        original = self._original_of(storage.data_ptr(), storage.nbytes())
        if original is None:
            return False
        original = original.view(tensor.dtype)
        return torch.equal(tensor, original.as_strided(tensor.shape, tensor.stride(), _offset(original, tensor)))

    def is_unchanged_memory(self, address: int, num_bytes: int) -> bool:
        """The same of memory of this process."""
        original = self._original_of(address, num_bytes)
        if original is None:
            return False
        start = address - self._address
        return torch.equal(self._memory[start : start + num_bytes], original)

    def _original_of(self, address: int, num_bytes: int) -> Tensor | None:
        start = address - self._address
        if self._segment.fd < 0 or not 0 <= start <= self._segment.num_bytes - num_bytes:
            return None
        if self._original is None:
            shared = mmap.mmap(self._segment.fd, self._segment.num_bytes, access=mmap.ACCESS_WRITE)
            self._original = torch.frombuffer(shared, dtype=torch.uint8)
        return self._original[start : start + num_bytes]


def _offset(original: Tensor, tensor: Tensor) -> int:
    return int(original.storage_offset() + tensor.storage_offset())


def _create_memory() -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memfd_create")
    return os.memfd_create("lightning-strategies-ext", os.MFD_CLOEXEC)


def _tell_of_files_once(error: OSError) -> None:
    global _has_told_of_files
    if not _has_told_of_files:
        log.warning(
            "Tensors travel between this process and others through files in %s, not through shared memory (%s).",
            tempfile.gettempdir(),
            error,
        )
        _has_told_of_files = True
