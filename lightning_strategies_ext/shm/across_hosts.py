"""The all-reduce of ranks on several hosts: in each host, between the first ranks of the hosts, in each host again."""

import time
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor

from lightning_strategies_ext.shm import collectives
from lightning_strategies_ext.shm.calls import Kind, number_of
from lightning_strategies_ext.shm.reduction import Reduction
from lightning_strategies_ext.shm.rounds import SPIN_S, Rounds


class AllReduceAcrossHosts:
    """The all-reduces of one rank.

    Args:
        rounds: Of the ranks of this host.
        leaders: A gloo group of the first rank of each host, if this rank is one of them.

    Attributes:
        spin_s: How long its caller shall look for others before it sleeps, in seconds.
    """

    spin_s: Final = SPIN_S

    def __init__(self, rounds: Rounds, leaders: Any) -> None:
        self._rounds = rounds
        self._leaders = leaders
        self._between: Any = None

    def go_through(
        self, flats: Sequence[Tensor], reductions: Sequence[Reduction], deadline: float
    ) -> Generator[None, None, None]:
        """Reduces tensors in place, one after the other; yields where it has to wait for others.

        Args:
            flats: One row each.
            reductions: One for each.
            deadline: Until when others may be waited for, on the monotonic clock, in seconds.

        Raises:
            RuntimeError: What the rounds, or gloo, have raised.
        """
        for flat, reduction in zip(flats, reductions, strict=True):
            if self._rounds.size > 1:
                steps, lookahead = collectives.reduce(self._rounds, flat, 0, reduction.undivided())
                number = number_of(Kind.REDUCE, [flat], reduction.op)
                yield from self._rounds.go_through(number, steps, lookahead, deadline)
            if self._leaders is not None:
                yield from self._reduce_between(flat, reduction.undivided(), deadline)
            if self._rounds.size > 1:
                steps, lookahead = collectives.broadcast(self._rounds, flat, 0)
                yield from self._rounds.go_through(number_of(Kind.BROADCAST, [flat]), steps, lookahead, deadline)
            reduction.divide(flat)

    def wait(self, deadline: float) -> None:
        """Sleeps until something came from the ranks that are waited for, of this host or another.

        Raises:
            PeerLostError: If one of this host is gone.
            TimeoutError: If nothing came before the deadline.
        """
        if self._between is None:
            self._rounds.wait(deadline)
            return
        try:
            self._between.wait(_left_until(deadline))
        except RuntimeError:
            if not self._between.is_completed():
                raise TimeoutError("nothing has come from other hosts") from None

    def _reduce_between(self, flat: Tensor, reduction: Reduction, deadline: float) -> Generator[None, None, None]:
        options = dist.AllreduceOptions()
        options.reduceOp = reduction.op
        options.timeout = _left_until(deadline)
        self._between = self._leaders.allreduce([flat], options)
        while not self._between.is_completed():
            yield
        between, self._between = self._between, None
        between.wait()  # raises what has gone wrong


def _left_until(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))
