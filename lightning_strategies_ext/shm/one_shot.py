"""One-shot all-reduce over gloo: each rank sends what it has to every other, and adds up for itself.

gloo's own all-reduce is a ring, each message of which costs a handshake and a thread's turn, twice per rank: 4 KiB took
1.9 ms between two hosts and 5.5 ms between four, where this takes 0.2 and 2.8 (network namespaces of one machine with
two cores, torch 2.13). It sends more: all of the tensor to each rank. So it is for short tensors.
"""

from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_strategies_ext.shm.reduction import Reduction

#: What a rank sends at most; with more, gloo's ring was as fast or faster.
_MOST_NUM_BYTES: Final = 2**18
#: What leaves a host more than with a ring, at most: at 100 Mbit/s it takes the time that is saved.
_MOST_MORE_NUM_BYTES: Final = 2**15


def is_short(num_bytes: float, num_ranks: int, num_sharing: int = 1) -> bool:
    """Whether a one-shot all-reduce is the faster one.

    Args:
        num_bytes: Of what each rank has.
        num_ranks: That add up.
        num_sharing: Ranks of a host that do so at once, each with ranks of other hosts.
    """
    num_sent, by_ring = (num_ranks - 1) * num_bytes, 2 * (num_ranks - 1) / num_ranks * num_bytes
    return num_sent <= _MOST_NUM_BYTES and num_sharing * (num_sent - by_ring) <= _MOST_MORE_NUM_BYTES


class OneShotAllReduce:
    """One all-reduce, in place, that is under way. Ranks combine in the order of their ranks, and so get the same bits.

    Args:
        group: Of gloo: torch's process group, or the backend itself.
        flat: Of one dimension, contiguous; it is read now, and written to by :meth:`combine`.
        reduction: How tensors are combined.
        timeout: Of the exchange, where torch lets gloo have one for it (2.13 does, 2.5 does not); else, and if None, it
            is the group's.
    """

    def __init__(self, group: Any, flat: Tensor, reduction: Reduction, timeout: timedelta | None = None) -> None:
        self._flat = flat
        self._reduction = reduction
        self._num_ranks = group.size()
        given = flat.repeat(self._num_ranks)
        self._got = torch.empty_like(given)
        options = dist.AllToAllOptions()
        if timeout is not None:
            options.timeout = timeout
        self._work = group.alltoall_base(self._got, given, [], [], options)

    def is_completed(self) -> bool:
        """Whether all has come, or the exchange has failed."""
        done: bool = self._work.is_completed()
        return done

    def wait(self, *timeout: timedelta) -> None:
        """Waits until all has come.

        Raises:
            RuntimeError: What gloo raises, also when the time is over.
        """
        self._work.wait(*timeout)

    def combine(self) -> None:
        """Reduces what has come."""
        self._reduction(self._got.chunk(self._num_ranks), self._flat)
