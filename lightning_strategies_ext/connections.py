"""Connections of this process to others: which there are, how they are made, and how they are cut."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import psutil
import torch.distributed as dist

#: How long a store may take to answer on a connection that :func:`own_connection` has made.
_STORE_TIMEOUT = timedelta(seconds=30)
_spared: "WeakSet[socket.socket]" = WeakSet()


def spare(connection: socket.socket) -> None:
    """Lets a connection be, whatever :func:`shut_down_connections` is to cut."""
    _spared.add(connection)


def own_connection(store: dist.Store) -> dist.Store:
    """The same store by a connection of its own, so that nobody waits for whoever waits at the other one.

    Args:
        store: With prefixes, perhaps, which what is returned does not have.
    """
    address = address_of(store)
    if address is None:
        return _without_prefixes(store)
    return dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)


def address_of(store: dist.Store) -> tuple[str, int] | None:
    """Where a store is served; None where it is in files, say."""
    store = _without_prefixes(store)
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None


def _without_prefixes(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


@contextmanager
def noting_connections(noted: set[tuple[Any, Any]]) -> Iterator[None]:
    """Notes the connections that this process makes in it, in whichever thread; none where the system does not say.

    Args:
        noted: Gets the addresses of both ends of each, this process's first.
    """
    before = _connections_now()
    try:
        yield
    finally:
        now = _connections_now()
        if before is not None and now is not None:
            noted |= now - before


def _connections_now() -> set[tuple[Any, Any]] | None:
    try:
        found = psutil.Process().net_connections("tcp")
    except psutil.Error:  # nobody is to fail for that: it matters once another one does
        return None
    return {(connection.laddr, connection.raddr) for connection in found if connection.raddr}


def shut_down_connections(is_meant: Callable[[Any], bool]) -> None:
    """Shuts down connections of this process, so that whoever waits at their ends fails.

    Args:
        is_meant: Says of a connection, as psutil describes it, whether it is meant.
    """
    spared = {connection.fileno() for connection in _spared}
    for connection in psutil.Process().net_connections("tcp"):
        if connection.fd not in spared and is_meant(connection):
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as twin:
                twin.shutdown(socket.SHUT_RDWR)
