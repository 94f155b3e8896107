"""What the watch over ranks costs: a look of one rank at itself and its host, and the talk between hosts.

    python -m benchmarks.watch
    python -m benchmarks.watch --hosts 2 64 1024 --seconds 20

A look happens four times per second, in a thread that holds Python's lock meanwhile. The talk is measured at rank 0, in
a process of its own; those that speak for the other hosts are all in this one, and train nothing.
"""

import argparse
import multiprocessing
import os
import statistics
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import psutil
import torch.distributed as dist

from benchmarks.report import print_table
from lightning_strategies_ext.failure.activity import Activity
from lightning_strategies_ext.failure.board import SLOT_NUM_BYTES, Board
from lightning_strategies_ext.failure.host_signs import INTERVAL_S
from lightning_strategies_ext.failure.hosts import Hosts
from lightning_strategies_ext.failure.signs import Sign, Silence, first_failure, stuck_ranks
from lightning_strategies_ext.failure.waiting import Waiting
from lightning_strategies_ext.peers import Peer

#: Until all have called, in seconds.
SETTLE_S = 5.0


class _Keys(dict[str, str]):
    """Stands for a store."""

    def set(self, key: str, value: str) -> None:
        """Sets a value."""
        self[key] = value

    def get(self, key: str, default: object = None) -> bytes:  # type: ignore[override]
        """Gets one."""
        return self[key].encode()


def time_of_a_look(num_ranks: int, rounds: int = 200) -> float:
    """Seconds that a watch takes to look once, with so many ranks on the host."""
    keys = _Keys()
    boards = [Board.of_host(keys, "path", rank, range(num_ranks)) for rank in range(num_ranks)]
    boards = [board for board in boards if board is not None]
    for rank, board in enumerate(boards):
        board.write(Sign(rank, where="train, epoch 0, step 100").dump(SLOT_NUM_BYTES - 64))
    activity, silence = Activity(threading.main_thread()), Silence()
    seconds = []
    for beats in range(rounds):
        begin = time.perf_counter()
        activity.sample(INTERVAL_S)
        boards[0].write(Sign(0, beats, where="train, epoch 0, step 100").dump(SLOT_NUM_BYTES - 64))
        read = [boards[0].read(slot) for slot in range(num_ranks)]
        signs = {rank: Sign.load(content) for rank, content in enumerate(read) if content is not None}
        silence.note(signs, INTERVAL_S)
        first_failure(signs)
        stuck_ranks(signs, silence.seconds, 300.0)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def load_of_first(num_hosts: int, ranks_per_host: int, seconds: float) -> float:
    """The part of a core that the watch of rank 0 needs to hear of so many hosts."""
    here, there = multiprocessing.Pipe()
    first = multiprocessing.get_context("spawn").Process(target=_hear, args=(there, num_hosts, ranks_per_host))
    first.start()
    store = dist.TCPStore("127.0.0.1", here.recv(), is_master=False, timeout=timedelta(seconds=60))
    peers, waiting = _peers(num_hosts, ranks_per_host), Waiting()
    speakers = range(ranks_per_host, len(peers), ranks_per_host)
    hosts = {rank: Hosts(store, peers, rank, 0, waiting) for rank in speakers}
    process, used, beats = psutil.Process(first.pid), 0.0, 0
    begin = until = time.monotonic()
    while time.monotonic() < begin + SETTLE_S + seconds:
        if until <= time.monotonic():
            until, beats = time.monotonic() + INTERVAL_S, beats + 1
            for speaker, host in hosts.items():
                ranks = range(speaker, speaker + ranks_per_host)
                host.tell({rank: Sign(rank, beats, where="train, epoch 0, step 100") for rank in ranks}, None)
        waiting.wait(max(0.0, until - time.monotonic()))
        if time.monotonic() < begin + SETTLE_S:
            used = sum(process.cpu_times()[:2])
    used = (sum(process.cpu_times()[:2]) - used) / seconds
    here.send("how many?")
    assert here.recv() == len(peers) - ranks_per_host
    for host in hosts.values():
        host.close()
    first.join()
    return used


def _hear(connection: Connection, num_hosts: int, ranks_per_host: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    waiting, peers = Waiting(), _peers(num_hosts, ranks_per_host)
    hosts = Hosts(store, peers, 0, 0, waiting)
    connection.send(store.port)
    while not connection.poll():
        waiting.wait(INTERVAL_S)
        hosts.tell({0: Sign(0, where="train, epoch 0, step 100")}, None)
    connection.send(sum(sign.beats > 0 for sign in hosts.signs.values()))
    os._exit(0)


def _peers(num_hosts: int, ranks_per_host: int) -> dict[int, Peer]:
    return {rank: Peer(rank, str(rank // ranks_per_host), 0, 0.0) for rank in range(num_hosts * ranks_per_host)}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 64, 256])
    parser.add_argument("--ranks-per-host", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    looks = [(str(num), time_of_a_look(num)) for num in options.ranks]
    rows = [[num, f"{1e6 * seconds:.0f} us", f"{100 * seconds / INTERVAL_S:.2f} %"] for num, seconds in looks]
    print_table("One look of a watch", ["ranks of the host", "time", "of a core"], rows)
    each = options.ranks_per_host
    loads = [(str(num), load_of_first(num, each, options.seconds)) for num in options.hosts]
    print_table(
        f"Rank 0 hears of hosts with {each} ranks each",
        ["hosts", "of a core"],
        [[num, f"{100 * load:.2f} %"] for num, load in loads],
    )


if __name__ == "__main__":
    main()
