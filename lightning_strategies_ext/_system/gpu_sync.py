"""GPU synchronization: waits for GPUs, aborted collectives, streams, and copies to the host.

A call returns before the GPU has finished the work. A collective over NCCL that another rank does not join therefore
blocks no thread at first. After its abort, the GPU computes the rest of the step from incomplete data. Code that keeps
results, in a checkpoint or in a commit, calls :func:`synchronize_gpu` first.
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

_aborted_group: "weakref.ref[Any] | None" = None


def mark_aborted(group: Any) -> None:
    """Records that the collectives of a process group on GPUs are about to be aborted."""
    global _aborted_group
    _aborted_group = weakref.ref(group)


def is_aborted() -> bool:
    """Returns whether the collectives of the default process group were aborted."""
    is_in_group = dist.is_available() and dist.is_initialized()
    return is_in_group and _aborted_group is not None and _aborted_group() is dist.group.WORLD


def synchronize_gpu() -> None:
    """Waits for the GPU of this process, if it uses one; other threads run meanwhile.

    ``torch.save`` would also wait, but with the GIL (observed in torch 2.11), so that no other thread could run.

    Raises:
        torch.distributed.DistBackendError: If collectives were aborted: later results must not be kept.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        if is_aborted():
            raise dist.DistBackendError(
                "Collectives between GPUs were aborted, so later results may be wrong and are discarded."
            )


def has_single_visible_gpu(devices: Sequence[torch.device]) -> bool:
    """Returns whether the devices are the only GPU that this process sees, as with SLURM's ``--gpus-per-task=1``."""
    return len(devices) == 1 and devices[0].type == "cuda" and torch.cuda.device_count() == 1


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream in which this package works in addition to the current stream; one per device.

    torch's allocator reuses memory that was freed in a stream for that stream only, so that each further stream would
    need as much memory again.
    """
    return torch.cuda.Stream(device)


def record_use(tensor: Tensor) -> None:
    """Keeps the memory of a tensor that is about to be freed until the current stream has used it.

    The memory belongs to the stream in which the tensor was created, which could otherwise reuse it at once.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def copy_to_host(tensors: Sequence[Tensor], destinations: Sequence[Tensor | None], *, may_pin: bool) -> list[Tensor]:
    """Copies tensors to the host, and waits once for all copies from a GPU.

    Args:
        tensors: Tensors on any device.
        destinations: For each tensor, the host tensor of its shape, dtype, and layout to write to; None for a new one.
        may_pin: Whether new copies from a GPU use pinned memory, which the GPU copies faster.

    Returns:
        The host tensors.
    """
    copies = []
    for tensor, destination in zip(tensors, destinations, strict=True):
        if destination is None and tensor.is_cuda and tensor.layout == torch.strided:
            destination = _host_memory_like(tensor, may_pin)
        if destination is None:
            copies.append(tensor.detach().to("cpu", copy=True))
        else:
            copies.append(destination.copy_(tensor.detach(), non_blocking=tensor.is_cuda))
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()
    return copies


def _host_memory_like(tensor: Tensor, may_pin: bool) -> Tensor:
    if may_pin:
        with suppress(RuntimeError):  # CUDA has no memory to pin
            return torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
    return torch.empty_like(tensor, device="cpu", requires_grad=False)


def pinned_bytes(num_bytes: int) -> int:
    """Returns the bytes that torch allocates to pin memory for a tensor: the next power of two."""
    return 1 << max(0, num_bytes - 1).bit_length()


def device_clock(device: torch.device) -> Callable[[], int]:
    """Returns a callable that waits for a device and then returns ``time.time_ns()``."""

    def clock() -> int:
        torch.cuda.synchronize(device)
        return time.time_ns()

    return clock if device.type == "cuda" else time.time_ns
