"""Check of the exchange logs of all ranks at moments at which wrong weights would be stored or returned."""

import time
from typing import Final

from lightning_strategies_ext.exceptions import RankFailedError
from lightning_strategies_ext.failure.exchange_log import ExchangeLog
from lightning_strategies_ext.failure.failure_detector import diagnose_mismatch
from lightning_strategies_ext.failure.failure_monitor import FailureMonitor

#: Seconds that a rank waits for equal statuses of the ranks of its host: two status intervals.
_STATUS_TIMEOUT_S: Final = 0.5
_POLL_S: Final = 0.002


def check_exchanges(log: ExchangeLog, monitor: FailureMonitor) -> None:
    """Compares the gradient exchanges of this rank with those that other ranks publish.

    All ranks call it at the same point, and then it takes milliseconds. It is no collective: a rank that calls it alone
    waits for half a second.

    Args:
        log: Exchanges of this rank.
        monitor: Failure monitor of this rank.

    Raises:
        RankFailedError: If this rank and another have exchanged gradients of different batches.
    """
    monitor.publish()
    deadline = time.monotonic() + _STATUS_TIMEOUT_S
    while True:
        observed = monitor.observe()
        failure = diagnose_mismatch(observed, log) or monitor.failure
        if failure is not None and failure.kind == "mismatch":
            raise RankFailedError(f"The ranks have exchanged gradients of different batches: {failure.headline}.")
        local = [status.exchanges for rank, status in observed.statuses.items() if observed.is_local(rank)]
        totals = {None if each is None else (each.stage, each.count, each.digest) for each in local}
        if len(totals) == 1 or time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)
