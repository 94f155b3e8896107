"""Starts the ranks of :mod:`benchmarks.scaling`, here or on hosts that are namespaces, and merges what they saw."""

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
    """What was measured with one number of hosts and ranks; of the slowest rank in each round.

    Attributes:
        num_hosts: Hosts.
        num_ranks: Ranks per host.
        messages: Size in bytes → seconds per all-reduce, one value per round.
        compression: Exchange → seconds per step of compressing and restoring.
        steps: Exchange, or the computation alone → seconds per step, one value per round.
        computation: Medians.
        apart: The same of ranks that do not meet; None if that was not measured.
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
        """In words."""
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)}"
        return f"1 host, {ranks}" if self.num_hosts == 1 else f"{self.num_hosts} hosts x {ranks}"

    @property
    def world_size(self) -> int:
        """Ranks on all hosts."""
        return self.num_hosts * self.num_ranks

    @property
    def has_two_levels(self) -> bool:
        """Whether ranks add up inside hosts first."""
        return self.num_hosts > 1 and self.num_ranks > 1

    def link(self) -> Link:
        """What its ranks are joined by, from all-reduces in a ring."""
        return fit([self._sample(size, median(times)) for size, times in self.messages.items()])

    def misfit(self, link: Link) -> float:
        """How far a link is from the all-reduces of this case: the most, as a part of what was measured."""
        samples = [self._sample(size, median(times)) for size, times in self.messages.items()]
        return max(abs(link.messages_s(one.num_messages, one.num_bytes) / one.seconds - 1) for one in samples)

    def _sample(self, size: int, seconds: float) -> Sample:
        others = self.world_size - 1
        return Sample(2 * others, 2 * others / self.world_size * size, seconds)


def measure(job: Job, megabits: float, timeout_s: float) -> Case:
    """Measures one case.

    Args:
        job: With the numbers of hosts and ranks.
        megabits: Per second, that leave each of several hosts; 0 for no limit.
        timeout_s: For all of it.

    Raises:
        NoHostsError: If there are to be several hosts, and they cannot be had here.
        RuntimeError: If a rank has failed; with what it has said.
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
        RuntimeError: If a rank has failed; with what it has said.
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
    """Puts together what the ranks have seen: a job is as slow, in each round, as its slowest rank."""
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
