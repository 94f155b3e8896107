"""Lines between hosts: connections that the kernel closes when a process at an end is gone, or a host out of reach.

The first rank of all listens; one of each other host calls it. Who ends in good order says so before.

A process that hears nothing for minutes, since it is stopped or its interpreter held, is still there, and its kernel
says so as long as it has room for what the other end says. So who has not heard what was said is told no more than
fits, but for what cannot wait.
"""

import errno
import hmac
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from weakref import WeakSet

from lightning_strategies_ext._system.connections import enable_keepalive, exempt
from lightning_strategies_ext._system.selector_loop import SelectorLoop

log = logging.getLogger(__name__)

#: In no words, which are text in a line.
_GOODBYE = b"\0"
_ACK = b"\1"
_END_OF_MESSAGE = b"\n"
_CALL_S = 2.0
#: What a caller sends, at once, is one line: a proof that it knows the token, and its rank.
_CALL_NUM_BYTES = 128
#: How much an end may be told before it has heard it, in bytes: what a kernel has room for, and half of it.
WINDOW_NUM_BYTES = 1 << 15
#: How many bytes are taken from a line at once.
_HEARD_NUM_BYTES = 1 << 16
#: Number of open connections that have not sent a call yet; every process that reaches the port can open connections.
_MAX_UNAUTHENTICATED = 64
#: For how long such a connection is kept in any case, in seconds.
_STRANGER_S = 1.0
#: How connections end that a process's end has closed; others have met no answer.
_PROCESS_EXIT_ERRNOS = (errno.ECONNRESET, errno.EPIPE)

_all: "WeakSet[PeerLinks]" = WeakSet()


