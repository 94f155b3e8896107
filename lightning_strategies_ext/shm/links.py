"""Links: signals and small messages between the ranks of one host.

Each pair of ranks is connected by a Unix socket that preserves message boundaries (``SOCK_SEQPACKET``). The counters in
shared memory of the native library are faster, but require atomic operations. For sockets the kernel guarantees, on
every processor:

- A rank that has received a message sees everything that the sender wrote before, also in shared memory.
- A rank that waits sleeps, and is woken.
- When a process exits, in any way, its peers are notified at once.

Limitations: A peer that is stopped, but has not exited, is detected only by the timeout.
"""

import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from torch.distributed import DistBackendError

#: Kind of the message, round number, operation number, size of the whole operation in bytes, identity, checksum of the
#: tensors. Data of any dtype follows, so that the size is a multiple of 16 bytes, the largest item.
HEADER: Final = struct.Struct("<BxHIQQI4x")
#: Maximum number of bytes that are sent in the message itself.
INLINE_NUM_BYTES: Final = 16 * 1024
MESSAGE_NUM_BYTES: Final = HEADER.size + INLINE_NUM_BYTES
#: Kinds of messages: data of a round; the last message of a rank that leaves, normally or after an error; a message
#: that only wakes a rank, because the data is in shared memory; and the text of a rank that has found a mismatch.
ROUND, LEFT, BROKEN, WAKE, MISMATCH = range(5)
#: Maximum number of bytes of a text in a message.
_TEXT_NUM_BYTES: Final = 4000
_HEADERS: Final = {kind: HEADER.pack(kind, 0, 0, 0, 0, 0) for kind in (LEFT, BROKEN, MISMATCH)}
_SEND_FLAGS: Final = getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_NOSIGNAL", 0)  # 0 on Windows
#: poll(2) takes milliseconds as an int, which overflows after 24 days.
_LONGEST_POLL_S: Final = 86_400.0


@dataclass(frozen=True)
class LocalPeer:
    """Another rank of this host.

    Attributes:
        rank: Rank in the group.
        global_rank: Rank in the default group, for messages to the user.
        pid: ID of the process.
    """

    rank: int
    global_rank: int
    pid: int

    def __str__(self) -> str:
        return f"rank {self.global_rank} (pid {self.pid})"


