"""How a rank lets go of others that wait for it within a collective."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import psutil
import torch.distributed as dist

from lightning_strategies_ext.connections import shut_down_connections
from lightning_strategies_ext.peers import Peer, host_identity
from lightning_strategies_ext.shm.execution import close_all
from lightning_strategies_ext.torch_distributed import process_group


class Listening:
    """At which ports the ranks of a group listen for each other: by them, its connections can be told from others.

    Create it before the group.
    """

    def __init__(self) -> None:
        self._before = _ports_of_this_process()
        self.of_rank: dict[int, set[int]] = {}

    @property
    def here(self) -> set[int]:
        """Those of this process."""
        return _ports_of_this_process() - self._before

    def share(self, store: dist.Store, rank: int, size: int) -> None:
        """Learns those of all ranks, which call it together when the group is there.

        Args:
            store: Shared by the ranks, for this alone.
            rank: Of this process.
            size: Number of ranks.

        Raises:
            torch.distributed.DistStoreError: If one does not come.
        """
        store.set(str(rank), json.dumps(sorted(self.here)))
        self.of_rank = {other: set(json.loads(store.get(str(other)))) for other in range(size)}


def disconnect(peers: Sequence[Peer], listening: Listening | None = None) -> None:
    """Closes this process's connections to other ranks, but for the key-value store's.

    A rank inside a collective of gloo or shm wakes up with an error once a connection in it closes. NCCL is aborted,
    which wakes this rank. Other backends do not notice: nothing is done then. `destroy_process_group` does not close
    gloo's connections: the model in DDP keeps the group, and traces keep the model (torch 2.13).

    Args:
        peers: The other ranks.
        listening: Says which connections to other hosts are the group's; all are, if None.
    """
    if not process_group.uses_gloo():
        process_group.abort()
        return
    close_all()
    here = host_identity()
    theirs: set[tuple[str, int]] = set()
    hosts: set[str] = set()
    for peer in peers:
        if peer.host == here:
            with suppress(psutil.Error):
                theirs.update(connection.laddr for connection in psutil.Process(peer.pid).net_connections("tcp"))
        elif listening is None:
            hosts.update(peer.addresses)
        else:
            theirs.update(product(peer.addresses, listening.of_rank.get(peer.rank, ())))
    ours = set() if listening is None else listening.here
    store_port = int(os.environ.get("MASTER_PORT", "0"))

    def is_meant(connection: Any) -> bool:
        if not connection.raddr or store_port in (connection.laddr.port, connection.raddr.port):
            return False
        address = connection.raddr.ip.removeprefix("::ffff:"), connection.raddr.port
        return connection.raddr in theirs or address in theirs or address[0] in hosts or connection.laddr.port in ours

    shut_down_connections(is_meant)


def _ports_of_this_process() -> set[int]:
    return {
        connection.laddr.port
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
