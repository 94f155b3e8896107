"""Memory files: unnamed memory (``memfd_create``) that one process fills and others map.

File descriptors, which are passed over a socket, are the only access to it. The kernel frees the memory when the last
descriptor and mapping are closed, however the processes exit. The size of ``/dev/shm`` does not matter. An unlinked
temporary file replaces the memory on systems without ``memfd_create``, and when no space is left.
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

from lightning_strategies_ext._system.memory import free_memory

log = logging.getLogger(__name__)

_ALIGNMENT = 64  # bytes: a cache line, and more than any dtype needs
_MAX_WRITE_BYTES = 1 << 30  # Linux writes at most 2 GiB per call
_WINDOW_BYTES = 1 << 26
_READ_AHEAD = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
_MIN_CACHED_BYTES = 1 << 20
#: Size in bytes from which the free memory is checked before a write; a check takes about 0.1 ms.
_MIN_CHECKED_BYTES = 1 << 26
#: Maximum number of descriptors that are sent with a message; the limit of Linux is 253.
MAX_DESCRIPTORS = 128
_EMPTY = torch.empty(0, dtype=torch.uint8)
_has_logged_fallback = False

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class MemoryFile:
    """A filled memory file, held by its writer or a receiver.

    Args:
        fd: File descriptor, owned by this object.
        spans: (offset, size) of each buffer in the file, in bytes.

    Attributes:
        num_bytes: Size of the file.
    """

    def __init__(self, fd: int, spans: Sequence[tuple[int, int]]) -> None:
        self.fd = fd
        self.spans = spans
        self.num_bytes = os.fstat(fd).st_size
        self._mapped = self._original = _EMPTY

    @classmethod
    def write(cls, buffers: Sequence[Any]) -> "MemoryFile":
        """Writes buffers one after the other to a new memory file, each of them once.

        A file that does not fit into the free memory is a temporary file, because the kernel kills a process that
        exceeds it.

        Raises:
            OSError: If there is not enough space, neither in memory nor for a temporary file.
        """
        try:
            return cls._write_to(_create_memory(sum(memoryview(buffer).nbytes for buffer in buffers)), buffers)
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
                data: Any = np.frombuffer(buffer, dtype=np.uint8)
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
        """Whether this file, of one buffer, contains these bytes."""
        data = np.frombuffer(buffer, dtype=np.uint8)
        if data.nbytes != self.num_bytes:
            return False
        # Compares in windows, so that the memory use of this process does not increase.
        for start in range(0, data.nbytes, _WINDOW_BYTES):
            size = min(_WINDOW_BYTES, data.nbytes - start)
            with mmap.mmap(self.fd, size, flags=_READ_AHEAD, prot=mmap.PROT_READ, offset=start) as window:
                own = np.frombuffer(window, dtype=np.uint8)
                is_same = _memcmp(own.ctypes.data, data.ctypes.data + start, size) == 0
                del own
            if not is_same:
                return False
        return True

    def map(self, *, private: bool) -> list[memoryview]:
        """Maps the file and returns its buffers, which are valid as long as they are referenced.

        Args:
            private: Whether writes stay in this process (copy-on-write), for a file that other processes map too.
        """
        access = mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
        memory = mmap.mmap(self.fd, self.num_bytes, access=access)
        self._mapped = torch.frombuffer(memory, dtype=torch.uint8)
        view = memoryview(memory)
        return [view[start : start + size] for start, size in self.spans]

    def contents_at(self, address: int, num_bytes: int) -> tuple[Tensor, Tensor] | None:
        """Returns the current and the original bytes of mapped memory; None if this file is not mapped there."""
        start = address - self._mapped.data_ptr()
        if not 0 <= start <= len(self._mapped) - num_bytes:
            return None
        if not len(self._original):
            original = mmap.mmap(self.fd, self.num_bytes, access=mmap.ACCESS_WRITE)
            self._original = torch.frombuffer(original, dtype=torch.uint8)
        return self._mapped[start : start + num_bytes], self._original[start : start + num_bytes]

    def close(self) -> None:
        """Closes the descriptor; mapped buffers stay valid. A second call is a no-op."""
        self._mapped = self._original = _EMPTY
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class MemoryFileCache:
    """Memory files of large buffers that were sent; they can be sent again until the buffers change."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], MemoryFile] = {}
        weakref.finalize(self, _close_all, self._files)

    @property
    def num_bytes(self) -> int:
        """Size of the cached memory, in bytes."""
        return sum(file.num_bytes for file in self._files.values())

    def files_for(self, buffers: dict[int, Any]) -> dict[int, MemoryFile]:
        """Returns memory files of the large buffers, by buffer number; closes those of all other buffers."""
        sizes = {number: memoryview(buffer).nbytes for number, buffer in buffers.items()}
        large = [number for number, size in sizes.items() if size >= _MIN_CACHED_BYTES]
        large = sorted(large, key=sizes.__getitem__, reverse=True)[: MAX_DESCRIPTORS - 1]
        locations = {n: (np.frombuffer(buffers[n], dtype=np.uint8).ctypes.data, sizes[n]) for n in large}
        for location in self._files.keys() - locations.values():
            self._files.pop(location).close()
        return {number: self._file_for(location, buffers[number]) for number, location in locations.items()}

    def _file_for(self, location: tuple[int, int], buffer: Any) -> MemoryFile:
        file = self._files.pop(location, None)
        if file is not None and not file.has_contents(buffer):
            file.close()
            file = None
        self._files[location] = file or MemoryFile.write([buffer])
        return self._files[location]

    def close(self) -> None:
        """Closes all memory files."""
        _close_all(self._files)


