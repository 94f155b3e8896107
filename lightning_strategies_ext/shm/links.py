"""Links: what carries signals and small messages between the ranks of one host.

Every two ranks hold the ends of a Unix socket that keeps messages apart (``SOCK_SEQPACKET``). It was chosen over flags
in shared memory, which are faster, for what the kernel promises about it on every processor: who has received a message
sees all that the sender wrote before, in shared memory too; who waits sleeps, and is woken; and when a process ends,
however it does, its peers are told at once.

What it does not promise: that a peer which is stopped, and not dead, is noticed before the timeout.
"""

import json
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch.distributed import DistBackendError, Store

#: Kind of message, which collective, number of the round, number of bytes of the whole operation.
HEADER: Final = struct.Struct("<BxHIQ")
#: Most bytes that travel in the message itself.
INLINE_NUM_BYTES: Final = 16 * 1024
MESSAGE_NUM_BYTES: Final = HEADER.size + INLINE_NUM_BYTES
#: Kinds of messages: of a round, the last words of a rank that leaves, for good reasons or for bad ones, and one that
#: only wakes a rank, which sees in shared memory what for.
ROUND, LEFT, BROKEN, WAKE = range(4)
_TOKEN_NUM_BYTES = 16
#: A rank says who it is as soon as it has connected. Who says nothing for so long, in seconds, is none.
_HELLO_S = 5.0


class PeerLostError(DistBackendError):
    """Raised where a rank waits for one that has ended, has left the group, or has met an error."""


@dataclass(frozen=True)
class Peer:
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


class Links:
    """The links of one rank to its peers.

    Args:
        sockets: One connected socket per peer.
    """

    def __init__(self, sockets: dict[Peer, socket.socket]) -> None:
        self._sockets = sockets
        self._by_fd = {link.fileno(): peer for peer, link in sockets.items()}
        self._early: dict[Peer, deque[bytes]] = {peer: deque() for peer in sockets}
        self._gone: set[Peer] = set()
        _open.add(self)

    def send(self, peer: Peer, parts: Sequence[bytes | memoryview], deadline: float) -> None:
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
                if not poller.poll(_ms_until(deadline)):
                    raise TimeoutError(f"{peer} does not take what is sent to it") from None
            except (BrokenPipeError, ConnectionError):
                self._read_early(peer)
                if self._early[peer]:
                    return  # it has said all it had to, and left: the receiving side will tell
                raise self._lost(peer) from None

    def receive(self, peer: Peer, into: memoryview) -> int:
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
        if num_bytes > 0 and into[0] == LEFT:
            raise PeerLostError(f"{peer} has left the process group, and this rank waits for it")
        if num_bytes > 0 and into[0] == BROKEN:
            raise PeerLostError(f"{peer} has failed: {bytes(into[HEADER.size : num_bytes]).decode(errors='replace')}")
        return max(num_bytes, 0)

    def has_message(self, peer: Peer) -> bool:
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

    def fileno(self, peer: Peer) -> int:
        """The descriptor of the socket to a peer."""
        return self._sockets[peer].fileno()

    def wait(self, awaited: Sequence[Peer], deadline: float) -> None:
        """Sleeps until the first of some peers has sent something, or one of them is gone.

        Args:
            awaited: The peers whose message is missing.
            deadline: On the monotonic clock, in seconds.

        Raises:
            PeerLostError: If one that is awaited is gone.
            TimeoutError: If nothing came before the deadline.
        """
        first, *others = awaited
        if self._early[first]:
            return
        poller = select.poll()
        for peer in awaited:
            if peer in self._gone and not self._early[peer]:
                raise self._lost(peer)
        poller.register(self._sockets[first], select.POLLIN | select.POLLRDHUP)
        for peer in others:
            # Their messages are read when it is their turn; that they are gone must be known at once.
            if peer not in self._gone:
                poller.register(self._sockets[peer], select.POLLRDHUP)
        events = poller.poll(_ms_until(deadline))
        if not events:
            names = ", ".join(str(peer) for peer in awaited)
            raise TimeoutError(f"{names}: nothing has come")
        for fd, event in events:
            peer = self._by_fd[fd]
            if event & ~select.POLLIN:
                self._read_early(peer)
                if not self._early[peer]:
                    raise self._lost(peer)

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

    def _read_early(self, peer: Peer) -> None:
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

    def _take(self, peer: Peer, into: memoryview) -> int:
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

    def _lost(self, peer: Peer) -> PeerLostError:
        return PeerLostError(f"{peer} has ended, and this rank waits for it")


