"""Peer links: TCP connections between hosts, which the kernel closes when a process exits or a host is unreachable.

The lowest rank, the coordinator, listens; one rank of each other host connects to it. A process that exits in good
order sends a goodbye first.

A process that receives nothing for minutes, because it is stopped or its GIL is held, is not lost: its kernel answers
keepalives as long as its receive buffer has space. A peer with unacknowledged messages therefore receives only what
fits its window. Urgent messages are exempt.
"""

import errno
import hmac
import json
import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakSet

import torch.distributed as dist

from lightning_strategies_ext._system import connections
from lightning_strategies_ext._system.peers import Peer, is_loopback
from lightning_strategies_ext._system.selector_loop import SelectorLoop

log = logging.getLogger(__name__)

#: Bytes that no message contains: a message is JSON in one line.
_GOODBYE = b"\0"
_ACK = b"\1"
_END_OF_MESSAGE = b"\n"
_CONNECT_TIMEOUT_S = 2.0
#: Size of the first message, which is sent at once: a proof of the token, and the rank.
_HELLO_NUM_BYTES = 128
#: Flow-control window in bytes: half of the space that a kernel has for unread data.
WINDOW_NUM_BYTES = 1 << 15
#: Bytes that are read from a link at once.
_RECEIVE_NUM_BYTES = 1 << 16
#: Number of open connections that have not sent the first message; every process that reaches the port can open them.
_MAX_UNAUTHENTICATED = 64
#: Seconds for which such a connection is kept in any case.
_UNAUTHENTICATED_S = 1.0
#: Errors of a connection whose process has exited; other errors mean that the host is unreachable.
_PROCESS_EXIT_ERRNOS = (errno.ECONNRESET, errno.EPIPE)

_all: "WeakSet[PeerLinks]" = WeakSet()


@dataclass
class _Link:
    """A connection to a rank.

    Attributes:
        received: Begin of a message that has not arrived completely.
        unacknowledged: Size of each message that the peer has not acknowledged, the oldest first.
    """

    socket: socket.socket
    rank: int
    received: bytes = b""
    unacknowledged: deque[int] = field(default_factory=deque)
    _unsent: bytes = b""

    def send(self, more: bytes = b"") -> None:
        """Sends bytes, and buffered bytes before them, as far as the kernel has space."""
        self._unsent += more
        if self._unsent:
            with suppress(OSError):
                self._unsent = self._unsent[self.socket.send(self._unsent) :]


