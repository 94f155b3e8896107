"""Waiting for what Horovod is doing, without keeping the core busy that it may need for that.

Horovod's own ``synchronize`` asks in a loop whether the work is done, and gives way to other threads in between, so
that a rank that waits takes a whole core: from the other ranks of the host, from workers of data loaders, and from
Horovod's own threads. Here a rank does so for a millisecond, and then sleeps between two looks.
"""

import os
import time
from typing import Any

#: For so long a rank looks without sleeping, in seconds. Cores that fall asleep between the words of a short exchange
#: took a tenth of a step to wake (h=1024 of ``benchmarks.horovod``, over MPI, on an idle virtual machine).
_AWAKE_S = 1e-3
#: How long it then sleeps between two looks, in seconds, to which the kernel adds some 60 microseconds. Horovod itself
#: looks for work once in a cycle of a millisecond, if it was not told otherwise.
_PAUSE_S = 2e-5
#: Who has waited for long sleeps longer, for this part of the time so far, and so many seconds at most.
_PART = 0.05
_LONGEST_PAUSE_S = 5e-3


def wait_for(handle: Any) -> Any:
    """Waits for an operation.

    Args:
        handle: What began it has returned it.

    Returns:
        What Horovod's ``synchronize`` returns.

    Raises:
        horovod.common.exceptions.HorovodInternalError: If the operation has failed.
    """
    import horovod.torch as hvd

    began_at = time.monotonic()
    try:
        while not hvd.poll(handle):
            waited_s = time.monotonic() - began_at
            if waited_s < _AWAKE_S:
                os.sched_yield()
            else:
                time.sleep(min(max(_PAUSE_S, _PART * waited_s), _LONGEST_PAUSE_S))
        return hvd.synchronize(handle)
    except ValueError as error:  # another thread has shut Horovod down, which cleared the handle
        from horovod.common.exceptions import HorovodInternalError

        raise HorovodInternalError(
            f"Horovod has been shut down while this rank waited for an operation: {error}"
        ) from error
