"""Segments: shared memory in which the ranks of one host lay out what is too large for a message.

A segment is a file in ``/dev/shm`` that never has a name (``O_TMPFILE``): ranks hand each other its descriptor, and the
kernel frees it when the last of them is gone, however they went. Its pages are taken when it is made, so that a full
``/dev/shm`` is an error then and there, and not a signal that ends the process in the middle of a step.
"""

import mmap
import os
from typing import Final

import torch
from torch import Tensor

DIRECTORY: Final = "/dev/shm"
#: So many pieces of one rank can be under way; see :mod:`.rounds` for why four.
NUM_SLOTS: Final = 4
#: Pieces that stay in the caches of the cores that write and read them; larger and smaller ones were slower.
DEFAULT_NUM_BYTES: Final = 2 * 1024 * 1024
#: Where ranks share cores, each piece costs turns of the scheduler; fewer, larger ones were faster.
DEFAULT_NUM_BYTES_WHEN_CROWDED: Final = 4 * DEFAULT_NUM_BYTES
MIN_NUM_BYTES: Final = 128 * 1024
#: Of a segment, a quarter is the compiled library's: this for its board, and the rest for slots of its own.
BOARD_NUM_BYTES: Final = 4096
_COMPILED_SHARE: Final = 4
_UNIT_NUM_BYTES: Final = 64 * 1024
#: Sets the number of bytes of each rank's segment.
VARIABLE: Final = "LIGHTNING_STRATEGIES_EXT_SHM_BYTES"


def chosen_num_bytes(num_bytes: int | None, num_ranks: int = 1) -> int:
    """The size of a segment: the argument, else the environment variable :data:`VARIABLE`, else a default.

    Args:
        num_bytes: The argument.
        num_ranks: How many ranks there are, for the default.

    Raises:
        ValueError: If it is no number, or too small.
    """
    is_crowded = num_ranks > len(os.sched_getaffinity(0))
    default = DEFAULT_NUM_BYTES_WHEN_CROWDED if is_crowded else DEFAULT_NUM_BYTES
    value = os.environ.get(VARIABLE, default) if num_bytes is None else num_bytes
    source = VARIABLE if num_bytes is None else "segment_num_bytes"
    try:
        chosen = int(value)
    except ValueError:
        raise ValueError(f"`{source}={value!r}` must be a whole number of bytes.") from None
    if chosen < MIN_NUM_BYTES:
        raise ValueError(f"`{source}={chosen}` is too small: a segment has {MIN_NUM_BYTES} bytes at least.")
    return chosen // _UNIT_NUM_BYTES * _UNIT_NUM_BYTES


def create(num_bytes: int) -> int:
    """Makes a segment and returns its descriptor.

    Raises:
        OSError: If ``/dev/shm`` is missing or has no room for it.
    """
    fd = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def mapped(fd: int) -> Tensor:
    """Maps the whole of a segment into this process as a tensor of bytes, and closes its descriptor."""
    try:
        memory = mmap.mmap(fd, 0)
    finally:
        os.close(fd)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Segment:
    """One rank's segment, mapped into this process.

    Args:
        fd: Its descriptor, which is closed.

    Attributes:
        slots: One byte tensor per slot of the rounds.
        board: The bytes that are the compiled library's.
    """

    def __init__(self, fd: int) -> None:
        whole = mapped(fd)
        self.board, slots = whole.tensor_split([whole.numel() // _COMPILED_SHARE])
        self.slots: tuple[Tensor, ...] = slots.chunk(NUM_SLOTS)

    @property
    def slot_num_bytes(self) -> int:
        """Most bytes that one piece may have."""
        return self.slots[0].numel()

    @property
    def compiled_slot_num_bytes(self) -> int:
        """Most bytes that one piece may have in the compiled library."""
        return (self.board.numel() - BOARD_NUM_BYTES) // NUM_SLOTS // 64 * 64
