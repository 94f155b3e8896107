"""The failure monitor in elastic training. ``tests/elastic`` tests it in a whole ``fit``."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_strategies_ext._system.peers import Peer, exchange_peers
from lightning_strategies_ext.failure.elastic_monitor import ElasticMonitor, elastic_monitor
from lightning_strategies_ext.failure.policies import CONFIRMATION_S
from lightning_strategies_ext.failure.process_exit import MONITOR_EXIT_CODE
from lightning_strategies_ext.failure.rank_status import CollectiveProgress
from lightning_strategies_ext.failure.stop_agreement import StoreAgreement
from tests.support.ranks import Outcome, free_port, outcomes_of_ranks

HANG_TIMEOUT_S = 2.0
#: Time limit in seconds, which only a failing test reaches.
LIMIT_S = 60.0
NUM_RANKS = 3
#: Stores that rank 0 serves.
stores: list[dist.TCPStore] = []


# --- hung ranks ---


class Waits(CollectiveProgress):
    """The progress of a rank that waits in one collective indefinitely."""

    def pending_work(self) -> Any:
        return HANG_TIMEOUT_S


def detect_hangs(progress: CollectiveProgress) -> tuple[dict[int, Peer], ElasticMonitor]:
    rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world_size, rank == 0, timeout)
    stores.append(store)
    peers, monitor = exchange_peers(dist.PrefixStore("peers", store), rank, world_size), elastic_monitor()
    monitor.start_hang_detection(store, rank, peers, progress, HANG_TIMEOUT_S, lambda: "step 3")
    return peers, monitor


def wait_for_statuses(monitor: ElasticMonitor) -> None:
    """Waits until all ranks have published a status."""
    deadline = time.monotonic() + LIMIT_S
    while len(monitor._hang_policy._local_status.read()) < int(os.environ["WORLD_SIZE"]):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def codes_of(outcomes: list[Outcome]) -> list[int | None]:
    return [outcome.exit_code for outcome in outcomes]


def wait_for_each_other() -> None:
    detect_hangs(Waits())
    time.sleep(60)


@pytest.mark.processes
def test_ranks_that_all_wait_for_each_other_exit():
    outcomes = outcomes_of_ranks(wait_for_each_other, world_size=3)
    assert codes_of(outcomes) == [MONITOR_EXIT_CODE, -signal.SIGKILL, -signal.SIGKILL], "\n".join(map(str, outcomes))
    assert "ranks 0-2 on " in outcomes[0].output
    assert "are stuck, last seen in step 3:" in outcomes[0].output
    assert "Killing ranks 0-2 so that the other ranks can continue." in outcomes[0].output


def wait_after_leaving() -> None:
    peers, monitor = detect_hangs(CollectiveProgress())
    if os.environ["LOCAL_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    if os.environ["LOCAL_RANK"] == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    monitor.mark_finished()
    deadline = time.monotonic() + 60
    while peers[1].is_running() and time.monotonic() < deadline:
        time.sleep(0.1)
    monitor.stop_hang_detection()


@pytest.mark.processes
def test_a_stopped_rank_is_killed_by_a_rank_that_has_left_the_world():
    outcomes = outcomes_of_ranks(wait_after_leaving, world_size=3)
    assert codes_of(outcomes) == [0, -signal.SIGKILL, -signal.SIGKILL], "\n".join(map(str, outcomes))
    assert "rank 1 is stopped" in outcomes[0].output
    assert outcomes[0].output.count("Killing rank 1 so that the other ranks can continue.") == 1


def wait_with_a_rank_that_detects_nothing() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    peers, monitor = detect_hangs(Waits() if rank == 1 else CollectiveProgress())
    wait_for_statuses(monitor)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 0:
        monitor.stop_hang_detection()
    deadline = time.monotonic() + LIMIT_S
    while peers[2].is_running() and time.monotonic() < deadline:
        time.sleep(0.1)
    monitor.stop_hang_detection()


@pytest.mark.processes
def test_a_hung_rank_is_killed_if_the_lowest_rank_no_longer_detects_hangs():
    outcomes = outcomes_of_ranks(wait_with_a_rank_that_detects_nothing, world_size=3)
    assert codes_of(outcomes) == [0, 0, -signal.SIGKILL], "\n".join(map(str, outcomes))
    assert "Killing rank 2 so that the other ranks can continue." in outcomes[1].output


STORE = """
import sys, time
from datetime import timedelta
import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, True, timedelta(seconds=60), False)
print("serves", flush=True)
time.sleep(600)
"""


def hang_after_the_store_stops(port: int, store_pid: int) -> bool:
    rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), False)
    peers, monitor = exchange_peers(dist.PrefixStore("peers", store), rank, world_size), elastic_monitor()
    monitor.start_hang_detection(store, rank, peers, CollectiveProgress(), HANG_TIMEOUT_S, lambda: "step 3")
    agreement = StoreAgreement(store, rank, world_size)
    store.add("ready", 1)
    while store.add("ready", 0) < world_size:
        time.sleep(0.01)
    if rank == 1:
        wait_for_statuses(monitor)
        os.kill(os.getpid(), signal.SIGSTOP)
    os.kill(store_pid, signal.SIGSTOP)
    agreement.request()  # the thread of the agreement sends the request to the store, which does not respond
    monitor.mark_finished()
    deadline = time.monotonic() + LIMIT_S
    while peers[1].is_running() and time.monotonic() < deadline:
        time.sleep(0.1)
    is_polling = any(thread.name == "lightning-strategies-ext store" for thread in threading.enumerate())
    agreement.abandon()
    os.kill(store_pid, signal.SIGKILL)
    return is_polling


@pytest.mark.processes
def test_a_hung_rank_is_killed_while_the_process_of_the_store_is_stopped():
    port = free_port()
    server = subprocess.Popen([sys.executable, "-c", STORE, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "serves\n"
        outcomes = outcomes_of_ranks(hang_after_the_store_stops, port, server.pid)
    finally:
        server.kill()
        server.wait()
    assert codes_of(outcomes) == [0, -signal.SIGKILL], "\n".join(map(str, outcomes))
    assert outcomes[0].value, "the thread of the agreement waits for the store"
    assert "Killing rank 1 so that the other ranks can continue." in outcomes[0].output


def compute_and_exit() -> bool:
    rank = int(os.environ["LOCAL_RANK"])
    _, monitor = detect_hangs(Waits() if rank == 0 else CollectiveProgress())
    deadline = time.monotonic() + 2.5 * HANG_TIMEOUT_S
    while time.monotonic() < deadline:
        time.sleep(0.05) if rank == 0 else sum(range(10_000))
    if rank == 1:
        monitor.stop_hang_detection()
        os._exit(0)
    time.sleep(2 * CONFIRMATION_S)  # the rank is in no collective that the backend would abort
    monitor.stop_hang_detection()
    monitor.stop_hang_detection()
    return True


@pytest.mark.processes
def test_a_computing_rank_and_a_rank_that_waits_for_an_exited_peer_are_not_killed():
    outcomes = outcomes_of_ranks(compute_and_exit)
    assert codes_of(outcomes) == [0, 0], str(outcomes[1])
    assert outcomes[0].value
    assert "killed" not in "".join(outcome.output for outcome in outcomes)


# --- lost hosts; tests/elastic loses one ---


@contextmanager
def linked_monitors() -> Iterator[tuple[list[ElasticMonitor], list[threading.Event]]]:
    """Provides failure monitors of ranks on different hosts, in one process, and an event per rank for an abort."""
    store, are_aborted = dist.HashStore(), [threading.Event() for _ in range(NUM_RANKS)]
    own = Peer.this_process(0)
    peers = {rank: replace(own, rank=rank, host=f"host{rank}") for rank in range(NUM_RANKS)}
    monitors = [ElasticMonitor() for _ in peers]
    threads = [
        threading.Thread(target=monitor.enter_world, args=(rank, peers, is_aborted.set), kwargs={"link_store": store})
        for rank, (monitor, is_aborted) in enumerate(zip(monitors, are_aborted, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        yield monitors, are_aborted
    finally:
        for monitor in monitors:
            monitor.leave_world(is_coordinated=True)


@pytest.mark.parametrize("lost", range(NUM_RANKS))
def test_collectives_of_the_peers_are_aborted_after_a_rank_leaves_without_agreement(lost: int):
    with linked_monitors() as (monitors, are_aborted):
        monitors[lost].leave_world(is_coordinated=False)
        for rank in {*range(NUM_RANKS)} - {lost}:
            assert are_aborted[rank].wait(LIMIT_S)
        assert not are_aborted[lost].is_set()


def test_nothing_is_aborted_after_a_rank_leaves_with_the_others():
    with linked_monitors() as (monitors, are_aborted):
        monitors[1].leave_world(is_coordinated=True)
        monitors[1].leave_world(is_coordinated=True)
        assert not any(is_aborted.wait(0.5) for is_aborted in are_aborted)


# --- exits, for backends that do not report them ---

PEER = """
import os, pickle, time
from lightning_strategies_ext._system.peers import Peer

