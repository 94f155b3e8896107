"""Lines between hosts: connections that the kernel closes when a process at an end is gone, or a host out of reach.

The first rank of all listens; the first of each other host calls it. Who ends in good order says so before.

A process that hears nothing for minutes, since it is stopped or its interpreter held, is still there, and its kernel
says so as long as it has room for what the other end says. So nothing more is said, but for what is said once, to who
has not heard the last.
"""

import errno
import hmac
import os
import socket
from contextlib import suppress
from functools import partial
from typing import NamedTuple
from weakref import WeakSet

from lightning_strategies_ext.connections import spare
from lightning_strategies_ext.failure.waiting import Waiting

#: In no words, which are text in a line.
_GOODBYE = b"\0"
_HEARD = b"\1"
_END_OF_WORDS = b"\n"
_CALL_S = 2.0
#: A host that has not answered for so long, in seconds, is lost; when nothing is said, it is asked so often.
LOST_S = 8
_ASK_S = 2
#: What a caller says, at once, is one line: the token and its rank.
_CALL_NUM_BYTES = 128
#: How many bytes are taken from a line at once.
_HEARD_NUM_BYTES = 2**16
#: How many callers may not have said yet who they are: anybody can connect.
_MOST_STRANGERS = 64
#: How connections end that a process's end has closed; others have met no answer.
_OF_PROCESSES = (errno.ECONNRESET, errno.EPIPE)

_all: "WeakSet[Lines]" = WeakSet()


class Address(NamedTuple):
    """Where the first rank listens."""

    host: str
    port: int


