"""What hosts tell each other by way of the store: no rank trains here, and the hosts are threads of this process."""

import socket
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_strategies_ext.failure import hosts
from lightning_strategies_ext.failure.hosts import Hosts
from lightning_strategies_ext.failure.signs import Failure, Sign

FAILURE = Failure((3,), "second", 12.0, "train", "ValueError: no", ("a:1 in f",), "trace", 3)


@pytest.fixture
def store() -> dist.TCPStore:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def hosts_of(store: dist.Store, ranks: list[list[int]]) -> dict[int, Hosts]:
    prefixed = dist.PrefixStore("groups/0", store)
    return {rank: Hosts(prefixed, ranks, rank, 0) for host in ranks for rank in host}


def test_the_first_rank_hears_all_and_a_failure_is_known_everywhere(store):
    by_rank = hosts_of(store, [[0, 1], [2, 3]])
    by_rank[2].tell({2: Sign(2, beats=5), 3: Sign(3, beats=7)}, None)
    until(lambda: by_rank[0].signs.get(3) == Sign(3, beats=7))
    assert by_rank[2].signs == {}  # one hears all; the others read what that one finds out
    by_rank[3].tell({}, FAILURE)  # whoever knows of it says so, the first of its host or not
    until(lambda: all(by_rank[rank].failure == FAILURE for rank in (0, 2, 3)))
    late = Failure((0,), "first", 13.0, "train", "Connection closed")
    by_rank[0].tell({}, late)
    time.sleep(0.1)
    assert by_rank[0].failure == FAILURE
    for one in by_rank.values():
        one.close()


def test_a_host_that_falls_silent_is_lost(store, monkeypatch):
    monkeypatch.setattr(hosts, "INTERVAL_S", 0.1)
    monkeypatch.setattr(hosts, "LOST_S", 5.0)  # which a busy machine does not reach
    by_rank = hosts_of(store, [[0], [1, 2], [3]])
    beats = 0

    def beat(*ranks: int) -> None:
        nonlocal beats
        beats += 1
        for rank in ranks:
            by_rank[rank].tell({rank: Sign(rank, beats=beats)}, None)
        time.sleep(0.05)

    begin = time.monotonic()
    while time.monotonic() < begin + 7:
        beat(0, 1, 3)
        assert [one.lost() for one in by_rank.values()] == [[]] * 4
    until(lambda: (beat(0, 3), by_rank[0].lost() == [1, 2])[1])
    by_rank[0].forget()  # as after a stop of this process
    assert by_rank[0].lost() == []
    for one in by_rank.values():
        one.close()
