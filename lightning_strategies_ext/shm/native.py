"""All-reduces of the ranks of one host by the native library; ``all_reduce.c`` describes the algorithm.

Rounds support all operations, but send a message per round and peer, so that a small all-reduce takes several times as
long (``docs/benchmarks.md`` has measurements). The library uses sockets only for long waits: a rank sleeps on them, is
woken through them, and detects the exit of a peer.
"""

import ctypes
from collections.abc import Generator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.distributed import DistBackendError, ReduceOp

from lightning_strategies_ext.identities import current
from lightning_strategies_ext.shm.comparison import Comparison, Operation
from lightning_strategies_ext.shm.links import (
    HEADER,
    MESSAGE_NUM_BYTES,
    WAKE,
    Links,
    LocalPeer,
    MismatchFoundError,
    PeerLostError,
)
from lightning_strategies_ext.shm.rounds import POLL_S, received_operation
from lightning_strategies_ext.shm.segments import CONTROL_BLOCK_NUM_BYTES, Segment

#: Maximum number of ranks on one host that the library supports.
MAX_RANKS: Final = 64
_DONE, _WAITS, _MISMATCH = range(3)  # as in all_reduce.c
_TYPES: Final = {torch.float32: 0, torch.float64: 1, torch.int32: 2, torch.int64: 3}
_IS_AVERAGE: Final = {ReduceOp.SUM: False, ReduceOp.AVG: True}
_TYPE_NAMES: Final = [str(dtype).removeprefix("torch.") for dtype in _TYPES]
_POLL_NS: Final = int(POLL_S * 1e9)
#: Maximum size in bytes, times the number of other ranks, of a tensor that every rank reduces as a whole.
_WHOLE_NUM_BYTES: Final = 32 * 1024


class SharedCopies(NamedTuple):
    """Memory for the results of all-reduces: one copy per rank, in memory that all ranks of the host have mapped.

    Attributes:
        own: Copy of this rank, contiguous.
        pointers: Addresses of all copies in this process, in rank order.
        memory: Tensors that keep the copies of all ranks mapped.
    """

    own: Tensor
    pointers: "ctypes.Array[ctypes.c_void_p]"
    memory: Sequence[Tensor]


class AllReduceCall(NamedTuple):
    """Arguments of one all-reduce for the library, with the tensors whose memory it reads and writes."""

    tensor: Tensor
    pointer: int
    numel: int
    type: int
    is_average: bool
    copies: SharedCopies | None
    identity: int


