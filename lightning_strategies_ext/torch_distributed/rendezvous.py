"""Rendezvous of a process group: the stores that its ranks share, on one host and on several.

Ranks of one host share a :class:`.HostStore`, which other users cannot use. Ranks of several hosts share torch's
``TCPStore`` at ``MASTER_ADDR``, which does not authenticate clients.
"""

import atexit
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from lightning_strategies_ext import host_store, rank_variables
from lightning_strategies_ext._system.connections import serve_store
from lightning_strategies_ext._system.peers import is_loopback

_RESTARTS_PREFIX = "lightning_strategies_ext/restarts"
_RESTART_POLL_S = 0.01
_HOST_STORE = "lightning_strategies_ext/host_store"
# Key under which rank 0 stores the job, see `_job`, before ranks join that another launcher has started.
_JOB_KEY = "job"
#: Free space that a store in a file requires, in bytes.
_STORE_BYTES = 1 << 24

# The store that this process shares with the other ranks, and the number of its next group: by process ID, name or
# address, rank, and world size.
_stores: dict[tuple[Any, ...], tuple[dist.Store, Iterator[int]]] = {}


def next_store(rank: int, world_size: int, num_hosts: int, timeout: timedelta) -> dist.Store:
    """Returns the store of this process's next default process group; the first call waits for all ranks.

    Each group uses its own part of the store: it must not read what an earlier group has written, even if
    ``destroy_process_group`` was called in between and an object still holds the earlier group.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks.
        num_hosts: Number of hosts that the ranks are on.
        timeout: Timeout of the wait for other ranks, and of later waits for keys.
    """
    if world_size == 1:
        return dist.HashStore()
    name = rank_variables.store_name() if num_hosts == 1 else None
    key = os.getpid(), name or (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]), rank, world_size
    if key not in _stores:
        _stores.clear()
        _stores[key] = _store_of_all(name, rank, world_size, num_hosts, timeout), count()
    store, numbers = _stores[key]
    store.set_timeout(timeout)
    return dist.PrefixStore(f"lightning_strategies_ext/groups/{next(numbers)}", store)


def _store_of_all(name: str | None, rank: int, world_size: int, num_hosts: int, timeout: timedelta) -> dist.Store:
    """Connects to the store that all ranks share, and returns when all ranks have connected.

    Ranks of one host share a store on a Unix socket. Ranks that another launcher has started read its name from the
    store at ``MASTER_ADDR``, which holds nothing else, because every user of the host can use it.
    """
    if name is not None:
        return _host_store(name, rank, world_size, timeout)
    try:
        address_store = _store_at_address(rank, world_size, num_hosts, timeout)
    except dist.DistNetworkError as error:
        if rank == 0 and "EADDRINUSE" in str(error):
            raise dist.DistNetworkError(f"{error}. {rank_variables.inherited_text()}") from error
        raise
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address_store = _store_for_this_restart(address_store, rank, world_size, timeout)
    if num_hosts > 1 or not host_store.is_available():
        return address_store
    if rank == 0:
        address_store.set(_HOST_STORE, f"{host_store.serve().name} {uuid4().hex}")  # a new part for each rendezvous
    name, part = address_store.get(_HOST_STORE).decode().split()
    return _host_store(name, rank, world_size, timeout, part)


