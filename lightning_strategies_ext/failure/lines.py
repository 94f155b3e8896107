"""Lines between hosts: connections that the kernel closes when a process at an end is gone.

The first rank of all listens; the first of each other host calls it. Little is said on them: who ends in good order
says so before, and who learns why it will have to end says that at once, for it may be killed before the store knows.
"""

import hmac
import os
import selectors
import socket
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakSet

from lightning_strategies_ext.connections import spare

#: In no words, which are text.
_GOODBYE = b"\0"
_END_OF_WORDS = b"\n"
_CALL_S = 2.0
#: What a caller says, at once, is one line: the token and its rank.
_CALL_NUM_BYTES = 128
#: How many bytes are taken from a line at once.
_HEARD_NUM_BYTES = 2**16
#: How many callers may not have said yet who they are: anybody can connect.
_MOST_STRANGERS = 64

_all: "WeakSet[Lines]" = WeakSet()


class Address(NamedTuple):
    """Where the first rank listens."""

    host: str
    port: int


class Lines:
    """One rank's ends of them, for one thread; without any, it only waits.

    Attributes:
        address: Where this rank listens; None if it does not.
        gone: Ranks at the other ends whose processes have ended without a goodbye.
        said: What a rank at another end has said, by rank.
    """

    def __init__(self) -> None:
        self.address: Address | None = None
        self.gone: set[int] = set()
        self.said: dict[int, bytes] = {}
        self._awake, self._waker = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._awake, selectors.EVENT_READ)
        self._listener: socket.socket | None = None
        self._ends: dict[socket.socket, int] = {}
        self._heard: dict[int, bytes] = {}
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
            self._selector.register(self._listener, selectors.EVENT_READ)
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
            self._watch(end)
            self._ends[end] = rank

    def wait(self, seconds: float | None) -> None:
        """Waits until something is to be seen, :meth:`wake` is called, or the time is over."""
        for key, _ in self._selector.select(seconds):
            if key.fd == self._awake:
                os.read(self._awake, 1)
            elif key.fileobj is self._listener:
                self._accept()
            elif key.fileobj in self._ends:
                self._hear(key.fileobj)
            elif key.fileobj in self._strangers:
                self._ask(key.fileobj)

    def wake(self) -> None:
        """Lets :meth:`wait` return; from any thread."""
        os.write(self._waker, b".")

    def say(self, words: bytes) -> None:
        """Says something to the other ends, once; returns at once, from any thread.

        Args:
            words: In one line. More than the kernel takes at once is not heard.
        """
        self._send(words + _END_OF_WORDS)

    def say_goodbye(self) -> None:
        """Says that this process ends in good order; from any thread."""
        self._send(_GOODBYE)

    def close(self) -> None:
        """Closes all; nobody may wait any more."""
        self.close_ends()
        self._selector.close()
        os.close(self._awake)
        os.close(self._waker)

    def close_ends(self) -> None:
        """Closes this process's ends without a word."""
        for end in (*self._ends, *self._strangers, *([self._listener] if self._listener is not None else [])):
            end.close()
        self._ends, self._strangers, self._listener = {}, [], None

    def _send(self, content: bytes) -> None:
        for end in list(self._ends):
            with suppress(OSError):
                end.send(content)

    def _watch(self, end: socket.socket) -> None:
        spare(end)  # who cuts its collectives off is still there
        end.setblocking(False)
        self._selector.register(end, selectors.EVENT_READ)

    def _accept(self) -> None:
        assert self._listener is not None
        with suppress(OSError):
            stranger, _ = self._listener.accept()
            if len(self._strangers) == _MOST_STRANGERS:
                self._drop(self._strangers.pop(0))
            self._watch(stranger)
            self._strangers.append(stranger)

    def _ask(self, stranger: Any) -> None:
        self._strangers.remove(stranger)
        call, is_whole, more = _received(stranger, _CALL_NUM_BYTES).partition(_END_OF_WORDS)
        for expected, rank in self._expected.items():
            if hmac.compare_digest(call + is_whole, expected):
                del self._expected[expected]
                self._ends[stranger] = rank
                self._heard[rank] = more
                return
        self._drop(stranger)

    def _hear(self, end: Any) -> None:
        rank = self._ends[end]
        heard = _received(end, _HEARD_NUM_BYTES)
        said = self._heard[rank] = self._heard.get(rank, b"") + heard
        words, is_whole, _ = said.partition(_END_OF_WORDS)
        if is_whole:
            self.said[rank] = words
        has_left = said.endswith(_GOODBYE)
        if not heard and not has_left:
            self.gone.add(rank)
        if not heard or has_left:
            del self._ends[end]
            self._drop(end)

    def _drop(self, end: socket.socket) -> None:
        self._selector.unregister(end)
        end.close()


def _call(token: str, rank: int) -> bytes:
    return f"{token} {rank}\n".encode()


def _received(end: socket.socket, most: int) -> bytes:
    with suppress(OSError):
        return end.recv(most)
    return b""


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
