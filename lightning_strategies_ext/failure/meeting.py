"""Startup barrier: no rank continues before the failure monitors of all ranks run.

Otherwise a rank could fail, or its host be lost, while other ranks still read from the store what their monitors need;
they would wait for the timeout of the store, half an hour.
"""

import time
from collections.abc import Callable

import torch.distributed as dist

from lightning_strategies_ext.exceptions import RankFailedError
from lightning_strategies_ext.failure import failure_report
from lightning_strategies_ext.failure.rank_status import Failure

#: Seconds that a rank waits for the failure monitors of the other ranks.
STARTUP_TIMEOUT_S = 60.0
_POLL_S = 0.002
#: Requests per second that all ranks together send to the store meanwhile.
REQUESTS_PER_S = 2000


def wait_for_all_monitors(
    store: dist.Store, num_ranks: int, is_first: bool, get_failure: Callable[[], Failure | None]
) -> None:
    """Waits until the failure monitors of all ranks run. Collective: all ranks call it.

    Args:
        store: Store that the ranks share, for this barrier alone.
        num_ranks: Number of ranks.
        is_first: Whether this is rank 0, which continues last, because its process may serve the store.
        get_failure: Callable that returns the first failure that this rank's monitor knows of, or None.

    Raises:
        RankFailedError: If a rank does not reach the barrier in time, or has failed.
    """
    deadline = time.monotonic() + STARTUP_TIMEOUT_S
    for key, until in ("watching", num_ranks), ("gone on", num_ranks if is_first else 0):
        found = store.add(key, 1)
        while found < until:
            if (failure := get_failure()) is not None:
                raise RankFailedError(failure_report.full_report(failure))
            if time.monotonic() > deadline:
                raise RankFailedError(
                    f"Only {found} of {until} ranks passed the startup barrier within {STARTUP_TIMEOUT_S:g} s. Check"
                    " the output of the other ranks, and whether their hosts are reachable."
                )
            time.sleep(max(_POLL_S, num_ranks / REQUESTS_PER_S))
            found = store.add(key, 0)
