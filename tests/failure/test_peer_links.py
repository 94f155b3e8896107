"""Peer links detect the exit of a peer immediately, and do not report processes that still run."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_strategies_ext._system.connections import SECRET, SECRET_FILE, job_secret
from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext._system.selector_loop import SelectorLoop
from lightning_strategies_ext.failure import peer_links as module
from lightning_strategies_ext.failure.peer_links import CoordinatorEndpoint, PeerLinks

TOKEN = "c0ffee"


class RecordingLinks(PeerLinks):
    """Peer links that record the last message of each rank."""

    def __init__(self) -> None:
        super().__init__(SelectorLoop(), self._record)
        self.received: dict[int, bytes] = {}

    def _record(self, rank: int, message: bytes) -> bool:
        self.received[rank] = message
        return True

    def connect_to(self, hub: PeerLinks, own_rank: int) -> None:
        assert self.connect(["127.0.0.1"], hub.port, 0, TOKEN, own_rank) is None


def wait(links: PeerLinks, seconds: float) -> None:
    links._loop.wait(seconds)


@pytest.fixture
def hub() -> Iterator[RecordingLinks]:
    hub = RecordingLinks()
    hub.listen([2, 4], TOKEN, "127.0.0.1")
    yield hub
    hub.close()


def fork_client(hub: PeerLinks, rank: int, then: str) -> int:
    """Forks a process that connects and then exits; its forked child remains until the end of the test."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writes)
        links = RecordingLinks()
        links.connect_to(hub, rank)
        if os.fork() == 0:  # a DataLoader worker
            os.read(reads, 1)
            os._exit(0)
        if then == "goodbye":
            links.close()
        os.kill(os.getpid(), signal.SIGKILL)
    return pid


