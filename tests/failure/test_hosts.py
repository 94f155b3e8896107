"""What hosts tell each other, by way of the store and on lines: no rank trains here, and all are in this process."""

import socket
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_strategies_ext.failure import hosts, lines
from lightning_strategies_ext.failure.hosts import Hosts
from lightning_strategies_ext.failure.signs import Failure, Sign
from lightning_strategies_ext.failure.waiting import Waiting

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
    return {rank: Hosts(prefixed, ranks, rank, 0, Waiting()) for host in ranks for rank in host}


def test_the_first_rank_hears_all_and_a_failure_is_known_everywhere(store, monkeypatch):
    monkeypatch.setattr(hosts, "INTERVAL_S", 0.05)
    monkeypatch.setattr(hosts, "READ_S", 0.1)  # nobody says here that it has read what failed
    by_rank = hosts_of(store, [[0, 1], [2, 3]])
    by_rank[2].tell({2: Sign(2, beats=5), 3: Sign(3, beats=7)}, None)
    until(lambda: by_rank[0].signs.get(3) == Sign(3, beats=7))
    assert by_rank[1].signs == by_rank[2].signs == {}  # one hears all; the others read what that one finds out
    by_rank[3].tell({}, FAILURE)  # whoever knows of it says so, the first of its host or not
    until(lambda: all(by_rank[rank].failure == FAILURE for rank in (0, 2, 3)))
    late = Failure((0,), "first", 13.0, "train", "Connection closed")
    by_rank[0].tell({}, late)
    time.sleep(0.1)
    assert by_rank[0].failure == FAILURE
    for one in by_rank.values():
        one.close()


class Clock:
    """Time that can be put forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


def test_a_host_that_falls_silent_and_has_no_line_is_lost(store, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(hosts, "time", clock)
    monkeypatch.setattr(hosts, "INTERVAL_S", 0.05)
    monkeypatch.setattr(hosts, "LOST_S", 100.0)  # which a busy machine does not reach
    by_rank = hosts_of(store, [[0], [1, 2], [3]])
    beats = 0

    def beat(*ranks: int) -> None:
        """They tell of a move, until the first rank has heard of it."""
        nonlocal beats
        beats += 1
        for rank in ranks:
            by_rank[rank].tell({rank: Sign(rank, beats=beats)}, None)
        until(lambda: all(by_rank[0].signs.get(rank) == Sign(rank, beats=beats) for rank in ranks))

    for _ in range(3):
        beat(1, 3)
        beat(1, 3)  # whoever has told of this one knows that it was there after the time was put forward
        assert [one.lost() for one in by_rank.values()] == [[]] * 4
        clock.ahead_s += 70
        assert [one.lost() for one in by_rank.values()] == [[]] * 4
    beat(3)
    assert by_rank[0].lost() == []
    clock.ahead_s += 70
    assert by_rank[0].lost() == [1, 2]
    by_rank[0].forget()  # as after a stop of this process
    assert by_rank[0].lost() == []
    for one in by_rank.values():
        one.close()


def test_a_host_that_falls_silent_is_there_as_long_as_its_kernel_answers(store, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(hosts, "time", clock)
    monkeypatch.setattr(lines, "_own_address", lambda towards, port: "127.0.0.1")
    by_rank = hosts_of(store, [[0, 1], [2, 3]])
    # Also of one that never comes to say a word it is known that it does not.
    assert by_rank[0].signs == {2: Sign(2), 3: Sign(3)}
    assert by_rank[2].signs == {0: Sign(0)}
    assert by_rank[1].signs == by_rank[3].signs == {}
    by_rank[0]._waiting.wait(30.0)  # the other calls
    by_rank[0]._waiting.wait(30.0)  # and says who it is
    clock.ahead_s += 1000
    assert [one.lost() for one in by_rank.values()] == [[]] * 4

    by_rank[0].tell({0: Sign(0, beats=5)}, None)
    by_rank[2]._waiting.wait(30.0)
    by_rank[2].tell({}, None)
    assert by_rank[2].signs == {0: Sign(0, beats=5)}
    by_rank[0].tell({0: Sign(0, beats=6)}, FAILURE)
    by_rank[2]._waiting.wait(30.0)
    assert by_rank[2].told() == FAILURE

    by_rank[2]._lines.close_ends()  # as the kernel does when the process ends
    until(lambda: by_rank[0]._waiting.wait(0.1) or by_rank[0].gone() == {2})
    assert by_rank[0].lost() == []
    for one in by_rank.values():
        one.close()
