"""The meeting: no rank goes on before all watch.

The script of one that does may fail at once, or its host be lost, while others still ask the store for what they need
to watch: they would wait for as long as the store has patience, half an hour.
"""

import time
from collections.abc import Callable

import torch.distributed as dist

from lightning_strategies_ext.exceptions import RankFailedError
from lightning_strategies_ext.failure import failure_report
from lightning_strategies_ext.failure.rank_status import Failure

#: How long ranks wait for others that have said where they are to watch, too, in seconds.
STARTUP_TIMEOUT_S = 60.0
_POLL_S = 0.002
#: How many requests all ranks together may then send to the store.
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
                    f"Only {found} of {until} ranks have come as far as this one in {STARTUP_TIMEOUT_S:g} s, after all"
                    " had met: look at what the others say, or whether their hosts are there."
                )
            time.sleep(max(_POLL_S, num_ranks / REQUESTS_PER_S))
            found = store.add(key, 0)
