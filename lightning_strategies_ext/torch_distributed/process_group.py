"""The life of the default torch.distributed process group: which backend, how it starts, how it ends.

Both front ends start the group here. It is left open between stages (``fit`` → ``test`` uses the same one) and closed
when the interpreter ends, so that no backend complains about a group that was not destroyed.
"""

import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lightning_strategies_ext import host_store, rank_variables, shm
from lightning_strategies_ext._system import forking
from lightning_strategies_ext._system.connections import record_connections, without_prefixes
from lightning_strategies_ext._system.gloo_connections import restrict_gloo
from lightning_strategies_ext._system.gpu_sync import is_aborted, mark_aborted
from lightning_strategies_ext.failure.process_exit import register_exit_handler
from lightning_strategies_ext.shm.options import ShmOptions
from lightning_strategies_ext.torch_distributed import rendezvous

if TYPE_CHECKING:
    from multiprocessing.util import Finalize

    from lightning.fabric.plugins import ClusterEnvironment

log = logging.getLogger(__name__)

_AVAILABILITY = {
    "gloo": "is_gloo_available",
    "nccl": "is_nccl_available",
    "mpi": "is_mpi_available",
    "ucc": "is_ucc_available",
    "xccl": "is_xccl_available",
}

#: Those between ranks of groups that this package has made, by the addresses of both ends, this process's first.
connections: set[tuple[Any, Any]] = set()

# Leaves the default group when this process ends.
_at_end: "Finalize[None] | None" = None

# Backends of the groups that were left last, see `_destroy`.
_left: deque[list[Any]] = deque(maxlen=2)

# While there is a group, torch shows exceptions with the rank: its `sys.excepthook`, and what was there before. torch
# wraps the hook for each group anew, and would show the rank as often.
_excepthooks: list[Any] = []

# The default group of several ranks that this package has made, and where it is during a stage on one device.
_own: "weakref.ref[Any] | None" = None
_aside: Any = None

# The store of the group: of the default one that this package has made.
_own_store: dist.Store | None = None

# Classes of backends that fail when their connections close. What aborts them, if anything, depends on torch's version.
_NOT_ABORTED = ("ProcessGroupGloo", "GlooBeside", "ShmProcessGroup")

# Backends whose threads do not use the group's store, so that it may be one that is written in Python.
_ON_MAIN_THREAD = ("gloo", shm.NAME)

# With these, torch's NCCL watchdog does not abort this process after the exit of a peer, nor after a dump of the flight
# recorder (read in torch 2.5 to 2.13). Values that the user has set are kept.
_WATCHDOG_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


def available_backends() -> list[str]:
    """The backends that this build of torch comes with."""
    return [name for name, asked in _AVAILABILITY.items() if getattr(dist, asked, bool)()]


def is_initialized() -> bool:
    """Whether this process belongs to a torch.distributed process group."""
    return dist.is_available() and dist.is_initialized()


def uses_gloo() -> bool:
    """Whether gloo carries tensors of some device in the default process group, or what ``shm`` does not carry."""
    return is_initialized() and any(name in ("gloo", shm.NAME) for name in _backends_in(dist.get_backend()))


def is_carried_by_gloo(group: Any) -> bool:
    """Whether gloo carries a group's collectives of tensors of the host: for ``shm`` between hosts or without memory.

    Args:
        group: A process group, default all ranks.
    """
    from lightning_strategies_ext.shm.process_group import ShmProcessGroup

    ranks: Any = group or dist.group.WORLD
    if isinstance(ranks, ShmProcessGroup):
        return ranks.spans_hosts
    backends = dist.get_backend_config(group)
    return "cpu:gloo" in backends or f"cpu:{shm.NAME}" in backends


def disable_nccl_watchdog_exit() -> None:
    """Makes NCCL process groups that this process joins afterwards survive the exit of other ranks."""
    for name, value in _WATCHDOG_SETTINGS.items():
        os.environ.setdefault(name, value)


def check_timeout(timeout: timedelta | None) -> None:
    """Refuses a timeout that no process group can have.

    Raises:
        TypeError: If it is neither a ``timedelta`` nor None.
        ValueError: If it is not positive.
    """
    if timeout is None:
        return
    if not isinstance(timeout, timedelta):
        raise TypeError(
            f"`timeout` must be a datetime.timedelta or None, got {timeout!r}. Write `timedelta(seconds=...)`."
        )
    if timeout <= timedelta(0):
        raise ValueError(f"`timeout` must be positive, got {timeout!r} ({timeout.total_seconds()} seconds).")


