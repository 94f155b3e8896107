"""Lifecycle of the default torch.distributed process group: default backend, start, and end.

Both front ends start the group here. It stays open between stages (``fit`` and then ``test`` use the same group) and is
closed when the interpreter exits, so that no backend reports a group that was not destroyed.
"""

import logging
import os
import sys
import weakref
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lightning_strategies_ext import host_store, rank_variables, shm
from lightning_strategies_ext._system import forking
from lightning_strategies_ext._system.connections import record_connections, without_prefixes
from lightning_strategies_ext._system.gloo_connections import restrict_gloo
from lightning_strategies_ext._system.gpu_sync import is_aborted
from lightning_strategies_ext.failure.process_exit import register_exit_handler
from lightning_strategies_ext.torch_distributed import rendezvous
from lightning_strategies_ext.torch_distributed.backend_checks import backends_in, check_options

if TYPE_CHECKING:
    from multiprocessing.util import Finalize

    from lightning.fabric.plugins import ClusterEnvironment

log = logging.getLogger(__name__)

#: Connections between ranks in groups that this package has created, by the addresses of both ends, the local one
#: first.
group_connections: set[tuple[Any, Any]] = set()

# Handler that leaves the default group when this process exits.
_at_end: "Finalize[None] | None" = None

# CPU backends of the groups that were left last, see `_destroy`.
_retained_gloo_backends: deque[list[Any]] = deque(maxlen=2)

# torch's `sys.excepthook` for a group, which prints exceptions with the rank, and the hook before it. torch wraps the
# hook again for each group, and would print the rank once per group.
_excepthooks: list[Any] = []

# The default group of several ranks that this package has created, and the same group while it is hidden during a
# stage on one device.
_own: "weakref.ref[Any] | None" = None
_hidden_group: Any = None

# Store of the default group that this package has created.
_own_store: dist.Store | None = None

# Backends whose threads do not use the group's store, so that it may be a store in Python.
_ACCEPTS_PYTHON_STORE = ("gloo", shm.NAME)

# With these settings, torch's NCCL watchdog does not abort this process after the exit of a peer or after a dump of the
# flight recorder (read in torch 2.5 to 2.13). Values that the user has set are kept.
_WATCHDOG_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


def is_initialized() -> bool:
    """Returns whether this process belongs to a torch.distributed process group."""
    return dist.is_available() and dist.is_initialized()


def uses_gloo() -> bool:
    """Returns whether the default process group uses gloo, for some device or for operations that ``shm`` lacks."""
    return is_initialized() and any(name in ("gloo", shm.NAME) for name in backends_in(dist.get_backend()))


def is_executed_by_gloo(group: Any) -> bool:
    """Returns whether gloo executes a group's collectives of host tensors.

    For ``shm``, gloo executes them between hosts and if there is no shared memory.

    Args:
        group: A process group; all ranks if None.
    """
    from lightning_strategies_ext.shm.process_group import ShmProcessGroup

    ranks: Any = group or dist.group.WORLD
    if isinstance(ranks, ShmProcessGroup):
        return ranks.spans_hosts
    backends = dist.get_backend_config(group)
    return "cpu:gloo" in backends or f"cpu:{shm.NAME}" in backends


def compares_identities() -> bool:
    """Returns whether the default group compares the identities of all ranks' collectives in each call."""
    from lightning_strategies_ext.shm.process_group import ShmProcessGroup

    group: Any = dist.group.WORLD
    return isinstance(group, ShmProcessGroup) and not group.spans_hosts


def disable_nccl_watchdog_exit() -> None:
    """Makes NCCL process groups that this process joins later survive the exit of other ranks."""
    for name, value in _WATCHDOG_SETTINGS.items():
        os.environ.setdefault(name, value)


def default_backend(device: torch.device, world_size: int, num_hosts: int) -> str:
    """Returns the default backend: ``shm`` for CPU ranks if a host has several, else the default of torch.

    Args:
        device: Device of this rank.
        world_size: Number of ranks.
        num_hosts: Number of hosts that the ranks are on.
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

    A no-op in a process that already belongs to a group of the same shape.

    Args:
        environment: Cluster environment that defines the rank, the world size, and the address of rank 0.
        backend: Backend in torch's form; None for the default.
        device: Device of this rank.
        timeout: Timeout of the rendezvous and of every collective; None for torch's default.
        options: Options of the backend.
        num_hosts: Number of hosts that the ranks are on, which determines the default backend.

    Returns:
        The backend.

    Raises:
        RuntimeError: If the process belongs to a group with another rank or world size.
        ValueError: If the options are for another backend.
    """
    rank, world_size = environment.global_rank(), environment.world_size()
    backend = backend or default_backend(device, world_size, num_hosts)
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise RuntimeError(
                f"This process is rank {dist.get_rank()} of {dist.get_world_size()} in a process group that was"
                f" created before, but should now be rank {rank} of {world_size}. Use the same number of devices and"
                " nodes as before, or call `torch.distributed.destroy_process_group()` first."
            )
        rank_variables.record_owner()
        return backend
    if _hidden_group is not None and world_size == 1:
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
    """Creates the default process group of ranks that share a store, which no other group has used.

    Raises:
        PermissionError: If a process of another user has taken the place of a rank.
    """
    forking.make_fork_safe()
    group_connections.clear()
    _retained_gloo_backends.clear()
    excepthook = sys.excepthook
    is_python = isinstance(without_prefixes(store), host_store.HostStore)
    torch_store = store
    if is_python and backend not in _ACCEPTS_PYTHON_STORE:
        torch_store = rendezvous.file_store(store, rank, world_size, timeout or default_pg_timeout)
    with record_connections(group_connections), restrict_gloo(is_one_host=num_hosts == 1):
        dist.init_process_group(
            backend,
            store=torch_store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if device.type != "cpu" else None,
            pg_options=options,
        )
    _excepthooks[:] = [sys.excepthook, excepthook]
    global _own, _own_store
    _own, _own_store = weakref.ref(dist.group.WORLD), store
    # Forked ranks inherit the handlers that were registered before the fork. The process that owns the group registers
    # this handler after the fork, so that each group is closed once.
    global _at_end
    if _at_end is not None:
        _at_end.cancel()
    _at_end = register_exit_handler(_stop_at_exit)


