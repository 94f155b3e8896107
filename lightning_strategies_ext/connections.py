"""Connections of this process to others: which there are, and how they are cut."""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import psutil

_spared: "WeakSet[socket.socket]" = WeakSet()


def spare(connection: socket.socket) -> None:
    """Lets a connection be, whatever :func:`shut_down_connections` is to cut."""
    _spared.add(connection)


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