def check_backend(backend: str | None) -> None:
    """Refuses a backend name that torch does not know or that this build of torch lacks.

    Args:
        backend: ``"gloo"``, ``"nccl"``, any backend registered with ``torch.distributed.Backend``, or one per device
            type in torch's form ``"cpu:gloo,cuda:nccl"``. None means: by device.

    Raises:
        TypeError: If it is neither a string nor None.
        ValueError: If the name is unknown.
        RuntimeError: If torch was built without it.
    """
    if backend is None:
        return
    if not isinstance(backend, str):
        raise TypeError(f"`process_group_backend` must be a name such as 'gloo', or None, got {backend!r}.")
    known = sorted(name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED)
    for name in _backends_in(backend):
        if name not in known:
            raise ValueError(
                f"`process_group_backend={backend!r}` names no backend of torch. Known: {', '.join(known)}."
            )
        is_available = getattr(dist, _AVAILABILITY.get(name, ""), None)
        if is_available is not None and not is_available():
            raise RuntimeError(
                f"`process_group_backend={backend!r}`: this build of torch ({torch.__version__}) comes without {name}."
                f" Leave the argument out to use the default for the device, or install a torch built with {name}."
            )


def check_backend_for_devices(backend: str | None, devices: list[torch.device]) -> None:
    """Refuses a backend that cannot move tensors of the devices, e.g. NCCL with CPU ranks.

    Raises:
        ValueError: If it cannot.
    """
    if backend is None or ":" in backend:
        return
    capable = dist.Backend.backend_capability.get(backend.lower(), [])
    for device_type in sorted({device.type for device in devices}):
        if capable and device_type not in capable:
            raise ValueError(
                f"`process_group_backend={backend!r}` moves tensors on {' and '.join(capable)}, and the devices are of"
                f" type {device_type!r}. Use `accelerator={capable[0]!r}` or another backend, such as 'gloo'."
            )


def check_options(options: Any, backend: str | None) -> None:
    """Refuses options that the backend does not take.

    Raises:
        ValueError: If they are those of another backend.
    """
    if isinstance(options, ShmOptions) and backend not in (None, shm.NAME):
        raise ValueError(
            f"`process_group_options={options!r}` are for the backend 'shm', and `process_group_backend={backend!r}`."
            " Leave the options out, or use `process_group_backend='shm'`."
        )


def default_backend(device: torch.device, world_size: int, num_hosts: int) -> str:
    """The backend for a device type: shm for CPU ranks of which a host has several, else what torch prefers.

    Args:
        device: Of this rank.
        world_size: Number of ranks.
        num_hosts: Number of hosts that they are on.
    """
    if device.type == "cpu" and num_hosts < world_size and shm.is_available():
        return shm.NAME
    return dist.Backend.default_device_backend_map.get(device.type, "gloo")


def start(
    environment: "ClusterEnvironment",
    backend: str | None,
    device: torch.device,
    timeout: timedelta | None,
    options: Any = None,
    num_hosts: int = 1,
) -> str:
    """Joins the default process group; returns when all ranks have joined.

    Does nothing in a process that already belongs to a group of the same shape.

    Args:
        environment: Where rank, world size and the address of rank 0 come from.
        backend: As torch takes it; None for the default.
        device: Device of this rank.
        timeout: For the rendezvous and for every collective. None leaves torch's default.
        options: What the backend takes beside.
        num_hosts: Number of hosts that the ranks are on, for the default.

    Returns:
        The backend.

    Raises:
        RuntimeError: If the process belongs to a group with another rank or world size.
        ValueError: If the options are those of another backend.
    """
    rank, world_size = environment.global_rank(), environment.world_size()
    backend = backend or default_backend(device, world_size, num_hosts)
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise RuntimeError(
                f"This process is rank {dist.get_rank()} of {dist.get_world_size()} in a process group that was made"
                f" before, and should now be rank {rank} of {world_size}. Ask for as many devices and nodes as before,"
                " or call `torch.distributed.destroy_process_group()` first."
            )
        rank_variables.record_owner()
        return backend
    if _aside is not None and world_size == 1:
        excepthook = sys.excepthook
        with restrict_gloo(is_one_host=True):
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        sys.excepthook = excepthook
        return backend
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    rank_variables.record_owner()
    log.info("rank %d of %d joins at %s:%s", rank, world_size, environment.main_address, environment.main_port)
    check_options(options, backend)
    store = rendezvous.next_store(rank, world_size, num_hosts, timeout or default_pg_timeout)
    join(backend, store, rank, world_size, device, timeout, options, num_hosts)
    return backend


def join(
    backend: str,
    store: dist.Store,
    rank: int,
    world_size: int,
    device: torch.device,
    timeout: timedelta | None,
    options: Any = None,
    num_hosts: int = 1,
) -> None:
    """Makes the default process group, of ranks that share a store which no other group has used.

    Raises:
        PermissionError: If another user of a host has taken the place of a rank.
    """
    forking.make_fork_safe()
    connections.clear()
    _left.clear()
    excepthook = sys.excepthook
    is_python = isinstance(without_prefixes(store), host_store.HostStore)
    of_torch = store
    if is_python and backend not in _ON_MAIN_THREAD:
        of_torch = rendezvous.file_store(store, rank, world_size, timeout or default_pg_timeout)
    with record_connections(connections), restrict_gloo(is_one_host=num_hosts == 1):
        dist.init_process_group(
            backend,
            store=of_torch,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if device.type != "cpu" else None,
            pg_options=options,
        )
    _excepthooks[:] = [sys.excepthook, excepthook]
    global _own, _own_store
    _own, _own_store = weakref.ref(dist.group.WORLD), store
    # Ranks that are forked inherit the handlers registered before the fork; registering after it, in the process that
    # owns the group, closes each group once.
    global _at_end
    if _at_end is not None:
        _at_end.cancel()
    _at_end = register_exit_handler(_stop_at_exit)


