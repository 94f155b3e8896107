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
    """Called by all ranks together, when their watches look.

    Args:
        store: Shared by the ranks, for this alone.
        num_ranks: How many there are.
        is_first: Whether this is the first of them: its process may have the store, so it goes on last.
        get_failure: Tells what has failed, as far as this rank's watch knows.

    Raises:
        RankFailedError: If some do not come to it, or one has failed.
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
