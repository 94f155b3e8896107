"""The center of a star of lines: the first rank of all, whom others call."""

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
    """What a rank knows of it. All ranks create theirs together; then the first listens.

    Args:
        store: The store that all ranks share.
        key: Of the store, for this alone.
        peers: All ranks.
        rank: Global rank of this process.
        allowed_ranks: Ranks that may call, once each.
        lines: Of this rank.
    """

    def __init__(
        self,
        store: dist.Store,
        key: str,
        peers: Mapping[int, Peer],
        rank: int,
        allowed_ranks: Collection[int],
        lines: PeerLinks,
    ) -> None:
        self._lines = lines
        self._peers = peers
        self._rank = rank
        self._first = min(peers)
        self._secret = job_secret()
        if rank == self._first:
            place = self._listen(store, allowed_ranks)
            store.set(key, json.dumps([*place, self._signature(place)]))
        *place, signature = json.loads(store.get(key))
        if not hmac.compare_digest(signature, self._signature(place)):
            raise RuntimeError(
                f"Rank {rank} has another secret than rank 0, or no rank has written what is in the store. Set"
                f" {SECRET} or {SECRET_FILE} alike on all hosts, or on none."
            )
        token, self._addresses, self._port = place
        self._proof = self._proof_of(token)

    def connect(self, *, may_have_exited: bool = False) -> None:
        """Calls it; says so if it cannot be reached.

        Args:
            may_have_exited: Whether its process need not be there any more, so that nobody may answer.
        """
        error = self._lines.connect(self._addresses, self._port, self._first, self._proof, self._rank)
        if error is not None and not (may_have_exited and isinstance(error, ConnectionRefusedError)):
            log.warning(
                "rank %d cannot reach rank 0 (%s) at %s, port %s (%s): what fails on one of their hosts is not known on"
                " the other until the backend notices. Let the hosts connect to each other at any port.",
                *(self._rank, self._peers[self._first].host_name, " or ".join(self._addresses), self._port, error),
            )

    def _listen(self, store: dist.Store, callers: Collection[int]) -> tuple[str, list[str], int | None]:
        """Lets others call where they reach the store, if that is on this host, or else anywhere.

        Returns:
            What they have to know, and where they may call.
        """
        token = secrets.token_hex(16)
        address, all_addresses = None, self._peers[self._rank].addresses
        if (of_store := store_address(store)) is not None:
            address = _local_address_towards(*of_store)
            is_one_machine = all(peer.addresses == all_addresses for peer in self._peers.values())
            if address is not None and is_loopback(address) and not is_one_machine:
                address = None
        self._lines.listen(callers, self._proof_of(token), address or "")
        return token, list(all_addresses) if address is None else [address], self._lines.port

    def _signature(self, place: Sequence[Any]) -> str:
        """Returns what only a process with the secret of the job can write beside the place; nothing without one."""
        return _signed(self._secret, json.dumps(place)) if self._secret else ""

    def _proof_of(self, token: str) -> str:
        """Returns what a caller must know: derived from the token and the secret of the job, if there is one."""
        return _signed(self._secret, token) if self._secret else token


def _signed(secret: bytes, text: str) -> str:
    return hmac.digest(secret, text.encode(), "sha256").hex()


def _local_address_towards(towards: str, port: int) -> str | None:
    """The address of this host on the way to another one, or to itself; None if there is none.

    Args:
        towards: Name or address of the other.
        port: There; nothing is sent to it.
    """
    with suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(towards, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe, suppress(OSError):
                probe.connect(place)
                return str(probe.getsockname()[0])
    return None