def wait_until_disconnected(links: PeerLinks, ranks: set[int], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while links.disconnected != ranks and time.monotonic() < deadline:
        wait(links, 0.1)
    assert links.disconnected == ranks


@pytest.mark.forked
def test_a_killed_process_is_disconnected_although_its_forked_child_runs(hub):
    os.waitpid(fork_client(hub, 2, "die"), 0)
    wait_until_disconnected(hub, {2})


def test_a_message_arrives_at_once_and_does_not_change_the_state_of_the_link(hub):
    clients = {2: RecordingLinks(), 4: RecordingLinks()}
    message = b"rank 3 has failed" * 1000
    for rank, client in clients.items():
        client.connect_to(hub, rank)
        client.send(message)
    while hub.received != {2: message, 4: message}:
        wait(hub, 0.1)
    assert hub.disconnected == set()
    hub.send(b"so it has")
    while clients[4].received != {0: b"so it has"}:
        wait(clients[4], 0.1)
    clients[4].close()
    clients[2].abort()
    wait_until_disconnected(hub, {2})


def test_a_peer_that_acknowledges_nothing_receives_no_more_than_its_window(hub):
    client = RecordingLinks()
    client.connect_to(hub, 2)
    while not hub.ranks:
        wait(hub, 0.1)
    were_sent = [hub.send(b"%d " % number + b"." * 10_000) for number in range(1000)]
    assert were_sent == [True] * 3 + [False] * 997
    assert not hub.is_acknowledged()
    while not client.received.get(0, b"").startswith(b"2 "):
        wait(client, 0.1)
    while not hub.is_acknowledged():
        wait(hub, 0.1)
    assert hub.send(b"as ever")
    while client.received[0] != b"as ever":
        wait(client, 0.1)
    client.close()


def test_bytes_without_space_in_the_buffer_are_sent_later(hub):
    client = RecordingLinks()
    client.connect_to(hub, 2)
    while not hub.ranks:
        wait(hub, 0.1)
    for number in range(100):
        hub.send(b"%d " % number + b"." * 100_000, is_urgent=True)
    while not client.received.get(0, b"").startswith(b"99 "):
        hub.flush()
        wait(client, 0.1)
    assert client.received == {0: b"99 " + b"." * 100_000}
    client.close()


def test_an_incomplete_message_is_ignored(hub):
    with socket.create_connection(("127.0.0.1", hub.port)) as client:
        client.sendall(module._hello(TOKEN, 2))
        while not hub.ranks:
            wait(hub, 0.1)
        client.sendall(b"rank 3 has fai")
    wait_until_disconnected(hub, {2})
    assert hub.received == {}


@pytest.mark.forked
def test_a_process_that_sends_a_goodbye_is_not_disconnected(hub):
    os.waitpid(fork_client(hub, 4, "goodbye"), 0)
    os.waitpid(fork_client(hub, 2, "die"), 0)
    wait_until_disconnected(hub, {2})


def test_both_ends_detect_a_disconnect(hub):
    client = RecordingLinks()
    client.connect_to(hub, 2)
    while not hub.ranks:
        wait(hub, 0.1)
    hub.abort()
    wait_until_disconnected(client, {0})
    client.close()


def test_a_connection_without_the_token_is_rejected_and_does_not_replace_a_rank(hub, monkeypatch):
    monkeypatch.setattr(module, "_MAX_UNAUTHENTICATED", 5)
    of_others = f"{TOKEN} 2\n".encode(), module._hello(TOKEN, 3), module._hello(TOKEN, 2)[:-1], module._hello("", 2)
    for data in (b"wrong 2\n", b"\xff\xfe 2\n", *of_others, b""):
        with socket.create_connection(("127.0.0.1", hub.port)) as connection:
            connection.sendall(data)
        wait(hub, 0.1)
    silent = []  # connections that send nothing do not delay other connections
    for _ in range(10):
        silent.append(socket.create_connection(("127.0.0.1", hub.port)))
        wait(hub, 0.02)
    client = RecordingLinks()
    client.connect_to(hub, 2)
    while not hub.ranks:
        wait(hub, 0.1)
    assert len(hub._unauthenticated) <= 5
    assert hub.disconnected == set()
    client.abort()
    wait_until_disconnected(hub, {2})
    for connection in silent:
        connection.close()


def connect(hub: PeerLinks) -> socket.socket:
    """Connects to the hub, which accepts the connection."""
    connection = socket.create_connection(("127.0.0.1", hub.port))
    wait(hub, 0.0)
    return connection


def test_a_rank_stays_connected_despite_many_unauthenticated_connections(hub):
    with ExitStack() as stack:
        client = stack.enter_context(connect(hub))
        for _ in range(module._MAX_UNAUTHENTICATED + 10):
            stack.enter_context(connect(hub))
        client.sendall(module._hello(TOKEN, 2))
        wait(hub, 0.0)
        assert hub.ranks == {2}


def test_a_rank_whose_first_message_was_not_read_for_seconds_stays_connected(hub, monkeypatch):
    monkeypatch.setattr(module, "_MAX_UNAUTHENTICATED", 5)
    with ExitStack() as stack:
        client = stack.enter_context(connect(hub))
        for _ in range(4):
            stack.enter_context(connect(hub))
        time.sleep(1.1)  # the thread is busy in the meantime
        stack.enter_context(socket.create_connection(("127.0.0.1", hub.port)))
        client.sendall(module._hello(TOKEN, 2))
        wait(hub, 0.0)
        assert hub.ranks == {2}


def test_unauthenticated_connections_older_than_a_second_are_closed_for_a_rank(hub):
    with ExitStack() as stack:
        for _ in range(module._MAX_UNAUTHENTICATED + 10):
            stack.enter_context(connect(hub))
        client = RecordingLinks()
        client.connect_to(hub, 2)
        busy, deadline = time.process_time(), time.monotonic() + 30
        while not hub.ranks and time.monotonic() < deadline:
            wait(hub, 0.1)
        assert hub.ranks == {2}
        assert time.process_time() - busy < 0.5, "waiting connections must not occupy the thread"
        client.close()


def test_an_unreachable_address_does_not_disconnect_a_rank():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    links = RecordingLinks()
    assert isinstance(links.connect(["127.0.0.1"], port, 1, TOKEN, 0), ConnectionRefusedError)
    assert "accepts no connections" in str(links.connect(["127.0.0.1"], None, 1, TOKEN, 0))
    wait(links, 0.0)
    assert links.disconnected == links.unreachable == set()
    links.close()


def test_one_reachable_address_is_enough_and_ranks_listen_at_the_stores_address(hub):
    client = RecordingLinks()
    assert (
        client.connect(["127.0.0.2", "127.0.0.1"], hub.port, 0, TOKEN, 2) is None
    )  # the hub does not listen at the first address
    all_addresses = RecordingLinks()
    all_addresses.listen([2], TOKEN, "")
    assert client.connect(["127.0.0.2"], all_addresses.port, 1, TOKEN, 2) is None
    while not (hub.ranks and all_addresses.ranks):
        wait(hub, 0.1)
        wait(all_addresses, 0.1)
    for links in (client, all_addresses):
        links.close()


# --- the secret of a job on several hosts ---


def centers(
    monkeypatch: pytest.MonkeyPatch, secrets: list[str], change: Callable[[str], str] = str
) -> list[RecordingLinks]:
    """Connects two ranks with a secret each through a store, whose entry is changed before the second rank reads it."""
    store, peers = dist.HashStore(), {rank: Peer(rank, str(rank), 1, 0.0, "", ("127.0.0.1",)) for rank in range(2)}
    ends = [RecordingLinks(), RecordingLinks()]
    for rank, secret in enumerate(secrets):
        monkeypatch.setenv(SECRET, secret)
        endpoint = CoordinatorEndpoint(store, "center", peers, rank, [1], ends[rank])
        store.set("center", change(store.get("center").decode()))
    endpoint.connect()
    for _ in range(100):
        wait(ends[0], 0.1 if not ends[0].ranks else 0.0)
    return ends


@pytest.mark.parametrize("secret", ["", "a secret"])
def test_ranks_with_the_same_secret_or_none_are_linked(monkeypatch: pytest.MonkeyPatch, secret: str):
    ends = centers(monkeypatch, [secret, secret])
    assert ends[0].ranks == {1}
    for links in ends:
        links.close()


def without_signature(entry: str) -> str:
    return json.dumps([*json.loads(entry)[:3], ""])


def at_another_address(entry: str) -> str:
    token, _, port, signature = json.loads(entry)
    return json.dumps([token, ["127.0.0.2"], port, signature])


@pytest.mark.parametrize(
    ("secrets", "change"),
    [
        (["a secret", "another"], str),
        (["a secret", ""], str),
        (["", "a secret"], str),
        (["a secret", "a secret"], without_signature),
        (["a secret", "a secret"], at_another_address),
    ],
)
def test_an_address_that_another_process_wrote_to_the_store_is_rejected(
    monkeypatch: pytest.MonkeyPatch, secrets: list[str], change: Callable[[str], str]
):
    with pytest.raises(RuntimeError, match="LIGHTNING_STRATEGIES_EXT_SECRET"):
        centers(monkeypatch, secrets, change)


def test_the_values_in_the_store_do_not_suffice_to_connect(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(SECRET, "a secret")
    store, hub = dist.HashStore(), RecordingLinks()
    peers = {rank: Peer(rank, str(rank), 1, 0.0, "", ("127.0.0.1",)) for rank in range(2)}
    CoordinatorEndpoint(store, "center", peers, 0, [1], hub)
    token, _, port, signature = json.loads(store.get("center"))
    for guess in (token, signature):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(module._hello(guess, 1))
            wait(hub, 0.1)
            wait(hub, 0.1)
    assert hub.ranks == set()
    hub.close()


def test_the_secret_may_be_in_a_file_that_other_users_cannot_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    file = tmp_path / "secret"
    file.write_text("a secret\n")
    monkeypatch.setenv(SECRET_FILE, str(file))
    file.chmod(0o600)
    assert job_secret() == b"a secret"
    link = tmp_path / "link"  # as in a Kubernetes volume
    link.symlink_to(file)
    monkeypatch.setenv(SECRET_FILE, str(link))
    assert job_secret() == b"a secret"
    file.write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        job_secret()
    file.chmod(0o640)
    with pytest.raises(PermissionError, match="with mode 640; it must belong to user"):
        job_secret()
