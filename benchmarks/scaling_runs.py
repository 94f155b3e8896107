"""Starts the ranks of :mod:`benchmarks.scaling`, here or in network namespaces, and merges their measurements."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import network_namespaces
from benchmarks.rank_launcher import free_port
from benchmarks.scaling_model import Bucket, Computation, Link, Sample, fit
from benchmarks.scaling_rank import APART, COMPUTE, Job, arguments_of

_PORT_BETWEEN_HOSTS = 29700


@dataclass(frozen=True)
class Case:
    """Measurements with one number of hosts and ranks, of the slowest rank in each round.

    Attributes:
        num_hosts: Number of hosts.
        num_ranks: Number of ranks per host.
        messages: Size in bytes → seconds per all-reduce, one value per round.
        compression: Exchange → seconds per step of compressing and restoring.
        steps: Exchange, or the computation alone → seconds per step, one value per round.
        computation: Medians of the computation.
        apart: Computation of ranks that do not synchronize in each step; None if it was not measured.
    """

    num_hosts: int
    num_ranks: int
    messages: dict[int, list[float]]
    compression: dict[str, float]
    steps: dict[str, list[float]]
    computation: Computation
    apart: Computation | None

    @property
    def label(self) -> str:
        """Name of the case."""
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)}"
        return f"1 host, {ranks}" if self.num_hosts == 1 else f"{self.num_hosts} hosts x {ranks}"

    @property
    def world_size(self) -> int:
        """Number of ranks on all hosts."""
        return self.num_hosts * self.num_ranks

    @property
    def has_two_levels(self) -> bool:
        """Whether the all-reduce is hierarchical."""
        return self.num_hosts > 1 and self.num_ranks > 1

    def link(self) -> Link:
        """Link between the ranks, fitted to all-reduces in a ring."""
        return fit([self._sample(size, median(times)) for size, times in self.messages.items()])

    def fit_error(self, link: Link) -> float:
        """Returns the largest relative error of a link for the all-reduces of this case."""
        samples = [self._sample(size, median(times)) for size, times in self.messages.items()]
        return max(abs(link.messages_s(one.num_messages, one.num_bytes) / one.seconds - 1) for one in samples)

    def _sample(self, size: int, seconds: float) -> Sample:
        others = self.world_size - 1
        return Sample(2 * others, 2 * others / self.world_size * size, seconds)


def measure(job: Job, megabits: float, timeout_s: float) -> Case:
    """Measures one case.

    Args:
        job: Settings, with the numbers of hosts and ranks.
        megabits: Limit of the rate at which each of several hosts sends, in megabits per second; 0 for no limit.
        timeout_s: Time limit of the case.

    Raises:
        NoHostsError: If several hosts are requested, and this machine permits no network namespaces.
        RuntimeError: If a rank fails; the message contains its output.
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        job = replace(job, directory=str(directory))
        hosts: list[network_namespaces.Host] = []
        if job.num_hosts > 1:
            hosts = stack.enter_context(network_namespaces.hosts(job.num_hosts, directory))
            for host in hosts:
                if megabits:
                    host.set_rate(megabits)
        run(job, hosts, timeout_s)
        ranks = range(job.num_hosts * job.num_ranks)
        return merged(job, [json.loads((directory / f"{rank}.json").read_text()) for rank in ranks])


def run(job: Job, hosts: Sequence[network_namespaces.Host], timeout_s: float) -> None:
    """Starts all ranks, on this machine if there are no hosts, and waits for them.

    Raises:
        RuntimeError: If a rank fails; the message contains its output.
    """
    address = hosts[0].address if hosts else "127.0.0.1"
    port = _PORT_BETWEEN_HOSTS if hosts else free_port()
    ranks, logs = [], []
    try:
        for node in range(job.num_hosts):
            for local in range(job.num_ranks):
                variables = {"NODE_RANK": node, "LOCAL_RANK": local, "MASTER_ADDR": address, "MASTER_PORT": port}
                environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
                command = [*(hosts[node].enter() if hosts else []), sys.executable, *arguments_of(job)]
                logs.append(Path(job.directory, f"{node}-{local}.log"))
                with logs[-1].open("wb") as output:
                    ranks.append(
                        subprocess.Popen(
                            command,
                            env={**environment, "OMP_NUM_THREADS": "1"},
                            stdout=output,
                            stderr=subprocess.STDOUT,
                        )
                    )
        codes = [rank.wait(timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
        for host in hosts:
            host.kill_all()
    if any(codes):
        raise RuntimeError("\n".join(log.read_text()[-3000:] for log in logs))


def merged(job: Job, seen: Sequence[dict[str, Any]]) -> Case:
    """Merges the measurements of the ranks: in each round, a job is as slow as its slowest rank."""
    trainings = {name: [one["trainings"][name] for one in seen] for name in seen[0]["trainings"]}
    steps = {name: _slowest([[one["step_s"] for one in rank] for rank in ranks]) for name, ranks in trainings.items()}

    def computation(name: str) -> Computation:
        backward_s = median(_slowest([[one["backward_s"] for one in rank] for rank in trainings[name]]))
        buckets = [one["buckets"] for rank in trainings[name] for one in rank]
        ready_s = [median(times) for times in zip(*([at for _, at in one] for one in buckets), strict=True)]
        with_times = tuple(Bucket(size, at) for (size, _), at in zip(buckets[0], ready_s, strict=True))
        return Computation(median(steps[name]) - backward_s, backward_s, with_times)

    return Case(
        job.num_hosts,
        job.num_ranks,
        {int(size): _slowest([one["messages"][size] for one in seen]) for size in seen[0]["messages"]},
        {name: median(_slowest([one["compression"][name] for one in seen])) for name in seen[0]["compression"]},
        steps,
        computation(COMPUTE),
        computation(APART) if APART in trainings else None,
    )


def _slowest(per_rank: Sequence[Sequence[float]]) -> list[float]:
    return [max(samples) for samples in zip(*per_rank, strict=True)]
