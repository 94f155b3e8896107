"""Packed exchange: reduces any number of named values over all ranks with one all-gather of bytes.

Each rank sends a message of fixed size: a digest of the names, reductions, dtypes, and shapes of its values, then the
values, each in its own dtype. Every rank compares the digests of all ranks before it uses a value, and then reduces in
rank order. Values are matched by name, so the order in which a rank lists them does not matter. If the ranks have
different names, every rank raises :class:`DifferentPartsError`.

Values that do not fit into the message take one more all-gather. More than :data:`MAX_GATHERED_RANKS` ranks first
compare their digests, and then reduce the values with one all-reduce per dtype and reduction.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from lightning_strategies_ext.collectives.base import Collectives

#: Size of the first message of a rank, in bytes. Loopback and Ethernet take as long for it as for one byte.
MESSAGE_NUM_BYTES: Final = 1024
#: Digest, number of bytes of the values, a flag, and a zero, so that all dtypes are aligned after it.
_HEADER_NUM_BYTES: Final = 32
#: Flags: more values of the kind may follow, no more follow, the rank has no values and takes those of other ranks.
_PARTIAL, _FINAL, _ABSENT = range(3)
_INLINE_NUM_BYTES: Final = MESSAGE_NUM_BYTES - _HEADER_NUM_BYTES
_ALIGNMENT: Final = 16
#: Number of ranks above which values are reduced by all-reduces: the size of a gathered message is that of all ranks.
MAX_GATHERED_RANKS = 64
#: Number of layouts that are cached; a layout depends on the names and their order.
_MAX_LAYOUTS: Final = 256
_UNSET: Final = torch.empty(0)
_DTYPE_AND_SHAPE: Final = attrgetter("dtype", "shape")
_REDUCTIONS: Final[dict[str, Callable[[Tensor, Tensor], Any]]] = {
    "mean": Tensor.add_,
    "sum": Tensor.add_,
    "min": lambda total, row: torch.minimum(total, row, out=total),
    "max": lambda total, row: torch.maximum(total, row, out=total),
}


class Part(NamedTuple):
    """A value that this rank passes to an exchange.

    Attributes:
        key: Name, equal on all ranks; unique among the values of an exchange.
        op: Reduction: "sum", "min", "max", or "mean" (floating point only).
        value: Tensor on the CPU without a graph, not modified.
    """

    key: str
    op: str
    value: Tensor


class Contribution(NamedTuple):
    """What some ranks have passed to an exchange.

    Attributes:
        ranks: The ranks, in ascending order.
        is_final: Whether these ranks will pass no more values of this kind.
        description: Description of the values of the first of them.
    """

    ranks: Sequence[int]
    is_final: bool
    description: Any


class DifferentPartsError(Exception):
    """The ranks have passed values of different names, reductions, dtypes, or shapes. Raised on every rank.

    Attributes:
        contributions: One entry for each distinct set of values, in the order of its first rank; at most
            :data:`MAX_CONTRIBUTIONS`.
        has_all: Whether there are no more distinct sets.
    """

    def __init__(self, contributions: Sequence[Contribution], *, has_all: bool) -> None:
        super().__init__("the ranks exchange different values")
        self.contributions = contributions
        self.has_all = has_all


#: Number of distinct sets of values that an error describes.
MAX_CONTRIBUTIONS: Final = 8


@dataclass(frozen=True)
class _Segment:
    """Values of one dtype and reduction, which are next to each other in a message."""

    dtype: torch.dtype
    op: str
    indices: tuple[int, ...]
    sizes: tuple[int, ...]
    num_bytes: int
    has_only_scalars: bool


class PackedLayout:
    """Position of each value in a message, and the digest.

    Args:
        kind: Kind of the exchange, part of the digest.
        keys: Names of the values, in any order.
        ops: Reduction of each value.
        values: The values.

    Attributes:
        digest: Signed 64-bit digest.
        num_bytes: Size of all values, in bytes.
    """

    def __init__(self, kind: str, keys: Sequence[str], ops: Sequence[str], values: Sequence[Tensor]) -> None:
        places = [
            (-value.element_size(), str(value.dtype), op, key, tuple(value.shape))
            for key, op, value in zip(keys, ops, values, strict=True)
        ]
        text = repr((kind, sorted(places)))
        self.digest = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
        # Large elements first, so that each segment starts at a multiple of its element size.
        self.order = sorted(range(len(values)), key=places.__getitem__)
        self.shapes = [value.shape for value in values]
        self.segments: list[_Segment] = []
        for (dtype, op), group in groupby(self.order, key=lambda index: (values[index].dtype, ops[index])):
            indices = tuple(group)
            sizes = tuple(values[index].numel() for index in indices)
            are_scalars = not any(values[index].ndim for index in indices)
            self.segments.append(_Segment(dtype, op, indices, sizes, sum(sizes) * dtype.itemsize, are_scalars))
        self.num_bytes = sum(segment.num_bytes for segment in self.segments)
        with torch.inference_mode(False):
            self._headers = [
                torch.tensor([self.digest, self.num_bytes, flag, 0], dtype=torch.int64).view(torch.uint8)
                for flag in range(_ABSENT + 1)
            ]
            num_padding = _INLINE_NUM_BYTES - self.num_bytes
            self._padding = torch.zeros(
                num_padding if num_padding >= 0 else num_padding % _ALIGNMENT, dtype=torch.uint8
            )

    def pack(self, values: Sequence[Tensor], flag: int = _FINAL) -> tuple[Tensor, Tensor | None]:
        """Returns the first message, and the rest of the values if they do not fit into it; both are bytes."""
        segments = [segment.view(torch.uint8) for segment in self.concatenated(values)]
        message = torch.cat([self._headers[flag], *segments, self._padding])
        if self.num_bytes <= _INLINE_NUM_BYTES:
            return message, None
        return message[:MESSAGE_NUM_BYTES], message[MESSAGE_NUM_BYTES:]

    def concatenated(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Returns the values of each segment as a new flat tensor."""
        return [
            torch.stack([values[index] for index in segment.indices])
            if segment.has_only_scalars
            else torch.cat([values[index].reshape(-1) for index in segment.indices])
            for segment in self.segments
        ]

    def reduce(self, rows: Tensor) -> list[Tensor]:
        """Reduces the bytes of the values of several ranks, one per row.

        Returns:
            The reduced values, in the order of the parts.
        """
        totals, at = [], 0
        for segment in self.segments:
            values = rows[:, at : at + segment.num_bytes].view(segment.dtype)
            at += segment.num_bytes
            total, reduce = values[0].clone(), _REDUCTIONS[segment.op]
            for row in values[1:]:
                reduce(total, row)
            totals.append(total.div_(len(values)) if segment.op == "mean" else total)
        return self.separated(totals)

    def separated(self, totals: Sequence[Tensor]) -> list[Tensor]:
        """Returns the values of flat segments, in the order of the parts."""
        ordered: list[Tensor] = [_UNSET] * len(self.order)
        for segment, total in zip(self.segments, totals, strict=True):
            if segment.has_only_scalars:
                for index, value in zip(segment.indices, total.unbind(), strict=True):
                    ordered[index] = value
            else:
                for index, value in zip(segment.indices, total.split(list(segment.sizes)), strict=True):
                    ordered[index] = value.view(self.shapes[index])
        return ordered


