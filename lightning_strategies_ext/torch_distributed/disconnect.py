"""How a rank lets go of others that wait for it within a collective."""

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil

from lightning_strategies_ext.connections import shut_down_connections
from lightning_strategies_ext.peers import Peer, host_identity
from lightning_strategies_ext.shm.execution import close_all
from lightning_strategies_ext.torch_distributed import process_group


def disconnect(peers: Sequence[Peer]) -> None:
    """Closes this process's connections to other ranks, but for the key-value store's.

    A rank inside a collective of gloo or shm wakes up with an error once a connection in it closes. NCCL is aborted,
    which wakes this rank. Other backends do not notice: nothing is done then. `destroy_process_group` does not close
    gloo's connections: the model in DDP keeps the group, and traces keep the model (torch 2.13).
    """
    if not process_group.uses_gloo():
        process_group.abort()
        return
    close_all()
    here = host_identity()
    theirs: set[tuple[str, int]] = set()
    hosts: set[str] = set()
    for peer in peers:
        if peer.host != here:
            hosts.update(peer.addresses)
            continue
        with suppress(psutil.Error):
            theirs.update(connection.laddr for connection in psutil.Process(peer.pid).net_connections("tcp"))
    store_port = int(os.environ.get("MASTER_PORT", "0"))

    def is_meant(connection: Any) -> bool:
        if not connection.raddr or store_port in (connection.laddr.port, connection.raddr.port):
            return False
        return connection.raddr in theirs or connection.raddr.ip.removeprefix("::ffff:") in hosts

    shut_down_connections(is_meant)
