"""How a rank lets go of others that wait for it within a collective."""

import os
from collections.abc import Sequence
from contextlib import suppress

import psutil

from lightning_strategies_ext.connections import shut_down_connections
from lightning_strategies_ext.peers import Peer
from lightning_strategies_ext.shm.execution import close_all
from lightning_strategies_ext.torch_distributed import process_group


def disconnect(peers: Sequence[Peer]) -> None:
    """Closes this process's connections to others on its host, but for the key-value store's.

    A rank inside a collective of gloo or shm wakes up with an error once its connection to us closes. Other backends do
    not notice: nothing is done then. `destroy_process_group` does not close gloo's connections: the model in DDP keeps
    the group, and traces keep the model (torch 2.13).
    """
    if not process_group.uses_gloo():
        return
    close_all()
    theirs: set[tuple[str, int]] = set()
    for peer in peers:
        with suppress(psutil.Error):
            theirs.update(connection.laddr for connection in psutil.Process(peer.pid).net_connections("tcp"))
    store_port = int(os.environ.get("MASTER_PORT", "0"))
    shut_down_connections(
        lambda connection: (
            connection.raddr in theirs and store_port not in (connection.laddr.port, connection.raddr.port)
        )
    )
