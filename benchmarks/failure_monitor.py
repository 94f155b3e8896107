"""Cost of the failure monitor: a heartbeat of one rank on its host, and the messages between hosts.

    python -m benchmarks.failure_monitor
    python -m benchmarks.failure_monitor --hosts 2 64 1024 --seconds 20
    python -m benchmarks.failure_monitor --against HEAD~1    # two revisions in turns: see benchmarks/against.py

A rank publishes a heartbeat four times per second, in a thread that holds the GIL meanwhile. The cost of messages is
measured at rank 0, in a separate process. This process contains the host leaders of all other hosts, which do not
train.
"""

import argparse
import multiprocessing
import os
import statistics
import threading
import time
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from benchmarks import against, names
from benchmarks.report import print_table
from benchmarks.turns import Part, Row

#: Time limit for the connections of all hosts, in seconds.
CONNECT_S = 5.0
#: Names of the package that are needed for a heartbeat on one host, and for messages between hosts.
_FOR_HEARTBEATS = (
    "ThreadActivity",
    "StatusTable",
    "open_status_table",
    "RankStatus",
    "stage_and_step",
    "HeartbeatAges",
    "update_ages",
    "SLOT_NUM_BYTES",
    "HEARTBEAT_INTERVAL_S",
    "first_failure",
    "hung_ranks",
)
_FOR_MESSAGES = (
    "RemoteStatus",
    "publish_remote",
    "RankStatus",
    "stage_and_step",
    "SelectorLoop",
    "Peer",
    "HEARTBEAT_INTERVAL_S",
)


class _Keys(dict[str, str]):
    """Store in a dictionary."""

    def set(self, key: str, value: str) -> None:
        """Sets a value."""
        self[key] = value

    def get(self, key: str, default: object = None) -> bytes:  # type: ignore[override]
        """Returns a value."""
        return self[key].encode()


def _attribute(value: object, *attributes: str) -> Any:
    """Returns the first of the given attributes that exists, because their names differ between revisions."""
    return next(getattr(value, name) for name in attributes if hasattr(value, name))


def time_heartbeat(num_ranks: int, rounds: int = 200) -> float:
    """Returns the seconds of one heartbeat, with the given number of ranks on the host."""
    keys, step = _Keys(), {names.stage_and_step: "train, epoch 0, step 100"}
    tables = [names.open_status_table(keys, "path", rank, range(num_ranks)) for rank in range(num_ranks)]
    tables = [table for table in tables if table is not None]
    for rank, table in enumerate(tables):
        table.write(names.RankStatus(rank, **step).dump(names.SLOT_NUM_BYTES - 64))
    activity, ages = names.ThreadActivity(threading.main_thread()), names.HeartbeatAges()
    seconds = []
    for beats in range(rounds):
        begin = time.perf_counter()
        activity.sample(names.HEARTBEAT_INTERVAL_S)
        tables[0].write(names.RankStatus(0, beats, **step).dump(names.SLOT_NUM_BYTES - 64))
        read = [tables[0].read(slot) for slot in range(num_ranks)]
        statuses = {rank: names.RankStatus.load(content) for rank, content in enumerate(read) if content is not None}
        names.update_ages(ages, statuses, names.HEARTBEAT_INTERVAL_S)
        names.first_failure(statuses)
        names.hung_ranks(statuses, _attribute(ages, "age_s", "seconds"), 300.0)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def measure_rank_0_load(num_hosts: int, ranks_per_host: int, seconds: float) -> float:
    """Returns the share of a core that the monitor of rank 0 uses for the messages of the given number of hosts."""
    parent_end, child_end = multiprocessing.Pipe()
    first = multiprocessing.get_context("spawn").Process(
        target=_serve_rank_0, args=(child_end, num_hosts, ranks_per_host)
    )
    first.start()
    step = {names.stage_and_step: "train, epoch 0, step 100"}
    store = dist.TCPStore("127.0.0.1", parent_end.recv(), is_master=False, timeout=timedelta(seconds=60))
    peers, loop = _peers(num_hosts, ranks_per_host), names.SelectorLoop()
    leaders = range(ranks_per_host, len(peers), ranks_per_host)
    hosts = {rank: names.RemoteStatus(store, peers, rank, 0, loop) for rank in leaders}
    process, used, beats = psutil.Process(first.pid), 0.0, 0
    begin = until = time.monotonic()
    while time.monotonic() < begin + CONNECT_S + seconds:
        if until <= time.monotonic():
            until, beats = time.monotonic() + names.HEARTBEAT_INTERVAL_S, beats + 1
            for leader, host in hosts.items():
                ranks = range(leader, leader + ranks_per_host)
                names.publish_remote(host, {rank: names.RankStatus(rank, beats, **step) for rank in ranks}, None)
        loop.wait(max(0.0, until - time.monotonic()))
        if time.monotonic() < begin + CONNECT_S:
            used = sum(process.cpu_times()[:2])
    used = (sum(process.cpu_times()[:2]) - used) / seconds
    parent_end.send("how many?")
    assert parent_end.recv() == len(peers) - ranks_per_host
    for host in hosts.values():
        host.close()
    first.join()
    return used