os.write(1, pickle.dumps(Peer.this_process(1)))
os.close(1)
time.sleep(600)
"""


@pytest.mark.processes
def test_collectives_are_aborted_once_another_process_of_the_host_has_exited():
    other = subprocess.Popen([sys.executable, "-c", PEER], stdout=subprocess.PIPE)
    assert other.stdout is not None
    peers = {0: Peer.this_process(0), 1: pickle.loads(other.stdout.read())}
    calls, never = [], threading.Event()
    is_aborted = threading.Event()

    def abort() -> None:
        calls.append(threading.current_thread().name)
        is_aborted.set()

    monitor, after_leaving = ElasticMonitor(), ElasticMonitor()
    monitor.enter_world(0, peers, abort, tracks_exits=True)
    after_leaving.enter_world(0, peers, never.set, tracks_exits=True)
    assert not is_aborted.wait(0.2)
    after_leaving.leave_world(is_coordinated=True)
    os.kill(other.pid, signal.SIGKILL)
    assert is_aborted.wait(LIMIT_S)
    other.wait()
    monitor._thread.stop()  # after another check
    monitor.leave_world(is_coordinated=False)
    assert calls == ["lightning-strategies-ext failure monitor"]
    assert not never.is_set()


def num_monitor_threads() -> int:
    return sum(thread.name == "lightning-strategies-ext failure monitor" for thread in threading.enumerate())


def detect_everything(port: int) -> tuple[int, list[int]]:
    rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    before, found = num_monitor_threads(), []
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timedelta(seconds=60))
    peers = exchange_peers(dist.PrefixStore("peers", store), rank, world_size)
    monitor = elastic_monitor()
    for world in range(2):
        of_world = dist.PrefixStore(str(world), store)
        monitor.enter_world(rank, peers, lambda: None, tracks_exits=True, link_store=of_world)
        monitor.start_hang_detection(of_world, rank, peers, CollectiveProgress(), HANG_TIMEOUT_S, lambda: "step 3")
        found.append(num_monitor_threads())
        monitor.leave_world(is_coordinated=True)
        found.append(num_monitor_threads())
    monitor.stop_hang_detection()
    store.add("left", 1)
    while rank == 0 and store.add("left", 0) < world_size:  # rank 0 serves the store, and exits last
        time.sleep(0.01)
    return before, [*found, num_monitor_threads()]


@pytest.mark.processes
def test_one_thread_detects_hangs_exits_and_lost_hosts_in_one_world_after_another():
    for outcome in outcomes_of_ranks(detect_everything, free_port()):
        assert outcome.value == (0, [1, 1, 1, 1, 0]), outcome
