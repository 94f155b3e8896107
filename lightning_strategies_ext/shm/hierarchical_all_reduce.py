"""All-reduce over several hosts: reduction in each host, all-reduce of the host leaders, broadcast in each host.

The leader of a host is its first rank.
"""

import time
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistBackendError

from lightning_strategies_ext.shm import algorithms
from lightning_strategies_ext.shm.links import MismatchFoundError
from lightning_strategies_ext.shm.native import NativeAllReduce
from lightning_strategies_ext.shm.one_shot import OneShotAllReduce, is_short
from lightning_strategies_ext.shm.operation_ids import CollectiveKind, operation_id
from lightning_strategies_ext.shm.reduction import Reduction
from lightning_strategies_ext.shm.rounds import POLL_S, Rounds
from lightning_strategies_ext.shm.work import Waitable

#: Size of one inter-host transfer, in bytes; meanwhile, hosts broadcast the previous piece and reduce the next piece.
_PIECE_NUM_BYTES: Final = 2**23
#: Size of one inter-host transfer of a dtype that gloo cannot reduce. Each host receives the pieces of all hosts.
_UNREDUCED_PIECE_NUM_BYTES: Final = 2**20
#: Dtypes that gloo reduces; torch.distributed passes complex tensors as real ones.
_REDUCED_BY_GLOO: Final = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64),
}


class HierarchicalAllReduce:
    """Runs the all-reduces of one rank.

    Args:
        rounds: Rounds of the ranks of this host.
        native: All-reduce of the native library among the ranks of this host, faster than rounds; None without it.
        leaders: gloo group of the host leaders; None if this rank is not one of them.
    """

    def __init__(self, rounds: Rounds, native: NativeAllReduce | None, leaders: Any) -> None:
        self._rounds = rounds
        self._native = native
        self._leaders = leaders
        self._inter_host: Any = None
        #: Object that waits for ranks of this host: the rounds or, during its operations, the native all-reduce.
        self._intra_host: Waitable = rounds
        self._waits_inter_host = False
        self._identity = 0

    @property
    def poll_s(self) -> float:
        """Time for which the caller polls before it sleeps, in seconds."""
        return POLL_S if self._waits_inter_host else self._intra_host.poll_s

    def run(
        self, flats: Sequence[Tensor], reductions: Sequence[Reduction], deadline: float, identity: int
    ) -> Generator[None, None, None]:
        """Reduces tensors in place, one after the other; yields whenever other ranks are not ready yet.

        Args:
            flats: Tensors with one dimension.
            reductions: Reduction of each tensor.
            deadline: Time on the monotonic clock until which this rank waits for others, in seconds.
            identity: Identity of the operation, which the ranks of each host compare.

        Raises:
            RuntimeError: If a round or an operation of gloo has failed.
        """
        self._identity = identity
        before: Tensor | None = None
        for flat, reduction in zip(flats, reductions, strict=True):
            undivided = reduction.undivided()
            num_bytes = _PIECE_NUM_BYTES if flat.dtype in _REDUCED_BY_GLOO else _UNREDUCED_PIECE_NUM_BYTES
            for piece in flat.split(num_bytes // flat.element_size()):
                yield from self._reduce_intra_host(piece, undivided, deadline)
                yield from self._finish_inter_host()
                if self._leaders is not None:
                    self._start_inter_host(piece, undivided, deadline)
                if before is not None:  # during the inter-host transfer of this piece
                    yield from self._broadcast_intra_host(before, deadline)
                before = piece
        yield from self._finish_inter_host()
        if before is not None:
            yield from self._broadcast_intra_host(before, deadline)
        for flat, reduction in zip(flats, reductions, strict=True):
            reduction.divide(flat)

    def wait(self, deadline: float) -> None:
        """Sleeps until data has arrived from the ranks that this rank waits for, on this host or on others.

        Raises:
            PeerLostError: If an awaited rank of this host has exited or left the group.
            TimeoutError: If no data has arrived before the deadline.
        """
        if not self._waits_inter_host:
            self._intra_host.wait(deadline)
            return
        try:
            self._inter_host.wait(_remaining_time(deadline))
        except RuntimeError:
            if not self._inter_host.is_completed():
                raise TimeoutError("no data arrived from other hosts") from None

    def reply_to_mismatch(self, found: MismatchFoundError) -> DistBackendError:
        """Returns the error after another rank of this host has found a mismatch."""
        return self._intra_host.reply_to_mismatch(found)

    def _reduce_intra_host(self, piece: Tensor, reduction: Reduction, deadline: float) -> Generator[None, None, None]:
        if self._native is not None and self._native.supports(piece, reduction.op):
            # All ranks of the host get a result that only the leader uses; this is faster than a reduce in rounds.
            self._intra_host = self._native
            yield from self._native.run([self._native.prepare(piece, reduction.op, identity=self._identity)])
            self._intra_host = self._rounds
        elif self._rounds.size > 1:
            steps, lookahead = algorithms.reduce(self._rounds, piece, 0, reduction)
            number = operation_id(CollectiveKind.REDUCE, [piece], reduction.op)
            yield from self._rounds.run(number, steps, lookahead, deadline, self._identity)

    def _broadcast_intra_host(self, piece: Tensor, deadline: float) -> Generator[None, None, None]:
        if self._rounds.size > 1:
            steps, lookahead = algorithms.broadcast(self._rounds, piece, 0)
            number = operation_id(CollectiveKind.BROADCAST, [piece])
            yield from self._rounds.run(number, steps, lookahead, deadline, self._identity)

    def _start_inter_host(self, piece: Tensor, reduction: Reduction, deadline: float) -> None:
        if piece.dtype not in _REDUCED_BY_GLOO or is_short(piece.nbytes, self._leaders.size()):
            self._inter_host = OneShotAllReduce(self._leaders, piece, reduction, _remaining_time(deadline))
            return
        options = dist.AllreduceOptions()
        options.reduceOp = reduction.op
        options.timeout = _remaining_time(deadline)
        self._inter_host = self._leaders.allreduce([piece], options)

    def _finish_inter_host(self) -> Generator[None, None, None]:
        if self._inter_host is None:
            return
        self._waits_inter_host = True
        try:
            while not self._inter_host.is_completed():
                yield
        finally:
            self._waits_inter_host = False
        work, self._inter_host = self._inter_host, None
        work.wait()  # raises if it has failed
        if isinstance(work, OneShotAllReduce):
            work.combine()


def _remaining_time(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))