class PeerLostError(DistBackendError):
    """Raised when a rank waits for a peer that has exited, left the group, or failed.

    Attributes:
        peer: The peer, or None.
    """

    def __init__(self, message: str, peer: LocalPeer | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class MismatchFoundError(PeerLostError):
    """Raised when a peer has found that the ranks are in different operations. The message is the peer's operation."""


class Links:
    """Links of one rank to its peers.

    Args:
        sockets: Connected socket of each peer.
    """

    def __init__(self, sockets: dict[LocalPeer, socket.socket]) -> None:
        self._sockets = sockets
        self._by_fd = {link.fileno(): peer for peer, link in sockets.items()}
        # Messages that were received during another wait, and peers whose sockets have no further messages.
        self._unread: dict[LocalPeer, deque[bytes]] = {peer: deque() for peer in sockets}
        self._closed: set[LocalPeer] = set()
        _open.add(self)

    def send(self, peer: LocalPeer, parts: Sequence[bytes | memoryview], deadline: float) -> None:
        """Sends one message.

        Raises:
            PeerLostError: If the peer has exited or left the group.
            TimeoutError: If the peer has not received earlier messages before the deadline.
        """
        link = self._sockets[peer]
        while True:
            try:
                link.sendmsg(parts, (), _SEND_FLAGS)
                return
            except BlockingIOError:
                poller = select.poll()
                poller.register(link, select.POLLOUT)
                if not poll_until(poller, deadline):
                    raise TimeoutError(f"{peer} has received no data") from None
            except (BrokenPipeError, ConnectionError):
                self._store_unread(peer)
                if self._unread[peer]:
                    return  # the peer had sent its messages before it left; `receive` raises later
                raise self._lost(peer) from None

    def receive(self, peer: LocalPeer, into: memoryview) -> int:
        """Receives the next message of a peer, if one has arrived.

        Returns:
            Size of the message in bytes; 0 if none has arrived.

        Raises:
            PeerLostError: If the peer has exited, left the group, or failed.
        """
        unread = self._unread[peer]
        if unread:
            message = unread.popleft()
            num_bytes = len(message)
            into[:num_bytes] = message
        elif peer in self._closed:
            raise self._lost(peer)
        else:
            num_bytes = self._receive_if_arrived(peer, into)
            while num_bytes > 0 and into[0] == WAKE:
                num_bytes = self._receive_if_arrived(peer, into)
        if num_bytes == 0:
            self._closed.add(peer)
            raise self._lost(peer)
        if num_bytes > 0:
            self._raise_if_last(peer, into[:num_bytes])
        return max(num_bytes, 0)

    def has_message(self, peer: LocalPeer) -> bool:
        """Returns whether :meth:`receive` would return a message or raise; discards messages of kind WAKE."""
        link = self._sockets[peer]
        while not self._unread[peer] and peer not in self._closed:
            try:
                if link.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) != bytes([WAKE]):
                    return True
                link.recv(1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                return True
        return True

    def fileno(self, peer: LocalPeer) -> int:
        """Returns the descriptor of the socket to a peer."""
        return self._sockets[peer].fileno()

    def wait(self, awaited: Sequence[LocalPeer], deadline: float) -> None:
        """Sleeps until the first awaited peer has sent a message, or any of them has exited or left the group.

        Args:
            awaited: Peers whose message is missing.
            deadline: Time on the monotonic clock, in seconds.

        Raises:
            PeerLostError: If an awaited peer has exited or left the group.
            TimeoutError: If no message has arrived before the deadline.
        """
        first, *others = awaited
        for peer in awaited:
            self._check_is_connected(peer)
        if self._unread[first]:
            return
        poller = select.poll()
        poller.register(self._sockets[first], select.POLLIN | select.POLLRDHUP)
        for peer in others:
            # Messages of these peers are read later, but their exit must be detected at once.
            if peer not in self._closed:
                poller.register(self._sockets[peer], select.POLLRDHUP)
        events = poll_until(poller, deadline)
        if not events:
            names = ", ".join(str(peer) for peer in awaited)
            raise TimeoutError(f"no data arrived from {names}")
        for fd, event in events:
            if event & ~select.POLLIN:
                peer = self._by_fd[fd]
                self._store_unread(peer)
                self._check_is_connected(peer)

    def report_mismatch(self, text: str) -> None:
        """Sends the peers, as far as they can receive it, a text that describes the operation of this rank."""
        for link in self._sockets.values():
            with suppress(OSError):
                link.sendmsg([_HEADERS[MISMATCH], text.encode()[:_TEXT_NUM_BYTES]], (), _SEND_FLAGS)

    def shut_down(self, kind: int, reason: str = "") -> None:
        """Disconnects from the peers: sends each a last message and shuts down the links. Repeated calls are no-ops."""
        for link in self._sockets.values():
            with suppress(OSError):
                link.sendmsg([_HEADERS[kind], reason.encode()[:_TEXT_NUM_BYTES]], (), _SEND_FLAGS)
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        self._closed.update(self._sockets)

    def close(self) -> None:
        """Closes the sockets. In a forked child, the parent's links stay connected."""
        for link in self._sockets.values():
            link.close()
        self._closed.update(self._sockets)

    def _check_is_connected(self, peer: LocalPeer) -> None:
        """Raises PeerLostError if the peer has exited or left the group without another message."""
        unread = self._unread[peer]
        if unread:
            self._raise_if_last(peer, unread[0])
        elif peer in self._closed:
            raise self._lost(peer)

    def _raise_if_last(self, peer: LocalPeer, message: bytes | memoryview) -> None:
        """Raises PeerLostError if a message ends the group."""
        if message[0] == LEFT:
            raise PeerLostError(f"{peer} has left the process group while this rank waits for it", peer)
        if message[0] in (BROKEN, MISMATCH):
            text = bytes(message[HEADER.size :]).decode(errors="replace")
            if message[0] == MISMATCH:
                raise MismatchFoundError(text, peer)
            raise PeerLostError(f"{peer} has failed: {text}", peer)

    def _store_unread(self, peer: LocalPeer) -> None:
        """Reads and stores the messages that a peer has sent before it exited or left the group."""
        while peer not in self._closed:
            into = bytearray(MESSAGE_NUM_BYTES)
            num_bytes = self._receive_if_arrived(peer, memoryview(into))
            if num_bytes < 0:
                return
            if not num_bytes:
                self._closed.add(peer)
            elif into[0] != WAKE:
                self._unread[peer].append(bytes(into[:num_bytes]))

    def _receive_if_arrived(self, peer: LocalPeer, into: memoryview) -> int:
        """Reads one message. Returns its size in bytes, 0 at the end of the stream, -1 if none has arrived."""
        for _ in range(2):
            try:
                return self._sockets[peer].recv_into(into, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return -1
            except ConnectionResetError:
                # Raised once if the peer left with unread messages; its own messages can be read afterwards.
                continue
            except OSError:
                return 0
        return 0

    def _lost(self, peer: LocalPeer) -> PeerLostError:
        return PeerLostError(f"{peer} has ended while this rank waits for it", peer)


_open: "weakref.WeakSet[Links]" = weakref.WeakSet()


def _close_all() -> None:
    for links in _open:
        links.close()


# Otherwise DataLoader workers would keep a rank's links open after the rank has exited.
if hasattr(os, "register_at_fork"):  # Windows forks nothing
    os.register_at_fork(after_in_child=_close_all)


def poll_until(poller: "select.poll", deadline: float) -> list[tuple[int, int]]:
    """Returns the events that occur before a deadline, on the monotonic clock in seconds; empty if none occurs."""
    while True:
        remaining_s = max(0.0, deadline - time.monotonic())
        events = poller.poll(min(remaining_s, _LONGEST_POLL_S) * 1e3)
        if events or remaining_s <= _LONGEST_POLL_S:
            return events
