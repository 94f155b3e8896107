"""One-shot all-reduce over gloo: each rank sends its tensor to all other ranks, and reduces all tensors itself.

gloo's own all-reduce is a ring with two messages per rank, each with a handshake and a thread switch. For 4 KiB it took
1.9 ms between two hosts and 5.5 ms between four; the one-shot all-reduce took 0.2 ms and 2.8 ms (network namespaces of
one machine with two cores, torch 2.13). It sends more data, the whole tensor to each rank, so it is for small tensors.
"""

from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_strategies_ext.shm.reduction import Reduction

#: Maximum number of bytes that a rank sends; with more, gloo's ring was as fast or faster.
_MAX_NUM_BYTES: Final = 2**18
#: Maximum number of bytes that a host sends in addition to those of a ring; at 100 Mbit/s, more would take longer than
#: the time saved.
_MAX_EXTRA_NUM_BYTES: Final = 2**15


def is_short(num_bytes: float, num_ranks: int, num_sharing: int = 1) -> bool:
    """Returns whether a one-shot all-reduce is faster than a ring.

    Args:
        num_bytes: Size of each rank's tensor, in bytes.
        num_ranks: Number of ranks in the all-reduce.
        num_sharing: Number of ranks per host that all-reduce at the same time, each with ranks of other hosts.
    """
    num_sent, by_ring = (num_ranks - 1) * num_bytes, 2 * (num_ranks - 1) / num_ranks * num_bytes
    return num_sent <= _MAX_NUM_BYTES and num_sharing * (num_sent - by_ring) <= _MAX_EXTRA_NUM_BYTES


class OneShotAllReduce:
    """An all-reduce in progress, in place. All ranks reduce in rank order, so their results are bitwise equal.

    Args:
        group: gloo group: torch's process group, or the backend itself.
        flat: Contiguous tensor with one dimension; read at once, overwritten by :meth:`combine`.
        reduction: Reduction of the tensors.
        timeout: Timeout of the operation, if torch supports one for gloo (2.13 does, 2.5 does not). Otherwise, and if
            None, the timeout of the group applies.
    """

    def __init__(self, group: Any, flat: Tensor, reduction: Reduction, timeout: timedelta | None = None) -> None:
        self._flat = flat
        self._reduction = reduction
        self._num_ranks = group.size()
        sent = flat.repeat(self._num_ranks)
        self._received = torch.empty_like(sent)
        options = dist.AllToAllOptions()
        if timeout is not None:
            options.timeout = timeout
        # As bytes, because gloo does not send tensors of all dtypes.
        received, sent = self._received.view(torch.uint8), sent.view(torch.uint8)
        self._work = group.alltoall_base(received, sent, [], [], options)

    def is_completed(self) -> bool:
        """Returns whether all tensors have arrived, or the operation has failed."""
        done: bool = self._work.is_completed()
        return done

    def wait(self, *timeout: timedelta) -> None:
        """Waits until all tensors have arrived.

        Raises:
            RuntimeError: If gloo has failed or the timeout has expired.
        """
        self._work.wait(*timeout)

    def combine(self) -> None:
        """Reduces the received tensors."""
        self._reduction(self._received.chunk(self._num_ranks), self._flat)
