"""Layout of packed values: where each value is in a message, and the reduction of the messages of all ranks.

A layout depends on the names, reductions, dtypes, and shapes of values. It has memory for the messages of all ranks and
views of each value in it, so that an exchange with values of these names needs a few tensor operations only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import groupby
from math import nan
from operator import itemgetter
from typing import Any, Final

import torch
from torch import Tensor

#: Size of the first message of a rank, in bytes. Loopback and Ethernet take as long for it as for one byte.
MESSAGE_NUM_BYTES: Final = 1024
#: Digest, number of bytes of the values, a flag, and a zero, so that all dtypes are aligned after it.
HEADER_NUM_BYTES: Final = 32
#: Flags: more values of the kind may follow, no more follow, the rank has no values and takes those of other ranks.
PARTIAL, FINAL, ABSENT = range(3)
INLINE_NUM_BYTES: Final = MESSAGE_NUM_BYTES - HEADER_NUM_BYTES
_WORD_NUM_BYTES: Final = 8
_ALIGNMENT: Final = 16
_UNSET: Final = torch.empty(0)
_REDUCTIONS: Final[dict[str, Callable[..., Tensor]]] = {
    "mean": torch.add,
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}
_REDUCTIONS_OF_ROWS: Final[dict[str, Callable[..., Tensor]]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "min": torch.amin,
    "max": torch.amax,
}


@dataclass(frozen=True)
class _Segment:
    """Values of one dtype and reduction, which are next to each other in a message."""

    dtype: torch.dtype
    op: str
    indices: tuple[int, ...]
    sizes: tuple[int, ...]
    num_bytes: int
    has_only_scalars: bool
    #: Returns the values of the segment: a tuple, or the value if there is one.
    select: Callable[[Sequence[Tensor]], Any]


class PackedLayout:
    """Position of each value in a message, the digest, and memory for the messages of all ranks.

    Args:
        kind: Kind of the exchange, part of the digest.
        keys: Names of the values, in any order.
        ops: Reduction of each value.
        values: The values.
        device: Device of the values.

    Attributes:
        digest: Signed 64-bit digest.
        num_bytes: Size of all values, in bytes.
        gathered: Memory for the messages of all ranks.
        message: This rank's message in it.
        gathered_digests: The digests in it, in rank order.
        gathered_flags: The flags in it, in rank order.
    """

    gathered: Tensor
    message: Tensor
    gathered_digests: "memoryview[int]"
    gathered_flags: "memoryview[int]"

    def __init__(
        self, kind: str, keys: Sequence[str], ops: Sequence[str], values: Sequence[Tensor], device: torch.device
    ) -> None:
        sort_keys = [
            (-value.element_size(), str(value.dtype), op, key, tuple(value.shape))
            for key, op, value in zip(keys, ops, values, strict=True)
        ]
        text = repr((kind, sorted(sort_keys)))
        self.digest = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
        # Large elements first, so that each segment starts at a multiple of its element size.
        self.order = sorted(range(len(values)), key=sort_keys.__getitem__)
        self.shapes = [value.shape for value in values]
        self.segments: list[_Segment] = []
        for (dtype, op), group in groupby(self.order, key=lambda index: (values[index].dtype, ops[index])):
            indices = tuple(group)
            sizes = tuple(values[index].numel() for index in indices)
            are_scalars = not any(values[index].ndim for index in indices)
            num_bytes = sum(sizes) * dtype.itemsize
            self.segments.append(_Segment(dtype, op, indices, sizes, num_bytes, are_scalars, itemgetter(*indices)))
        self.num_bytes = sum(segment.num_bytes for segment in self.segments)
        self._rank_and_size = (0, 0)
        self._device = device
        self._headers: dict[int, tuple[Tensor, Tensor]] = {}

    def pack(self, values: Sequence[Tensor], flag: int = FINAL) -> tuple[Tensor, Tensor | None]:
        """Returns the first message as words, and the rest of the values as bytes if they do not fit into it."""
        header, padding = self._header_and_padding(flag)
        parts = (part.reshape(-1).view(torch.uint8) for part in self.concatenated(values))
        message = torch.cat([header, *parts, padding])
        first, rest = message[:MESSAGE_NUM_BYTES].view(torch.int64), message[MESSAGE_NUM_BYTES:]
        return first, rest if self.num_bytes > INLINE_NUM_BYTES else None

    def _header_and_padding(self, flag: int) -> tuple[Tensor, Tensor]:
        cached = self._headers.get(flag)
        if cached is None:
            num_padding = INLINE_NUM_BYTES - self.num_bytes
            num_zeros = num_padding if num_padding >= 0 else num_padding % _ALIGNMENT
            with torch.inference_mode(False):
                words = torch.zeros(HEADER_NUM_BYTES // _WORD_NUM_BYTES, dtype=torch.int64, device=self._device)
                for index, word in enumerate((self.digest, self.num_bytes, flag)):
                    words[index].fill_(word)  # a copy of a host tensor to a GPU would wait for the GPU
                cached = words.view(torch.uint8), torch.zeros(num_zeros, dtype=torch.uint8, device=self._device)
            self._headers[flag] = cached
        return cached

    def pack_in_place(self, values: Sequence[Tensor], flag: int, rank: int, size: int) -> None:
        """Writes the message to :attr:`message`, and zeros to the rest of :attr:`gathered`.

        Args:
            values: Values that fit into one message.
            flag: Flag of the message.
            rank: This rank.
            size: Number of ranks.
        """
        if self._rank_and_size != (rank, size):
            self._allocate(rank, size)
        # Few operations on tensors, each of which takes a microsecond or more: a step has one exchange.
        self._bytes[:] = self._cleared[flag]
        for segment, row in zip(self.segments, self._own_rows, strict=True):
            if len(segment.indices) == 1:
                row.copy_(segment.select(values))
            elif segment.has_only_scalars:
                torch.stack(segment.select(values), out=row)
            else:
                torch.cat([value.reshape(-1) for value in segment.select(values)], out=row)

    def _allocate(self, rank: int, size: int) -> None:
        memory = bytearray(size * MESSAGE_NUM_BYTES)
        self._bytes = memoryview(memory)
        words, step = self._bytes.cast("q"), MESSAGE_NUM_BYTES // _WORD_NUM_BYTES
        self.gathered_digests, self.gathered_flags = words[::step], words[2::step]
        self._cleared = []
        for flag in range(ABSENT + 1):
            words[rank * step], words[rank * step + 1], words[rank * step + 2] = self.digest, self.num_bytes, flag
            self._cleared.append(bytes(memory))
        with torch.inference_mode(False):  # it is used outside inference mode, too
            self.gathered = torch.frombuffer(memory, dtype=torch.int64)
            rows = self.gathered.view(size, -1)
            self.message = rows[rank]
            self._rows = self._separated_rows(rows.view(torch.uint8)[:, HEADER_NUM_BYTES:])
        self._own_rows = [of_ranks[rank] for of_ranks in self._rows]
        self._rank_and_size = rank, size

    def reduce_gathered(self) -> list[Tensor]:
        """Returns the reduced values of :attr:`gathered`, in the order of the parts."""
        return self._reduce(self._rows)

    def concatenated(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Returns the values of each segment as a new flat tensor; a segment of one value keeps its shape."""
        return [
            values[segment.indices[0]].clone(memory_format=torch.contiguous_format)
            if len(segment.indices) == 1
            else torch.stack(segment.select(values))
            if segment.has_only_scalars
            else torch.cat([value.reshape(-1) for value in segment.select(values)])
            for segment in self.segments
        ]

    def reduce(self, rows: Tensor) -> list[Tensor]:
        """Reduces the bytes of the values of several ranks, one per row.

        Returns:
            The reduced values, in the order of the parts.
        """
        return self._reduce(self._separated_rows(rows))

    def reduce_at_once(self, rows: Tensor, is_invalid: Tensor) -> list[Tensor]:
        """Reduces as :meth:`reduce`, but all ranks in one operation: on a GPU, the number of operations counts.

        Args:
            rows: Bytes of the values, one row per rank.
            is_invalid: Boolean on the device of ``rows``: whether floating-point values are NaN.
        """
        totals, at = [], 0
        for segment in self.segments:
            values = rows[:, at : at + segment.num_bytes].view(segment.dtype)
            at += segment.num_bytes
            options = {"dtype": segment.dtype} if segment.op == "sum" else {}
            total = _REDUCTIONS_OF_ROWS[segment.op](values, 0, **options)
            if segment.dtype.is_floating_point:
                total.masked_fill_(is_invalid, nan)
            totals.append(total.view(self.shapes[segment.indices[0]]) if len(segment.indices) == 1 else total)
        return self.separated(totals)

    def _separated_rows(self, rows: Tensor) -> list[list[Tensor]]:
        """Returns the values of each rank, in the form of :meth:`concatenated`, for each segment."""
        separated, at = [], 0
        for segment in self.segments:
            values: Sequence[Tensor] = rows[:, at : at + segment.num_bytes].view(segment.dtype).unbind()
            at += segment.num_bytes
            if len(segment.indices) == 1:
                values = [value.view(self.shapes[segment.indices[0]]) for value in values]
            separated.append([*values])
        return separated

    def _reduce(self, separated: Sequence[list[Tensor]]) -> list[Tensor]:
        totals = []
        for segment, rows in zip(self.segments, separated, strict=True):
            reduce = _REDUCTIONS[segment.op]
            total = reduce(rows[0], rows[1]) if len(rows) > 1 else rows[0].clone()
            for row in rows[2:]:
                reduce(total, row, out=total)
            totals.append(total.div_(_number(len(rows), segment.dtype)) if segment.op == "mean" else total)
        return self.separated(totals)

    def separated(self, totals: Sequence[Tensor]) -> list[Tensor]:
        """Returns the values of segments in the form of :meth:`concatenated`, in the order of the parts."""
        ordered: list[Tensor] = [_UNSET] * len(self.order)
        for segment, total in zip(self.segments, totals, strict=True):
            if len(segment.indices) == 1:
                ordered[segment.indices[0]] = total
            elif segment.has_only_scalars:
                for index, value in zip(segment.indices, total.unbind(), strict=True):
                    ordered[index] = value
            else:
                for index, value in zip(segment.indices, total.split(list(segment.sizes)), strict=True):
                    ordered[index] = value.view(self.shapes[index])
        return ordered


@cache
def _number(number: int, dtype: torch.dtype) -> Tensor:
    """Returns a divisor; torch takes longer to divide by a Python number."""
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=dtype)
