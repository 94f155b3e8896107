"""Statuses of other hosts; all ranks of the tests are in one process."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist

from lightning_strategies_ext._system.connections import HOST_LOSS_TIMEOUT_S
from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext._system.selector_loop import SelectorLoop
from lightning_strategies_ext.failure import remote_status
from lightning_strategies_ext.failure.peer_links import WINDOW_NUM_BYTES, PeerLinks
from lightning_strategies_ext.failure.rank_status import Failure, RankStatus, StopDecision, StopVote
from lightning_strategies_ext.failure.remote_status import RemoteStatus

FAILURE = Failure((3,), "second", 12.0, "train", "ValueError: no", ("a:1 in f",), "trace", 3)


class Clock:
    """A clock that can be advanced."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


class Ranks:
    """Ranks of several hosts, whose monitors publish when a test calls :meth:`update`."""

    def __init__(self, *of_hosts: list[int]) -> None:
        self.peers = {rank: Peer(rank, str(host), rank, 0.0) for host, ranks in enumerate(of_hosts) for rank in ranks}
        self.statuses = {rank: RankStatus(rank) for rank in self.peers}
        self.by_rank: dict[int, RemoteStatus] = {}
        self.waiting = {rank: SelectorLoop() for rank in self.peers}
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in self.peers:
            self.by_rank[rank] = RemoteStatus(store, self.peers, rank, 0, self.waiting[rank])

    def __getitem__(self, rank: int) -> RemoteStatus:
        return self.by_rank[rank]

    def update(self, failures: dict[int, Failure], *without: int) -> None:
        """Lets all ranks except some publish and receive once; ``failures`` has the known failure of each rank."""
        for rank, one in self.by_rank.items():
            if rank not in without:
                self.waiting[rank].wait(0.0)
                local_statuses = {
                    other: replace(self.statuses[other], failure=failures.get(other)) for other in one._local_ranks
                }
                one.publish(local_statuses, failures.get(rank))

    def update_until(self, condition: Callable[[], bool], failures: dict[int, Failure] | None = None, *without) -> None:
        deadline = time.monotonic() + 30.0
        while not condition():
            assert time.monotonic() < deadline
            self.update(failures or {}, *without)
            time.sleep(0.01)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(remote_status, "REPORT_INTERVAL_S", 0.05)
    ranks = Ranks([0, 1], [2, 3, 4])
    yield ranks
    for one in ranks.by_rank.values():
        one.close()


def test_rank_0_receives_all_statuses_and_other_ranks_receive_rank_0s(ranks):
    ranks.statuses[4] = RankStatus(4, heartbeat=7, stack="at work\n" * WINDOW_NUM_BYTES)  # only the end fits
    ranks.update_until(lambda: ranks[0].statuses.keys() == {2, 3, 4} and ranks[0].statuses[4].heartbeat == 7)
    assert ranks[0].statuses[4].stack.endswith("at work\n")
    assert ranks[2].statuses == {0: RankStatus(0)}
    ranks.statuses[0] = RankStatus(0, heartbeat=5)
    ranks.update_until(lambda: ranks[2].statuses == {0: RankStatus(0, heartbeat=5)})
    assert ranks[1].statuses == ranks[3].statuses == {}


def test_a_linked_rank_without_a_status_is_known(ranks):
    ranks.update_until(lambda: ranks[0].statuses == {rank: RankStatus(rank) for rank in (2, 3, 4)}, {}, 2, 3, 4)
    assert ranks[2].statuses == {0: RankStatus(0)}


def test_rank_0_expects_the_first_status_of_a_rank_for_a_while(ranks, monkeypatch):
    assert [one.unknown_ranks() for one in ranks.by_rank.values()] == [{2, 3, 4}, set(), set(), set(), set()]
    with monkeypatch.context() as later:
        clock = Clock()
        later.setattr(remote_status, "time", clock)
        clock.ahead_s += 2 * HOST_LOSS_TIMEOUT_S
        assert ranks[0].unknown_ranks() == set()
    ranks.update_until(lambda: not ranks[0].unknown_ranks())
    assert ranks[0].statuses.keys() == {2, 3, 4}


@pytest.mark.parametrize("sender", [0, 2])
def test_a_failure_reaches_every_host_at_once(ranks, monkeypatch, sender):
    clock, receiver = Clock(), 2 - sender
    monkeypatch.setattr(remote_status, "time", clock)
    ranks.update_until(lambda: ranks[0].statuses.keys() == {2, 3, 4})
    monkeypatch.setattr(ranks[sender], "_published_at", clock.monotonic() + 1000)  # no status is due
    ranks.update_until(lambda: ranks[receiver].statuses[sender].failure == FAILURE, {sender: FAILURE})


