"""A shutdown of connections lets the end that is shut down send until it has read the end of the connection."""

import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from lightning_strategies_ext._system import connections
from lightning_strategies_ext._system.connections import shut_down_connections

#: Time limit in seconds, which nothing here reaches.
LIMIT_S = 60.0


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = socket.create_connection(server.getsockname(), timeout=LIMIT_S)
        own, _ = server.accept()
    with own, peer:
        yield own, peer


def shut_down(own: socket.socket) -> None:
    address = own.getsockname(), own.getpeername()
    shut_down_connections(lambda connection: (connection.laddr, connection.raddr) == address)


@pytest.mark.skipif(not hasattr(select, "POLLRDHUP"), reason="only Linux reports the shutdown to the process itself")
def test_an_end_replies_to_what_it_received_before_the_shutdown(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, peer = ends
    monkeypatch.setattr(connections, "_CLOSING_TIMEOUT_S", LIMIT_S)
    peer.sendall(b"request")
    thread = threading.Thread(target=shut_down, args=[own])
    thread.start()
    poll = select.poll()
    poll.register(own, select.POLLRDHUP)
    assert poll.poll(LIMIT_S * 1e3)
    # gloo's thread acts like this when it reads the rest of the messages after the shutdown.
    assert own.recv(100) == b"request"
    own.sendall(b"reply")
    assert own.recv(100) == b""
    own.close()
    thread.join(LIMIT_S)
    assert peer.recv(100) == b"reply"
    assert peer.recv(100) == b""


def test_an_end_that_is_never_closed_is_shut_down_soon(ends: tuple[socket.socket, socket.socket]) -> None:
    own, peer = ends
    start = time.monotonic()
    shut_down(own)
    assert time.monotonic() - start < LIMIT_S / 2
    assert own.recv(100) == peer.recv(100) == b""
    with pytest.raises(BrokenPipeError):
        own.sendall(b"too late")
