"""Ray Train: a worker of a ``TorchTrainer`` is a rank, and has a process group, before it makes a Trainer."""

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_strategies_ext.arguments import DEFAULT_TIMEOUT
from lightning_strategies_ext.launch.protocol import Seat


def seat_here() -> Seat | None:
    """Where this process sits among the workers of a ``TorchTrainer``; None if it is none of them.

    Nothing of Ray's is imported for it: who runs in its workers has done so. Of hosts that have not all as many ranks,
    each counts as if they had.
    """
    context = _context()
    if context is None:
        return None
    world_size, local_world_size = context.get_world_size(), context.get_local_world_size()
    return Seat(
        rank=context.get_world_rank(),
        world_size=world_size,
        local_rank=context.get_local_rank(),
        local_world_size=local_world_size,
        host_rank=context.get_node_rank(),
        num_hosts=-(-world_size // local_world_size),
        address=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        port=int(os.environ.get("MASTER_PORT", "0")),
    )


def check_fits(
    seat: Seat,
    strategy: str,
    *,
    starts_ranks: bool,
    num_devices: int,
    process_group_backend: str | None,
    process_group_options: Any,
    timeout: timedelta | None,
) -> None:
    """Refuses what a strategy was asked for and Ray Train has decided otherwise.

    Args:
        seat: Of this process.
        strategy: Name of its class.
        starts_ranks: Whether it starts processes itself.
        num_devices: How many devices the Trainer has been given.
        process_group_backend: As the strategy was given it.
        process_group_options: As the strategy was given them.
        timeout: As the strategy was given it.

    Raises:
        ValueError: If something differs.
    """
    if starts_ranks:
        raise ValueError(
            f"`{strategy}` starts ranks, and Ray Train has started this one and the others. Use `strategy='ddp_ext'` in"
            " what a TorchTrainer runs."
        )
    backend = dist.get_backend()
    refused = [f"process_group_backend={process_group_backend!r}"] * (process_group_backend not in (None, backend))
    refused += [f"process_group_options={process_group_options!r}"] * (process_group_options is not None)
    refused += [f"timeout={timeout!r}"] * (timeout != DEFAULT_TIMEOUT)
    if refused:
        raise ValueError(
            f"`{refused[0]}`: Ray Train has made the process group already, over {backend!r}. Leave it out, and give"
            " `torch_config=ray.train.torch.TorchConfig(backend=..., timeout_s=...)` to the TorchTrainer."
        )
    if device_here().type == "cpu" and num_devices not in (1, seat.local_world_size):
        raise ValueError(
            f"`devices={num_devices}`: Ray Train has started {seat.local_world_size} of its {seat.world_size} workers"
            " on this host. Leave it out: `ScalingConfig(num_workers=...)` says it."
        )


def device_here() -> torch.device:
    """The device that Ray Train has given to this process."""
    from ray.train.torch import get_device

    device: torch.device = get_device()
    return device


def _context() -> Any:
    train = sys.modules.get("ray.train")
    if train is None or not dist.is_available() or not dist.is_initialized():
        return None
    try:
        context = train.get_context()
        is_one = (context.get_world_rank(), context.get_world_size()) == (dist.get_rank(), dist.get_world_size())
    except (RuntimeError, DeprecationWarning):  # not one of its workers, or a trial of Ray Tune's
        return None
    return context if is_one else None
