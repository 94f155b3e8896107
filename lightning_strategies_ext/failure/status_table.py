"""Status table: shared memory in which the ranks of one host publish their statuses.

Writing takes no lock, so a rank that is stopped, or whose GIL is held, does not block readers. The last status of a
rank remains readable after its process has exited.
"""

import ctypes
import mmap
import os
import stat
import struct
import tempfile
import zlib
from collections.abc import Sequence
from contextlib import suppress

from lightning_strategies_ext._system.peers import KeyValueStore

#: Size of one rank's row, in bytes.
SLOT_NUM_BYTES = 1 << 15
_NAME = "lightning_strategies_ext_status"
_HEADER = struct.Struct("<II")  # length and checksum of the content
#: Attempts of a reader to read a row that is being written.
_ATTEMPTS = 5
if hasattr(os, "memfd_create"):
    import fcntl

    _PR_GET_DUMPABLE = 3
    #: Seals that fix the size of the memory.
    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class StatusTable:
    """One rank's handle of the table, which :meth:`open_for_host` returns."""

    def __init__(self, memory: mmap.mmap, own_slot: int) -> None:
        self._memory = memory
        self._own_slot = own_slot
        self._descriptor: int | None = None
        self._name: str | None = None

    @classmethod
    def open_for_host(cls, store: KeyValueStore, key: str, rank: int, ranks: Sequence[int]) -> "StatusTable | None":
        """Opens the table of this host. Collective among the ranks of the host.

        On Linux the memory is an unnamed memory file, so that no file remains after the ranks exit. On other systems,
        and where /proc is missing or ranks cannot open descriptors there, it is a temporary file that the lowest rank
        removes in :meth:`close`. The key in the store is for the ranks of this host alone.

        Returns:
            The table; None if this rank cannot open the memory of the lowest rank, or the memory belongs to another
            user.
        """
        num_bytes = SLOT_NUM_BYTES * len(ranks)
        if rank == min(ranks):
            descriptor, path, name = _create(num_bytes)
            store.set(key, path)
            table = cls(mmap.mmap(descriptor, num_bytes), ranks.index(rank))
            table._descriptor, table._name = descriptor, name  # open until `close`: another rank may open it later
            return table
        path = store.get(key).decode()
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | getattr(os, "O_NONBLOCK", 0))
            try:
                if _is_status_table(descriptor, path, num_bytes):
                    return cls(mmap.mmap(descriptor, num_bytes), ranks.index(rank))
            finally:
                os.close(descriptor)
        return None

    def close(self) -> None:
        """Unmaps the memory."""
        self._memory.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
        if self._name is not None:
            with suppress(OSError):
                os.unlink(self._name)

    def write(self, content: bytes) -> None:
        """Replaces the content of this rank's row.

        Raises:
            ValueError: If the content is larger than a row.
        """
        if len(content) > SLOT_NUM_BYTES - _HEADER.size:
            raise ValueError(f"{len(content)} bytes do not fit into a slot of {SLOT_NUM_BYTES}")
        at = self._own_slot * SLOT_NUM_BYTES
        self._memory[at : at + _HEADER.size + len(content)] = _HEADER.pack(len(content), zlib.crc32(content)) + content

    def read(self, slot: int) -> bytes | None:
        """Returns the content of a row; None if the row is empty, or its rank is writing it."""
        at = slot * SLOT_NUM_BYTES
        for _ in range(_ATTEMPTS):
            num_bytes, checksum = _HEADER.unpack_from(self._memory, at)
            begin = at + _HEADER.size
            content = self._memory[begin : begin + min(num_bytes, SLOT_NUM_BYTES)]
            if content and zlib.crc32(content) == checksum:
                return content
        return None


def _create(num_bytes: int) -> tuple[int, str, str | None]:
    """Creates memory. Returns its descriptor, the path by which ranks open it, and the path to remove, or None."""
    if hasattr(os, "memfd_create"):
        with suppress(OSError):  # a container may forbid it
            descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            if os.access(path, os.R_OK | os.W_OK) and _is_dumpable():
                os.ftruncate(descriptor, num_bytes)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
                return descriptor, path, None
            os.close(descriptor)
    descriptor, path = tempfile.mkstemp(prefix=f"{_NAME}_")
    os.ftruncate(descriptor, num_bytes)
    return descriptor, path, path


def _is_dumpable() -> bool:
    """Returns whether other processes of this user can open the descriptors of this process in /proc."""
    return bool(ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 1)


def _is_status_table(descriptor: int, path: str, num_bytes: int) -> bool:
    """Returns whether a file is a status table of this user. A manipulated store could name another file."""
    status = os.fstat(descriptor)
    is_own = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    if not is_own or not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes:
        return False
    if os.path.basename(path).startswith(_NAME):
        return True
    # A process that truncated unsealed memory would end this process by a SIGBUS.
    is_memory = os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{_NAME}")
    return is_memory and fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) == _SEALS