def can_abort() -> bool:
    """Whether :func:`abort` has something to abort."""
    return is_initialized() and bool(_abortable())


def abort() -> None:
    """Aborts all groups of this process, so that collectives that wait on GPUs fail: the default one and all others.

    gloo and ``shm`` are not aborted; closed connections end their collectives. Each backend is aborted in a thread of
    its own: to abort NCCL's waits for the GPU, which the collective of another group may occupy until that is aborted.
    """
    if not is_initialized() or is_aborted():
        return
    backends = _abortable()
    if not backends:
        return
    mark_aborted(dist.group.WORLD)  # before: what is computed from there on is not to be kept
    threads = [threading.Thread(target=_abort, args=(backend,), name="abort", daemon=True) for backend in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _abortable() -> list[Any]:
    """The backends of all groups of this process, except gloo. torch 2.5 can abort backends, but no groups."""
    from torch.distributed.distributed_c10d import _world

    found: list[Any] = []
    for group in list(_world.pg_map):
        backends: list[Any] = [group._get_backend(device) for device in group._device_types]
        for backend in backends or [group]:
            # With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch wraps backends in one that passes no abort on.
            backend = getattr(backend, "wrapped_pg", backend)
            if type(backend).__name__ not in _NOT_ABORTED and all(backend is not each for each in found):
                found.append(backend)
    return found


def _abort(backend: Any) -> None:
    with suppress(AttributeError, RuntimeError):  # it cannot, or has failed
        backend.abort()


def has_others() -> bool:
    """Whether this process belongs to a default group of several ranks that this package has made."""
    return is_initialized() and _own is not None and _own() is dist.group.WORLD and dist.get_world_size() > 1


def set_aside() -> bool:
    """Makes this process belong to no default group, for a stage on one device, in which other ranks may take no part.

    The group stays, and other ranks may wait in its collectives meanwhile.

    Returns:
        Whether there was a group, which :func:`bring_back` makes the default one again.
    """
    global _aside
    if not has_others():
        return False
    _aside, dist.group.WORLD = dist.group.WORLD, None
    return True


def bring_back() -> None:
    """Makes the group the default one that :func:`set_aside` has set aside, in place of that of the stage."""
    global _aside
    of_stage = dist.group.WORLD
    dist.group.WORLD, _aside = _aside, None
    if of_stage is not None:
        _destroy(of_stage)


def stop() -> None:
    """Leaves the default process group, if there is one."""
    if not is_initialized():
        return
    if _excepthooks and sys.excepthook is _excepthooks[0]:
        sys.excepthook = _excepthooks[1]
    # A group that was aborted would wait for what it has not done (seen in torch 2.11). A private name of torch's, read
    # in 2.13, which earlier versions need not have. It aborts all groups that torch has names of; `abort` has
    # done so, and to abort gloo raises a RuntimeError in versions that cannot.
    forget = getattr(dist.distributed_c10d, "_abort_process_group", None) if is_aborted() else None
    if forget is None:
        _destroy(None)
    else:
        _keep_gloo(dist.distributed_c10d._world.pg_map)
        dist.distributed_c10d._world.pg_names.clear()
        forget()


def _stop_at_exit() -> None:
    stop()
    _left.clear()


def leave(group: Any) -> None:
    """Leaves a group that was made beside the default one. A second call does no harm.

    One that was aborted is left together with the default group: to leave it alone would wait, see :func:`stop`.
    """
    from torch.distributed.distributed_c10d import _world

    if group in _world.pg_map and not is_aborted():
        _destroy(group)


def _destroy(group: Any) -> None:
    """Leaves a group, or all if it is None.

    Its gloo outlives it, until two more are left, or ranks join again. Whoever lets go of a group last may do so with
    Python's lock: DDP's reducer where Python collects it (seen in torch 2.13), and before torch 2.8 anybody. If that
    were the end of gloo too, it would wait for its threads, one of which may wait for the lock, to let go of what its
    last collective has held. Later they have nothing left to do; and a gloo that ends by itself does not hold the lock.
    """
    from torch.distributed.distributed_c10d import _world

    _keep_gloo(_world.pg_map if group is None else [group])
    dist.destroy_process_group(group)


def _keep_gloo(groups: Iterable[Any]) -> None:
    cpu = torch.device("cpu")
    _left.append([each._get_backend(cpu) for each in groups if cpu in each._device_types])


def default_store() -> dist.Store:
    """The key-value store of the default process group; every rank reaches it, on any number of hosts."""
    from torch.distributed.distributed_c10d import _get_default_store

    if _own_store is not None and _own is not None and _own() is dist.group.WORLD:
        return _own_store
    return _get_default_store()  # torch has no public accessor for it (read in torch 2.5 to 2.13)


def _backends_in(backend: str) -> list[str]:
    return [part.rpartition(":")[2].strip().lower() for part in backend.split(",")]
