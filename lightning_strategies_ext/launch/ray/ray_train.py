"""Ray Train: a worker of a ``TorchTrainer`` is a rank, and has a process group, before it makes a Trainer."""

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_strategies_ext.arguments import DEFAULT_TIMEOUT
from lightning_strategies_ext.launch.protocol import WorkerRankInfo


def current_rank_info() -> WorkerRankInfo | None:
    """Where this process sits among the workers of a ``TorchTrainer``; None if it is none of them.

    Nothing of Ray's is imported for it: who runs in its workers has done so. Of hosts that have not all as many ranks,
    each counts as if they had.
    """
    context = _context()
    if context is None:
        return None
    world_size, local_world_size = context.get_world_size(), context.get_local_world_size()
    return WorkerRankInfo(
        rank=context.get_world_rank(),
        world_size=world_size,
        local_rank=context.get_local_rank(),
        local_world_size=local_world_size,
        node_rank=context.get_node_rank(),
        num_nodes=-(-world_size // local_world_size),
        main_address=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        main_port=int(os.environ.get("MASTER_PORT", "0")),
    )


def check_compatible(
    rank_info: WorkerRankInfo,
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
        rank_info: Of this process.
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
    if current_device().type == "cpu" and num_devices not in (1, rank_info.local_world_size):
        raise ValueError(
            f"`devices={num_devices}`: Ray Train has started {rank_info.local_world_size} of its"
            f" {rank_info.world_size} workers on this host. Leave it out: `ScalingConfig(num_workers=...)` says it."
        )


def current_device() -> torch.device:
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