class PackedExchange:
    """Reduces named values over all ranks, see the module. Collective: all ranks call each method in the same order.

    Args:
        name: Name of the exchange, equal on all ranks; at most one exchange of a name is pending at a time.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._layouts: dict[tuple[Any, ...], PackedLayout] = {}

    def start(
        self,
        collectives: Collectives,
        kind: str,
        parts: Iterable[Part | tuple[str, str, Tensor]],
        describe: Callable[[], Any],
        *,
        is_final: bool = True,
    ) -> Callable[[], list[Tensor]]:
        """Starts an exchange, concurrently with other operations.

        Args:
            collectives: Collectives of all ranks.
            kind: Kind of the values, equal on all ranks.
            parts: This rank's values, at least one.
            describe: Function that returns a picklable description of the values, for an error.
            is_final: Whether this rank will pass no more values of this kind; part of the error.

        Returns:
            Function that waits for the other ranks and returns the reduced values in the order of ``parts``, or raises
            :class:`DifferentPartsError`. All ranks call it, after the same collectives.

        Raises:
            DifferentPartsError: If values do not fit into one message, or there are more than
                :data:`MAX_GATHERED_RANKS` ranks, and the ranks have different values.
        """
        keys, ops, values = _transposed(parts)
        if collectives.is_local or collectives.rank() is None or (size := collectives.world_size()) == 1:
            copies = [value.clone() for value in values]
            return lambda: copies
        layout = self._layout_of(kind, keys, ops, values)
        flag = _FINAL if is_final else _PARTIAL
        if size > MAX_GATHERED_RANKS:
            return self._start_all_reduces(collectives, layout, values, describe, flag)
        message, rest = layout.pack(values, flag)
        gathered = torch.empty(size * MESSAGE_NUM_BYTES, dtype=torch.uint8)
        finish_gather = collectives.start_all_gather(gathered, message, self._name)

        def finish() -> Tensor:
            finish_gather()
            digests = gathered.view(torch.int64)[:: MESSAGE_NUM_BYTES // 8].tolist()
            if digests.count(layout.digest) != size:
                self._raise_difference(collectives, digests, _flags_of(gathered), describe)
            return gathered.view(size, -1)[:, _HEADER_NUM_BYTES:]

        if rest is None:
            return lambda: layout.reduce(finish())
        first = finish()  # only ranks with equal digests have rests of equal size
        finish_rest = self._start_rest(collectives, first, rest)
        return lambda: layout.reduce(finish_rest())

    def run_with_absent(
        self, collectives: Collectives, kind: str, parts: Sequence[Part] | None, describe: Callable[[], Any]
    ) -> tuple[Any, list[Tensor]] | None:
        """Reduces the values of some ranks; other ranks have none, and receive the results.

        Args:
            collectives: Collectives of all ranks.
            kind: Kind of the values, equal on all ranks.
            parts: This rank's values, possibly none; None if this rank is absent. A mean is not supported.
            describe: Function that returns a picklable description of the values.

        Returns:
            Description of the values by the first rank that is not absent, and the reduced values in the order of that
            rank; None if no rank has values.

        Raises:
            DifferentPartsError: If ranks that are not absent have different values.
        """
        keys, ops, values = _transposed(parts or ())
        layout = self._layout_of(kind, keys, ops, values)
        message, rest = layout.pack(values, _ABSENT if parts is None else _FINAL)
        gathered = torch.empty(collectives.world_size() * MESSAGE_NUM_BYTES, dtype=torch.uint8)
        collectives.start_all_gather(gathered, message, self._name)()
        digests, sizes, flags, _ = gathered.view(torch.int64).view(collectives.world_size(), -1)[:, :4].mT.tolist()
        present = [rank for rank, flag in enumerate(flags) if flag != _ABSENT]
        if not any(sizes):
            return None
        if any(digests[rank] != digests[present[0]] for rank in present):
            self._raise_difference(collectives, digests, flags, describe)
        signature = [(part.key, part.op, part.value.dtype, tuple(part.value.shape)) for part in parts or ()]
        signature, description = collectives.broadcast((signature, describe()), present[0])
        if parts is None:
            parts = [Part(key, op, torch.zeros(shape, dtype=dtype)) for key, op, dtype, shape in signature]
            keys, ops, values = _transposed(parts)
            layout = self._layout_of(kind, keys, ops, values)
            _, rest = layout.pack(values)
        rows = gathered.view(len(flags), -1)[:, _HEADER_NUM_BYTES:]
        if rest is not None:
            rows = self._start_rest(collectives, rows, rest)()
        reduced = dict(zip(keys, layout.reduce(rows[present]), strict=True))
        return description, [reduced[key] for key, *_ in signature]

    def _start_rest(self, collectives: Collectives, first: Tensor, rest: Tensor) -> Callable[[], Tensor]:
        rests = torch.empty(len(first) * len(rest), dtype=torch.uint8)
        finish = collectives.start_all_gather(rests, rest, f"{self._name}.rest")

        def finish_both() -> Tensor:
            finish()
            return torch.cat([first, rests.view(len(first), -1)], dim=1)

        return finish_both

    def _layout_of(
        self, kind: str, keys: tuple[str, ...], ops: tuple[str, ...], values: tuple[Tensor, ...]
    ) -> PackedLayout:
        # Built without a Python call per value: this is most of the time of an exchange over shared memory.
        signature = kind, keys, ops, tuple(map(_DTYPE_AND_SHAPE, values))
        layout = self._layouts.get(signature)
        if layout is None:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[signature] = PackedLayout(kind, keys, ops, values)
        return layout

    def _start_all_reduces(
        self,
        collectives: Collectives,
        layout: PackedLayout,
        values: Sequence[Tensor],
        describe: Callable[[], Any],
        flag: int,
    ) -> Callable[[], list[Tensor]]:
        extremes = torch.tensor([layout.digest, ~layout.digest], dtype=torch.int64)  # the complement does not overflow
        collectives.start_all_reduce(extremes, "max", f"{self._name}.digest")()
        largest, complement_of_smallest = extremes.tolist()
        if largest != ~complement_of_smallest:
            own = torch.tensor([layout.digest, flag], dtype=torch.int64)
            pairs = torch.empty(2 * collectives.world_size(), dtype=torch.int64)
            collectives.start_all_gather(pairs, own, self._name)()
            self._raise_difference(collectives, pairs[::2].tolist(), pairs[1::2].tolist(), describe)
        totals = layout.concatenated(values)
        finishes = [
            collectives.start_all_reduce(total, "sum" if segment.op == "mean" else segment.op, f"{self._name}.{number}")
            for number, (segment, total) in enumerate(zip(layout.segments, totals, strict=True))
        ]

        def finish() -> list[Tensor]:
            for segment, total, finish_one in zip(layout.segments, totals, finishes, strict=True):
                finish_one()
                if segment.op == "mean":
                    total.div_(collectives.world_size())
            return layout.separated(totals)

        return finish

    def _raise_difference(
        self, collectives: Collectives, digests: Sequence[int], flags: Sequence[int], describe: Callable[[], Any]
    ) -> None:
        ranks: dict[tuple[int, int], list[int]] = {}
        for rank, (digest, flag) in enumerate(zip(digests, flags, strict=True)):
            if flag != _ABSENT:
                ranks.setdefault((digest, flag), []).append(rank)
        description = describe()
        contributions = [
            Contribution(those, flag == _FINAL, collectives.broadcast(description, those[0]))
            for (_, flag), those in [*ranks.items()][:MAX_CONTRIBUTIONS]
        ]
        collectives.barrier()  # a rank that raises leaves the collectives, so all must have the descriptions
        raise DifferentPartsError(contributions, has_all=len(ranks) <= MAX_CONTRIBUTIONS)


def _transposed(
    parts: Iterable[Part | tuple[str, str, Tensor]],
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[Tensor, ...]]:
    return tuple(zip(*parts, strict=True)) or ((), (), ())  # type: ignore[return-value]


def _flags_of(gathered: Tensor) -> list[int]:
    flags: list[int] = gathered.view(torch.int64)[2 :: MESSAGE_NUM_BYTES // 8].tolist()
    return flags
