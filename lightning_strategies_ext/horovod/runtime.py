"""The life of Horovod in this process: when it begins and ends.

It stays initialised between stages and is shut down when the interpreter ends.
"""

import atexit
import os
import socket
import threading
import warnings
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from itertools import count
from typing import Any
from uuid import uuid4

import psutil
import torch
from torch.distributed import PrefixStore, Store, TCPStore

from lightning_strategies_ext import host_store, rank_variables
from lightning_strategies_ext._system import forking
from lightning_strategies_ext._system.connections import serve_store
from lightning_strategies_ext._system.peers import Peer, host_identity
from lightning_strategies_ext.failure import failure_monitor
from lightning_strategies_ext.horovod.launch import Launch, renew_rendezvous, told_as_by_a_launcher
from lightning_strategies_ext.horovod_build.installed import horovod_problem, what_is_not_fixed
from lightning_strategies_ext.registry import EngineNotInstalledError

_store: Store | None = None
#: The store of the last ranks that the process has joined, also after it has left them.
_last_store: Store | None = None
_rendezvous_numbers = count()
_leaving = threading.Lock()


def check_installed() -> None:
    """Refuses to go on without a Horovod that works here.

    Raises:
        EngineNotInstalledError: If there is none; the message names the command that builds it.
    """
    if (problem := horovod_problem()) is not None:
        raise EngineNotInstalledError(f"`strategy='horovod_ext'`: {problem}")


def start(launch: Launch, device: torch.device, process_set: Any = None) -> None:
    """Joins the other ranks; returns when all have. Does nothing if this process has joined them already.

    Args:
        launch: Which rank this is, of how many, and who has started them.
        device: The device of this rank.
        process_set: A process set of the user's that Horovod should know of.

    Raises:
        RuntimeError: If this process has joined other ranks before, or if Horovod was built without what the device
            needs.
    """
    import horovod.torch as hvd

    if device.type == "cuda" and not hvd.cuda_built():
        raise RuntimeError(
            "This Horovod was built for tensors on CPUs, and would read those on GPUs before they are there. Build it"
            " with `python -m lightning_strategies_ext install-horovod --nccl`, or use `accelerator='cpu'`."
        )
    process_sets = [] if process_set is None else [process_set]
    forking.make_fork_safe()
    if launch.rank == 0 and (said := what_is_not_fixed()) is not None:
        warnings.warn(said, stacklevel=2)
    if not hvd.is_initialized():
        if device.type == "cpu" and launch.launcher not in ("python", "horovodrun"):
            set_defaults_for_cpus_over_mpi()
        if _last_store is not None and launch.launcher in ("python", "horovodrun"):
            address = "127.0.0.1" if launch.local_size == launch.size else _own_address()
            renew_rendezvous(_last_store, next(_rendezvous_numbers), launch, address)
        with told_as_by_a_launcher(launch) if launch.launcher == "python" else nullcontext():
            hvd.init(process_sets=process_sets)
    rank_variables.record_owner()
    atexit.unregister(_leave_at_exit)
    atexit.register(_leave_at_exit)  # Horovod's own comes after it, and has nothing more to do
    if process_set is not None and process_set.process_set_id is None:
        raise RuntimeError(
            f"`process_set={process_set}` is not known to Horovod, which was initialized before. Pass it to"
            " `horovod.torch.init(process_sets=[...])`, or let the first Trainer have it."
        )
    if (hvd.rank(), hvd.size()) != (launch.rank, launch.size):
        raise RuntimeError(
            f"Horovod is initialized in this process as rank {hvd.rank()} of {hvd.size()}, and this run is for rank"
            f" {launch.rank} of {launch.size}. Use as many `devices` in every Trainer of a script, or call"
            " `horovod.torch.shutdown()` between them."
        )


def set_defaults_for_cpus_over_mpi() -> None:
    """Sets, where the user has not, what makes Horovod over MPI fast on CPUs; for a process that has not joined yet.

    A rank's thread of Horovod's that waits in MPI would keep a core busy on which a training step could run: with Open
    MPI it yields instead. And since looking for work costs little then, it looks every 0.1 ms and not every 1 ms.
    ``python -m benchmarks.horovod`` shows what this gains.
    """
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "0.1")


def make_store() -> Store:
    """Makes a key-value store that all ranks share; called by all of them together."""
    import horovod.torch as hvd

    if hvd.local_size() == hvd.size() and host_store.is_available():
        place = (host_store.serve().name, uuid4().hex) if hvd.rank() == 0 else None
        name, part = hvd.broadcast_object(place, 0, name="store")
        return PrefixStore(part, host_store.connect(name))
    host = "127.0.0.1" if hvd.local_size() == hvd.size() else _own_address()
    if hvd.rank() == 0:
        store = serve_store(host)
        hvd.broadcast_object((host, store.port), 0, name="store")
        return store
    host, port = hvd.broadcast_object(None, 0, name="store")
    return TCPStore(host, port, hvd.size(), is_master=False, wait_for_workers=False)


def _own_address() -> str:
    """Where other hosts reach this one: on the network interface that Horovod's gloo uses, if it is told one."""
    addresses = psutil.net_if_addrs().get(os.environ.get("HOROVOD_GLOO_IFACE", ""), [])
    found = [address.address for address in addresses if address.family == socket.AF_INET]
    return found[0] if found else socket.gethostbyname(socket.gethostname())


def has_others() -> bool:
    """Whether this process has joined other ranks."""
    import horovod.torch as hvd

    return bool(hvd.is_initialized() and hvd.size() > 1)


def store() -> Store:
    """The key-value store of the ranks that this process has joined; the first call is made by all of them together."""
    global _store, _last_store
    if _store is None:
        _store = _last_store = make_store()
    return _store


def let_go(peers: Sequence[Peer]) -> None:
    """Lets the collective fail that this rank is in; all ranks take part in that, by a thread of Horovod's.

    One that is stopped cannot, and the others would wait for it: it is killed.
    """
    here = host_identity()
    for peer in peers:
        if peer.host == here:
            with suppress(psutil.Error, OSError):
                process = psutil.Process(peer.pid)
                if process.status() == psutil.STATUS_STOPPED:
                    process.kill()
    shut_down()


def _leave_at_exit() -> None:
    # The watch first: it sets a clock where ranks have failed, since Horovod waits half a minute for a lost host.
    if (own := failure_monitor.current_monitor()) is not None:
        own.run_exit_handler()
    shut_down()


def shut_down() -> None:
    """Leaves the other ranks, which makes whatever they wait for fail.

    One thread after the other: of two that shut Horovod down at once, both wait for its own thread to end, and the
    second for ever.
    """
    global _store
    import horovod.torch as hvd

    with _leaving:
        if hvd.is_initialized():
            hvd.shutdown()
        _store = None