def test_votes_and_decisions_reach_every_host_at_once(ranks, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(remote_status, "time", clock)
    ranks.update_until(lambda: ranks[0].statuses.keys() == {2, 3, 4})
    for one in ranks.by_rank.values():
        monkeypatch.setattr(one, "_published_at", clock.monotonic() + 1000)
    vote, decision = StopVote((1, 0), True, (3, 0)), StopDecision((1, 0), (3, 0))
    ranks.statuses[4] = RankStatus(4, stop_vote=vote)
    ranks.update_until(lambda: ranks[0].statuses[4].stop_vote == vote)
    ranks.statuses[0] = RankStatus(0, stop_decision=decision)
    ranks.update_until(lambda: ranks[2].statuses[0].stop_decision == decision)


@pytest.mark.parametrize("sender", [0, 2])
def test_a_status_published_while_a_failure_is_received_contains_the_failure(ranks, sender):
    ranks.update_until(lambda: ranks[0].statuses.keys() == {2, 3, 4})
    ranks[sender]._published_at = 0.0
    read_before = {rank: RankStatus(rank, heartbeat=9) for rank in ranks[sender]._local_ranks}
    ranks[sender].publish(read_before, FAILURE)
    ranks.update_until(lambda: ranks[2 - sender].statuses[sender].heartbeat == 9, {}, sender)
    assert ranks[2 - sender].statuses[sender].failure == FAILURE


def test_the_next_rank_of_a_host_replaces_its_leader(ranks):
    ranks.update_until(lambda: ranks[0].statuses.keys() == {2, 3, 4})
    ranks.statuses[2] = RankStatus(2, state="exited")
    ranks[2].close()
    ranks.statuses[3], ranks.statuses[4] = RankStatus(3, heartbeat=9), RankStatus(4, heartbeat=9)
    ranks.update_until(lambda: (ranks[0].statuses[3].heartbeat, ranks[0].statuses[4].heartbeat) == (9, 9), {}, 2)
    assert ranks[3].statuses.keys() == {0}
    assert ranks[4].statuses == {}
    assert ranks[0]._links.disconnected == set()
    ranks[3]._links.abort()  # as the kernel does when the process exits
    ranks.update_until(lambda: ranks[0]._links.disconnected == {3}, {}, 2, 3)


def test_a_rank_sends_a_failure_in_place_of_its_unresponsive_host_leader(ranks, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(remote_status, "time", clock)
    ranks.update_until(lambda: ranks[0].statuses.keys() == {2, 3, 4})
    ranks.update({3: FAILURE}, 2)
    assert 3 not in ranks[0]._links.ranks
    clock.ahead_s += remote_status.LEADER_DETECTION_S
    ranks.update_until(lambda: ranks[0].statuses[3].failure == FAILURE, {3: FAILURE}, 2)
    # A rank that closes its links sends its failure immediately.
    ranks[4]._published_failure = FAILURE
    ranks[4].close()
    ranks.update_until(lambda: ranks[0].statuses[4].failure == FAILURE, {}, 2)


def test_a_host_that_sends_nothing_is_not_lost_while_its_kernel_responds(ranks, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(remote_status, "time", clock)
    ranks.update_until(lambda: ranks[0].statuses.keys() == {2, 3, 4})
    clock.ahead_s += 1000
    assert [one.lost_ranks() for one in ranks.by_rank.values()] == [[]] * 5
    ranks[0]._links.unreachable.add(2)  # tests with network namespaces cover the kernel's report
    assert ranks[0].lost_ranks() == [2, 3, 4]


def test_without_keepalives_a_host_that_sends_nothing_is_lost(ranks, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(remote_status, "time", clock)
    for one in ranks.by_rank.values():
        one._lost_s = 100.0  # a busy machine does not reach this timeout
        one._links.with_keepalive = set()
    ranks.update_until(lambda: ranks[0].statuses.keys() == {2, 3, 4})
    ranks[0]._links.with_keepalive = set()
    clock.ahead_s += 70
    ranks.statuses[2] = RankStatus(2, heartbeat=1)
    ranks.update_until(lambda: ranks[0].statuses[2].heartbeat == 1)
    clock.ahead_s += 70
    assert ranks[0].lost_ranks() == []
    clock.ahead_s += 70
    assert ranks[0].lost_ranks() == [2, 3, 4]
    assert ranks[2].lost_ranks() == [0, 1]
    ranks[0].reset_timeouts()  # as after a stop of this process
    assert ranks[0].lost_ranks() == []
    ranks[2].close()  # a rank that closes its link is not lost
    ranks.update_until(lambda: not ranks[0]._links.ranks, {}, 2)
    clock.ahead_s += 1000
    assert ranks[0].lost_ranks() == []


def test_a_new_leader_that_cannot_connect_logs_no_warning(ranks, caplog):
    ranks.update_until(lambda: ranks[0].statuses.keys() == {2, 3, 4})
    ranks[0].close()  # its process has exited
    ranks.statuses[2] = RankStatus(2, state="exited")
    with caplog.at_level(logging.WARNING):
        ranks.update_until(lambda: ranks[3]._has_connected, {}, 0)
    assert caplog.records == []


def test_an_unreachable_coordinator_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(PeerLinks, "connect", lambda *arguments: OSError("no route"))
    with caplog.at_level(logging.WARNING):
        ranks = Ranks([0], [1])
        for _ in range(3):
            ranks.update({})
    (record,) = caplog.records
    assert "rank 1 cannot connect to rank 0" in record.getMessage()
    assert "127.0.0.1" in record.getMessage()
    assert "no route" in record.getMessage()
    assert ranks[0].statuses == ranks[1].statuses == {}
    for one in ranks.by_rank.values():
        one.close()