def has_others() -> bool:
    """Returns whether this process belongs to a default group of several ranks that this package has created."""
    return is_initialized() and _own is not None and _own() is dist.group.WORLD and dist.get_world_size() > 1


def hide_default_group() -> bool:
    """Unsets the default group for a stage on one device, in which the other ranks may not take part.

    The group stays open, and other ranks may wait in its collectives meanwhile.

    Returns:
        Whether there was a group, which :func:`restore_default_group` restores.
    """
    global _hidden_group
    if not has_others():
        return False
    _hidden_group, dist.group.WORLD = dist.group.WORLD, None
    return True


def restore_default_group() -> None:
    """Restores the default group that :func:`hide_default_group` has unset, and leaves the group of the stage."""
    global _hidden_group
    stage_group = dist.group.WORLD
    dist.group.WORLD, _hidden_group = _hidden_group, None
    if stage_group is not None:
        _destroy(stage_group)


@contextmanager
def replaced_by_local_group() -> Generator[None, None, None]:
    """Replaces the default group, if there is one, by a gloo group of this rank alone, as long as the block runs."""
    if not hide_default_group():
        yield
        return
    excepthook = sys.excepthook
    try:
        with restrict_gloo(is_one_host=True):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        sys.excepthook = excepthook
        yield
    finally:
        restore_default_group()


def stop() -> None:
    """Leaves the default process group, if there is one."""
    if not is_initialized():
        return
    if _excepthooks and sys.excepthook is _excepthooks[0]:
        sys.excepthook = _excepthooks[1]
    # The destruction of an aborted group would wait for its unfinished operations (observed in torch 2.11).
    # `_abort_process_group` is a private name of torch, read in 2.13, which earlier versions may lack. It aborts all
    # groups in `pg_names`, which are therefore cleared: `abort` has aborted them, and an abort of gloo raises a
    # RuntimeError in versions that cannot abort it.
    abort_groups = getattr(dist.distributed_c10d, "_abort_process_group", None) if is_aborted() else None
    if abort_groups is None:
        _destroy(None)
    else:
        _retain_gloo_backends(dist.distributed_c10d._world.pg_map)
        dist.distributed_c10d._world.pg_names.clear()
        abort_groups()


def _stop_at_exit() -> None:
    stop()
    _retained_gloo_backends.clear()


def leave_subgroup(group: Any) -> None:
    """Leaves a group other than the default group. A second call is a no-op.

    An aborted group is left together with the default group: to leave it alone would block, see :func:`stop`.
    """
    from torch.distributed.distributed_c10d import _world

    if group in _world.pg_map and not is_aborted():
        _destroy(group)


def _destroy(group: Any) -> None:
    """Leaves a group, or all groups if it is None.

    The gloo backend of the group is retained until two more groups are left, or ranks join again. The thread that drops
    the last reference to a group may hold the GIL: DDP's reducer when Python collects it (observed in torch 2.13), and
    before torch 2.8 any thread. If this thread also freed gloo, it would wait for gloo's threads, and one of these may
    wait for the GIL to free the tensors of its last collective. Later the threads have nothing left to free, and a gloo
    backend that is freed by itself does not hold the GIL.
    """
    from torch.distributed.distributed_c10d import _world

    _retain_gloo_backends(_world.pg_map if group is None else [group])
    dist.destroy_process_group(group)


def _retain_gloo_backends(groups: Iterable[Any]) -> None:
    cpu = torch.device("cpu")
    _retained_gloo_backends.append([each._get_backend(cpu) for each in groups if cpu in each._device_types])


def default_store() -> dist.Store:
    """Returns the key-value store of the default process group, which every rank on any host can reach."""
    from torch.distributed.distributed_c10d import _get_default_store

    if _own_store is not None and _own is not None and _own() is dist.group.WORLD:
        return _own_store
    return _get_default_store()  # torch has no public accessor (read in torch 2.5 to 2.13)
