"""Training on several hosts over a slow network: time per step and bytes on the network, by strategy and compression.

    python -m benchmarks.multi_host                               # 1 Gbit/s, two hosts, one and two ranks on each
    python -m benchmarks.multi_host --rates 100 1000 10000 0 --hosts 2 4 --ranks 1
    python -m benchmarks.multi_host --only ddp powersgd --steps 2000 --rates 0 --rounds 1     # learning curves

Hosts are network namespaces, see :mod:`benchmarks.network_namespaces`: they share the cores of this machine, and the
rate at which each host sends is limited (0: no limit). The model is a transformer with about ten million parameters,
trained on the docstrings of Python's standard library. Contenders alternate in each round, and the slowest rank counts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import network_namespaces
from benchmarks.horovod_commands import RENDEZVOUS
from benchmarks.multi_host_rank import CONTENDERS, HOROVOD, Job
from benchmarks.plots import draw_plot
from benchmarks.report import (
    DEFAULT_OUTPUT,
    Spread,
    paired_ratio,
    print_goals,
    print_table,
    rotated,
    write_json,
)
from lightning_strategies_ext.horovod.runtime import check_installed

STOCK = "ddp"
_FIRST_PORT = 29600
#: Goals at 1 Gbit/s on two hosts: ranks per host, contender, and speed relative to stock.
GOALS = (
    (2, "ddp_ext", 1.8),
    (1, "bf16", 1.7),
    (1, "powersgd", 4.0),
    (1, "localsgd", 6.0),
    (1, "diloco", 6.0),
)

Measured = dict[str, list[dict[str, Any]]]


def run_round(job: Job, hosts: Sequence[network_namespaces.Host], timeout_s: float) -> dict[str, dict[str, Any]]:
    """Starts all ranks and waits for them.

    Returns:
        Results of the slowest rank, by contender.

    Raises:
        RuntimeError: If a rank fails; the message contains its output.
    """
    ranks, logs = [], []
    for node, host in enumerate(hosts):
        for local in range(job.num_ranks):
            log = Path(job.directory, f"{node}-{local}.log")
            variables = {"NODE_RANK": node, "LOCAL_RANK": local, "MASTER_ADDR": hosts[0].address, "OMP_NUM_THREADS": 1}
            environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
            command = [*host.enter(), sys.executable, "-m", "benchmarks.multi_host_rank", json.dumps(asdict(job))]
            with log.open("wb") as output:
                ranks.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
            logs.append(log)
    try:
        codes = [rank.wait(timeout_s) for rank in ranks]
    finally:
        for host in hosts:
            host.kill_all()
    if any(codes):
        raise RuntimeError("\n".join(log.read_text()[-3000:] for log in logs))
    seen = [json.loads(Path(job.directory, f"{rank}.json").read_text()) for rank in range(len(ranks))]
    return {name: max((of_rank[name] for of_rank in seen), key=lambda one: one["step_ms"]) for name in job.contenders}


def measure(job: Job, rate: float, rounds: int, timeout_s: float) -> Measured:
    """Measures all contenders, round by round."""
    measured: Measured = {name: [] for name in job.contenders}
    with tempfile.TemporaryDirectory() as directory:
        with network_namespaces.hosts(job.num_hosts, Path(directory)) as hosts:
            for host in hosts:
                if rate:
                    host.set_rate(rate)
            for index in range(rounds):
                order = rotated(job.contenders, index)
                ports = _FIRST_PORT + index * len(order)
                with rendezvous_of_horovod(job, hosts[0]) as horovod_port:
                    settings = {"directory": directory, "port": ports, "horovod_port": horovod_port}
                    found = run_round(replace(job, contenders=order, **settings), hosts, timeout_s)
                for name, one in found.items():
                    measured[name].append(one)
    return measured


@contextmanager
def rendezvous_of_horovod(job: Job, host: network_namespaces.Host) -> Iterator[int]:
    """Runs Horovod's rendezvous server on a host during the context, if it is needed; yields its port."""
    if HOROVOD not in job.contenders:
        yield 0
        return
    check_installed()
    command = [*host.enter(), sys.executable, "-c", RENDEZVOUS, str(job.num_hosts), str(job.num_ranks)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield int(server.stdout.readline())


def label_of(job: Job, rate: float) -> str:
    """Returns the name of a case."""
    speed = "no limit" if not rate else f"{rate / 1000:g} Gbit/s" if rate >= 1000 else f"{rate:g} Mbit/s"
    return f"{job.num_hosts} hosts x {job.num_ranks}, {speed}"


def show(label: str, measured: Measured) -> None:
    """Prints the table of a case."""
    stock = [one["step_ms"] for one in measured[STOCK]] if STOCK in measured else None
    rows = []
    for name, seen in measured.items():
        times = [one["step_ms"] for one in seen]
        ratio = paired_ratio(stock, times).text() if stock is not None else ""
        last = [sum(one["bits"][-100:]) / len(one["bits"][-100:]) for one in seen]
        sent = median(one["sent_mb"] for one in seen)
        rows.append([name, Spread.of(times).text(1), ratio, f"{sent:.2f}", f"{median(last):.3f}"])
    columns = ["strategy", "ms per step", "times stock's speed", "MB per step and host", "bits per byte, last steps"]
    print_table(label, columns, rows)


def goals_of(job: Job, rate: float, measured: Measured) -> list[dict[str, Any]]:
    """Returns the goals of a case with the reached values."""
    if (job.num_hosts, rate) != (2, 1000) or STOCK not in measured:
        return []
    goals = []
    for ranks, name, wanted in GOALS:
        if ranks == job.num_ranks and name in measured:
            stock, own = ([one["step_ms"] for one in measured[each]] for each in (STOCK, name))
            reached = paired_ratio(stock, own).median
            goals.append(
                {
                    "goal": f"{name}: times stock's speed",
                    "case": label_of(job, rate),
                    "wanted": f"at least {wanted:g}",
                    "reached": reached,
                    "is_met": reached >= wanted,
                }
            )
    return goals


def main() -> None:
    """Measures, prints the tables, writes the JSON file, and draws the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[1000], help="megabits per second; 0 for no limit")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="per host")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps",
        type=int,
        default=32,
        help="number of timed steps: a multiple of 32, which is the period of local SGD",
    )
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=16, help="bytes per window")
    parser.add_argument("--batch-size", type=int, default=1, help="windows per rank and step")
    parser.add_argument("--timeout", type=float, default=3600, help="time limit of a round, in seconds")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--name", default="hosts", help="name of the files in the output directory")
    options = parser.parse_args()
    shape = options.steps, options.width, options.layers, options.context, options.batch_size
    results, goals = {}, []
    for num_hosts, num_ranks, rate in product(options.hosts, options.ranks, options.rates):
        job = Job(options.only, num_hosts, num_ranks, *shape, _FIRST_PORT, "")
        measured = measure(job, rate, options.rounds, options.timeout)
        results[label_of(job, rate)] = measured
        show(label_of(job, rate), measured)
        goals += goals_of(job, rate, measured)
    if goals:
        print_goals(goals)
    file = write_json(options.output, options.name, {"shape": shape, "results": results, "goals": goals})
    draw_plot(file, kind="hosts")


if __name__ == "__main__":
    main()
