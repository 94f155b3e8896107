"""Startup and shutdown of Horovod in this process.

Horovod stays initialized between stages and is shut down when the interpreter exits.
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
from lightning_strategies_ext.horovod.launch_info import LaunchInfo, launcher_variables, renew_rendezvous
from lightning_strategies_ext.horovod_build.installed import horovod_problem, outdated_build_warning
from lightning_strategies_ext.registry import EngineNotInstalledError

_store: Store | None = None
#: Store of the last world that this process has joined; kept after a shutdown.
_last_store: Store | None = None
_rendezvous_numbers = count()
_leaving = threading.Lock()


def check_installed() -> None:
    """Checks that a usable Horovod is installed.

    Raises:
        EngineNotInstalledError: If none is; the message contains the command that builds Horovod.
    """
    if (problem := horovod_problem()) is not None:
        raise EngineNotInstalledError(f"`strategy='horovod_ext'`: {problem}")


def start(launch: LaunchInfo, device: torch.device, process_set: Any = None) -> None:
    """Initializes Horovod; returns after all ranks have connected. Repeated calls with the same ranks are no-ops.

    Args:
        launch: Rank of this process, numbers of ranks, and the launcher.
        device: Device of this rank.
        process_set: User's process set to register with Horovod, or None.

    Raises:
        RuntimeError: If Horovod is already initialized with other ranks or without ``process_set``, or if it was built
            without support for the device.
    """
    import horovod.torch as hvd

    if device.type == "cuda" and not hvd.cuda_built():
        raise RuntimeError(
            "This Horovod was built for tensors on CPUs, and would read tensors on GPUs before they are computed."
            " Build it with `python -m lightning_strategies_ext install-horovod --nccl`, or use `accelerator='cpu'`."
        )
    process_sets = [] if process_set is None else [process_set]
    forking.make_fork_safe()
    if launch.rank == 0 and (warning_text := outdated_build_warning()) is not None:
        warnings.warn(warning_text, stacklevel=2)
    if not hvd.is_initialized():
        if device.type == "cpu" and launch.launcher not in ("python", "horovodrun"):
            set_defaults_for_cpus_over_mpi()
        if _last_store is not None and launch.launcher in ("python", "horovodrun"):
            address = "127.0.0.1" if launch.local_size == launch.size else _own_address()
            renew_rendezvous(_last_store, next(_rendezvous_numbers), launch, address)
        with launcher_variables(launch) if launch.launcher == "python" else nullcontext():
            hvd.init(process_sets=process_sets)
    rank_variables.record_owner()
    atexit.unregister(_shut_down_at_exit)
    atexit.register(_shut_down_at_exit)  # runs before Horovod's exit handler, which is then a no-op
    if process_set is not None and process_set.process_set_id is None:
        raise RuntimeError(
            f"`process_set={process_set}` is not known to Horovod, which was initialized before. Pass it to"
            " `horovod.torch.init(process_sets=[...])`, or to the first Trainer."
        )
    if (hvd.rank(), hvd.size()) != (launch.rank, launch.size):
        raise RuntimeError(
            f"Horovod is initialized in this process as rank {hvd.rank()} of {hvd.size()}, but this run is for rank"
            f" {launch.rank} of {launch.size}. Use the same number of `devices` in every Trainer of a script, or call"
            " `horovod.torch.shutdown()` between them."
        )


def set_defaults_for_cpus_over_mpi() -> None:
    """Sets environment variables that make Horovod over MPI faster on CPUs, unless set; call it before ``hvd.init()``.

    By default, Horovod's background thread occupies a core while it waits in MPI; with ``mpi_yield_when_idle``, Open
    MPI yields the core. Polling is then cheap, so the cycle time is 0.1 ms instead of 1 ms. ``python -m
    benchmarks.horovod`` measures the gain.
    """
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "0.1")


def make_store() -> Store:
    """Creates a key-value store that all ranks share. Collective: all ranks call it."""
    import horovod.torch as hvd

    if hvd.local_size() == hvd.size() and host_store.is_available():
        name_and_prefix = (host_store.serve().name, uuid4().hex) if hvd.rank() == 0 else None
        name, prefix = hvd.broadcast_object(name_and_prefix, 0, name="store")
        return PrefixStore(prefix, host_store.connect(name))
    host = "127.0.0.1" if hvd.local_size() == hvd.size() else _own_address()
    if hvd.rank() == 0:
        store = serve_store(host)
        hvd.broadcast_object((host, store.port), 0, name="store")
        return store
    host, port = hvd.broadcast_object(None, 0, name="store")
    return TCPStore(host, port, hvd.size(), is_master=False, wait_for_workers=False)


def _own_address() -> str:
    """Returns the address of this host for other hosts, on Horovod's network interface for gloo if one is set."""
    addresses = psutil.net_if_addrs().get(os.environ.get("HOROVOD_GLOO_IFACE", ""), [])
    found = [address.address for address in addresses if address.family == socket.AF_INET]
    return found[0] if found else socket.gethostbyname(socket.gethostname())


def has_others() -> bool:
    """Returns whether this process is connected to other ranks."""
    import horovod.torch as hvd

    return bool(hvd.is_initialized() and hvd.size() > 1)


def store() -> Store:
    """Returns the key-value store of the current ranks. The first call is collective: all ranks make it."""
    global _store, _last_store
    if _store is None:
        _store = _last_store = make_store()
    return _store


def abort_collectives(peers: Sequence[Peer]) -> None:
    """Aborts the pending collectives of this rank by a shutdown, in which Horovod's threads of all ranks participate.

    A stopped process cannot participate, and the other ranks would wait for it; stopped peers of this host are killed.

    Args:
        peers: Processes of the other ranks.
    """
    host = host_identity()
    for peer in peers:
        if peer.host == host:
            with suppress(psutil.Error, OSError):
                process = psutil.Process(peer.pid)
                if process.status() == psutil.STATUS_STOPPED:
                    process.kill()
    shut_down()


def _shut_down_at_exit() -> None:
    # The failure monitor first: after a failure it sets a time limit, as Horovod waits half a minute for a lost host.
    if (monitor := failure_monitor.current_monitor()) is not None:
        monitor.run_exit_handler()
    shut_down()


def shut_down() -> None:
    """Shuts Horovod down, which makes pending collectives of the other ranks fail.

    A lock serializes shutdowns: if two threads shut Horovod down at the same time, both wait for its background thread,
    and the second waits indefinitely.
    """
    global _store
    import horovod.torch as hvd

    with _leaving:
        if hvd.is_initialized():
            hvd.shutdown()
        _store = None
