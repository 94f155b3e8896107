"""Who has started the ranks of Horovod: a launcher, or ``trainer.fit``, which runs Horovod's rendezvous server then."""

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
#: For how long ranks wait for each other, in seconds, where Horovod's default would be half a minute: importing torch
#: from a slow disk may take longer, and Horovod aborts the process then. As long as ranks of torch.distributed wait.
_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
_TIMEOUT_S = 1800
#: What Horovod and NCCL read when a process set or a communicator is made.
_READ_LATER = (_RENDEZVOUS_ADDRESS, _RENDEZVOUS_PORT, "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME")
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

#: The process of the ranks' script that has started the others: it and they know by it that no launcher has.
_STARTED_BY = "LIGHTNING_STRATEGIES_EXT_HOROVOD_STARTED_BY"


@dataclass(frozen=True)
class Launch:
    """What a launcher says of this process.

    Attributes:
        launcher: Its name; "python" where the user's script starts the ranks.
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
    def find(cls) -> "Launch | None":
        """What the environment variables say, or None if no launcher has started this process."""
        for launcher, names in _LAUNCHERS.items():
            if all(name in os.environ for name in names):
                return cls(launcher, *(int(os.environ[name]) for name in names))
        return None


def is_started_by_us() -> bool:
    """Whether this process is a rank of a script that has started its ranks itself."""
    return os.environ.get(_STARTED_BY) in (str(os.getpid()), str(os.getppid()))


def lost_starter() -> int | None:
    """The pid of the process that had started this rank, if it has ended since."""
    starter = int(os.environ.get(_STARTED_BY, os.getpid()))
    return None if is_running(starter) else starter


def serve_rendezvous(num_processes: int) -> None:
    """Starts Horovod's rendezvous server for ranks of this host; called by the process that starts them, before.

    The server lives in a thread of this process.
    """
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments

    server = _rendezvous_server("127.0.0.1")
    os.environ[_RENDEZVOUS_PORT] = str(server.server_port)
    os.environ[_STARTED_BY] = str(os.getpid())
    server.init(get_host_assignments([HostInfo("127.0.0.1", num_processes)], num_processes))


def _rendezvous_server(address: str) -> Any:
    """Starts a rendezvous server at one address; Horovod's ``RendezvousServer`` listens at all of the host."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = RendezvousHTTPServer((address, 0), RendezvousHandler, 0)
    threading.Thread(target=server.serve_forever, daemon=True, name="lightning-strategies-ext Horovod").start()
    return server


def renew_rendezvous(store: "Store", number: int, launch: Launch, address: str) -> None:
    """Starts another rendezvous server on rank 0, for ranks that connect again. Collective: all ranks call it.

    The first server may still have addresses of the first time, where no rank listens. Horovod 0.28 ends the process
    that connects there.

    Args:
        store: The store in which the ranks have met.
        number: The number of such servers before, the same on all ranks.
        launch: The rank of this process.
        address: The address of rank 0 for the other ranks; used on rank 0.
    """
    key = f"lightning_strategies_ext/rendezvous/{number}"
    if launch.rank == 0:
        store.set(key, f"{address} {_rendezvous_server(address).server_port}")
    os.environ[_RENDEZVOUS_ADDRESS], os.environ[_RENDEZVOUS_PORT] = store.get(key).decode().split()


@contextmanager
def told_as_by_a_launcher(launch: Launch) -> Iterator[None]:
    """Sets the environment variables from which Horovod learns which rank this is, as a launcher would have.

    Most are gone afterwards: what the script starts later would take itself for this rank. Where the rendezvous is
    stays, since process sets that are added later are made there.
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
