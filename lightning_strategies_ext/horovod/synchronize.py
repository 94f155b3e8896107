"""Waiting for Horovod's operations without occupying a core.

Horovod's ``synchronize`` polls and yields in a loop, so a waiting rank occupies a core, which the other ranks of the
host, DataLoader workers, and Horovod's own threads could use. Here a rank polls in this way for one millisecond, and
then sleeps between polls.
"""

import os
import time
from typing import Any

from lightning_strategies_ext.failure.rank_status import CollectiveProgress

#: Time for which a rank polls without sleeping, in seconds. Cores that became idle between the messages of a short
#: exchange took a tenth of a step to wake (h=1024 of ``benchmarks.horovod``, over MPI, on an idle virtual machine).
_YIELD_S = 1e-3
#: Minimum sleep between two polls, in seconds; the kernel adds about 60 microseconds. Horovod itself looks for work
#: once per cycle, one millisecond by default.
_MIN_SLEEP_S = 2e-5
#: Sleep as a fraction of the time waited so far, and its maximum in seconds.
_SLEEP_FRACTION = 0.05
_MAX_SLEEP_S = 5e-3


#: The operation of all ranks that the training thread waits for, as an object of its own, or None.
_pending_work: list[object] = [None]


class HorovodProgress(CollectiveProgress):
    """Progress of this process in the operations of all ranks."""

    def pending_work(self) -> Any:
        """Returns the operation that this rank waits for; None if there is none."""
        return _pending_work[0]


def synchronize(handle: Any, process_set: Any = None) -> Any:
    """Waits for an asynchronous operation.

    Args:
        handle: Handle that the call that started the operation has returned.
        process_set: Process set of the operation; None for all ranks.

    Returns:
        The result of Horovod's ``synchronize``.

    Raises:
        horovod.common.exceptions.HorovodInternalError: If the operation has failed.
    """
    import horovod.torch as hvd

    began_at = time.monotonic()
    if process_set is None or process_set.process_set_id == 0:
        _pending_work[0] = [handle]
    try:
        while not hvd.poll(handle):
            waited_s = time.monotonic() - began_at
            if waited_s < _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(min(max(_MIN_SLEEP_S, _SLEEP_FRACTION * waited_s), _MAX_SLEEP_S))
        return hvd.synchronize(handle)
    except ValueError as error:  # another thread has shut Horovod down, which cleared the handles
        from horovod.common.exceptions import HorovodInternalError

        raise HorovodInternalError(
            f"Horovod has been shut down while this rank waited for an operation: {error}"
        ) from error
    finally:
        _pending_work[0] = None
