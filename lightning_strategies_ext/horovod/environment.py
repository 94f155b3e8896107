"""Lightning's cluster environment for Horovod, and checks of arguments against the launcher."""

import os

import torch
from lightning.fabric.plugins import ClusterEnvironment

from lightning_strategies_ext import rank_variables
from lightning_strategies_ext._lightning import launching
from lightning_strategies_ext._system.gpu_sync import has_single_visible_gpu
from lightning_strategies_ext.horovod.launch_info import LaunchInfo, exited_parent_pid, is_rank_of_script
from lightning_strategies_ext.launch.script_launcher import environment_of_child


def environment_of_launcher() -> ClusterEnvironment | None:
    """Returns the environment of a process that a launcher of Horovod has started, and sets the rank for messages.

    In a process that a rank has started, it removes the rank's variables first, and returns an environment that starts
    ranks. None in a process that no launcher has started.
    """
    environment = environment_of_child(None)
    launch = LaunchInfo.from_environment()
    if launch is None:
        return environment
    launching.set_rank_zero_only_rank(launch.rank)
    return HorovodEnvironment(launch)


class HorovodEnvironment(ClusterEnvironment):
    """Cluster environment of a process that a launcher of Horovod has started.

    Args:
        launch: Rank of this process, from the launcher.

    Attributes:
        launch: Current rank of this process; elastic training replaces it.
    """

    def __init__(self, launch: LaunchInfo) -> None:
        self.launch = launch

    @property
    def creates_processes_externally(self) -> bool:
        """True: the launcher has created the processes."""
        return True

    @property
    def main_address(self) -> str:
        """Placeholder: Horovod has its own rendezvous."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Placeholder: Horovod has its own rendezvous."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Returns whether a launcher has started this process."""
        return LaunchInfo.from_environment() is not None

    def world_size(self) -> int:
        """Returns the number of ranks."""
        return self.launch.size

    def set_world_size(self, size: int) -> None:
        """Does nothing: the launcher has set the value."""

    def global_rank(self) -> int:
        """Returns the global rank."""
        return self.launch.rank

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the launcher has set the value."""

    def local_rank(self) -> int:
        """Returns the rank on this host."""
        return self.launch.local_rank

    def node_rank(self) -> int:
        """Returns the index of this host."""
        return int(os.environ.get("HOROVOD_CROSS_RANK", self.launch.rank // self.launch.local_size))


def launch_info_from(environment: ClusterEnvironment, num_processes: int) -> LaunchInfo:
    """Returns the rank of this process, and the numbers of ranks.

    Args:
        environment: Cluster environment of this process.
        num_processes: Number of ranks on this host.
    """
    if isinstance(environment, HorovodEnvironment):
        return environment.launch
    ranks = environment.global_rank(), environment.world_size(), environment.local_rank()
    return LaunchInfo("python", *ranks, num_processes)


def check_num_nodes(num_nodes: int, environment: ClusterEnvironment | None) -> None:
    """Rejects several hosts without a launcher, and a number of hosts that contradicts the launcher.

    Raises:
        ValueError: If ``num_nodes`` is invalid.
    """
    launch = environment.launch if isinstance(environment, HorovodEnvironment) else None
    hosts = 1 if launch is None else max(1, launch.size // launch.local_size)
    if num_nodes in (1, hosts):
        return
    raise ValueError(
        f"`num_nodes={num_nodes}`: "
        + (
            f"{launch.launcher} has started ranks on {hosts} hosts. Omit `num_nodes`."
            if launch is not None
            else "without a launcher, Horovod's ranks are started on this host only. Use `horovodrun -H` or `mpirun`."
        )
    )


def num_processes(devices: list[torch.device], environment: ClusterEnvironment | None) -> int:
    """Returns the number of ranks on this host."""
    return environment.launch.local_size if isinstance(environment, HorovodEnvironment) else len(devices)


def num_nodes(environment: ClusterEnvironment | None) -> int:
    """Returns the number of hosts."""
    if not isinstance(environment, HorovodEnvironment):
        return 1
    return max(1, environment.launch.size // environment.launch.local_size)


def set_launch_size(devices: list[torch.device], environment: ClusterEnvironment) -> None:
    """Sets the number of ranks and this process's rank, before ranks are started.

    Raises:
        ValueError: If the number of devices contradicts the launcher.
        RuntimeError: If the process that started this rank has exited.
    """
    check_devices(devices, environment)
    if not isinstance(environment, HorovodEnvironment):
        environment.set_world_size(len(devices))
        environment.set_global_rank(environment.local_rank())
    launching.set_rank_zero_only_rank(environment.global_rank())


def check_devices(devices: list[torch.device], environment: ClusterEnvironment) -> None:
    """Rejects a number of devices that contradicts the launcher.

    Raises:
        ValueError: If the number contradicts the launcher, or a launcher without Horovod has started the processes.
        RuntimeError: If the process that started this rank has exited.
    """
    if not isinstance(environment, HorovodEnvironment):
        if environment.creates_processes_externally and not is_rank_of_script():
            if (starter := exited_parent_pid()) is not None:
                raise RuntimeError(f"The process {starter} that started this rank has ended, so this rank exits.")
            raise ValueError(
                f"The processes were started for {type(environment).__name__}, but Horovod requires ranks from"
                " `horovodrun` or `mpirun`. Start the script with one of these, or once with `python`."
                f" {rank_variables.inherited_text()}"
            )
        return
    launch = environment.launch
    if len(devices) not in (1, launch.local_size):
        raise ValueError(
            f"`devices={len(devices)}`: {launch.launcher} has started {launch.local_size} ranks on this host. Use"
            f" `devices={launch.local_size}`, or start one rank per device."
        )


def device_of_rank(devices: list[torch.device], local_rank: int) -> torch.device:
    """Returns the device of a rank of this host.

    If ``devices`` contains one GPU, ranks use consecutive GPUs, starting with this GPU. If each process sees only one
    GPU, the rank uses this GPU.
    """
    if len(devices) == 1 and devices[0].type != "cpu":
        if has_single_visible_gpu(devices):
            return devices[0]
        return torch.device(devices[0].type, (devices[0].index or 0) + local_rank)
    return devices[local_rank if len(devices) > 1 else 0]
