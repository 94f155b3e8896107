"""Assignment of ranks and devices to the processes of a DDP strategy, before the strategy starts processes."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy

from lightning_strategies_ext._lightning import strategy_parts
from lightning_strategies_ext.launch.protocol import WorkerRankInfo
from lightning_strategies_ext.launch.ray import ray_train
from lightning_strategies_ext.launch.script_launcher import devices_of_ranks
from lightning_strategies_ext.torch_distributed import process_group

#: Rank info of a Trainer on one device, in a process that belongs to a group of several ranks.
_SINGLE_RANK_INFO = WorkerRankInfo(0, 1, 0, 1, 0, 1, "127.0.0.1", 0)


def assign_ranks(
    strategy: LightningDDPStrategy, backend: str | None, options: Any, timeout: timedelta | None, *, starts_ranks: bool
) -> str | None:
    """Assigns one device to each rank of this host, and its rank to this process.

    Args:
        strategy: The strategy, with the devices, the environment, and the number of hosts of its Trainer.
        backend: Backend of the process group; None for the default.
        options: Options of the backend, or None.
        timeout: Timeout of collectives; None for torch's default.
        starts_ranks: Whether the strategy starts workers.

    Returns:
        The backend; with Ray Train, the backend of the process group that it has created.

    Raises:
        ValueError: If an argument contradicts what Ray Train has set up.
    """
    assert strategy.cluster_environment is not None
    devices = strategy.parallel_devices or []
    rank_info = ray_train.current_rank_info()
    if rank_info is not None:
        ray_train.check_compatible(
            rank_info,
            type(strategy).__name__,
            starts_ranks=starts_ranks,
            num_devices=len(devices),
            process_group_backend=backend,
            process_group_options=options,
            timeout=timeout,
        )
        backend = dist.get_backend()
        use_rank_info(strategy, rank_info, ray_train.current_device())
    else:
        strategy.parallel_devices = devices_of_ranks(devices, strategy.cluster_environment, strategy.num_nodes)
        if process_group.has_others() and strategy.num_nodes * strategy.num_processes == 1:
            use_rank_info(strategy, _SINGLE_RANK_INFO, strategy.parallel_devices[0])
        elif len(strategy.parallel_devices) == len(devices):
            return backend
    strategy.set_world_ranks()
    return backend


def use_rank_info(strategy: LightningDDPStrategy, rank_info: WorkerRankInfo, device: torch.device) -> None:
    """Makes a strategy use a rank info, with which this process was started, and the device of this process."""
    strategy.parallel_devices = [device] * rank_info.local_world_size
    strategy.num_nodes = rank_info.num_nodes
    strategy.cluster_environment = ray_train.RayEnvironment(rank_info)


def hide_group_on_one_device(world_size: int) -> bool:
    """Hides the default process group during a stage of one rank, in which the other ranks may not take part.

    In a stage of several ranks, it arranges this for later stages on one device instead.

    Args:
        world_size: Number of ranks of this stage.

    Returns:
        Whether a group is hidden, which :func:`.process_group.restore_default_group` restores.
    """
    if world_size == 1:
        return process_group.hide_default_group()
    strategy_parts.wrap_stages_on_one_device(process_group.hide_default_group, process_group.restore_default_group)
    return False


def no_device_error(devices: Sequence[torch.device], local_rank: int) -> RuntimeError:
    """Returns the error for a rank of this host for which there is no device."""
    if not devices:
        return RuntimeError("The devices are not known yet. Pass the strategy to a Trainer first.")
    return RuntimeError(
        f"This process is local rank {local_rank} according to its environment, but `devices` specifies"
        f" {len(devices)} for this host. Pass as many `devices` to the Trainer as processes were started per host, or"
        " start one process per device. If each process is to use its own GPU, make only that GPU visible to it"
        " (`--gpus-per-task=1` under SLURM), with `devices=1`."
    )
