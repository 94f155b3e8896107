"""All-reduce over several hosts: reduction in each host, all-reduce of their first ranks, broadcast in each host."""

import time
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor

from lightning_strategies_ext.shm import collectives
from lightning_strategies_ext.shm.calls import Kind, number_of
from lightning_strategies_ext.shm.native import CompiledAllReduce
from lightning_strategies_ext.shm.one_shot import OneShotAllReduce, is_short
from lightning_strategies_ext.shm.reduction import Reduction
from lightning_strategies_ext.shm.rounds import SPIN_S, Rounds
from lightning_strategies_ext.shm.work import Exchange

#: Size of one inter-host transfer, in bytes; meanwhile, hosts broadcast the previous piece and reduce the next piece.
_PIECE_NUM_BYTES: Final = 2**23


class AllReduceAcrossHosts:
    """Runs the all-reduces of one rank.

    Args:
        rounds: Rounds of the ranks of this host.
        compiled: All-reduce of the native library among the ranks of this host, faster than rounds; None without it.
        leaders: gloo group of the first rank of each host; None if this rank is not one of them.
    """

    def __init__(self, rounds: Rounds, compiled: CompiledAllReduce | None, leaders: Any) -> None:
        self._rounds = rounds
        self._compiled = compiled
        self._leaders = leaders
        self._between: Any = None
        #: Object that waits for ranks of this host: the rounds or, during its operations, the native all-reduce.
        self._inside: Exchange = rounds
        self._waits_between = False

    @property
    def spin_s(self) -> float:
        """Time for which the caller polls before it sleeps, in seconds."""
        return SPIN_S if self._waits_between else self._inside.spin_s

    def go_through(
        self, flats: Sequence[Tensor], reductions: Sequence[Reduction], deadline: float
    ) -> Generator[None, None, None]:
        """Reduces tensors in place, one after the other; yields whenever other ranks are not ready yet.

        Args:
            flats: Tensors with one dimension.
            reductions: Reduction of each tensor.
            deadline: Time on the monotonic clock until which this rank waits for others, in seconds.

        Raises:
            RuntimeError: If a round or an operation of gloo has failed.
        """
        before: Tensor | None = None
        for flat, reduction in zip(flats, reductions, strict=True):
            undivided = reduction.undivided()
            for piece in flat.split(max(1, _PIECE_NUM_BYTES // flat.element_size())):
                yield from self._reduce_inside(piece, undivided, deadline)
                yield from self._finish_between()
                if self._leaders is not None:
                    self._begin_between(piece, undivided, deadline)
                if before is not None:  # during the inter-host transfer of this piece
                    yield from self._spread_inside(before, deadline)
                before = piece
        yield from self._finish_between()
        if before is not None:
            yield from self._spread_inside(before, deadline)
        for flat, reduction in zip(flats, reductions, strict=True):
            reduction.divide(flat)

    def wait(self, deadline: float) -> None:
        """Sleeps until data has arrived from the ranks that this rank waits for, on this host or on others.

        Raises:
            PeerLostError: If an awaited rank of this host has exited or left the group.
            TimeoutError: If no data has arrived before the deadline.
        """
        if not self._waits_between:
            self._inside.wait(deadline)
            return
        try:
            self._between.wait(_left_until(deadline))
        except RuntimeError:
            if not self._between.is_completed():
                raise TimeoutError("no data arrived from other hosts") from None

    def _reduce_inside(self, piece: Tensor, reduction: Reduction, deadline: float) -> Generator[None, None, None]:
        if self._compiled is not None and self._compiled.does(piece, reduction.op):
            self._inside = self._compiled
            yield from self._compiled.go_through([self._compiled.call_for(piece, reduction.op)])
            self._inside = self._rounds
        elif self._rounds.size > 1:
            steps, lookahead = collectives.reduce(self._rounds, piece, 0, reduction)
            number = number_of(Kind.REDUCE, [piece], reduction.op)
            yield from self._rounds.go_through(number, steps, lookahead, deadline)

    def _spread_inside(self, piece: Tensor, deadline: float) -> Generator[None, None, None]:
        if self._rounds.size > 1:
            steps, lookahead = collectives.broadcast(self._rounds, piece, 0)
            yield from self._rounds.go_through(number_of(Kind.BROADCAST, [piece]), steps, lookahead, deadline)

    def _begin_between(self, piece: Tensor, reduction: Reduction, deadline: float) -> None:
        if is_short(piece.nbytes, self._leaders.size()):
            self._between = OneShotAllReduce(self._leaders, piece, reduction, _left_until(deadline))
            return
        options = dist.AllreduceOptions()
        options.reduceOp = reduction.op
        options.timeout = _left_until(deadline)
        self._between = self._leaders.allreduce([piece], options)

    def _finish_between(self) -> Generator[None, None, None]:
        if self._between is None:
            return
        self._waits_between = True
        try:
            while not self._between.is_completed():
                yield
        finally:
            self._waits_between = False
        between, self._between = self._between, None
        between.wait()  # raises if it has failed
        if isinstance(between, OneShotAllReduce):
            between.combine()


def _left_until(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))
