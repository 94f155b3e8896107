"""Packed exchange: reduces any number of named values over all ranks with one all-gather of bytes.

Each rank sends a message of fixed size: a digest of the names, reductions, dtypes, and shapes of its values, then the
values, each in its own dtype. Every rank compares the digests of all ranks before it uses a value, and then reduces in
rank order. Values are matched by name, so the order in which a rank lists them does not matter. If the ranks have
different names, every rank raises :class:`DifferentPartsError`.

Values that do not fit into the message take one more all-gather. More than :data:`MAX_GATHERED_RANKS` ranks first
compare their digests, and then reduce the values with one all-reduce per dtype and reduction.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from lightning_strategies_ext.collectives.base import Collectives
from lightning_strategies_ext.collectives.packed_layout import (
    ABSENT,
    FINAL,
    HEADER_NUM_BYTES,
    INLINE_NUM_BYTES,
    PARTIAL,
    PackedLayout,
)

#: Number of ranks above which values are reduced by all-reduces: the size of a gathered message is that of all ranks.
MAX_GATHERED_RANKS = 64
#: Number of layouts that are cached; a layout depends on the names and their order.
_MAX_LAYOUTS: Final = 256
_DTYPE_AND_SHAPE: Final = attrgetter("dtype", "shape")

#: Values that this rank passes to an exchange: their names, their reductions, and the tensors. A name is equal on all
#: ranks, and unique among the values of the exchange. A reduction is "sum", "min", "max", or "mean" (floating point
#: only). A tensor is on the CPU, has no graph, and is not modified.
Parts = tuple[tuple[str, ...], tuple[str, ...], Sequence[Tensor]]


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


class PackedExchange:
    """Reduces named values over all ranks, see the module. Collective: all ranks call each method in the same order.

    Args:
        name: Name of the exchange, equal on all ranks; at most one exchange of a name is pending at a time.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._layouts: dict[tuple[Any, ...], PackedLayout] = {}
        self._collectives: Collectives | None = None
        self._rank: int | None = None
        self._size = 1

    def start(
        self,
        collectives: Collectives,
        kind: str,
        parts: Parts,
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
        _, _, values = parts
        if collectives is not self._collectives:
            self._collectives = collectives
            self._rank = None if collectives.is_local else collectives.rank()
            self._size = 1 if self._rank is None else collectives.world_size()
        rank, size = self._rank, self._size
        if rank is None or size == 1:
            copies = [value.clone() for value in values]
            return lambda: copies
        layout = self._layout_of(kind, parts)
        flag = FINAL if is_final else PARTIAL
        if size > MAX_GATHERED_RANKS:
            return self._start_all_reduces(collectives, layout, values, describe, flag)
        if layout.num_bytes > INLINE_NUM_BYTES:
            return self._start_long(collectives, layout, values, describe, flag)
        layout.pack_in_place(values, flag, rank, size)
        finish_gather = collectives.start_all_gather(layout.gathered, layout.message, self._name)

        def finish() -> list[Tensor]:
            finish_gather()
            digests = layout.gathered_digests.tolist()
            if digests.count(layout.digest) != size:
                self._raise_difference(collectives, digests, layout.gathered_flags.tolist(), describe)
            return layout.reduce_gathered()

        return finish

    def _start_long(
        self,
        collectives: Collectives,
        layout: PackedLayout,
        values: Sequence[Tensor],
        describe: Callable[[], Any],
        flag: int,
    ) -> Callable[[], list[Tensor]]:
        """Exchanges values that do not fit into one message: only ranks with equal digests have rests of equal size."""
        message, rest = layout.pack(values, flag)
        assert rest is not None
        rows, header = self._gather(collectives, message)
        digests, _, flags, _ = header
        if digests.count(layout.digest) != len(digests):
            self._raise_difference(collectives, digests, flags, describe)
        finish = self._start_rest(collectives, rows, rest)
        return lambda: layout.reduce(finish())

    def _gather(self, collectives: Collectives, message: Tensor) -> tuple[Tensor, list[list[int]]]:
        """Returns the values of all ranks as rows of bytes, and for each field of the headers a list of all ranks."""
        gathered = torch.empty(collectives.world_size() * len(message), dtype=torch.int64)
        collectives.start_all_gather(gathered, message, self._name)()
        rows = gathered.view(-1, len(message)).view(torch.uint8)
        return rows[:, HEADER_NUM_BYTES:], rows[:, :HEADER_NUM_BYTES].view(torch.int64).mT.tolist()

    def run_with_absent(
        self, collectives: Collectives, kind: str, parts: Parts | None, describe: Callable[[], Any]
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
        keys, ops, values = parts or parts_of(())
        layout = self._layout_of(kind, (keys, ops, values))
        message, rest = layout.pack(values, ABSENT if parts is None else FINAL)
        rows, header = self._gather(collectives, message)
        digests, sizes, flags, _ = header
        present = [rank for rank, flag in enumerate(flags) if flag != ABSENT]
        if not any(sizes):
            return None
        if any(digests[rank] != digests[present[0]] for rank in present):
            self._raise_difference(collectives, digests, flags, describe)
        signature = [
            (key, op, value.dtype, tuple(value.shape)) for key, op, value in zip(keys, ops, values, strict=True)
        ]
        signature, description = collectives.broadcast((signature, describe()), present[0])
        if parts is None:
            keys, ops, values = parts_of(
                (key, op, torch.zeros(shape, dtype=dtype)) for key, op, dtype, shape in signature
            )
            layout = self._layout_of(kind, (keys, ops, values))
            _, rest = layout.pack(values)
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

    def _layout_of(self, kind: str, parts: Parts) -> PackedLayout:
        # Built without a Python call per value: this is most of the time of an exchange over shared memory.
        keys, ops, values = parts
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
            if flag != ABSENT:
                ranks.setdefault((digest, flag), []).append(rank)
        description = describe()
        contributions = [
            Contribution(ranks_of_part, flag == FINAL, collectives.broadcast(description, ranks_of_part[0]))
            for (_, flag), ranks_of_part in [*ranks.items()][:MAX_CONTRIBUTIONS]
        ]
        collectives.barrier()  # a rank that raises leaves the collectives, so all must have the descriptions
        raise DifferentPartsError(contributions, has_all=len(ranks) <= MAX_CONTRIBUTIONS)


def parts_of(rows: Iterable[tuple[str, str, Tensor]]) -> Parts:
    """Returns the parts of an exchange from the name, the reduction, and the tensor of each value."""
    names, ops, values = tuple(zip(*rows, strict=True)) or ((), (), ())
    return names, ops, values
