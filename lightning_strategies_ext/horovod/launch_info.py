"""Detects which launcher has started the ranks. Without a launcher, ``fit`` starts them and a rendezvous server."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_strategies_ext._system.peers import is_running

if TYPE_CHECKING:
    from torch.distributed import Store

_RENDEZVOUS_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
_RENDEZVOUS_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
#: Time for which ranks wait for each other at startup, in seconds, as in torch.distributed. Horovod's default is half a
#: minute, after which it aborts the process; an import of torch from a slow disk may take longer.
_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
_TIMEOUT_S = 1800
#: Variables that Horovod and NCCL read whenever a process set or a communicator is created.
_READ_LATER = (_RENDEZVOUS_ADDRESS, _RENDEZVOUS_PORT, "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME")
#: Variables with the rank, size, local rank, and local size, by launcher.
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

#: Pid of the rank that has started the other ranks. It marks processes that no launcher has started.
_PARENT_PID = "LIGHTNING_STRATEGIES_EXT_HOROVOD_PARENT_PID"


@dataclass(frozen=True)
class LaunchInfo:
    """Rank of this process, as its launcher has assigned it.

    Attributes:
        launcher: Name of the launcher; "python" if the user's script starts the ranks.
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
    def from_environment(cls) -> "LaunchInfo | None":
        """Reads the environment variables; returns None if no launcher has started this process."""
        for launcher, names in _LAUNCHERS.items():
            if all(name in os.environ for name in names):
                return cls(launcher, *(int(os.environ[name]) for name in names))
        return None


def is_rank_of_script() -> bool:
    """Returns whether the user's script has started the ranks, including this process."""
    return os.environ.get(_PARENT_PID) in (str(os.getpid()), str(os.getppid()))


def exited_parent_pid() -> int | None:
    """Returns the pid of the process that started this rank if it has exited; else None."""
    starter = int(os.environ.get(_PARENT_PID, os.getpid()))
    return None if is_running(starter) else starter


def serve_rendezvous(num_processes: int) -> None:
    """Starts Horovod's rendezvous server for the ranks of this host, in a thread of this process.

    The process that starts the ranks calls it before it starts them.

    Args:
        num_processes: Number of ranks.
    """
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments

    server = _rendezvous_server("127.0.0.1")
    os.environ[_RENDEZVOUS_PORT] = str(server.server_port)
    os.environ[_PARENT_PID] = str(os.getpid())
    server.init(get_host_assignments([HostInfo("127.0.0.1", num_processes)], num_processes))


def _rendezvous_server(address: str) -> Any:
    """Starts a rendezvous server on one address; Horovod's ``RendezvousServer`` listens on all addresses."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = RendezvousHTTPServer((address, 0), RendezvousHandler, 0)
    threading.Thread(target=server.serve_forever, daemon=True, name="lightning-strategies-ext Horovod").start()
    return server


def renew_rendezvous(store: "Store", number: int, launch: LaunchInfo, address: str) -> None:
    """Starts another rendezvous server on rank 0, for ranks that reconnect. Collective: all ranks call it.

    The first server may still have addresses from the first rendezvous, on which no rank listens any more. Horovod 0.28
    terminates a process that connects to such an address.

    Args:
        store: Store that the ranks share.
        number: Number of previous servers of this kind, equal on all ranks.
        launch: Rank of this process.
        address: Address of rank 0 for the other ranks; used on rank 0.
    """
    key = f"lightning_strategies_ext/rendezvous/{number}"
    if launch.rank == 0:
        store.set(key, f"{address} {_rendezvous_server(address).server_port}")
    os.environ[_RENDEZVOUS_ADDRESS], os.environ[_RENDEZVOUS_PORT] = store.get(key).decode().split()


@contextmanager
def launcher_variables(launch: LaunchInfo) -> Iterator[None]:
    """Sets the environment variables that Horovod reads at startup, as a launcher would.

    Most are restored on exit, because child processes of the script would take them for their own rank. The variables
    of the rendezvous stay, because Horovod reads them when a process set is added later.
    """
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars

    if launch.size == 1:
        serve_rendezvous(1)
    slot = SlotInfo("127.0.0.1", launch.rank, launch.local_rank, 0, launch.size, launch.local_size, 1)
    variables = create_slot_env_vars(slot) | create_run_env_vars("127.0.0.1", ["lo"], os.environ[_RENDEZVOUS_PORT])
    variables[_TIMEOUT] = os.environ.get(_TIMEOUT, _TIMEOUT_S)
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