def _host_store(name: str, rank: int, world_size: int, timeout: timedelta, part: str | None = None) -> dist.Store:
    """Connects to a part of a store on a Unix socket, which rank 0 serves; returns when all ranks have connected.

    Args:
        name: Name of the store.
        rank: Rank of this process.
        world_size: Number of ranks.
        timeout: Timeout of the wait for other ranks, and of later waits for keys.
        part: Name of the part, if the ranks have read it from a store to which other users can write.

    Raises:
        torch.distributed.DistNetworkError: If another process already serves a store with this name, or the store
            belongs to another job.
        torch.distributed.DistStoreError: If a rank does not join within the timeout.
    """
    try:
        root_store = host_store.serve(name) if rank == 0 else host_store.connect(name)
    except OSError as error:
        raise dist.DistNetworkError(
            f"Another process is already rank 0 of this job: {error}. {rank_variables.inherited_text()}"
        ) from error
    root_store.set_timeout(timeout)
    store = dist.PrefixStore(part or "ranks", root_store)
    if part is not None:
        # Another user may have written the name of another job's store, which lacks this key or has another value for
        # it.
        if rank == 0:
            store.set(_JOB_KEY, _job())
        store.wait([_JOB_KEY], timeout)
        found = store.get(_JOB_KEY).decode()
        if found != _job():
            raise dist.DistNetworkError(
                f"The store at MASTER_ADDR contains the name of another job's store ({found}; this is {_job()}):"
                " another process has written to it. Restart the job; SECURITY.md lists what other users of the host"
                " can do."
            )
    keys = [f"rank {other}" for other in range(world_size)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError as error:
        late = " and ".join(key for key in keys if not store.check([key])) or "a rank"
        seconds = f"{timeout.total_seconds():g} s"
        raise dist.DistStoreError(f"Waited {seconds} for {late} to join (world size {world_size}).") from error
    return store


def _job() -> str:
    """Returns a text that all ranks of a job share, and that differs between simultaneous jobs of a host."""
    return f"port {os.environ['MASTER_PORT']}, run {os.environ.get('TORCHELASTIC_RUN_ID', '-')}"


def _store_at_address(rank: int, world_size: int, num_hosts: int, timeout: timedelta) -> dist.Store:
    """Connects to the store at ``MASTER_ADDR``; rank 0 serves it, unless the agent of torchrun does.

    Rank 0 listens only at that address if the address belongs to its host, otherwise at all addresses.
    """
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        address = os.environ["MASTER_ADDR"]
        with suppress(OSError):  # otherwise torch serves the store at all addresses, or reports the error
            # A host name may resolve to a loopback address on its own host, and to another address on other hosts.
            if num_hosts == 1 or not is_loopback(socket.gethostbyname(address)):
                return serve_store(address, int(os.environ["MASTER_PORT"]), world_size, timeout)
    store: dist.Store
    store, _, _ = next(iter(dist.rendezvous("env://", rank, world_size, timeout=timeout)))
    return store


def file_store(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Creates a store in a file of this user, for a backend whose threads use the store and must not wait for the GIL.

    Args:
        store: Store of the group, through which the ranks receive the path of the file.
        rank: Rank of this process.
        world_size: Number of ranks.
        timeout: Timeout of waits for keys.

    Raises:
        PermissionError: If the file belongs to another user, or other users can open it.
    """
    if rank == 0:
        directory = tempfile.mkdtemp(prefix="lightning_strategies_ext-", dir="/dev/shm" if _has_memory() else None)
        remove = partial(shutil.rmtree, directory, ignore_errors=True)
        atexit.register(remove)
        os.close(os.open(os.path.join(directory, "store"), os.O_CREAT | os.O_EXCL, 0o600))
        store.set("file", os.path.join(directory, "store"))
    path = store.get("file").decode()
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o600:
        raise PermissionError(
            f"{path}, the store of rank 0, belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o};"
            f" it must belong to user {os.geteuid()} with mode 600."
        )
    descriptor_path = f"/proc/self/fd/{descriptor}"
    is_reachable = os.access(descriptor_path, os.R_OK | os.W_OK)  # not if the process is not dumpable
    store.set(f"file/{rank}", str(is_reachable))
    if rank == 0 and all(store.get(f"file/{other}") == b"True" for other in range(world_size)):
        remove()
        atexit.unregister(remove)
    # The descriptor stays open: torch opens it again for each request, and when the store is deleted.
    opened = dist.FileStore(descriptor_path if is_reachable else path)
    opened.set_timeout(timeout)
    return opened


def _has_memory() -> bool:
    """Returns whether ``/dev/shm`` has space for a store in a file, which needs some KiB per rank."""
    with suppress(OSError):
        return os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > _STORE_BYTES
    return False


def _store_for_this_restart(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Returns a part of a store that ranks from before the last restart of the job do not use.

    The agents of torchrun keep one store for all restarts of a job, and torch reads what ranks of earlier restarts have
    written (observed in 2.13: after a second restart, ranks wait for each other indefinitely). Rank 0 generates a name
    for the restart. The other ranks cannot distinguish it from the name of an earlier restart, so each sends rank 0 a
    request with a new random number. The rank 0 of an earlier restart has exited and does not reply.

    Raises:
        torch.distributed.DistStoreError: If another rank does not join within the timeout.
    """
    if rank == 0:
        name = uuid4().hex
        store.set(f"{_RESTARTS_PREFIX}/newest", name)
        for other in range(1, world_size):
            request = store.get(f"{_RESTARTS_PREFIX}/{name}/request {other}").decode()
            store.set(f"{_RESTARTS_PREFIX}/{name}/reply {other}", request)
        return dist.PrefixStore(f"{_RESTARTS_PREFIX}/{name}", store)
    request, deadline, requested = uuid4().hex, time.monotonic() + timeout.total_seconds(), ""
    while time.monotonic() < deadline:
        name = store.get(f"{_RESTARTS_PREFIX}/newest").decode()
        if name != requested:
            store.set(f"{_RESTARTS_PREFIX}/{name}/request {rank}", request)
            requested = name
        reply_key = f"{_RESTARTS_PREFIX}/{name}/reply {rank}"
        if store.check([reply_key]) and store.get(reply_key).decode() == request:
            return dist.PrefixStore(f"{_RESTARTS_PREFIX}/{name}", store)
        time.sleep(_RESTART_POLL_S)
    raise dist.DistStoreError(f"rank 0 did not join within {timeout.total_seconds():g} s.")
