"""Checks of the exchange logs of all ranks at moments at which wrong weights would be stored or returned."""

import time
from typing import Any, Final, Protocol

import torch

from lightning_strategies_ext.exceptions import RankFailedError
from lightning_strategies_ext.failure.exchange_log import ADVICE, ExchangeLog, describe_difference
from lightning_strategies_ext.failure.failure_detector import diagnose_mismatch
from lightning_strategies_ext.failure.failure_monitor import FailureMonitor

#: Seconds that a rank waits for the statuses of ranks of its host.
_STATUS_TIMEOUT_S: Final = 0.5
_POLL_S: Final = 0.002


class _Collectives(Protocol):
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def broadcast(self, obj: Any, src: int) -> Any: ...


def check_statuses(log: ExchangeLog, monitor: FailureMonitor) -> None:
    """Compares the gradient exchanges of this rank with those that other ranks publish; for a checkpoint.

    All ranks call it, but a rank that calls it alone waits only half a second: it is not a collective.

    Raises:
        RankFailedError: If this rank and another have exchanged gradients of different batches.
    """
    monitor.publish()
    deadline = time.monotonic() + _STATUS_TIMEOUT_S
    while True:
        observed = monitor.observe()
        failure = diagnose_mismatch(observed, log)
        if failure is not None:
            raise RankFailedError(f"The ranks have exchanged gradients of different batches: {failure.headline}.")
        own = observed.own.exchanges
        others = [status.exchanges for rank, status in observed.statuses.items() if observed.is_local(rank)]
        is_behind = any(
            own is not None and (other is None or other.stage != own.stage or other.count < own.count)
            for other in others
        )
        if not is_behind or time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)


def check_exchanges(log: ExchangeLog, collectives: _Collectives, rank: int, device: torch.device) -> None:
    """Compares the gradient exchanges of all ranks so far. Collective: all ranks call it; takes one round trip.

    Args:
        log: Exchanges of this rank.
        collectives: Collectives of the ranks.
        rank: Global rank of this process.
        device: Device of this rank.

    Raises:
        RankFailedError: On all ranks, if ranks have exchanged gradients of different batches. The message names the
            first difference.
    """
    own = log.summary(0)
    of_ranks = collectives.all_gather(torch.tensor([own.count, own.digest], device=device)).cpu()
    others = (of_ranks != of_ranks[0]).any(dim=1).nonzero().flatten().tolist()
    if not others:
        return
    # The rank with more exchanges finds the difference.
    shorter, longer = sorted((0, others[0]), key=lambda each: int(of_ranks[each, 0]))
    summary = collectives.broadcast(own, shorter)
    difference = collectives.broadcast(log.first_difference(summary) if rank == longer else None, longer)
    if difference is None:  # the exchanges of one rank begin with all exchanges of the other
        num_less, num_more = (int(of_ranks[each, 0]) for each in (shorter, longer))
        text = f"rank {shorter} has exchanged gradients {num_less} times, and rank {longer} {num_more} times. {ADVICE}"
    else:
        text = describe_difference(longer, shorter, difference)
    raise RankFailedError(f"The ranks have exchanged gradients of different batches: {text}.")
