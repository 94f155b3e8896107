"""Checks of the arguments of a torch.distributed process group, before processes start."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_strategies_ext import shm
from lightning_strategies_ext.shm.options import ShmOptions

_AVAILABILITY = {
    "gloo": "is_gloo_available",
    "nccl": "is_nccl_available",
    "mpi": "is_mpi_available",
    "ucc": "is_ucc_available",
    "xccl": "is_xccl_available",
}


def available_backends() -> list[str]:
    """Returns the backends of this build of torch."""
    return [name for name, predicate in _AVAILABILITY.items() if getattr(dist, predicate, bool)()]


def check_arguments(backend: str | None, options: Any, timeout: timedelta | None) -> None:
    """Checks the arguments of a process group before processes start.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If torch does not know the backend, the options are for another backend, or the timeout is invalid.
        RuntimeError: If torch was built without the backend.
    """
    check_backend(backend)
    check_options(options, backend)
    check_timeout(timeout)


def check_timeout(timeout: timedelta | None) -> None:
    """Checks that a timeout is valid for a process group.

    Raises:
        TypeError: If the timeout is neither a ``timedelta`` nor None.
        ValueError: If the timeout is not positive.
    """
    if timeout is None:
        return
    if not isinstance(timeout, timedelta):
        raise TypeError(
            f"`timeout` must be a datetime.timedelta or None, got {timeout!r}. Write `timedelta(seconds=...)`."
        )
    if timeout <= timedelta(0):
        raise ValueError(f"`timeout` must be positive, got {timeout!r} ({timeout.total_seconds()} seconds).")


def check_backend(backend: str | None) -> None:
    """Checks that torch knows a backend and that this build of torch has it.

    Args:
        backend: ``"gloo"``, ``"nccl"``, any backend registered with ``torch.distributed.Backend``, or one per device
            type in torch's form ``"cpu:gloo,cuda:nccl"``. None for the default of the device.

    Raises:
        TypeError: If the backend is neither a string nor None.
        ValueError: If torch does not know the backend.
        RuntimeError: If torch was built without the backend.
    """
    if backend is None:
        return
    if not isinstance(backend, str):
        raise TypeError(f"`process_group_backend` must be a name such as 'gloo', or None, got {backend!r}.")
    known = sorted(name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED)
    for name in backends_in(backend):
        if name not in known:
            raise ValueError(
                f"`process_group_backend={backend!r}` is not a backend of torch. Use one of {', '.join(known)}."
            )
        is_available = getattr(dist, _AVAILABILITY.get(name, ""), None)
        if is_available is not None and not is_available():
            raise RuntimeError(
                f"`process_group_backend={backend!r}`: this build of torch ({torch.__version__}) does not include"
                f" {name}. Omit the argument to use the default for the device, or install a torch built with {name}."
            )


def check_backend_for_devices(backend: str | None, devices: list[torch.device]) -> None:
    """Checks that a backend supports tensors of the devices; NCCL does not support CPU ranks, for example.

    Raises:
        ValueError: If the backend does not support a device.
    """
    if backend is None or ":" in backend:
        return
    capable = dist.Backend.backend_capability.get(backend.lower(), [])
    for device_type in sorted({device.type for device in devices}):
        if capable and device_type not in capable:
            raise ValueError(
                f"`process_group_backend={backend!r}` supports tensors on {' and '.join(capable)}, but the devices"
                f" are of type {device_type!r}. Use `accelerator={capable[0]!r}` or another backend, such as 'gloo'."
            )


def check_options(options: Any, backend: str | None) -> None:
    """Checks that a backend accepts the options.

    Raises:
        ValueError: If the options are for another backend.
    """
    if isinstance(options, ShmOptions) and backend not in (None, shm.NAME):
        raise ValueError(
            f"`process_group_options={options!r}` are for the backend 'shm', but `process_group_backend={backend!r}`."
            " Omit the options, or use `process_group_backend='shm'`."
        )


def backends_in(backend: str) -> list[str]:
    """Returns the names in a backend of torch's form ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``, in lowercase."""
    return [part.rpartition(":")[2].strip().lower() for part in backend.split(",")]
