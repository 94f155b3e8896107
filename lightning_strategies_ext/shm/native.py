"""All-reduces of the ranks of one host, carried out by the compiled library (``all_reduce.c``, which says how).

Rounds do the same, and everything else; the compiled way costs a microsecond where they cost some fifty. Sockets serve
it for what they are good at: a rank that waits long sleeps on them, is woken through them, and hears of a peer's end.
"""

import ctypes
from collections.abc import Generator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.distributed import DistBackendError, ReduceOp

from lightning_strategies_ext.shm.links import HEADER, MESSAGE_NUM_BYTES, WAKE, LinkedRank, Links, PeerLostError
from lightning_strategies_ext.shm.rounds import SPIN_S
from lightning_strategies_ext.shm.segments import BOARD_NUM_BYTES, Segment

#: Ranks of one host that the library has room for.
MAX_RANKS: Final = 64
_DONE, _WAITS, _MISMATCH = range(3)
_TYPES: Final = {torch.float32: 0, torch.float64: 1, torch.int32: 2, torch.int64: 3}
_IS_AVERAGE: Final = {ReduceOp.SUM: False, ReduceOp.AVG: True}
_TYPE_NAMES: Final = [str(dtype).removeprefix("torch.") for dtype in _TYPES]
_SPIN_NS: Final = int(SPIN_S * 1e9)
#: A tensor up to this size, in bytes times the other ranks, is read whole by all of them.
_WHOLE_NUM_BYTES: Final = 32 * 1024


class SharedCopies(NamedTuple):
    """Memory for the result of all-reduces: a copy per rank, in memory that all ranks of the host have mapped.

    Attributes:
        own: This rank's copy, contiguous.
        pointers: The addresses of all copies in this process, in rank order.
        memory: What keeps the copies of all ranks mapped.
    """

    own: Tensor
    pointers: "ctypes.Array[ctypes.c_void_p]"
    memory: Sequence[Tensor]


class Call(NamedTuple):
    """One all-reduce, in the library's terms; the tensors are held as long as their memory is read or written to."""

    tensor: Tensor
    pointer: int
    numel: int
    type: int
    is_average: bool
    copies: SharedCopies | None


class CompiledAllReduce:
    """The compiled all-reduces of one rank.

    Args:
        library: As :func:`.compilation.library` gives it.
        rank: Of this process, among those of the host.
        peers: The others, by their rank there.
        links: To them.
        segments: Everyone's, in rank order.

    Attributes:
        spin_s: How long its caller shall look for others: not at all, the library does.
    """

    spin_s: Final = 0.0

    def __init__(
        self,
        library: ctypes.CDLL,
        rank: int,
        peers: dict[int, LinkedRank],
        links: Links,
        segments: Sequence[Segment],
    ) -> None:
        self._library = library
        self._rank = rank
        self._size = len(segments)
        self._peers = peers
        self._links = links
        self._segments = segments  # mapped as long as the library may write to them
        self._message = memoryview(bytearray(MESSAGE_NUM_BYTES))
        self._whole_num_bytes = _WHOLE_NUM_BYTES // max(1, self._size - 1)
        self._group = ctypes.create_string_buffer(library.all_reduce_group_bytes())
        areas = (ctypes.c_void_p * self._size)(*(segment.board.data_ptr() for segment in segments))
        fds = [links.fileno(peers[place]) if place in peers else -1 for place in range(self._size)]
        slot_num_bytes = min(segment.compiled_slot_num_bytes for segment in segments)
        library.all_reduce_open(
            self._group,
            rank,
            self._size,
            areas,
            BOARD_NUM_BYTES,
            slot_num_bytes,
            (ctypes.c_int * self._size)(*fds),
            HEADER.pack(WAKE, 0, 0, 0),
        )

    @staticmethod
    def does(tensor: Tensor, op: Any) -> bool:
        """Whether the library can reduce such a tensor; what it cannot do is done in rounds, on all ranks alike."""
        return tensor.dtype in _TYPES and getattr(op, "op", op) in _IS_AVERAGE and tensor.numel() > 0

    @staticmethod
    def call_for(flat: Tensor, op: Any, copies: SharedCopies | None = None) -> Call:
        """What :meth:`begin` takes, found out before anything is begun.

        Args:
            flat: Contiguous, on the CPU, and such that :meth:`does` says yes.
            op: SUM, or AVG.
            copies: Of the size of the tensor, for the result; None if it belongs into the tensor.

        Raises:
            RuntimeError: If the tensor has no memory.
        """
        is_average = _IS_AVERAGE[getattr(op, "op", op)]
        return Call(flat, flat.data_ptr(), flat.numel(), _TYPES[flat.dtype], is_average, copies)

    def begin(self, call: Call) -> bool:
        """Begins to reduce a tensor; True if that is done already, else :meth:`go_on` goes on."""
        _, *numbers, copies = call
        pointers = None if copies is None else copies.pointers
        self._library.all_reduce_begin(self._group, *numbers, self._whole_num_bytes, pointers)
        return bool(self._library.all_reduce_advance(self._group, _SPIN_NS) == _DONE)

    def go_on(self, call: Call) -> Generator[None, None, None]:
        """Goes on where :meth:`begin` had to stop; yields where it has to wait for others.

        Args:
            call: The one that has begun. Its memory is held until the end.

        Raises:
            DistBackendError: If a rank reduces a tensor of another size or dtype, or with another op.
        """
        while (state := self._library.all_reduce_advance(self._group, _SPIN_NS)) != _DONE:
            if state != _WAITS:
                raise self._mismatch(state - _MISMATCH)
            yield

    def go_through(self, calls: Sequence[Call]) -> Generator[None, None, None]:
        """Reduces tensors in place, one after the other; as :meth:`begin` and :meth:`go_on` do."""
        for call in calls:
            if not self.begin(call):
                yield from self.go_on(call)

    def wait(self, deadline: float) -> None:
        """Sleeps until a rank that is waited for has laid something out.

        Raises:
            PeerLostError: If one is gone.
            TimeoutError: If nothing came before the deadline.
            DistBackendError: If one is in another collective.
        """
        place = self._library.all_reduce_fall_asleep(self._group)
        if place < 0:
            return
        first = self._peers[place]
        awaited = [place, *(other for other in self._peers if other > place and self._awaits(other))]
        try:
            self._links.wait([self._peers[other] for other in awaited], deadline)
            has_message = self._links.has_message(first)
        except PeerLostError as error:
            # One that is gone may have laid out all it had to, while this process had no core to see it.
            if any(self._peers[other] == error.peer and self._awaits(other) for other in awaited):
                raise
            return
        finally:
            self._library.all_reduce_wake_up(self._group)
        # Before any message that a rank sends, all that it has laid out can be seen.
        if has_message and self._awaits(place):
            self._links.receive(first, self._message)
            raise DistBackendError(f"the ranks do not call the same collectives: {first} is not in this all-reduce")

    def _awaits(self, place: int) -> bool:
        return bool(self._library.all_reduce_awaits(self._group, place))

    def _mismatch(self, place: int) -> DistBackendError:
        theirs, ours = (self._call(rank) for rank in (place, self._rank))
        return DistBackendError(
            f"the ranks do not call the same collectives: {self._peers[place]} all-reduces {theirs},"
            f" and this rank {ours}"
        )

    def _call(self, place: int) -> str:
        call = self._library.all_reduce_call(self._group, place)
        return f"{call >> 8} x {_TYPE_NAMES[call >> 1 & 127]} ({'AVG' if call & 1 else 'SUM'})"
