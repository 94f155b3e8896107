"""The board of a host: what its ranks say of themselves, in memory that all of them have mapped.

Writing takes no lock and asks nobody, so that a rank which is stopped, or whose interpreter is held by somebody, cannot
keep the others from reading. What was last written stays readable when its writer has died.
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

#: What one rank may say at most, in bytes.
SLOT_NUM_BYTES = 1 << 15
_NAME = "lightning_strategies_ext_board"
_HEADER = struct.Struct("<II")  # length and checksum of what follows
#: A reader may come while the writer writes: it reads again, so often at most.
_ATTEMPTS = 5
if hasattr(os, "memfd_create"):
    import fcntl

    _PR_GET_DUMPABLE = 3
    #: Seals that fix the size of the memory.
    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class StatusTable:
    """One rank's view of it.

    Args:
        memory: Mapped by all ranks of the host.
        own_slot: The one this rank writes to.
        descriptor: By which others find the memory, if they find it by this rank's.
        name: Of the file that it is, if this rank is to remove it.
    """

    def __init__(
        self, memory: mmap.mmap, own_slot: int, descriptor: int | None = None, name: str | None = None
    ) -> None:
        self._memory = memory
        self._own_slot = own_slot
        self._descriptor = descriptor
        self._name = name

    @classmethod
    def open_for_host(cls, store: KeyValueStore, key: str, rank: int, ranks: Sequence[int]) -> "StatusTable | None":
        """The board of this host; called by all its ranks together.

        On Linux the memory has no name in any directory, so that nothing of it is left, however the ranks end.
        Elsewhere, and where /proc is missing or other ranks cannot open descriptors there, it is a file among the
        temporary ones, which the first rank removes when it lets go of it.

        Args:
            store: Shared by the ranks.
            key: In which they find the board, the same for the ranks of this host and for no others.
            rank: Of this process.
            ranks: Those of this host, this one among them.

        Returns:
            The board; None if this rank may not open the memory of the first, or it is somebody else's.
        """
        num_bytes = SLOT_NUM_BYTES * len(ranks)
        if rank == min(ranks):
            descriptor, path, name = _create(num_bytes)
            # The descriptor stays open: a late rank may still come for it.
            store.set(key, path)
            return cls(mmap.mmap(descriptor, num_bytes), ranks.index(rank), descriptor, name)
        path = store.get(key).decode()
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | getattr(os, "O_NONBLOCK", 0))
            try:
                if _is_board(descriptor, path, num_bytes):
                    return cls(mmap.mmap(descriptor, num_bytes), ranks.index(rank))
            finally:
                os.close(descriptor)
        return None

    def close(self) -> None:
        """Lets go of it."""
        self._memory.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
        if self._name is not None:
            with suppress(OSError):
                os.unlink(self._name)

    def write(self, content: bytes) -> None:
        """Replaces what this rank says.

        Raises:
            ValueError: If it is longer than a slot.
        """
        if len(content) > SLOT_NUM_BYTES - _HEADER.size:
            raise ValueError(f"{len(content)} bytes do not fit into a slot of {SLOT_NUM_BYTES}")
        at = self._own_slot * SLOT_NUM_BYTES
        self._memory[at : at + _HEADER.size + len(content)] = _HEADER.pack(len(content), zlib.crc32(content)) + content

    def read(self, slot: int) -> bytes | None:
        """What the rank of a slot says; None if it has said nothing, or is at it just now."""
        at = slot * SLOT_NUM_BYTES
        for _ in range(_ATTEMPTS):
            num_bytes, checksum = _HEADER.unpack_from(self._memory, at)
            begin = at + _HEADER.size
            content = self._memory[begin : begin + min(num_bytes, SLOT_NUM_BYTES)]
            if content and zlib.crc32(content) == checksum:
                return content
        return None


def _create(num_bytes: int) -> tuple[int, str, str | None]:
    """Memory for a board: its descriptor, where other ranks find it, and what is to be removed, if anything is."""
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


def _is_board(descriptor: int, path: str, num_bytes: int) -> bool:
    """Returns whether a file is a board of this user. A manipulated store could name another file."""
    status = os.fstat(descriptor)
    is_own = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    if not is_own or not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes:
        return False
    if os.path.basename(path).startswith(_NAME):
        return True
    # A process that truncated unsealed memory would end this process by a SIGBUS.
    is_memory = os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{_NAME}")
    return is_memory and fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) == _SEALS
