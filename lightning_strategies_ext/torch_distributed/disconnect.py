"""Closes the connections of a rank, so that collectives between it and other ranks fail."""

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil

from lightning_strategies_ext import rank_variables
from lightning_strategies_ext._system.connections import shut_down_connections
from lightning_strategies_ext._system.peers import Peer, host_identity
from lightning_strategies_ext.shm.executor import close_all
from lightning_strategies_ext.torch_distributed import process_group


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
        elif match_hosts:
            hosts.update(peer.addresses)
    # If the ranks share a store on a Unix socket, this port may belong to another connection.
    store_port = int(os.environ.get("MASTER_PORT", "0")) if rank_variables.store_name() is None else 0

    def is_meant(connection: Any) -> bool:
        if not connection.raddr or store_port in (connection.laddr.port, connection.raddr.port):
            return False
        is_known = (connection.laddr, connection.raddr) in process_group.group_connections
        return is_known or connection.raddr in theirs or connection.raddr.ip.removeprefix("::ffff:") in hosts

    shut_down_connections(is_meant)
