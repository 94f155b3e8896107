"""Coordinator: the lowest rank, to which one rank of each other host connects."""

import hmac
import json
import logging
import secrets
import socket
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from lightning_strategies_ext._system.connections import SECRET, SECRET_FILE, job_secret, store_address
from lightning_strategies_ext._system.peers import Peer, is_loopback
from lightning_strategies_ext.failure.peer_links import PeerLinks

log = logging.getLogger(__name__)


class CoordinatorEndpoint:
    """Address and credentials of the coordinator. Collective: all ranks create it together; the coordinator listens.

    Args:
        store: Store that all ranks share.
        key: Key in the store, for this object alone.
        peers: All ranks.
        rank: Global rank of this process.
        allowed_ranks: Ranks that may connect, once each.
        links: Links of this rank.
    """

    def __init__(
        self,
        store: dist.Store,
        key: str,
        peers: Mapping[int, Peer],
        rank: int,
        allowed_ranks: Collection[int],
        links: PeerLinks,
    ) -> None:
        self._links = links
        self._peers = peers
        self._rank = rank
        self._first = min(peers)
        self._secret = job_secret()
        if rank == self._first:
            endpoint = self._listen(store, allowed_ranks)
            store.set(key, json.dumps([*endpoint, self._signature(endpoint)]))
        *endpoint, signature = json.loads(store.get(key))
        if not hmac.compare_digest(signature, self._signature(endpoint)):
            raise RuntimeError(
                f"Rank {rank} has another secret than rank 0, or another process has written to the store. Set"
                f" {SECRET} or {SECRET_FILE} to the same value on all hosts, or on none."
            )
        token, self._addresses, self._port = endpoint
        self._proof = self._proof_of(token)

    def connect(self, *, may_have_exited: bool = False) -> None:
        """Connects to the coordinator; logs a warning if that fails.

        Args:
            may_have_exited: Whether a refused connection is expected, because the coordinator may have exited.
        """
        error = self._links.connect(self._addresses, self._port, self._first, self._proof, self._rank)
        if error is not None and not (may_have_exited and isinstance(error, ConnectionRefusedError)):
            log.warning(
                "rank %d cannot connect to rank 0 (%s) at %s, port %s: %s. Failures on one of the two hosts are"
                " detected on the other only when the backend reports them. Allow TCP connections between the hosts on"
                " all ports.",
                *(self._rank, self._peers[self._first].host_name, " or ".join(self._addresses), self._port, error),
            )

    def _listen(self, store: dist.Store, allowed_ranks: Collection[int]) -> tuple[str, list[str], int | None]:
        """Listens at the address of the store if that is on this host, else at all addresses.

        Returns:
            The token, the addresses, and the port.
        """
        token = secrets.token_hex(16)
        address, all_addresses = None, self._peers[self._rank].addresses
        if (of_store := store_address(store)) is not None:
            address = _local_address_towards(*of_store)
            is_one_machine = all(peer.addresses == all_addresses for peer in self._peers.values())
            if address is not None and is_loopback(address) and not is_one_machine:
                address = None
        self._links.listen(allowed_ranks, self._proof_of(token), address or "")
        return token, list(all_addresses) if address is None else [address], self._links.port

    def _signature(self, endpoint: Sequence[Any]) -> str:
        """Returns the signature of an endpoint with the job's secret; empty if the job has none."""
        return _signed(self._secret, json.dumps(endpoint)) if self._secret else ""

    def _proof_of(self, token: str) -> str:
        """Returns what a connecting rank must know, derived from the token and from the job's secret if it has one."""
        return _signed(self._secret, token) if self._secret else token


def _signed(secret: bytes, text: str) -> str:
    return hmac.digest(secret, text.encode(), "sha256").hex()


def _local_address_towards(towards: str, port: int) -> str | None:
    """Returns the local address of the route to a host, or None.

    Args:
        towards: Name or address of the host.
        port: Port at the host; nothing is sent to it.
    """
    with suppress(OSError):
        for family, kind, protocol, _, endpoint in socket.getaddrinfo(towards, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe, suppress(OSError):
                probe.connect(endpoint)
                return str(probe.getsockname()[0])
    return None