def _serve_rank_0(connection: Connection, num_hosts: int, ranks_per_host: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    loop, peers = names.SelectorLoop(), _peers(num_hosts, ranks_per_host)
    step = {names.stage_and_step: "train, epoch 0, step 100"}
    hosts = names.RemoteStatus(store, peers, 0, 0, loop)
    connection.send(store.port)
    while not connection.poll():
        loop.wait(names.HEARTBEAT_INTERVAL_S)
        names.publish_remote(hosts, {0: names.RankStatus(0, **step)}, None)
    statuses = _attribute(hosts, "statuses", "signs").values()
    connection.send(sum(_attribute(status, "heartbeat", "beats") > 0 for status in statuses))
    os._exit(0)


def _peers(num_hosts: int, ranks_per_host: int) -> dict[int, Any]:
    return {rank: names.Peer(rank, str(rank // ranks_per_host), 0, 0.0) for rank in range(num_hosts * ranks_per_host)}


def rows(num_ranks: list[int], num_hosts: list[int], ranks_per_host: int, seconds: float) -> dict[str, Row]:
    """Returns the rows of ``--against``: heartbeats by number of ranks, messages by number of hosts."""

    def heartbeat_row(row: str, num: int) -> dict[str, float]:
        return {f"{row}, us": 1e6 * time_heartbeat(num)}

    def load_row(row: str, num: int) -> dict[str, float]:
        return {f"{row}, % of a core": 100 * measure_rank_0_load(num, ranks_per_host, seconds)}

    heartbeats = {f"heartbeat, {num} ranks on the host": num for num in num_ranks}
    loads = {f"messages of {num} hosts to rank 0": num for num in num_hosts}
    return {
        **{row: Row(partial(heartbeat_row, row, num), _FOR_HEARTBEATS) for row, num in heartbeats.items()},
        **{row: Row(partial(load_row, row, num), _FOR_MESSAGES) for row, num in loads.items()},
    }


def main() -> None:
    """Measures, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 64, 256])
    parser.add_argument("--ranks-per-host", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=7, help="rounds with --against; otherwise one round")
    parser.add_argument("--output", type=Path, help=f"with --against, directory of the JSON: {against.OUTPUT}")
    against.add_arguments(parser)
    options = parser.parse_args()
    if options.against:
        settings = {
            "num_ranks": options.ranks,
            "num_hosts": options.hosts,
            "ranks_per_host": options.ranks_per_host,
            "seconds": options.seconds,
        }
        against.compare("failure_monitor", options, [Part("benchmarks.failure_monitor:rows", options.rounds, settings)])
        return
    heartbeats = [(str(num), time_heartbeat(num)) for num in options.ranks]
    rows = [
        [num, f"{1e6 * seconds:.0f} us", f"{100 * seconds / names.HEARTBEAT_INTERVAL_S:.2f} %"]
        for num, seconds in heartbeats
    ]
    print_table("One heartbeat of a failure monitor", ["ranks on the host", "time", "of a core"], rows)
    each = options.ranks_per_host
    loads = [(str(num), measure_rank_0_load(num, each, options.seconds)) for num in options.hosts]
    print_table(
        f"Messages of hosts with {each} ranks each to rank 0",
        ["hosts", "of a core"],
        [[num, f"{100 * load:.2f} %"] for num, load in loads],
    )


if __name__ == "__main__":
    main()
