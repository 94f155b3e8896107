"""Rendezvous: the ranks of one host find each other, and exchange sockets and descriptors of segments.

Each rank listens on a Unix socket without a name in any file system, publishes its address in the group's store, and
connects to all lower ranks. Any user of the host can find such a socket, or bind its address after it is closed. Both
ends therefore check with the kernel that the other process belongs to the same user, and the connecting rank must send
a token from the store. A process that connects and sends nothing delays no rank.
"""

import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from torch.distributed import Store

from lightning_strategies_ext._system.peers import UNMAPPED_USER, host_identity, is_of_this_user, user_of
from lightning_strategies_ext.shm.links import Links, LocalPeer, PeerLostError, poll_until

_TOKEN_NUM_BYTES: Final = 16
_HELLO: Final = struct.Struct(f"<I{_TOKEN_NUM_BYTES}s")
#: Seconds until the next attempt to connect, if the queue of the listener is full of unknown connections.
_RETRY_INTERVAL_S: Final = 0.01
#: Maximum number of connections that are accepted before this rank serves others and checks the deadline.
_MAX_ACCEPTED: Final = 128


class Rendezvous:
    """Rendezvous of one rank during the creation of a process group.

    Args:
        rank: Rank of this process in the group.
        size: Number of ranks in the group.
        store: Store for this rendezvous alone.
    """

    def __init__(self, rank: int, size: int, store: Store) -> None:
        self._rank = rank
        self._size = size
        self._store = store
        self._token = secrets.token_bytes(_TOKEN_NUM_BYTES)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._address = f"lightning-strategies-ext-{secrets.token_hex(16)}"
        self._listener.bind("\0" + self._address)
        self._listener.listen(max(size, 128))

    def announce(self, info: dict[str, Any], deadline: float) -> list[dict[str, Any]]:
        """Publishes the address of this rank, and waits for those of all other ranks.

        Args:
            info: Further information to publish.
            deadline: Time on the monotonic clock, in seconds.

        Returns:
            Information from each rank, in rank order: ``host``, ``address``, ``token``, ``pid``, ``user``, and its
            ``info``.

        Raises:
            PermissionError: On all ranks, if ranks of one host belong to different users.
            TimeoutError: If a rank publishes nothing before the deadline. The message names such ranks.
        """
        own: dict[str, Any] = {"host": host_identity(), "address": self._address, "token": self._token.hex()}
        own |= {"pid": os.getpid(), "user": os.geteuid()}
        keys = [f"rank/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], json.dumps({**own, **info}))
        try:
            self._store.wait(keys, timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            missing = [f"rank {rank} of the group" for rank, key in enumerate(keys) if not self._store.check([key])]
            if not missing:
                raise
            raise _connection_timeout(missing) from error
        announced = [json.loads(self._store.get(key)) for key in keys]
        try:
            _check_users(announced)
        except PermissionError:
            self.await_readers(range(self._size))
            raise
        return announced

    def await_readers(self, ranks: Iterable[int]) -> None:
        """Waits until other ranks have read what all ranks announced, for at most ten seconds.

        A rank calls this before it raises an error that those ranks raise, too. Without it, the rank that serves the
        store could exit first, and the others would report a lost connection instead of the error.

        Args:
            ranks: Ranks that call this method.
        """
        with suppress(RuntimeError):  # no reply in time, or the server of the store has exited
            self._store.set(f"read/{self._rank}", "")
            self._store.wait([f"read/{rank}" for rank in ranks], timedelta(seconds=10))

    def connect(
        self, peers: Sequence[tuple[LocalPeer, dict[str, Any]]], own_fd: int, deadline: float
    ) -> tuple[Links, dict[LocalPeer, int]]:
        """Connects this rank with other ranks of its host, and exchanges one file descriptor with each.

        Args:
            peers: Other ranks of the host, each with the information that it has published.
            own_fd: Descriptor to send to each peer.
            deadline: Time on the monotonic clock, in seconds.

        Returns:
            The links, and the descriptor received from each peer.

        Raises:
            PeerLostError: If a peer has exited.
            TimeoutError: If a peer does not connect before the deadline. The message names such ranks.
        """
        connections = _PeerConnections(self._listener, self._rank, self._token, peers, own_fd)
        try:
            connections.connect_all(deadline)
        except BaseException:
            connections.close_all()
            raise
        finally:
            connections.drop_unauthenticated()
        return Links(connections.sockets), connections.fds

    def close(self) -> None:
        """Closes the listener."""
        self._listener.close()


class _PeerConnections:
    """Connections of one rank: to peers of lower rank, and from peers of higher rank.

    Attributes:
        sockets: Socket of each connected peer.
        fds: Descriptor received from each peer.
    """

    def __init__(
        self,
        listener: socket.socket,
        rank: int,
        token: bytes,
        peers: Sequence[tuple[LocalPeer, dict[str, Any]]],
        own_fd: int,
    ) -> None:
        self.sockets: dict[LocalPeer, socket.socket] = {}
        self.fds: dict[LocalPeer, int] = {}
        self._listener = listener
        self._rank = rank
        self._token = token
        self._own_fd = own_fd
        self._to_connect = {peer: info for peer, info in peers if peer.rank < rank}
        self._expected = {peer.rank: peer for peer, _ in peers if peer.rank > rank}
        self._all = [peer for peer, _ in peers]
        self._connected: dict[int, LocalPeer] = {}
        self._accepted: dict[int, socket.socket] = {}
        self._poller = select.poll()

    def connect_all(self, deadline: float) -> None:
        """Connects to all peers; returns when each has sent its descriptor."""
        self._poller.register(self._listener, select.POLLIN)
        while missing := [peer for peer in self._all if peer not in self.fds]:
            for peer in list(self._to_connect):
                self._connect(peer)
            until = min(deadline, time.monotonic() + _RETRY_INTERVAL_S) if self._to_connect else deadline
            events = poll_until(self._poller, until)
            for fd, _ in events:
                if fd == self._listener.fileno():
                    self._accept()
                elif fd in self._accepted:
                    self._authenticate(fd)
                else:
                    self._receive_reply(fd)
            if time.monotonic() >= deadline and (missing := [peer for peer in missing if peer not in self.fds]):
                raise _connection_timeout(map(str, missing))

    def close_all(self) -> None:
        """Closes all sockets and received descriptors."""
        for link in self.sockets.values():
            link.close()
        for fd in self.fds.values():
            os.close(fd)

    def drop_unauthenticated(self) -> None:
        """Closes connections that have not sent the token and therefore belong to no peer."""
        for link in self._accepted.values():
            link.close()

    def _connect(self, peer: LocalPeer) -> None:
        info = self._to_connect[peer]
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.setblocking(False)
        try:
            link.connect("\0" + info["address"])
            if not is_of_this_user(link):
                user = user_of(link)
                link.close()
                problem = f"has ended, and a process of user {user} uses the address of its socket"
                if user == UNMAPPED_USER:
                    problem += f", or the user namespace of this process has no id for the user of {peer}"
                raise PeerLostError(f"the process group was not created: {peer} {problem}", peer)
            socket.send_fds(link, [_HELLO.pack(self._rank, bytes.fromhex(info["token"]))], [self._own_fd])
        except BlockingIOError:
            link.close()
            return
        except ConnectionError:
            link.close()
            problem = "accepts no connections: it has ended, or has reached its timeout"
            raise PeerLostError(f"the process group was not created: {peer} {problem}", peer) from None
        del self._to_connect[peer]
        self.sockets[peer] = link
        self._connected[link.fileno()] = peer
        self._poller.register(link, select.POLLIN)

    def _receive_reply(self, fd: int) -> None:
        peer = self._connected.pop(fd)
        self._poller.unregister(fd)
        try:
            received = socket.recv_fds(self.sockets[peer], 16, 1)[1]
        except ConnectionError:
            received = []
        if not received:
            raise PeerLostError(f"the process group was not created: {peer} has left", peer)
        self.fds[peer] = received[0]

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTED):
            try:
                link, _ = self._listener.accept()
            except BlockingIOError:
                return
            if not is_of_this_user(link):
                link.close()
                continue
            link.setblocking(False)
            self._accepted[link.fileno()] = link
            self._poller.register(link, select.POLLIN)

    def _authenticate(self, fd: int) -> None:
        """Reads the token from a connection, and closes the connection if the token is wrong."""
        link = self._accepted.pop(fd)
        self._poller.unregister(fd)
        try:
            hello, received, _, _ = socket.recv_fds(link, _HELLO.size, 1)
        except OSError:
            hello, received = b"", []
        rank, token = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (-1, b"")
        is_peer = secrets.compare_digest(token, self._token) and rank in self._expected and len(received) == 1
        if not is_peer:
            link.close()
            for other in received:
                os.close(other)
            return
        peer = self._expected.pop(rank)
        self.sockets[peer], self.fds[peer] = link, received[0]
        try:
            socket.send_fds(link, [b"welcome"], [self._own_fd])
        except ConnectionError:
            raise PeerLostError(f"the process group was not created: {peer} has left", peer) from None


def _check_users(announced: Sequence[dict[str, Any]]) -> None:
    """Raises PermissionError, on all ranks, if ranks of a host belong to different users."""
    first_ranks: dict[str, int] = {}
    for rank, info in enumerate(announced):
        first = first_ranks.setdefault(info["host"], rank)
        if info["user"] != announced[first]["user"]:
            raise PermissionError(
                f"`shm`: rank {first} of the group runs as user {announced[first]['user']}, but rank {rank} as user"
                f" {info['user']}. Ranks of different users cannot share memory. Start all ranks of a host as one user,"
                " or use `process_group_backend='gloo'`."
            )


def _connection_timeout(missing: Iterable[str]) -> TimeoutError:
    return TimeoutError(f"the process group was not created: {', '.join(missing)} did not connect before the timeout")