class PeerLinks:
    """The links of one rank, for use by one thread.

    ``on_message`` receives a message with the rank of its sender, and returns whether the thread has to check at once.

    Attributes:
        port: Port at which this rank listens; None if it does not.
        with_keepalive: Linked ranks whose loss the kernel detects, by TCP keepalive.
        closed: Ranks that have sent a goodbye.
        disconnected: Ranks whose processes have exited without a goodbye.
        unreachable: Ranks whose hosts do not respond.
    """

    def __init__(self, loop: SelectorLoop, on_message: Callable[[int, bytes], bool]) -> None:
        self.port: int | None = None
        self.with_keepalive: set[int] = set()
        self.closed: set[int] = set()
        self.disconnected: set[int] = set()
        self.unreachable: set[int] = set()
        self._loop = loop
        self._on_message = on_message
        self._listener: socket.socket | None = None
        self._links: dict[int, _Link] = {}
        self._unauthenticated: dict[socket.socket, float] = {}  # and when each was accepted, the oldest first
        self._expected: dict[int, bytes] = {}
        _all.add(self)

    @property
    def ranks(self) -> set[int]:
        """Ranks that are linked with this rank."""
        return set(self._links)

    def listen(self, ranks: Collection[int], token: str, host: str) -> None:
        """Listens at an address of this host, if this process may: at all addresses if ``host`` is empty.

        The given ranks may connect, once each. They must prove that they know the token.
        """
        is_any = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if ":" in host or is_any else socket.AF_INET
        # Connections wait in the backlog while too many others are not authenticated.
        backlog = max(len(ranks) + _MAX_UNAUTHENTICATED, socket.SOMAXCONN)
        with suppress(OSError):
            self._listener = socket.create_server((host, 0), family=family, backlog=backlog, dualstack_ipv6=is_any)
            self._expected = {rank: _hello(token, rank) for rank in ranks}
            self._listener.setblocking(False)
            self._loop.add(self._listener, partial(self._accept, self._listener))
            self.port = self._listener.getsockname()[1]

    def connect(
        self, addresses: Sequence[str], port: int | None, rank: int, token: str, own_rank: int
    ) -> OSError | None:
        """Connects to a rank at one of its addresses; takes at most two seconds for each.

        Returns:
            The error if the connection failed, or if the rank does not listen because its port is None; else None.
        """
        failed = OSError("it accepts no connections")
        for address in addresses if port is not None else ():
            try:
                end = socket.create_connection((address, port), _CONNECT_TIMEOUT_S)
                end.sendall(_hello(token, own_rank))
                end.setblocking(False)
                self._register(end, rank)
            except OSError as error:
                failed = error
            else:
                return None
        return failed

    def send(self, message: bytes, *, is_urgent: bool = False) -> bool:
        """Sends a message of one line to all linked ranks; returns at once.

        Returns:
            Whether all received it: peers with a full window receive only urgent messages.
        """
        is_sent = True
        for link in self._links.values():
            num_bytes = sum(link.unacknowledged)
            if not is_urgent and num_bytes and num_bytes + len(message) > WINDOW_NUM_BYTES:
                is_sent = False
                continue
            link.unacknowledged.append(len(message))
            link.send(message + _END_OF_MESSAGE)
        return is_sent

    def flush(self) -> None:
        """Sends buffered bytes for which the kernel had no space before."""
        for link in self._links.values():
            link.send()

    def is_acknowledged(self, without: Collection[int] = ()) -> bool:
        """Whether all linked ranks, except some, have acknowledged all messages."""
        return not any(link.unacknowledged for rank, link in self._links.items() if rank not in without)

    def close(self) -> None:
        """Sends a goodbye and closes all links. The selector loop must not run any more."""
        self.flush()
        for link in self._links.values():
            with suppress(OSError):
                link.socket.send(_GOODBYE)
                while link.socket.recv(_RECEIVE_NUM_BYTES):  # with unread data, the kernel would send a reset
                    pass
        self.abort()

    def abort(self) -> None:
        """Closes all links without a goodbye."""
        for end in (*(link.socket for link in self._links.values()), *self._unauthenticated, self._listener):
            if end is not None:
                end.close()
        self._links, self._unauthenticated, self._listener = {}, {}, None

    def _register(self, end: socket.socket, rank: int) -> _Link:
        connections.exempt(end)  # an abort of collectives keeps the link
        self._links[rank] = link = _Link(end, rank)
        self._loop.add(end, partial(self._receive, link))
        if connections.enable_keepalive(end):
            self.with_keepalive.add(rank)
        return link

    def _accept(self, listener: socket.socket) -> bool:
        """Accepts a connection; closes the oldest unauthenticated one first if there are too many."""
        is_urgent = False
        if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED:
            oldest, accepted_at = next(iter(self._unauthenticated.items()))
            if (too_early_s := accepted_at + _UNAUTHENTICATED_S - time.monotonic()) > 0:
                self._loop.pause(listener, too_early_s)
                return False
            is_urgent = self._authenticate(oldest)  # its first message may have arrived just now
        with suppress(OSError):
            connected, _ = listener.accept()
            connected.setblocking(False)
            self._loop.add(connected, partial(self._authenticate, connected))
            self._unauthenticated[connected] = time.monotonic()
        return is_urgent

    def _authenticate(self, connected: socket.socket) -> bool:
        """Reads the first message of a connection, and closes the connection if the message proves nothing."""
        del self._unauthenticated[connected]
        self._loop.remove(connected)
        received = b""
        with suppress(OSError):
            received = connected.recv(_HELLO_NUM_BYTES)
        hello, end_of_message, more = received.partition(_END_OF_MESSAGE)
        number = hello.rpartition(b" ")[2]
        rank = int(number) if number.isdigit() else -1
        if rank in self._expected and hmac.compare_digest(hello + end_of_message, self._expected[rank]):
            del self._expected[rank]
            return self._handle_data(self._register(connected, rank), more)
        connected.close()
        return False

    def _receive(self, link: _Link) -> bool:
        try:
            received, ended_by = link.socket.recv(_RECEIVE_NUM_BYTES), None
        except BlockingIOError:
            return False
        except OSError as error:
            received, ended_by = b"", error.errno
        if received:
            return self._handle_data(link, received)
        (self.disconnected if ended_by in (None, *_PROCESS_EXIT_ERRNOS) else self.unreachable).add(link.rank)
        self._remove(link)
        return True

    def _handle_data(self, link: _Link, received: bytes) -> bool:
        is_urgent = False
        for _ in range(received.count(_ACK)):
            link.unacknowledged.popleft()
        has_left = received.endswith(_GOODBYE)
        text = link.received + received.replace(_ACK, b"").rstrip(_GOODBYE)
        *messages, link.received = text.split(_END_OF_MESSAGE)
        for message in messages:
            is_urgent |= self._on_message(link.rank, message)
        link.send(_ACK * len(messages))
        if has_left:
            self.closed.add(link.rank)
            self._remove(link)
        return is_urgent or has_left

    def _remove(self, link: _Link) -> None:
        del self._links[link.rank]
        self._loop.remove(link.socket)
        link.socket.close()


