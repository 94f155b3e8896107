"""Segments: shared memory of the ranks of one host, for data that is too large for a message.

A segment is a file in ``/dev/shm`` that never has a name (``O_TMPFILE``). Ranks send each other its descriptor. The
kernel frees the segment when no process has it open or mapped, also if ranks were killed. Its pages are allocated at
its creation, so that a full ``/dev/shm`` raises an error there. Otherwise a write during a step would kill the process
with a signal.
"""

import mmap
import os
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

DIRECTORY: Final = "/dev/shm"
#: Number of pieces of one rank that can be in use; :mod:`.rounds` explains why four.
NUM_SLOTS: Final = 4
#: Default size. Pieces of this segment stay in the caches of their cores; larger and smaller segments were slower.
DEFAULT_NUM_BYTES: Final = 2 * 1024 * 1024
#: Default size if ranks share cores. Each piece costs context switches, so fewer and larger pieces were faster.
DEFAULT_NUM_BYTES_WHEN_CROWDED: Final = 4 * DEFAULT_NUM_BYTES
MIN_NUM_BYTES: Final = 128 * 1024
#: Size of the native library's control block. The library has a quarter of a segment, the native area: this block, and
#: then the library's slots.
CONTROL_BLOCK_NUM_BYTES: Final = 4096
#: Size of a line of a core's cache, of which the native library uses whole ones; as in ``all_reduce.c``.
LINE_NUM_BYTES: Final = 64
_NATIVE_SHARE: Final = 4
_UNIT_NUM_BYTES: Final = 64 * 1024
#: Maximum number of ranks on this host in a group of this process.
_max_local_ranks = 0
#: Environment variable with the size of each rank's segment, in bytes.
SIZE_VARIABLE: Final = "LIGHTNING_STRATEGIES_EXT_SHM_SEGMENT_BYTES"


def resolve_num_bytes(num_bytes: int | None) -> int | None:
    """Returns the size of a segment: the argument, else the environment variable :data:`SIZE_VARIABLE`, else None.

    Args:
        num_bytes: Size in bytes, or None.

    Raises:
        ValueError: If the size is not a number, or too small.
    """
    value = os.environ.get(SIZE_VARIABLE) if num_bytes is None else num_bytes
    if value is None:
        return None
    source = SIZE_VARIABLE if num_bytes is None else "segment_num_bytes"
    try:
        chosen = int(value)
    except ValueError:
        raise ValueError(f"`{source}={value!r}` must be a whole number of bytes.") from None
    if chosen < MIN_NUM_BYTES:
        raise ValueError(f"`{source}={chosen}` is too small: a segment must have at least {MIN_NUM_BYTES} bytes.")
    return chosen // _UNIT_NUM_BYTES * _UNIT_NUM_BYTES


def create(num_bytes: int) -> int:
    """Creates a segment and returns its descriptor.

    Raises:
        OSError: If ``/dev/shm`` does not exist, is full, or has no unnamed files.
    """
    fd = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def grow_if_crowded(fd: int, num_local_ranks: int) -> None:
    """Enlarges a segment of the default size if ranks share cores, and ``/dev/shm`` has space.

    Args:
        fd: Descriptor of the segment, which no process has mapped yet.
        num_local_ranks: Number of ranks of a group on this host; ranks of earlier groups of this process count, too.
    """
    global _max_local_ranks
    _max_local_ranks = max(_max_local_ranks, num_local_ranks)
    if _max_local_ranks > len(os.sched_getaffinity(0)):
        with suppress(OSError):
            os.posix_fallocate(fd, 0, DEFAULT_NUM_BYTES_WHEN_CROWDED)


def mapped(fd: int) -> Tensor:
    """Maps a whole segment into this process as a tensor of bytes. Its descriptor is not required afterwards."""
    return torch.frombuffer(mmap.mmap(fd, 0), dtype=torch.uint8)


class Segment:
    """One rank's segment, mapped into this process.

    Args:
        fd: Descriptor of the segment.

    Attributes:
        slots: Slots for the rounds, one byte tensor each.
        native_area: Byte tensor for the native library: its control block, and then its slots.
    """

    def __init__(self, fd: int) -> None:
        whole = mapped(fd)
        self.native_area, slots = whole.tensor_split([whole.numel() // _NATIVE_SHARE])
        self.slots: tuple[Tensor, ...] = slots.chunk(NUM_SLOTS)

    @property
    def slot_num_bytes(self) -> int:
        """Maximum size of a piece, in bytes."""
        return self.slots[0].numel()

    @property
    def native_slot_num_bytes(self) -> int:
        """Maximum size of a piece in the native library, in bytes."""
        return (self.native_area.numel() - CONTROL_BLOCK_NUM_BYTES) // NUM_SLOTS // LINE_NUM_BYTES * LINE_NUM_BYTES
