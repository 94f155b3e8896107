"""Whether GPUs have computed what they were asked for, and from numbers that were all there.

A call returns before the GPU has done what it asks for. So an exchange over NCCL to which another rank does not come
holds nobody up at first; and where it is cut off in the end, all that follows is computed nevertheless, from whatever
was there. Who keeps something of it, in a checkpoint or in a commit, asks here before.
"""

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_cut_off: "weakref.ref[Any] | None" = None


def mark_aborted(group: Any) -> None:
    """Called before the exchanges of a process group on GPUs are cut off; until this process has left that group."""
    global _cut_off
    _cut_off = weakref.ref(group)


def is_aborted() -> bool:
    """Whether those of the default process group are."""
    is_in_group = dist.is_available() and dist.is_initialized()
    return is_in_group and _cut_off is not None and _cut_off() is dist.group.WORLD


def synchronize_gpu() -> None:
    """Waits for the GPU of this process, if it uses one; other threads go on meanwhile.

    ``torch.save`` would wait, too, with Python's lock (seen in torch 2.11): no thread could say or do anything then.

    Raises:
        torch.distributed.DistBackendError: If an exchange was cut off: what was computed since is not to be kept.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        if is_aborted():
            raise dist.DistBackendError(
                "An exchange between GPUs was cut off, and what was computed since may be wrong: it is not kept."
            )


def sees_one_gpu(devices: Sequence[torch.device]) -> bool:
    """Whether these devices are one GPU, the only GPU that this process sees, as with SLURM's ``--gpus-per-task=1``."""
    return len(devices) == 1 and devices[0].type == "cuda" and torch.cuda.device_count() == 1


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream in which this package works beside the current one; the same at each call for a device.

    torch's allocator gives memory that was freed in a stream to that stream only, so that each further stream would
    need as much memory again.
    """
    return torch.cuda.Stream(device)


def note_use(tensor: Tensor) -> None:
    """Keeps the memory of a tensor that is about to be freed until the current stream has used it.

    The memory belongs to the stream in which the tensor was made, which may be another one and get it back at once.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def copy_to_host(tensors: Sequence[Tensor], kept: Sequence[Tensor | None], *, may_pin: bool) -> list[Tensor]:
    """Copies tensors to the host, and waits once for all copies from a GPU.

    Args:
        tensors: On any device.
        kept: For each tensor, one of the host with its shape, dtype and layout to write to; None makes one.
        may_pin: Whether copies from a GPU get pinned memory, from which and to which the GPU copies faster.

    Returns:
        The tensors of the host.
    """
    copies = []
    for tensor, own in zip(tensors, kept, strict=True):
        if own is None and tensor.is_cuda and tensor.layout == torch.strided:
            own = _host_memory_like(tensor, may_pin)
        if own is None:
            copies.append(tensor.detach().to("cpu", copy=True))
        else:
            copies.append(own.copy_(tensor.detach(), non_blocking=tensor.is_cuda))
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()
    return copies


def _host_memory_like(tensor: Tensor, may_pin: bool) -> Tensor:
    if may_pin:
        with suppress(RuntimeError):  # CUDA has no memory to pin
            return torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
    return torch.empty_like(tensor, device="cpu", requires_grad=False)


def pinned_bytes(num_bytes: int) -> int:
    """What torch takes to pin memory for a tensor: the next power of two."""
    return 1 << max(0, num_bytes - 1).bit_length()


def device_clock(device: torch.device) -> Callable[[], int]:
    """What gives the time of ``time.time_ns()`` once a device has done all that it was asked for."""

    def clock() -> int:
        torch.cuda.synchronize(device)
        return time.time_ns()

    return clock if device.type == "cuda" else time.time_ns