class CoordinatorEndpoint:
    """Address and credentials of the coordinator. Collective: all ranks create it together; the coordinator listens.

    The key in the store is for this object alone. The allowed ranks may connect, once each.

    Raises:
        RuntimeError: If the value in the store is not signed with the secret of this rank.
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
        self._secret = connections.job_secret()
        if rank == self._first:
            endpoint = self._listen(store, allowed_ranks)
            store.set(key, json.dumps([*endpoint, self._signature(json.dumps(endpoint), "")]))
        *endpoint, signature = json.loads(store.get(key))
        if not hmac.compare_digest(signature, self._signature(json.dumps(endpoint), "")):
            raise RuntimeError(
                f"Rank {rank} has a different secret than rank 0, or another process has written to the store. Set"
                f" {connections.SECRET} or {connections.SECRET_FILE} to the same value on all hosts, or on none."
            )
        self._token, self._addresses, self._port = endpoint

    def connect(self, *, may_have_exited: bool = False) -> None:
        """Connects to the coordinator; logs a warning if that fails, except a refusal if it ``may_have_exited``."""
        proof = self._signature(self._token, self._token)
        error = self._links.connect(self._addresses, self._port, self._first, proof, self._rank)
        if error is not None and not (may_have_exited and isinstance(error, ConnectionRefusedError)):
            log.warning(
                "rank %d cannot connect to rank 0 (%s) at %s, port %s: %s. Failures on one of the two hosts are"
                " detected on the other only when the backend reports them. Allow TCP connections between the hosts on"
                " all ports.",
                *(self._rank, self._peers[self._first].host_name, " or ".join(self._addresses), self._port, error),
            )

    def _listen(self, store: dist.Store, allowed_ranks: Collection[int]) -> tuple[str, list[str], int | None]:
        """Listens at the address of the store if that is on this host, else at all addresses.

        Returns the token, the addresses, and the port.
        """
        token = secrets.token_hex(16)
        address, all_addresses = None, self._peers[self._rank].addresses
        if (of_store := connections.store_address(store)) is not None:
            address = _local_address_towards(*of_store)
            is_one_machine = all(peer.addresses == all_addresses for peer in self._peers.values())
            if address is not None and is_loopback(address) and not is_one_machine:
                address = None
        self._links.listen(allowed_ranks, self._signature(token, token), address or "")
        return token, list(all_addresses) if address is None else [address], self._links.port

    def _signature(self, text: str, without_secret: str) -> str:
        """Returns a signature with the secret of the job, or ``without_secret`` if the job has none."""
        return hmac.digest(self._secret, text.encode(), "sha256").hex() if self._secret else without_secret


def _local_address_towards(towards: str, port: int) -> str | None:
    """Returns the local address of the route to a port of another host, or None. Nothing is sent."""
    with suppress(OSError):
        for family, kind, protocol, _, endpoint in socket.getaddrinfo(towards, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe, suppress(OSError):
                probe.connect(endpoint)
                return str(probe.getsockname()[0])
    return None


def _hello(token: str, rank: int) -> bytes:
    """Returns the first message of a rank: a proof that it knows the token, which does not reveal the token."""
    return f"{hmac.digest(token.encode(), b'%d' % rank, 'sha256').hex()} {rank}\n".encode()


def _close_inherited() -> None:
    # Otherwise a forked DataLoader worker would keep this process's links open.
    for links in _all:
        links.abort()


if hasattr(os, "register_at_fork"):  # Windows forks nothing
    os.register_at_fork(after_in_child=_close_inherited)
