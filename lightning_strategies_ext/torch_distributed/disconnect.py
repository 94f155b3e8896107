"""How a rank lets go of others that wait for it within a collective."""

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil

from lightning_strategies_ext import rank_variables
from lightning_strategies_ext._system.connections import shut_down_connections
from lightning_strategies_ext._system.peers import Peer, host_identity
from lightning_strategies_ext.shm.execution import close_all
from lightning_strategies_ext.torch_distributed import process_group


def disconnect(peers: Sequence[Peer], *, by_host: bool = True) -> None:
    """Closes this process's connections to other ranks, but for the key-value store's.

    A rank inside a collective of gloo or shm wakes up with an error once a connection in it closes. NCCL is aborted, in
    all groups, which wakes this rank. With ``"cpu:gloo,cuda:nccl"`` both is done. `destroy_process_group` does not
    close gloo's connections: the model in DDP keeps the group, and traces keep the model (torch 2.13).

    Those of the groups that this package has made are known, also where a rank is gone and what it has forked holds
    them. Those of other groups are told by who is at their other end.

    Args:
        peers: The other ranks.
        by_host: Whether a connection to another host of theirs, whatever it is for, is one to them.
    """
    process_group.abort()
    if not process_group.uses_gloo():
        return
    close_all()
    here = host_identity()
    theirs: set[tuple[str, int]] = set()
    hosts: set[str] = set()
    for peer in peers:
        if peer.host == here:
            with suppress(psutil.Error, OSError):
                theirs.update(connection.laddr for connection in psutil.Process(peer.pid).net_connections("tcp"))
        elif by_host:
            hosts.update(peer.addresses)
    # Ranks that share a store on a Unix socket may have another connection at this port.
    store_port = int(os.environ.get("MASTER_PORT", "0")) if rank_variables.store_name() is None else 0

    def is_meant(connection: Any) -> bool:
        if not connection.raddr or store_port in (connection.laddr.port, connection.raddr.port):
            return False
        is_known = (connection.laddr, connection.raddr) in process_group.connections
        return is_known or connection.raddr in theirs or connection.raddr.ip.removeprefix("::ffff:") in hosts

    shut_down_connections(is_meant)
