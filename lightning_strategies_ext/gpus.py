"""Whether GPUs have computed what they were asked for, and from numbers that were all there.

A call returns before the GPU has done what it asks for. So an exchange over NCCL to which another rank does not come
holds nobody up at first; and where it is cut off in the end, all that follows is computed nevertheless, from whatever
was there. Who keeps something of it, in a checkpoint or in a commit, asks here before.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

_is_cut_off = False


def note_cut_off(is_cut_off: bool) -> None:
    """Called before an exchange on GPUs is cut off, and when ranks meet anew.

    Args:
        is_cut_off: Which of the two.
    """
    global _is_cut_off
    _is_cut_off = is_cut_off


def is_cut_off() -> bool:
    """Whether an exchange on GPUs was cut off since ranks have met."""
    return _is_cut_off


def wait_until_computed() -> None:
    """Waits for the GPU of this process, if it uses one; other threads go on meanwhile.

    ``torch.save`` would wait, too, with Python's lock (seen in torch 2.11): no thread could say or do anything then.

    Raises:
        torch.distributed.DistBackendError: If an exchange was cut off: what was computed since is not to be kept.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        if _is_cut_off:
            raise dist.DistBackendError(
                "An exchange between GPUs was cut off, and what was computed since may be wrong: it is not kept."
            )


def clock_of(device: torch.device) -> Callable[[], int]:
    """What gives the time of ``time.time_ns()`` once a device has done all that it was asked for."""

    def clock() -> int:
        torch.cuda.synchronize(device)
        return time.time_ns()

    return clock if device.type == "cuda" else time.time_ns
