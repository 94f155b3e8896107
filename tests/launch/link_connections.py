"""Connections to a link server, like those of workers on Ray."""

import hmac
import socket
import struct
import time
from collections.abc import Callable

from lightning_strategies_ext.launch.ray.worker_link import LinkServer

NUMBER = struct.Struct("!I")


def connect(server: LinkServer, number: int, secret: bytes | None = None) -> socket.socket:
    """Connects like a worker, with a proof of the secret."""
    connection = socket.create_connection(server.address)
    challenge = connection.recv(32, socket.MSG_WAITALL)
    key = server.secret if secret is None else secret
    connection.sendall(hmac.digest(key, challenge + NUMBER.pack(number), "sha256") + NUMBER.pack(number))
    return connection


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
