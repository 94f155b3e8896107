"""Connections of this process to others: which there are, and how they are cut."""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil


def shut_down_connections(is_meant: Callable[[Any], bool]) -> None:
    """Shuts down connections of this process, so that whoever waits at their ends fails.

    Args:
        is_meant: Says of a connection, as psutil describes it, whether it is meant.
    """
    for connection in psutil.Process().net_connections("tcp"):
        if is_meant(connection):
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as twin:
                twin.shutdown(socket.SHUT_RDWR)