_open: "weakref.WeakSet[Links]" = weakref.WeakSet()


def _close_all() -> None:
    for links in _open:
        links.close()


# Else the workers of a rank's DataLoader would hold its links open when the rank has died.
os.register_at_fork(after_in_child=_close_all)


class Meeting:
    """How the ranks of one host find each other: a socket without a name in any file system, told through the store.

    Args:
        rank: Of this process, in the group.
        size: Number of ranks in the group.
        store: The group's own.
    """

    def __init__(self, rank: int, size: int, store: Store) -> None:
        self._rank = rank
        self._size = size
        self._store = store
        # Any user of this host can find the socket; only ranks of the group know the token.
        self._token = secrets.token_bytes(_TOKEN_NUM_BYTES)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._address = f"lightning-strategies-ext-{secrets.token_hex(16)}"
        self._listener.bind("\0" + self._address)
        self._listener.listen(max(size, 8))

    def announce(self, words: dict[str, Any]) -> list[dict[str, Any]]:
        """Tells all ranks of the group where this one is.

        Args:
            words: What else it has to say.

        Returns:
            What each rank has said, in rank order: ``host``, ``address``, ``token``, ``pid`` and its words.
        """
        place = {
            "host": host_identity(),
            "address": self._address,
            "token": self._token.hex(),
            "pid": os.getpid(),
        }
        self._store.set(f"rank/{self._rank}", json.dumps({**place, **words}))
        return [json.loads(self._store.get(f"rank/{rank}")) for rank in range(self._size)]

    def connect(
        self, peers: Sequence[tuple[Peer, dict[str, Any]]], own_fd: int, deadline: float
    ) -> tuple[Links, dict[Peer, int]]:
        """Connects this rank with others of its host, and exchanges one file descriptor with each.

        Args:
            peers: The others, with what they have said.
            own_fd: Given to each.
            deadline: On the monotonic clock, in seconds.

        Returns:
            The links, and the descriptor that each peer gave.

        Raises:
            TimeoutError: If a peer does not come.
        """
        sockets: dict[Peer, socket.socket] = {}
        fds: dict[Peer, int] = {}
        try:
            for peer, said in peers:
                if peer.rank < self._rank:
                    sockets[peer] = link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    link.connect("\0" + said["address"])
                    socket.send_fds(link, [struct.pack("<I", self._rank) + bytes.fromhex(said["token"])], [own_fd])
            self._accept([peer for peer, _ in peers if peer.rank > self._rank], own_fd, deadline, sockets, fds)
            for peer in sockets.keys() - fds.keys():
                sockets[peer].settimeout(max(deadline - time.monotonic(), 0.001))
                received = socket.recv_fds(sockets[peer], 16, 1)[1]
                if not received:
                    raise PeerLostError(f"{peer} has ended before the process group was made")
                fds[peer] = received[0]
        except BaseException:
            for link in sockets.values():
                link.close()
            for fd in fds.values():
                os.close(fd)
            raise
        for link in sockets.values():
            link.settimeout(None)
        return Links(sockets), fds

    def _accept(
        self,
        expected: Sequence[Peer],
        own_fd: int,
        deadline: float,
        sockets: dict[Peer, socket.socket],
        fds: dict[Peer, int],
    ) -> None:
        by_rank = {peer.rank: peer for peer in expected}
        while by_rank:
            self._listener.settimeout(max(deadline - time.monotonic(), 0.001))
            link, _ = self._listener.accept()
            link.settimeout(_HELLO_S)
            try:
                hello, received, _, _ = socket.recv_fds(link, 4 + _TOKEN_NUM_BYTES, 1)
            except TimeoutError:
                hello, received = b"", []
            if hello[4:] != self._token or len(received) != 1:  # a stranger
                link.close()
                for fd in received:
                    os.close(fd)
                continue
            peer = by_rank.pop(struct.unpack("<I", hello[:4])[0])
            sockets[peer], fds[peer] = link, received[0]
            socket.send_fds(link, [b"welcome"], [own_fd])

    def close(self) -> None:
        """Takes no more calls."""
        self._listener.close()


def host_identity() -> str:
    """Tells apart hosts, and on one host what cannot reach each other's sockets: network namespaces."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    network = Path("/proc/self/ns/net")
    try:
        return f"{boot.read_text().strip()}/{network.readlink()}"
    except OSError:
        return socket.gethostname()


def _ms_until(deadline: float) -> float:
    return max(0.0, (deadline - time.monotonic()) * 1e3)
