"""Assignment of ranks and devices to the processes of a DDP strategy, before the strategy starts processes.

The ranks come from the cluster environment, or from Ray: for workers of a ``TorchTrainer`` of Ray Train, which have a
process group before they create a Trainer, and for workers of ``ddp_ray_ext``.
"""

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from typing_extensions import override

from lightning_strategies_ext._lightning import strategy_parts
from lightning_strategies_ext.arguments import DEFAULT_TIMEOUT
from lightning_strategies_ext.launch.protocol import WorkerRankInfo
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
    rank_info = ray_train_rank_info()
    if rank_info is not None:
        _check_compatible_with_ray_train(rank_info, strategy, backend, options, timeout, starts_ranks=starts_ranks)
        backend = dist.get_backend()
        use_rank_info(strategy, rank_info, _ray_train_device())
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
    strategy.cluster_environment = RayEnvironment(rank_info)


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


# --- processes whose ranks come from Ray ---


def ray_train_rank_info() -> WorkerRankInfo | None:
    """Returns this process's rank among the workers of a ``TorchTrainer``, or None if it is not one of them.

    Does not import Ray: a worker has already imported it. The number of hosts is computed as if all hosts had as many
    ranks as this one.
    """
    context = _ray_train_context()
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


def _check_compatible_with_ray_train(
    rank_info: WorkerRankInfo,
    strategy: LightningDDPStrategy,
    backend: str | None,
    options: Any,
    timeout: timedelta | None,
    *,
    starts_ranks: bool,
) -> None:
    """Checks arguments of the Trainer and of its strategy, see :func:`assign_ranks`.

    Raises:
        ValueError: If an argument contradicts what Ray Train has set up, or the strategy starts ranks itself.
    """
    if starts_ranks:
        raise ValueError(
            f"`{type(strategy).__name__}` starts ranks, but Ray Train has started them already. Use"
            " `strategy='ddp_ext'` in the training function of a TorchTrainer."
        )
    used = dist.get_backend()
    refused = [f"process_group_backend={backend!r}"] * (backend not in (None, used))
    refused += [f"process_group_options={options!r}"] * (options is not None)
    refused += [f"timeout={timeout!r}"] * (timeout != DEFAULT_TIMEOUT)
    if refused:
        raise ValueError(
            f"`{refused[0]}`: Ray Train has already created the process group, with backend {used!r}. Omit the"
            " argument, and pass `torch_config=ray.train.torch.TorchConfig(backend=..., timeout_s=...)` to the"
            " TorchTrainer."
        )
    num_devices = len(strategy.parallel_devices or [])
    if _ray_train_device().type == "cpu" and num_devices not in (1, rank_info.local_world_size):
        raise ValueError(
            f"`devices={num_devices}`: Ray Train has started {rank_info.local_world_size} of its"
            f" {rank_info.world_size} workers on this host. Omit the argument: `ScalingConfig(num_workers=...)` sets"
            " the number of ranks."
        )


def _ray_train_device() -> torch.device:
    """Returns the device that Ray Train has assigned to this process."""
    from ray.train.torch import get_device

    device: torch.device = get_device()
    return device


def _ray_train_context() -> Any:
    train = sys.modules.get("ray.train")
    if train is None or not dist.is_available() or not dist.is_initialized():
        return None
    try:
        context = train.get_context()
        is_same_rank = (context.get_world_rank(), context.get_world_size()) == (dist.get_rank(), dist.get_world_size())
    except (RuntimeError, DeprecationWarning):  # not a worker of a TorchTrainer, or a trial of Ray Tune
        return None
    return context if is_same_rank else None


class RayEnvironment(ClusterEnvironment):
    """Cluster environment with the ranks and addresses of a process that Ray has started as one of several."""

    def __init__(self, rank_info: WorkerRankInfo) -> None:
        super().__init__()
        self._rank_info = rank_info

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return self._rank_info.main_address

    @property
    @override
    def main_port(self) -> int:
        return self._rank_info.main_port

    @staticmethod
    @override
    def detect() -> bool:
        return False  # the strategy creates this environment itself

    @override
    def world_size(self) -> int:
        return self._rank_info.world_size

    @override
    def set_world_size(self, size: int) -> None:
        """No-op: Ray has set the world size."""

    @override
    def global_rank(self) -> int:
        return self._rank_info.rank

    @override
    def set_global_rank(self, rank: int) -> None:
        """No-op: Ray has set the rank."""

    @override
    def local_rank(self) -> int:
        return self._rank_info.local_rank

    @override
    def node_rank(self) -> int:
        return self._rank_info.node_rank