class NativeAllReduce:
    """Runs the all-reduces of one rank with the native library.

    Args:
        library: Library from :func:`.native_build.library`.
        local_rank: Local rank of this process: its index among the ranks of the group on this host.
        peers: Other ranks of the host, by local rank.
        links: Links to the peers.
        segments: Segments of all ranks of the host, by local rank.
        comparison: Creates the error if ranks are in different operations.

    Attributes:
        poll_s: Time for which the caller polls before it sleeps, in seconds: zero, because the library polls.
    """

    poll_s: Final = 0.0

    def __init__(
        self,
        library: ctypes.CDLL,
        local_rank: int,
        peers: dict[int, LocalPeer],
        links: Links,
        segments: Sequence[Segment],
        comparison: Comparison,
    ) -> None:
        self._library = library
        self._local_rank = local_rank
        self._size = len(segments)
        self._peers = peers
        self._links = links
        self._comparison = comparison
        self._segments = segments  # stay mapped, because the library may write to them
        self._message = memoryview(bytearray(MESSAGE_NUM_BYTES))
        self._whole_num_bytes = _WHOLE_NUM_BYTES // max(1, self._size - 1)
        self._group = ctypes.create_string_buffer(library.all_reduce_group_bytes())
        areas = (ctypes.c_void_p * self._size)(*(segment.native_area.data_ptr() for segment in segments))
        fds = [links.fileno(peers[other]) if other in peers else -1 for other in range(self._size)]
        slot_num_bytes = min(segment.native_slot_num_bytes for segment in segments)
        library.all_reduce_open(
            self._group,
            local_rank,
            self._size,
            areas,
            CONTROL_BLOCK_NUM_BYTES,
            slot_num_bytes,
            (ctypes.c_int * self._size)(*fds),
            HEADER.pack(WAKE, 0, 0, 0, 0, 0),
        )

    @staticmethod
    def supports(tensor: Tensor, op: Any) -> bool:
        """Returns whether the library supports a tensor and an operator. If not, all ranks use rounds."""
        return tensor.dtype in _TYPES and getattr(op, "op", op) in _IS_AVERAGE and tensor.numel() > 0

    @staticmethod
    def prepare(
        flat: Tensor, op: Any, copies: SharedCopies | None = None, identity: int | None = None
    ) -> AllReduceCall:
        """Returns the argument of :meth:`begin`; raises before an operation has begun.

        Args:
            flat: Contiguous tensor on the CPU that :meth:`supports` supports.
            op: Reduction operator: SUM or AVG.
            copies: Memory for the result, of the size of the tensor; None to reduce the tensor in place.
            identity: Identity of the operation; that of the calling thread if None.

        Raises:
            RuntimeError: If the tensor has no memory.
        """
        is_average = _IS_AVERAGE[getattr(op, "op", op)]
        identity = current.identity if identity is None else identity
        return AllReduceCall(flat, flat.data_ptr(), flat.numel(), _TYPES[flat.dtype], is_average, copies, identity)

    def begin(self, call: AllReduceCall) -> bool:
        """Begins to reduce a tensor. Returns whether it is finished; otherwise :meth:`resume` continues."""
        _, *numbers, copies, identity = call
        pointers = None if copies is None else copies.pointers
        self._library.all_reduce_begin(self._group, *numbers, self._whole_num_bytes, pointers, identity)
        return bool(self._library.all_reduce_advance(self._group, _POLL_NS) == _DONE)

    def resume(self, call: AllReduceCall) -> Generator[None, None, None]:
        """Continues after :meth:`begin`; yields whenever other ranks are not ready yet.

        Args:
            call: Operation that has begun. Its memory stays alive until the end.

        Raises:
            DistBackendError: If a rank reduces a tensor of another size or dtype, with another operator, or for
                another purpose.
        """
        while (state := self._library.all_reduce_advance(self._group, _POLL_NS)) != _DONE:
            if state == _MISMATCH:
                raise self._comparison.mismatch([self._operation(local_rank) for local_rank in range(self._size)])
            yield

    def run(self, calls: Sequence[AllReduceCall]) -> Generator[None, None, None]:
        """Reduces tensors in place, one after the other, with :meth:`begin` and :meth:`resume`."""
        for call in calls:
            if not self.begin(call):
                yield from self.resume(call)

    def wait(self, deadline: float) -> None:
        """Sleeps until an awaited rank has published data.

        Raises:
            PeerLostError: If an awaited rank has exited or left the group.
            TimeoutError: If no data has arrived before the deadline.
            DistBackendError: If an awaited rank is in another collective.
        """
        local_rank = self._library.all_reduce_fall_asleep(self._group)
        if local_rank < 0:
            return
        first = self._peers[local_rank]
        awaited = [local_rank, *(other for other in self._peers if other > local_rank and self._awaits(other))]
        try:
            self._links.wait([self._peers[other] for other in awaited], deadline)
            has_message = self._links.has_message(first)
        except PeerLostError as error:
            # The peer may have published all its data before it exited, while this process had no core to read it.
            if any(self._peers[other] == error.peer and self._awaits(other) for other in awaited):
                raise
            return
        finally:
            self._library.all_reduce_wake_up(self._group)
        # When a message has arrived, all data that its sender published before is visible.
        if has_message and self._awaits(local_rank):
            self._links.receive(first, self._message)
            operations: list[Operation | None] = [None] * self._size
            operations[self._local_rank], operations[local_rank] = (
                self.current_operation,
                received_operation(self._message),
            )
            raise self._comparison.mismatch(operations)

    @property
    def current_operation(self) -> Operation:
        """The operation of this rank."""
        return self._operation(self._local_rank)

    def reply_to_mismatch(self, found: MismatchFoundError) -> DistBackendError:
        """Returns the error after a peer has found a mismatch, see :meth:`.Comparison.reply_to_mismatch`."""
        return self._comparison.reply_to_mismatch(found, self.current_operation)

    def _awaits(self, local_rank: int) -> bool:
        return bool(self._library.all_reduce_awaits(self._group, local_rank))

    def _operation(self, local_rank: int) -> Operation:
        call = self._library.all_reduce_call(self._group, local_rank)
        tensors = f" of {call >> 8} x {_TYPE_NAMES[call >> 1 & 63]} ({'AVG' if call & 1 else 'SUM'})"
        if call & 128:
            tensors += " into shared memory"
        return Operation("all_reduce", tensors, self._library.all_reduce_identity(self._group, local_rank))