def _close_all(files: dict[tuple[int, int], MemoryFile]) -> None:
    while files:
        files.popitem()[1].close()


class ReceivedBuffers:
    """Buffers that a process received in memory files that other processes map too, to detect what it changes.

    Args:
        files: Memory files, privately mapped; none after a fork. The buffers of a closed file count as changed.
    """

    def __init__(self, files: Sequence[MemoryFile] = ()) -> None:
        self._files = files

    def __bool__(self) -> bool:
        """Whether buffers were received."""
        return bool(self._files)

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Whether a tensor was received and has its original values; False if in doubt."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.numel() == 0:
            return False
        storage = tensor.untyped_storage()
        contents = self._contents_at(storage.data_ptr(), storage.nbytes())
        if contents is None:
            return False
        original = contents[1][: storage.nbytes() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
        offset = int(original.storage_offset() + tensor.storage_offset())
        return torch.equal(tensor, original.as_strided(tensor.shape, tensor.stride(), offset))

    def is_unchanged_memory(self, address: int, num_bytes: int) -> bool:
        """Whether memory of this process was received and has its original contents."""
        contents = self._contents_at(address, num_bytes)
        return contents is not None and torch.equal(*contents)

    def _contents_at(self, address: int, num_bytes: int) -> tuple[Tensor, Tensor] | None:
        found = (file.contents_at(address, num_bytes) for file in self._files)
        return next((contents for contents in found if contents is not None), None)


def _create_memory(num_bytes: int) -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memfd_create")
    if num_bytes >= _MIN_CHECKED_BYTES and num_bytes > (free := free_memory()):
        raise OSError(errno.ENOMEM, f"{num_bytes:,} bytes are needed, and {free:,} are free")
    return os.memfd_create("lightning-strategies-ext", os.MFD_CLOEXEC)


def _log_fallback_once(error: OSError) -> None:
    global _has_logged_fallback
    if not _has_logged_fallback:
        log.warning(
            "Shared memory is unavailable (%s): tensors are transferred between processes through files in %s.",
            error,
            tempfile.gettempdir(),
        )
        _has_logged_fallback = True
