"""Segments: memory that one process fills and others map, without a name that could stay behind.

A segment is an anonymous memory file (``memfd_create``), reached only through file descriptors, which are passed over
a socket. When the last descriptor and mapping are gone, so is the memory, however the processes ended; the size of
``/dev/shm`` does not matter. Where there is none, or it has no space left, an unlinked temporary file takes its place.
"""

import ctypes
import errno
import logging
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)

_ALIGNMENT = 64  # bytes: a cache line, and more than any dtype needs
_MAX_WRITE_BYTES = 1 << 30  # Linux writes at most 2 GiB a call
_WINDOW_BYTES = 1 << 26
_READ_AHEAD = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
_MIN_CACHED_BYTES = 1 << 20
#: How many descriptors may go with a message; Linux sends 253 at most.
MAX_DESCRIPTORS = 128
_has_logged_fallback = False

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class MemoryFile:
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
    def write(cls, buffers: Sequence[Any]) -> "MemoryFile":
        """Writes buffers one after the other into a new segment, once each.

        Raises:
            OSError: If neither memory nor a temporary file has the space.
        """
        try:
            return cls._write_to(_create_memory(), buffers)
        except OSError as error:
            _log_fallback_once(error)
            with tempfile.TemporaryFile() as file:
                return cls._write_to(os.dup(file.fileno()), buffers)

    @classmethod
    def _write_to(cls, fd: int, buffers: Sequence[Any]) -> "MemoryFile":
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

    def has_contents(self, buffer: Any) -> bool:
        """Whether a segment of one buffer has these bytes."""
        data = np.frombuffer(buffer, dtype=np.uint8)
        if data.nbytes != self.num_bytes:
            return False
        # A window at a time, so that this process's memory stays as large as it is.
        for start in range(0, data.nbytes, _WINDOW_BYTES):
            size = min(_WINDOW_BYTES, data.nbytes - start)
            with mmap.mmap(self.fd, size, flags=_READ_AHEAD, prot=mmap.PROT_READ, offset=start) as window:
                ours = np.frombuffer(window, dtype=np.uint8)
                is_same = _memcmp(ours.ctypes.data, data.ctypes.data + start, size) == 0
                del ours
            if not is_same:
                return False
        return True

    def map(self, *, private: bool) -> "MappedFile":
        """Maps the segment; the mapping outlives the segment's descriptor.

        Args:
            private: Whether writes stay in this process (pages are copied when they are written to). For a segment that
                others map too.
        """
        return MappedFile(mmap.mmap(self.fd, self.num_bytes, access=mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE))

    def close(self) -> None:
        """Closes the descriptor; mappings stay. A second call does no harm."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class MappedFile:
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


class MemoryFileCache:
    """The memory of large buffers that were sent, to send it once more as long as they have not changed."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], MemoryFile] = {}
        weakref.finalize(self, _close_all, self._files)

    @property
    def num_bytes(self) -> int:
        """How much memory it holds."""
        return sum(file.num_bytes for file in self._files.values())

    def files_for(self, buffers: dict[int, Any]) -> dict[int, MemoryFile]:
        """Segments that hold the large ones of some buffers, by their number; those of other buffers are let go."""
        sizes = {number: memoryview(buffer).nbytes for number, buffer in buffers.items()}
        large = [number for number, size in sizes.items() if size >= _MIN_CACHED_BYTES]
        large = sorted(large, key=sizes.__getitem__, reverse=True)[: MAX_DESCRIPTORS - 1]
        places = {n: (np.frombuffer(buffers[n], dtype=np.uint8).ctypes.data, sizes[n]) for n in large}
        for place in self._files.keys() - places.values():
            self._files.pop(place).close()
        return {number: self._file_for(place, buffers[number]) for number, place in places.items()}

    def _file_for(self, place: tuple[int, int], buffer: Any) -> MemoryFile:
        file = self._files.pop(place, None)
        if file is not None and not file.has_contents(buffer):
            file.close()
            file = None
        self._files[place] = file or MemoryFile.write([buffer])
        return self._files[place]

    def close(self) -> None:
        """Lets go of all."""
        _close_all(self._files)


def _close_all(files: dict[tuple[int, int], MemoryFile]) -> None:
    while files:
        files.popitem()[1].close()


class ReceivedBuffers:
    """What a process received in segments that others have mapped as well, to tell what it changed.

    Args:
        parts: Each segment, with this process's private mapping of it; once it is closed, nothing can be told any more.
    """

    def __init__(self, parts: Sequence[tuple[MemoryFile, "MappedFile"]]) -> None:
        self._parts = [_ReceivedBuffer(file, mapping.as_tensor()) for file, mapping in parts]

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Whether a tensor is one that was received, with the values it had; False when in doubt."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.numel() == 0:
            return False
        storage = tensor.untyped_storage()
        part = self._find_buffer(storage.data_ptr(), storage.nbytes())
        if part is None:
            return False
        original = part.original(storage.data_ptr(), storage.nbytes()).view(tensor.dtype)
        return torch.equal(tensor, original.as_strided(tensor.shape, tensor.stride(), _offset(original, tensor)))

    def is_unchanged_memory(self, address: int, num_bytes: int) -> bool:
        """The same of memory of this process."""
        part = self._find_buffer(address, num_bytes)
        return part is not None and torch.equal(part.now(address, num_bytes), part.original(address, num_bytes))

    def _find_buffer(self, address: int, num_bytes: int) -> "_ReceivedBuffer | None":
        return next((part for part in self._parts if part.contains(address, num_bytes)), None)


class _ReceivedBuffer:
    def __init__(self, file: MemoryFile, memory: Tensor) -> None:
        self._file = file
        self._memory = memory
        self._address = memory.data_ptr()
        self._original: Tensor | None = None

    def contains(self, address: int, num_bytes: int) -> bool:
        return self._file.fd >= 0 and 0 <= address - self._address <= self._file.num_bytes - num_bytes

    def now(self, address: int, num_bytes: int) -> Tensor:
        start = address - self._address
        return self._memory[start : start + num_bytes]

    def original(self, address: int, num_bytes: int) -> Tensor:
        if self._original is None:
            shared = mmap.mmap(self._file.fd, self._file.num_bytes, access=mmap.ACCESS_WRITE)
            self._original = torch.frombuffer(shared, dtype=torch.uint8)
        start = address - self._address
        return self._original[start : start + num_bytes]


def _offset(original: Tensor, tensor: Tensor) -> int:
    return int(original.storage_offset() + tensor.storage_offset())


def _create_memory() -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memfd_create")
    return os.memfd_create("lightning-strategies-ext", os.MFD_CLOEXEC)


def _log_fallback_once(error: OSError) -> None:
    global _has_logged_fallback
    if not _has_logged_fallback:
        log.warning(
            "Tensors travel between this process and others through files in %s, not through shared memory (%s).",
            tempfile.gettempdir(),
            error,
        )
        _has_logged_fallback = True
