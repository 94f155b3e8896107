"""Packed exchange: reduces any number of named values over all ranks with one all-gather of bytes.

Each rank sends a message of fixed size: a digest of the names, reductions, dtypes, and shapes of its values, then the
values, each in its own dtype. Every rank compares the digests of all ranks before it uses a value, and then reduces in
rank order. Values are matched by name, so the order in which a rank lists them does not matter. If the ranks have
different names, every rank raises :class:`.DifferentPartsError`.

Values that do not fit into the message take one more all-gather. More than :data:`MAX_GATHERED_RANKS` ranks first
compare their digests, and then reduce the values with one all-reduce per dtype and reduction.

A comparison by the host waits for a GPU. With :meth:`PackedExchange.start_deferred`, the GPU compares the digests and
turns the values into NaN if they differ, and the host reads the digests later.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import Store

from lightning_strategies_ext.collectives.base import Collectives
from lightning_strategies_ext.collectives.digest_comparison import DeferredComparison, error_of
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
_CPU: Final = torch.device("cpu")

#: Values that this rank passes to an exchange: their names, their reductions, and the tensors. A name is equal on all
#: ranks, and unique among the values of the exchange. A reduction is "sum", "min", "max", or "mean" (floating point
#: only). A tensor is on the device of the exchange, has no graph, and is not modified.
Parts = tuple[tuple[str, ...], tuple[str, ...], Sequence[Tensor]]


class PackedExchange:
    """Reduces named values over all ranks, see the module. Collective: all ranks call each method in the same order.

    Args:
        name: Name of the exchange, equal on all ranks; at most one exchange of a name is pending at a time.
        device: Device of the values.
        find_store: Function that :class:`.DeferredComparison` requires. It is necessary for :meth:`start_deferred`. The
            ranks then compare in all exchanges without a collective.
    """

    def __init__(
        self, name: str, device: torch.device = _CPU, find_store: Callable[[], Store | None] | None = None
    ) -> None:
        self._name = name
        self._device = device
        self._comparison = None if find_store is None else DeferredComparison(find_store)
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
            :class:`.DifferentPartsError`. All ranks call it, after the same collectives.

        Raises:
            DifferentPartsError: If values do not fit into one message, or there are more than
                :data:`MAX_GATHERED_RANKS` ranks, and the ranks have different values.
        """
        _, _, values = parts
        if collectives is not self._collectives:
            self._use(collectives)
        rank, size = self._rank, self._size
        if rank is None or size == 1:
            copies = [value.clone() for value in values]
            return lambda: copies
        layout = self._layout_of(kind, parts)
        flag = FINAL if is_final else PARTIAL
        if size > MAX_GATHERED_RANKS:
            return self._start_all_reduces(collectives, layout, values, describe, flag)
        if layout.num_bytes > INLINE_NUM_BYTES or self._comparison is not None:
            return self._start_compared(collectives, layout, values, describe, flag)
        layout.pack_in_place(values, flag, rank, size)
        finish_gather = collectives.start_all_gather(layout.gathered, layout.message, self._name)

        def finish() -> list[Tensor]:
            finish_gather()
            digests = layout.gathered_digests.tolist()
            if digests.count(layout.digest) != size:
                self._raise_difference(collectives, digests, layout.gathered_flags.tolist(), describe)
            return layout.reduce_gathered()

        return finish

    def start_deferred(
        self, collectives: Collectives, kind: str, parts: Parts, describe: Callable[[], Any]
    ) -> Callable[[], list[Tensor]]:
        """Starts an exchange whose digests the host compares later, see :meth:`check_deferred`.

        If the ranks have different values, the results are NaN; results of integer dtypes are undefined. Values that do
        not fit into one message are exchanged as by :meth:`start`, and so are those of more than
        :data:`MAX_GATHERED_RANKS` ranks.

        Args:
            collectives: Collectives of all ranks.
            kind: Kind of the values, equal on all ranks.
            parts: This rank's values, at least one.
            describe: Function that returns a description of the values, of types that JSON has, for an error.

        Returns:
            Function that returns the reduced values in the order of ``parts``, and does not wait for a GPU.
        """
        if collectives is not self._collectives:
            self._use(collectives)
        comparison, rank, size = self._comparison, self._rank, self._size
        layout = self._layout_of(kind, parts)
        is_short = layout.num_bytes <= INLINE_NUM_BYTES and 1 < size <= MAX_GATHERED_RANKS
        if comparison is None or rank is None or not is_short:
            return self.start(collectives, kind, parts, describe)
        comparison.publish(rank, layout.digest, describe)
        message, _ = layout.pack(parts[2], FINAL)
        gathered = message.new_empty(size * len(message))
        finish_gather = collectives.start_all_gather(gathered, message, self._name)

        def finish() -> list[Tensor]:
            finish_gather()
            rows = gathered.view(size, -1)
            digests = rows[:, 0].contiguous()
            comparison.add(digests, layout.digest)
            return layout.reduce_at_once(rows.view(torch.uint8)[:, HEADER_NUM_BYTES:], (digests != layout.digest).any())

        return finish

    def check_deferred(self, *, waits: bool) -> None:
        """Compares the digests of deferred exchanges, see :meth:`.DeferredComparison.check`."""
        if self._comparison is not None:
            self._comparison.check(waits=waits)

    def _start_compared(
        self,
        collectives: Collectives,
        layout: PackedLayout,
        values: Sequence[Tensor],
        describe: Callable[[], Any],
        flag: int,
    ) -> Callable[[], list[Tensor]]:
        """Compares the digests before it returns: only ranks with equal digests have rests of equal size."""
        self._publish(collectives, layout, describe)
        message, rest = layout.pack(values, flag)
        rows, header = self._gather(collectives, message)
        digests, _, flags, _ = header
        if digests.count(layout.digest) != len(digests):
            self._raise_difference(collectives, digests, flags, describe)
        if rest is None:
            return lambda: layout.reduce(rows)
        finish = self._start_rest(collectives, rows, rest)
        return lambda: layout.reduce(finish())

    def _gather(self, collectives: Collectives, message: Tensor) -> tuple[Tensor, list[list[int]]]:
        """Returns the values of all ranks as rows of bytes, and for each field of the headers a list of all ranks."""
        gathered = message.new_empty(collectives.world_size() * len(message))
        collectives.start_all_gather(gathered, message, self._name)()
        rows = gathered.view(-1, len(message)).view(torch.uint8)
        return rows[:, HEADER_NUM_BYTES:], rows[:, :HEADER_NUM_BYTES].view(torch.int64).mT.tolist()

    def run_with_absent(
        self,
        collectives: Collectives,
        kind: str,
        parts: Parts | None,
        describe: Callable[[], Any],
        attach: Callable[[], Any],
    ) -> tuple[Any, Any, list[Tensor]] | None:
        """Reduces the values of some ranks; other ranks have none, and receive the results.

        Args:
            collectives: Collectives of all ranks.
            kind: Kind of the values, equal on all ranks.
            parts: This rank's values, possibly none; None if this rank is absent. A mean is not supported.
            describe: Function that returns a description of the values, as for :meth:`start`.
            attach: Function that returns an object that absent ranks receive, too; it can be pickled.

        Returns:
            Of the first rank that is not absent: the description and the attached object; and the reduced values in the
            order of that rank. None if no rank has values.

        Raises:
            DifferentPartsError: If ranks that are not absent have different values.
        """
        keys, ops, values = parts or parts_of(())
        layout = self._layout_of(kind, (keys, ops, values))
        self._publish(collectives, layout, describe)
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
        signature, description, attached = collectives.broadcast((signature, describe(), attach()), present[0])
        if parts is None:
            keys, ops, values = parts_of(
                (key, op, torch.zeros(shape, dtype=dtype, device=self._device)) for key, op, dtype, shape in signature
            )
            layout = self._layout_of(kind, (keys, ops, values))
            _, rest = layout.pack(values)
        if rest is not None:
            rows = self._start_rest(collectives, rows, rest)()
        reduced = dict(zip(keys, layout.reduce(rows[present]), strict=True))
        return description, attached, [reduced[key] for key, *_ in signature]

    def _use(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._rank = None if collectives.is_local else collectives.rank()
        self._size = 1 if self._rank is None else collectives.world_size()

    def _publish(self, collectives: Collectives, layout: PackedLayout, describe: Callable[[], Any]) -> None:
        if self._comparison is not None:
            self._comparison.publish(collectives.rank() or 0, layout.digest, describe)

    def _start_rest(self, collectives: Collectives, first: Tensor, rest: Tensor) -> Callable[[], Tensor]:
        rests = rest.new_empty(len(first) * len(rest))
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
            layout = self._layouts[signature] = PackedLayout(kind, keys, ops, values, self._device)
        return layout

    def _start_all_reduces(
        self,
        collectives: Collectives,
        layout: PackedLayout,
        values: Sequence[Tensor],
        describe: Callable[[], Any],
        flag: int,
    ) -> Callable[[], list[Tensor]]:
        options: Any = {"dtype": torch.int64, "device": self._device}
        extremes = torch.tensor([layout.digest, ~layout.digest], **options)  # the complement does not overflow
        collectives.start_all_reduce(extremes, "max", f"{self._name}.digest")()
        largest, complement_of_smallest = extremes.tolist()
        if largest != ~complement_of_smallest:
            own = torch.tensor([layout.digest, flag], **options)
            pairs = own.new_empty(2 * collectives.world_size())
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
        if self._comparison is not None:
            raise error_of(digests, flags, self._comparison.read)
        description = describe()
        error = error_of(digests, flags, lambda rank, _: collectives.broadcast(description, rank))
        collectives.barrier()  # a rank that raises leaves the collectives, so all must have the descriptions
        raise error


def parts_of(rows: Iterable[tuple[str, str, Tensor]]) -> Parts:
    """Returns the parts of an exchange from the name, the reduction, and the tensor of each value."""
    names, ops, values = tuple(zip(*rows, strict=True)) or ((), (), ())
    return names, ops, values