class Lines:
    """One rank's ends of them, for one thread; it may have none.

    Args:
        waiting: Of that thread.

    Attributes:
        address: Where this rank listens; None if it does not.
        reached: Ranks with which there is, or was, a line whose loss the kernel notices.
        gone: Ranks at the other ends whose processes have ended without a goodbye.
        lost: Ranks at the other ends whose hosts do not answer any more.
        said: What a rank at another end has said last, by rank.
    """

    def __init__(self, waiting: Waiting) -> None:
        self.address: Address | None = None
        self.reached: set[int] = set()
        self.gone: set[int] = set()
        self.lost: set[int] = set()
        self.said: dict[int, bytes] = {}
        self._waiting = waiting
        self._listener: socket.socket | None = None
        self._ends: dict[socket.socket, int] = {}
        self._heard: dict[int, bytes] = {}
        self._unsaid: dict[int, bytes] = {}
        self._num_unheard: dict[int, int] = {}
        self._strangers: list[socket.socket] = []
        self._expected: dict[bytes, int] = {}
        _all.add(self)

    def listen(self, ranks: list[int], token: str, towards: str, port: int) -> None:
        """Lets ranks call, where whoever reaches the store can: not at all if that is on this host only.

        Args:
            ranks: Those that may.
            token: What they have to know.
            towards: Name or address of the host that has the store.
            port: Of the store.
        """
        host = _own_address(towards, port)
        if host is None:
            return
        with suppress(OSError):
            self._listener = socket.create_server(
                (host, 0),
                family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                backlog=len(ranks) + _MOST_STRANGERS,
            )
            self._expected = {_call(token, rank): rank for rank in ranks}
            self._listener.setblocking(False)
            self._waiting.add(self._listener, partial(self._accept, self._listener))
            self.address = Address(*self._listener.getsockname()[:2])

    def call(self, address: Address, rank: int, token: str, own_rank: int) -> None:
        """Calls a rank, if it can be reached.

        Args:
            address: Where it listens.
            rank: Which it is.
            token: What this rank has to know.
            own_rank: Which this is.
        """
        with suppress(OSError):
            end = socket.create_connection(address, _CALL_S)
            end.sendall(_call(token, own_rank))
            end.setblocking(False)
            self._waiting.add(end, partial(self._hear, end))
            self._keep(end, rank)

    def say(self, words: bytes, *, to_all: bool = False) -> None:
        """Says something to the other ends; returns at once.

        Args:
            words: In one line.
            to_all: Whether also to who has not heard yet what was said last.
        """
        for rank in self._ends.values():
            if to_all or not self._num_unheard.get(rank):
                self._unsaid[rank] = self._unsaid.get(rank, b"") + words + _END_OF_WORDS
                self._num_unheard[rank] = self._num_unheard.get(rank, 0) + 1
        self.say_rest()

    def say_rest(self) -> None:
        """Says what there was no room for when it was to be said, which is little."""
        for end, rank in self._ends.items():
            if rest := self._unsaid.get(rank):
                with suppress(OSError):
                    self._unsaid[rank] = rest[end.send(rest) :]

    def close(self) -> None:
        """Says that this process ends in good order, and closes all; nobody may wait any more."""
        self.say_rest()
        for end in self._ends:
            with suppress(OSError):
                end.send(_GOODBYE)
        self.close_ends()

    def close_ends(self) -> None:
        """Closes this process's ends without a word."""
        for end in (*self._ends, *self._strangers, *([self._listener] if self._listener is not None else [])):
            end.close()
        self._ends, self._strangers, self._listener = {}, [], None

    def _keep(self, end: socket.socket, rank: int) -> None:
        spare(end)  # who cuts its collectives off is still there
        self._ends[end] = rank
        if _lets_the_kernel_ask(end):
            self.reached.add(rank)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            stranger, _ = listener.accept()
            if len(self._strangers) == _MOST_STRANGERS:
                self._drop(self._strangers.pop(0))
            stranger.setblocking(False)
            self._waiting.add(stranger, partial(self._ask, stranger))
            self._strangers.append(stranger)

    def _ask(self, stranger: socket.socket) -> None:
        self._strangers.remove(stranger)
        self._waiting.remove(stranger)
        said = b""
        with suppress(OSError):
            said = stranger.recv(_CALL_NUM_BYTES)
        call, is_whole, more = said.partition(_END_OF_WORDS)
        for expected, rank in self._expected.items():
            if hmac.compare_digest(call + is_whole, expected):
                del self._expected[expected]
                self._waiting.add(stranger, partial(self._hear, stranger))
                self._keep(stranger, rank)
                self._heard[rank] = more
                return
        stranger.close()

    def _hear(self, end: socket.socket) -> None:
        rank = self._ends[end]
        try:
            heard, ended_by = end.recv(_HEARD_NUM_BYTES), None
        except BlockingIOError:
            return
        except OSError as error:
            heard, ended_by = b"", error.errno
        self._num_unheard[rank] = self._num_unheard.get(rank, 0) - heard.count(_HEARD)
        *whole, rest = (self._heard.get(rank, b"") + heard.replace(_HEARD, b"")).split(_END_OF_WORDS)
        self._heard[rank] = rest
        if whole:
            self.said[rank] = whole[-1]
            self._unsaid[rank] = self._unsaid.get(rank, b"") + _HEARD * len(whole)
            self.say_rest()
        has_left = rest.endswith(_GOODBYE)
        if not heard and not has_left:
            (self.gone if ended_by in (None, *_OF_PROCESSES) else self.lost).add(rank)
        if not heard or has_left:
            del self._ends[end]
            self._drop(end)

    def _drop(self, end: socket.socket) -> None:
        self._waiting.remove(end)
        end.close()


def _lets_the_kernel_ask(end: socket.socket) -> bool:
    """Lets the kernel ask at the other end, and give up when there is no answer. Whether it can, whatever is unsaid."""
    if not hasattr(socket, "TCP_USER_TIMEOUT"):  # elsewhere than on Linux
        return False
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASK_S)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_S)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_S)
    return True


def _call(token: str, rank: int) -> bytes:
    return f"{token} {rank}\n".encode()


def _own_address(towards: str, port: int) -> str | None:
    """The address of this host on the way to another; None if there is none but for this host itself."""
    with suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(towards, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe, suppress(OSError):
                probe.connect(place)  # which sends nothing
                host = str(probe.getsockname()[0])
                if not host.startswith("127.") and host != "::1":
                    return host
    return None


def _close_inherited() -> None:
    # A forked worker of a loader would keep lines open that are this process's.
    for lines in _all:
        lines.close_ends()


if hasattr(os, "register_at_fork"):  # Windows forks nothing
    os.register_at_fork(after_in_child=_close_inherited)
