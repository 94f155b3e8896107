"""Links: what carries signals and small messages between the ranks of one host.

Every two ranks hold the ends of a Unix socket that keeps messages apart (``SOCK_SEQPACKET``). It was chosen over flags
in shared memory, which are faster, for what the kernel promises about it on every processor: who has received a message
sees all that the sender wrote before, in shared memory too; who waits sleeps, and is woken; and when a process ends,
however it does, its peers are told at once.

What it does not promise: that a peer which is stopped, and not dead, is noticed before the timeout.
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

#: Kind of message, number of the round, which collective, number of bytes of the whole operation.
HEADER: Final = struct.Struct("<BxHIQ")
#: Most bytes that travel in the message itself.
INLINE_NUM_BYTES: Final = 16 * 1024
MESSAGE_NUM_BYTES: Final = HEADER.size + INLINE_NUM_BYTES
#: Kinds of messages: of a round, the last words of a rank that leaves, for good reasons or for bad ones, and one that
#: only wakes a rank, which sees in shared memory what for.
ROUND, LEFT, BROKEN, WAKE = range(4)
#: The system's poll counts milliseconds in an int, which ends after 24 days.
_LONGEST_POLL_S: Final = 86_400.0


@dataclass(frozen=True)
class LinkedRank:
    """Another rank of this host.

    Attributes:
        rank: In the group.
        global_rank: In the default group, as the user knows it.
        pid: Of its process.
    """

    rank: int
    global_rank: int
    pid: int

    def __str__(self) -> str:
        return f"rank {self.global_rank} (pid {self.pid})"


class PeerLostError(DistBackendError):
    """Raised where a rank waits for one that has ended, has left the group, or has met an error.

    Attributes:
        peer: Which.
    """

    def __init__(self, message: str, peer: LinkedRank | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class Links:
    """The links of one rank to its peers.

    Args:
        sockets: One connected socket per peer.
    """

    def __init__(self, sockets: dict[LinkedRank, socket.socket]) -> None:
        self._sockets = sockets
        self._by_fd = {link.fileno(): peer for peer, link in sockets.items()}
        self._early: dict[LinkedRank, deque[bytes]] = {peer: deque() for peer in sockets}
        self._gone: set[LinkedRank] = set()
        _open.add(self)

    def send(self, peer: LinkedRank, parts: Sequence[bytes | memoryview], deadline: float) -> None:
        """Sends one message.

        Raises:
            PeerLostError: If the peer is gone.
            TimeoutError: If it has not taken what was sent before, up to the deadline.
        """
        link = self._sockets[peer]
        while True:
            try:
                link.sendmsg(parts, (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                poller = select.poll()
                poller.register(link, select.POLLOUT)
                if not polled(poller, deadline):
                    raise TimeoutError(f"{peer} has taken nothing") from None
            except (BrokenPipeError, ConnectionError):
                self._read_early(peer)
                if self._early[peer]:
                    return  # it has said all it had to, and left: the receiving side will tell
                raise self._lost(peer) from None

    def receive(self, peer: LinkedRank, into: memoryview) -> int:
        """Takes the next message of a peer, if there is one.

        Returns:
            Its number of bytes; 0 if there is none yet.

        Raises:
            PeerLostError: If the peer is gone, or says that it has left or failed.
        """
        early = self._early[peer]
        if early:
            message = early.popleft()
            num_bytes = len(message)
            into[:num_bytes] = message
        elif peer in self._gone:
            raise self._lost(peer)
        else:
            num_bytes = self._take(peer, into)
            while num_bytes > 0 and into[0] == WAKE:
                num_bytes = self._take(peer, into)
        if num_bytes == 0:
            self._gone.add(peer)
            raise self._lost(peer)
        if num_bytes > 0:
            self._check_goes_on(peer, into[:num_bytes])
        return max(num_bytes, 0)

    def has_message(self, peer: LinkedRank) -> bool:
        """Whether there is something to :meth:`receive`, or the peer is gone; forgets what has only woken this rank."""
        link = self._sockets[peer]
        while not self._early[peer] and peer not in self._gone:
            try:
                if link.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) != bytes([WAKE]):
                    return True
                link.recv(1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                return True
        return True

    def fileno(self, peer: LinkedRank) -> int:
        """The descriptor of the socket to a peer."""
        return self._sockets[peer].fileno()

    def wait(self, awaited: Sequence[LinkedRank], deadline: float) -> None:
        """Sleeps until the first of some peers has sent something, or one of them is gone.

        Args:
            awaited: The peers whose message is missing.
            deadline: On the monotonic clock, in seconds.

        Raises:
            PeerLostError: If one that is awaited is gone.
            TimeoutError: If nothing came before the deadline.
        """
        first, *others = awaited
        for peer in awaited:
            self._check_may_come(peer)
        if self._early[first]:
            return
        poller = select.poll()
        poller.register(self._sockets[first], select.POLLIN | select.POLLRDHUP)
        for peer in others:
            # Their messages are read when it is their turn; that they are gone must be known at once.
            if peer not in self._gone:
                poller.register(self._sockets[peer], select.POLLRDHUP)
        events = polled(poller, deadline)
        if not events:
            names = ", ".join(str(peer) for peer in awaited)
            raise TimeoutError(f"nothing has come from {names}")
        for fd, event in events:
            if event & ~select.POLLIN:
                peer = self._by_fd[fd]
                self._read_early(peer)
                self._check_may_come(peer)

    def shut(self, kind: int, reason: str = "") -> None:
        """Leaves the peers, with a last word to each. A second call does nothing."""
        for link in self._sockets.values():
            with suppress(OSError):
                link.sendmsg([HEADER.pack(kind, 0, 0, 0), reason.encode()[:4000]], (), socket.MSG_DONTWAIT)
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        self._gone.update(self._sockets)

    def close(self) -> None:
        """Closes the sockets; also for a child that was forked, whose parent goes on to use its own."""
        for link in self._sockets.values():
            link.close()
        self._gone.update(self._sockets)

    def _check_may_come(self, peer: LinkedRank) -> None:
        """Refuses to wait for what a peer that is gone has not sent."""
        early = self._early[peer]
        if early:
            self._check_goes_on(peer, early[0])
        elif peer in self._gone:
            raise self._lost(peer)

    def _check_goes_on(self, peer: LinkedRank, message: bytes | memoryview) -> None:
        if message[0] == LEFT:
            raise PeerLostError(f"{peer} has left the process group, and this rank waits for it", peer)
        if message[0] == BROKEN:
            said = bytes(message[HEADER.size :]).decode(errors="replace")
            raise PeerLostError(f"{peer} has failed: {said}", peer)

    def _read_early(self, peer: LinkedRank) -> None:
        """Keeps what a peer that is gone had sent before."""
        while peer not in self._gone:
            into = bytearray(MESSAGE_NUM_BYTES)
            num_bytes = self._take(peer, memoryview(into))
            if num_bytes < 0:
                return
            if not num_bytes:
                self._gone.add(peer)
            elif into[0] != WAKE:
                self._early[peer].append(bytes(into[:num_bytes]))

    def _take(self, peer: LinkedRank, into: memoryview) -> int:
        """Reads one message: its number of bytes, 0 at the end, -1 if there is none yet."""
        for _ in range(2):
            try:
                return self._sockets[peer].recv_into(into, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return -1
            except ConnectionResetError:
                # Said once by a peer that left with messages unread; what it has sent before comes after that.
                continue
            except OSError:
                return 0
        return 0

    def _lost(self, peer: LinkedRank) -> PeerLostError:
        return PeerLostError(f"{peer} has ended, and this rank waits for it", peer)


_open: "weakref.WeakSet[Links]" = weakref.WeakSet()


def _close_all() -> None:
    for links in _open:
        links.close()


# Else the workers of a rank's DataLoader would hold its links open when the rank has died.
if hasattr(os, "register_at_fork"):  # Windows forks nothing
    os.register_at_fork(after_in_child=_close_all)


def polled(poller: "select.poll", deadline: float) -> list[tuple[int, int]]:
    """The events that come before a deadline, on the monotonic clock in seconds; none if none does."""
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        events = poller.poll(min(left_s, _LONGEST_POLL_S) * 1e3)
        if events or left_s <= _LONGEST_POLL_S:
            return events
