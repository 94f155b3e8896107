"""Ends the collectives of a rank: aborts process groups, and closes the connections to other ranks."""

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil
import torch.distributed as dist

from lightning_strategies_ext import rank_variables
from lightning_strategies_ext._system.connections import shut_down_connections
from lightning_strategies_ext._system.gpu_sync import is_aborted, mark_aborted
from lightning_strategies_ext._system.peers import Peer, host_identity
from lightning_strategies_ext.shm.executor import close_all
from lightning_strategies_ext.torch_distributed import process_group

# Classes of backends whose collectives fail when connections close. `abort` and `shutdown` of ProcessGroupGloo do
# nothing: it inherits them from `Backend` (torch 2.13 to 2.15). A rank that waits in an all-reduce continues to wait.
_NOT_ABORTED = ("ProcessGroupGloo", "GlooFallback", "ShmProcessGroup", "RecordedShmProcessGroup")


def disconnect(peers: Sequence[Peer], *, match_hosts: bool = True) -> None:
    """Closes this process's connections to other ranks, except connections of the key-value store.

    A rank inside a collective of gloo or shm receives an error when a connection in it closes. NCCL is aborted, in all
    groups, so that this rank receives an error. With ``"cpu:gloo,cuda:nccl"``, both happen. `destroy_process_group`
    does not close gloo's connections: the model in DDP keeps the group, and tracebacks keep the model (torch 2.13).

    The connections of groups that this package has created are known, even if a rank has exited and processes that it
    has forked hold them. The connections of other groups are identified by their remote ends.

    Args:
        peers: The other ranks.
        match_hosts: Whether every connection to another host of the peers counts as a connection to them.
    """
    abort()
    if not process_group.uses_gloo():
        return
    close_all()
    host = host_identity()
    peer_addresses: set[tuple[str, int]] = set()
    hosts: set[str] = set()
    for peer in peers:
        if peer.host == host:
            with suppress(psutil.Error, OSError):
                peer_addresses.update(
                    connection.laddr for connection in psutil.Process(peer.pid).net_connections("tcp")
                )
        elif match_hosts:
            hosts.update(peer.addresses)
    # If the ranks share a store on a Unix socket, this port may belong to another connection.
    store_port = int(os.environ.get("MASTER_PORT", "0")) if rank_variables.store_name() is None else 0

    def is_to_peer(connection: Any) -> bool:
        if not connection.raddr or store_port in (connection.laddr.port, connection.raddr.port):
            return False
        is_known = (connection.laddr, connection.raddr) in process_group.group_connections
        return is_known or connection.raddr in peer_addresses or connection.raddr.ip.removeprefix("::ffff:") in hosts

    shut_down_connections(is_to_peer)


def can_abort() -> bool:
    """Returns whether :func:`abort` has a backend to abort."""
    return process_group.is_initialized() and bool(_abortable())


def abort() -> None:
    """Aborts all process groups of this process, so that collectives that wait on GPUs fail.

    gloo and ``shm`` are not aborted: their collectives fail when connections close. Each backend is aborted in its own
    thread: the abort of NCCL waits for the GPU, which a collective of another group may occupy until that group is
    aborted.
    """
    if not process_group.is_initialized() or is_aborted():
        return
    backends = _abortable()
    if not backends:
        return
    mark_aborted(dist.group.WORLD)  # before the abort: later results must not be kept
    threads = [threading.Thread(target=_abort, args=(backend,), name="abort", daemon=True) for backend in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _abortable() -> list[Any]:
    """Returns the backends of all groups of this process, except gloo and ``shm``. torch 2.5 cannot abort groups."""
    from torch.distributed.distributed_c10d import _world

    found: list[Any] = []
    for group in list(_world.pg_map):
        backends: list[Any] = [group._get_backend(device) for device in group._device_types]
        for backend in backends or [group]:
            # With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch wraps each backend in an object that does not forward `abort`.
            backend = getattr(backend, "wrapped_pg", backend)
            if type(backend).__name__ not in _NOT_ABORTED and all(backend is not each for each in found):
                found.append(backend)
    return found


def _abort(backend: Any) -> None:
    with suppress(AttributeError, RuntimeError):  # the backend has no `abort`, or has failed
        backend.abort()