class PeerLinks:
    """One rank's ends of them, for one thread; it may have none.

    Args:
        waiting: Of that thread.
        on_message: Takes what a rank at another end has said. Whether the thread is to look at once.

    Attributes:
        port: Where this rank listens; None if it does not.
        kept_alive: Ranks at the other ends whose loss the kernel notices.
        closed: Ranks at the other ends that have said goodbye.
        disconnected: Ranks at the other ends whose processes have ended without one.
        unreachable: Ranks at the other ends whose hosts do not answer any more.
    """

    def __init__(self, waiting: SelectorLoop, on_message: Callable[[int, bytes], bool]) -> None:
        self.port: int | None = None
        self.kept_alive: set[int] = set()
        self.closed: set[int] = set()
        self.disconnected: set[int] = set()
        self.unreachable: set[int] = set()
        self._waiting = waiting
        self._on_words = on_message
        self._listener: socket.socket | None = None
        self._peers_by_socket: dict[socket.socket, int] = {}
        self._received: dict[int, bytes] = {}
        self._unsent: dict[int, bytes] = {}
        self._unacknowledged: dict[int, deque[int]] = {}
        self._unauthenticated: dict[socket.socket, float] = {}  # and when each was accepted, the oldest first
        self._expected: dict[int, bytes] = {}
        _all.add(self)

    @property
    def ranks(self) -> set[int]:
        """Those with which there is a line."""
        return set(self._peers_by_socket.values())

    def listen(self, ranks: Collection[int], token: str, host: str) -> None:
        """Lets ranks call, if this process may listen.

        Args:
            ranks: Those that may, once each.
            token: What they have to know.
            host: Where they call: an address of this host, or nothing for each that it has.
        """
        is_any = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if ":" in host or is_any else socket.AF_INET
        # Connections wait there while too many others have not sent a call.
        backlog = max(len(ranks) + _MAX_UNAUTHENTICATED, socket.SOMAXCONN)
        with suppress(OSError):
            self._listener = socket.create_server((host, 0), family=family, backlog=backlog, dualstack_ipv6=is_any)
            self._expected = {rank: _hello(token, rank) for rank in ranks}
            self._listener.setblocking(False)
            self._waiting.add(self._listener, partial(self._accept, self._listener))
            self.port = self._listener.getsockname()[1]

    def connect(
        self, addresses: Sequence[str], port: int | None, rank: int, token: str, own_rank: int
    ) -> OSError | None:
        """Calls a rank, which takes two seconds at most for each address.

        Args:
            addresses: Where it may be reached.
            port: Where it listens; None if it does not.
            rank: Which it is.
            token: What this rank has to know.
            own_rank: Which this is.

        Returns:
            Why it cannot be reached; None if it is.
        """
        failed = OSError("it does not listen")
        for address in addresses if port is not None else ():
            try:
                end = socket.create_connection((address, port), _CALL_S)
                end.sendall(_hello(token, own_rank))
                end.setblocking(False)
                self._register(end, rank)
            except OSError as error:
                failed = error
            else:
                return None
        return failed

    def send(self, message: bytes, *, is_urgent: bool = False) -> bool:
        """Says something to the other ends; returns at once.

        Args:
            message: In one line.
            is_urgent: Whether also to who has not heard so much yet that there may be no room for it.

        Returns:
            Whether it was said to each.
        """
        is_said = True
        for end, rank in self._peers_by_socket.items():
            unheard = self._unacknowledged.setdefault(rank, deque())
            if not is_urgent and unheard and sum(unheard) + len(message) > WINDOW_NUM_BYTES:
                is_said = False
                continue
            unheard.append(len(message))
            self._send(end, message + _END_OF_MESSAGE)
        return is_said

    def flush(self) -> None:
        """Sends what there was no room for when it was said."""
        for end in self._peers_by_socket:
            self._send(end)

    def is_acknowledged(self, without: Collection[int] = ()) -> bool:
        """Whether all ends that are there, but for those of some ranks, have heard all that was said."""
        return not any(self._unacknowledged.get(rank) for rank in self.ranks.difference(without))

    def close(self) -> None:
        """Says that this process ends in good order, and closes all; nobody may wait any more."""
        self.flush()
        for end in self._peers_by_socket:
            with suppress(OSError):
                end.send(_GOODBYE)
                while end.recv(_HEARD_NUM_BYTES):  # what is left there would have the kernel take the goodbye back
                    pass
        self.abort()

    def abort(self) -> None:
        """Closes this process's ends without a word."""
        for end in (
            *self._peers_by_socket,
            *self._unauthenticated,
            *([self._listener] if self._listener is not None else []),
        ):
            end.close()
        self._peers_by_socket, self._unauthenticated, self._listener = {}, {}, None

    def _send(self, end: socket.socket, more: bytes = b"") -> None:
        rank = self._peers_by_socket[end]
        if rest := self._unsent.get(rank, b"") + more:
            self._unsent[rank] = rest
            with suppress(OSError):
                self._unsent[rank] = rest[end.send(rest) :]

    def _register(self, end: socket.socket, rank: int) -> None:
        exempt(end)  # who cuts its collectives off is still there
        self._waiting.add(end, partial(self._receive, end))
        self._peers_by_socket[end] = rank
        if enable_keepalive(end):
            self.kept_alive.add(rank)

    def _accept(self, listener: socket.socket) -> bool:
        """Accepts a connection; where there are too many without a call, an old one is closed first."""
        is_urgent = False
        if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED:
            oldest, accepted_at = next(iter(self._unauthenticated.items()))
            if (too_early_s := accepted_at + _STRANGER_S - time.monotonic()) > 0:
                self._waiting.pause(listener, too_early_s)
                return False
            is_urgent = self._authenticate(oldest)  # its call may have arrived just now
        with suppress(OSError):
            stranger, _ = listener.accept()
            stranger.setblocking(False)
            self._waiting.add(stranger, partial(self._authenticate, stranger))
            self._unauthenticated[stranger] = time.monotonic()
        return is_urgent

    def _authenticate(self, stranger: socket.socket) -> bool:
        """Reads the call of a connection, and closes the connection if there is none."""
        del self._unauthenticated[stranger]
        self._waiting.remove(stranger)
        said = b""
        with suppress(OSError):
            said = stranger.recv(_CALL_NUM_BYTES)
        call, is_whole, more = said.partition(_END_OF_MESSAGE)
        number = call.rpartition(b" ")[2]
        rank = int(number) if number.isdigit() else -1
        if rank in self._expected and hmac.compare_digest(call + is_whole, self._expected[rank]):
            del self._expected[rank]
            self._register(stranger, rank)
            return self._handle_data(stranger, more)
        stranger.close()
        return False

    def _receive(self, end: socket.socket) -> bool:
        try:
            received, ended_by = end.recv(_HEARD_NUM_BYTES), None
        except BlockingIOError:
            return False
        except OSError as error:
            received, ended_by = b"", error.errno
        if received:
            return self._handle_data(end, received)
        rank = self._peers_by_socket.pop(end)
        (self.disconnected if ended_by in (None, *_PROCESS_EXIT_ERRNOS) else self.unreachable).add(rank)
        self._close(end)
        return True

    def _handle_data(self, end: socket.socket, received: bytes) -> bool:
        rank, is_urgent = self._peers_by_socket[end], False
        for _ in range(received.count(_ACK)):
            self._unacknowledged[rank].popleft()
        has_left = received.endswith(_GOODBYE)
        received = self._received.get(rank, b"") + received.replace(_ACK, b"").rstrip(_GOODBYE)
        *whole, self._received[rank] = received.split(_END_OF_MESSAGE)
        for words in whole:
            is_urgent |= self._on_words(rank, words)
        self._send(end, _ACK * len(whole))
        if has_left:
            self.closed.add(rank)
            del self._peers_by_socket[end]
            self._close(end)
        return is_urgent or has_left

    def _close(self, end: socket.socket) -> None:
        self._waiting.remove(end)
        end.close()


def _hello(token: str, rank: int) -> bytes:
    """Returns the call of one rank, which shows that it knows the token, and does not show the token."""
    return f"{hmac.digest(token.encode(), b'%d' % rank, 'sha256').hex()} {rank}\n".encode()


def _close_inherited() -> None:
    # A forked worker of a loader would keep lines open that are this process's.
    for lines in _all:
        lines.abort()


if hasattr(os, "register_at_fork"):  # Windows forks nothing
    os.register_at_fork(after_in_child=_close_inherited)
