"""The life of Horovod in this process: who has started it, as which rank, when it begins and ends.

Ranks come from a launcher (``horovodrun``, ``mpirun``), which says so in environment variables, or from
``trainer.fit`` itself on this host: the first process runs Horovod's rendezvous server then, and the others are the
user's script started again.

Horovod stays initialised between stages and is shut down when the interpreter ends, which Horovod sees to by itself.
"""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.distributed import Store, TCPStore

from lightning_strategies_ext.horovod_build.installed import horovod_problem
from lightning_strategies_ext.registry import EngineNotInstalledError

_RENDEZVOUS_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
#: What Horovod and NCCL read when a process set or a communicator is made.
_READ_LATER = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", _RENDEZVOUS_PORT, "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME")
#: Rank, size, local rank and local size, as the launchers name them.
_LAUNCHERS = {
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
_store: Store | None = None
#: The process of the ranks' script that has started the others: it and they know by it that no launcher has.
_STARTED_BY = "LIGHTNING_STRATEGIES_EXT_HOROVOD_STARTED_BY"


@dataclass(frozen=True)
class Launch:
    """What a launcher says of this process.

    Attributes:
        launcher: Its name.
        rank: Global rank.
        size: Number of ranks.
        local_rank: Rank on this host.
        local_size: Number of ranks on this host.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def find(cls, variables: Mapping[str, str] | None = None) -> "Launch | None":
        """What the environment variables say, or None if no launcher has started this process."""
        variables = os.environ if variables is None else variables
        if _is_started_by_us(variables):
            return None
        for launcher, names in _LAUNCHERS.items():
            if all(name in variables for name in names):
                return cls(launcher, *(int(variables[name]) for name in names))
        return None


class HorovodEnvironment(ClusterEnvironment):
    """The ranks of a launcher of Horovod's, as Lightning asks for them.

    Args:
        launch: What the launcher says.

    Attributes:
        launch: The same; in elastic training the place of this rank changes.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    @property
    def creates_processes_externally(self) -> bool:
        """True: the launcher has."""
        return True

    @property
    def main_address(self) -> str:
        """Not known, and not needed: Horovod has a rendezvous of its own."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """See :attr:`main_address`."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Whether a launcher has started this process."""
        return Launch.find() is not None

    def world_size(self) -> int:
        """Number of ranks."""
        return self.launch.size

    def set_world_size(self, size: int) -> None:
        """Does nothing: the launcher has decided."""

    def global_rank(self) -> int:
        """Rank among all."""
        return self.launch.rank

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the launcher has decided."""

    def local_rank(self) -> int:
        """Rank on this host."""
        return self.launch.local_rank

    def node_rank(self) -> int:
        """Number of this host."""
        return int(os.environ.get("HOROVOD_CROSS_RANK", self.launch.rank // self.launch.local_size))


def check_installed() -> None:
    """Refuses to go on without a Horovod that works here.

    Raises:
        EngineNotInstalledError: If there is none; the message names the command that builds it.
    """
    if (problem := horovod_problem()) is not None:
        raise EngineNotInstalledError(f"`strategy='horovod_ext'`: {problem}")


def say_rank(rank: int) -> None:
    """Tells Lightning which rank this is, for what only rank 0 prints or writes."""
    for decorator in (fabric_rank_zero_only, rank_zero_only):
        decorator.rank = rank  # type: ignore[attr-defined]


def _is_started_by_us(variables: Mapping[str, str]) -> bool:
    # What the user's script starts later inherits the variable, and `horovodrun` there is a launcher.
    return variables.get(_STARTED_BY) in (str(os.getpid()), str(os.getppid()))


def serve_rendezvous(num_processes: int) -> Any:
    """Starts Horovod's rendezvous server for ranks of this host; called by the process that starts them, before.

    Returns:
        The server. It lives in a thread of this process.
    """
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    os.environ[_RENDEZVOUS_PORT] = str(server.start())
    os.environ[_STARTED_BY] = str(os.getpid())
    server.init(get_host_assignments([HostInfo("127.0.0.1", num_processes)], num_processes))
    return server


def start(environment: ClusterEnvironment, num_processes: int, device: torch.device, process_set: Any = None) -> None:
    """Joins the other ranks; returns when all have. Does nothing if this process has joined them already.

    Args:
        environment: Where ranks come from.
        num_processes: Ranks on this host.
        device: The device of this rank.
        process_set: A process set of the user's that Horovod should know of.

    Raises:
        RuntimeError: If this process has joined other ranks than the environment says, or if Horovod was built without
            what the device needs.
    """
    import horovod.torch as hvd

    if device.type == "cuda" and not hvd.cuda_built():
        raise RuntimeError(
            "This Horovod was built for tensors on CPUs, and would read those on GPUs before they are there. Build it"
            " with `python -m lightning_strategies_ext install-horovod --nccl`, or use `accelerator='cpu'`."
        )
    process_sets = [] if process_set is None else [process_set]
    if not hvd.is_initialized():
        if isinstance(environment, HorovodEnvironment):
            if device.type == "cpu" and environment.launch.launcher != "horovodrun":
                set_defaults_for_cpus_over_mpi()
            hvd.init(process_sets=process_sets)
        else:
            with _variables_of_a_launcher(environment, num_processes):
                hvd.init(process_sets=process_sets)
    if process_set is not None and process_set.process_set_id is None:
        raise RuntimeError(
            f"`process_set={process_set}` is not known to Horovod, which was initialized before. Pass it to"
            " `horovod.torch.init(process_sets=[...])`, or let the first Trainer have it."
        )
    if (hvd.rank(), hvd.size()) != (environment.global_rank(), environment.world_size()):
        raise RuntimeError(
            f"Horovod is initialized in this process as rank {hvd.rank()} of {hvd.size()}, and this run is for rank"
            f" {environment.global_rank()} of {environment.world_size()}. Use as many `devices` in every Trainer of a"
            " script, or call `horovod.torch.shutdown()` between them."
        )


def set_defaults_for_cpus_over_mpi() -> None:
    """Sets, where the user has not, what makes Horovod over MPI fast on CPUs; for a process that has not joined yet.

    A rank's thread of Horovod's that waits in MPI would keep a core busy on which a training step could run: with Open
    MPI it yields instead. And since looking for work costs little then, it looks every 0.1 ms and not every 1 ms.
    ``python -m benchmarks.horovod`` shows what this gains.
    """
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "0.1")


@contextmanager
def _variables_of_a_launcher(environment: ClusterEnvironment, num_processes: int) -> Iterator[None]:
    # Who this is and how it meets the others stays only while Horovod reads it: what the script starts later would take
    # itself for this rank. Where the rendezvous is stays: process sets that are added later are made there.
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars

    if environment.world_size() == 1:
        serve_rendezvous(1)
    rank = environment.global_rank()
    slot = SlotInfo("127.0.0.1", rank, environment.local_rank(), 0, environment.world_size(), num_processes, 1)
    variables = create_slot_env_vars(slot) | create_run_env_vars("127.0.0.1", ["lo"], os.environ[_RENDEZVOUS_PORT])
    before = {name: os.environ.get(name) for name in variables if name not in _READ_LATER}
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def make_store() -> Store:
    """Makes a key-value store that all ranks share; called by all of them together."""
    import horovod.torch as hvd

    host = "127.0.0.1" if hvd.local_size() == hvd.size() else _own_address()
    if hvd.rank() == 0:
        store = TCPStore(host, 0, hvd.size(), is_master=True, wait_for_workers=False)
        hvd.broadcast_object((host, store.port), 0, name="store")
        return store
    host, port = hvd.broadcast_object(None, 0, name="store")
    return TCPStore(host, port, hvd.size(), is_master=False, wait_for_workers=False)


def _own_address() -> str:
    """Where other hosts reach this one: on the network interface that Horovod's gloo uses, if it is told one."""
    addresses = psutil.net_if_addrs().get(os.environ.get("HOROVOD_GLOO_IFACE", ""), [])
    found = [address.address for address in addresses if address.family == socket.AF_INET]
    return found[0] if found else socket.gethostbyname(socket.gethostname())


def store() -> Store:
    """The key-value store of the ranks that this process has joined; the first call is made by all of them together."""
    global _store
    if _store is None:
        _store = make_store()
    return _store


def shut_down() -> None:
    """Leaves the other ranks, which makes whatever they wait for fail."""
    global _store
    import horovod.torch as hvd

    if hvd.is_initialized():
        hvd.shutdown()
    _store = None


def check_num_nodes(num_nodes: int, environment: ClusterEnvironment | None) -> None:
    """Refuses several hosts without a launcher, and a number that contradicts it.

    Raises:
        ValueError: If it does.
    """
    launch = environment.launch if isinstance(environment, HorovodEnvironment) else None
    hosts = 1 if launch is None else max(1, launch.size // launch.local_size)
    if num_nodes in (1, hosts):
        return
    raise ValueError(
        f"`num_nodes={num_nodes}`: "
        + (
            f"{launch.launcher} has started ranks on {hosts} hosts. Leave `num_nodes` out."
            if launch is not None
            else "without a launcher, Horovod's ranks are started on this host only. Use `horovodrun -H` or `mpirun`."
        )
    )


def num_processes(devices: list[torch.device], environment: ClusterEnvironment | None) -> int:
    """The number of ranks on this host."""
    return environment.launch.local_size if isinstance(environment, HorovodEnvironment) else len(devices)


def configure(devices: list[torch.device], environment: ClusterEnvironment) -> None:
    """Sets what ranks there are to be, before any is started.

    Raises:
        ValueError: If the number of devices contradicts the launcher.
    """
    check_devices(devices, environment)
    if not isinstance(environment, HorovodEnvironment):
        environment.set_world_size(len(devices))
        environment.set_global_rank(environment.local_rank())
    say_rank(environment.global_rank())


def check_devices(devices: list[torch.device], environment: ClusterEnvironment) -> None:
    """Refuses a number of devices that contradicts the launcher.

    Raises:
        ValueError: If it does.
    """
    if not isinstance(environment, HorovodEnvironment):
        if environment.creates_processes_externally and not _is_started_by_us(os.environ):
            raise ValueError(
                f"The processes were started for {type(environment).__name__}, and Horovod's ranks come from"
                " `horovodrun` or `mpirun`. Start the script with one of these, or once with `python`."
            )
        return
    launch = environment.launch
    if len(devices) not in (1, launch.local_size):
        raise ValueError(
            f"`devices={len(devices)}`: {launch.launcher} has started {launch.local_size} ranks on this host. Use"
            f" `devices={launch.local_size}`, or start as many ranks as devices."
        )


def device_of_rank(devices: list[torch.device], local_rank: int) -> torch.device:
    """The device of a rank of this host. With one GPU named, it is that which has the number of the rank."""
    if len(devices) == 1 and devices[0].type != "cpu":
        return torch.device(devices[0].type, (devices[0].index or 0) + local_rank)
    return devices[local_rank if len(devices) > 1 else 0]
