"""Starts workers on a Ray cluster: a placement group, an actor in each of its bundles, a seat for each."""

import logging
import os
import sys
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lightning_strategies_ext import rank_variables
from lightning_strategies_ext.launch.processes.worker import Job
from lightning_strategies_ext.launch.protocol import Seat, Start
from lightning_strategies_ext.launch.ray import cluster
from lightning_strategies_ext.launch.ray.actor import WorkerActor, versions
from lightning_strategies_ext.launch.ray.conditions import ConditionsElsewhere, selected
from lightning_strategies_ext.launch.ray.demand import Demand
from lightning_strategies_ext.launch.ray.line import Switchboard
from lightning_strategies_ext.launch.ray.messages import Parcel, dump_for_ray
from lightning_strategies_ext.launch.ray.relay import RelayedSwitchboard
from lightning_strategies_ext.launch.ray.worker import RayWorker, SentParcel, reason_in, wait_until
from lightning_strategies_ext.launch.transport.messages import Pickled
from lightning_strategies_ext.launch.transport.segments import KeptSegments

log = logging.getLogger(__name__)

#: After how long it is said that the cluster has no room, in seconds.
_SAY_S = 5.0
_POLL_S = 0.2
_PACKAGES = ("lightning_strategies_ext", "torch", "cloudpickle")


class RayStarter:
    """See :class:`.Starter`.

    Args:
        demand: What each worker needs.
        address: See :func:`.cluster.join`.
        runtime_env: What workers find on their hosts, as Ray takes it.
        environment_variables: Names of variables that workers receive, see :func:`.conditions.selected`.
        timeout_s: How long to wait for room in the cluster.
        modules: What workers import before they get a job: the Lightning that the main process has.
        may_change: Whether workers may be replaced in the middle of a job.
    """

    name = "strategy='ddp_ray_ext'"
    forks = False
    ends_by_calls = True
    conditions = ConditionsElsewhere
    dump = staticmethod(dump_for_ray)

    def __init__(
        self,
        demand: Demand,
        address: str | None,
        runtime_env: dict[str, Any] | None,
        environment_variables: Sequence[str] | None,
        timeout_s: float,
        modules: Sequence[str],
        may_change: bool = False,
    ) -> None:
        self._demand = demand
        self._address = address
        self._runtime_env = runtime_env
        self._environment_variables = environment_variables
        self._timeout_s = timeout_s
        self._modules = list(modules)
        self._may_change = may_change
        self._packages = [*_PACKAGES, *(module.partition(".")[0] for module in modules)]
        self._group: Any = None
        self._switchboard: Switchboard | RelayedSwitchboard | None = None
        self._has_joined = False
        self._actor_class: Any = None
        self._of_actors: dict[str, Any] = {}
        self._number = 0  # of workers so far
        self._workers: list[RayWorker] = []  # by bundle, the newest of each

    def __getstate__(self) -> dict[str, Any]:
        nothing: dict[str, Any] = {"_group": None, "_switchboard": None, "_actor_class": None, "_workers": []}
        return {**vars(self), **nothing, "_has_joined": False}

    @property
    def kind(self) -> Any:
        """What has to be alike in two of them for the workers of one to be of use to the other."""
        demand = self._demand
        bundles = sorted(demand.bundle.items()), demand.placement
        return "ray", self._address, repr(self._runtime_env), bundles, self._may_change

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of the main process that its workers receive."""
        return selected(rank_variables.environment_for_ranks(), self._environment_variables)

    def num_cpus(self, num_workers: int) -> int:
        """How many CPUs a worker has for its computations."""
        return max(1, int(self._demand.num_cpus))

    @property
    def address(self) -> str:
        """Of this process's host, as the workers reach it."""
        assert self._switchboard is not None
        return self._switchboard.address[0]

    def check_can_start(self) -> None:
        """Does nothing: what a cluster can give is known when it is joined."""

    def start(self, rank: int, num_workers: int, inherited: Job | None) -> RayWorker:
        """Starts a worker, the first one when the cluster has room for all.

        Raises:
            ValueError: If the cluster has less than they need.
            RuntimeError: If it cannot be reached, or others do not leave room in time.
        """
        if not self._has_joined:
            has_connected = cluster.join(self._address, self._demand, num_workers, self._runtime_env)
            self._has_joined = True
            self._of_actors = {} if has_connected or not self._runtime_env else {"runtime_env": self._runtime_env}
            self._actor_class = ray.remote(WorkerActor)
            is_elsewhere = cluster.is_elsewhere()
            if is_elsewhere and self._may_change:
                raise RuntimeError(
                    "`elastic=True` with Ray Client: workers meet in the main process, which they cannot reach there."
                    " Run the script in the cluster, by `ray job submit` or on one of its hosts, or leave it out."
                )
            self._reserve(num_workers)
            self._switchboard = RelayedSwitchboard() if is_elsewhere else Switchboard(ray.util.get_node_ip_address())
            self._workers = []
        worker = self._start(rank, rank)
        self._workers.append(worker)
        return worker

    def _start(self, rank: int, bundle: int) -> RayWorker:
        assert self._switchboard is not None
        options: dict[str, Any] = {
            "num_cpus": self._demand.num_cpus,
            "num_gpus": self._demand.num_gpus,
            "resources": dict(self._demand.resources),
            **self._of_actors,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=False
            ),
        }
        self._number += 1
        return RayWorker(rank, self._number, bundle, self._switchboard, options, self._actor_class, self._may_change)

    def _reserve(self, num_workers: int) -> None:
        demand = self._demand
        self._group = placement_group([demand.bundle] * num_workers, strategy=demand.placement)
        started, has_said = time.monotonic(), False
        while not self._group.wait(_POLL_S):
            waited = time.monotonic() - started
            if waited > self._timeout_s:
                raise RuntimeError(
                    f"The Ray cluster has had no room for {num_workers} workers with {demand.bundle} each for"
                    f" {waited:.0f} s (`timeout`): free are {cluster.said_of_free()}. Others use the rest."
                )
            if waited > _SAY_S and not has_said:
                log.warning(
                    "Waiting for room in the Ray cluster for %d workers with %s each; free are %s.",
                    num_workers,
                    demand.bundle,
                    cluster.said_of_free(),
                )
                has_said = True

    def prepare(self, workers: Sequence[RayWorker]) -> list[RayWorker]:
        """Waits until all workers are there, and gives each its seat: those of the main process's host come first.

        Raises:
            RuntimeError: If one does not come, or has other versions of what must be alike.
        """
        asked = [(worker, self._ask_for_facts(worker)) for worker in workers]
        for worker, future in asked:
            worker.facts = _result(worker, future)
            self._check_versions(worker)
        seated = _seated(workers, ray.get_runtime_context().get_node_id())
        started = [(worker, worker.ask("start", Start(worker.rank, None, worker.seat))) for worker in seated]
        for worker, future in started:
            _check_has_started(worker, _result(worker, future))
        return seated

    def replace(self, dead: RayWorker, num_workers: int, inherited: Job | None) -> RayWorker:
        """Starts a worker in the bundle of one that has died, on another host if Ray has had to move the bundle."""
        worker = self._workers[dead.bundle] = self._start(dead.rank, dead.bundle)
        worker.get_ready(self._steps_of(worker, num_workers))
        return worker

    def _steps_of(self, worker: RayWorker, num_workers: int) -> Generator["Future[Any]", Any, None]:
        worker.facts = yield self._ask_for_facts(worker)
        self._check_versions(worker)
        facts = worker.facts
        assert facts is not None
        others = [other for other in self._workers if other is not worker and other.facts is not None]
        num_here = sum(other.is_alive() and other.facts.host == facts.host for other in others)  # type: ignore[union-attr]
        # Until it has joined the others it is none of them, and not the first, whose part in that is done.
        worker.seat = Seat(max(1, worker.rank), num_workers, num_here, num_here + 1, 0, 1, facts.address, facts.port)
        _check_has_started(worker, (yield worker.ask("start", Start(worker.rank, None, worker.seat))))

    def _ask_for_facts(self, worker: RayWorker) -> Any:
        paths = [os.path.abspath(path) for path in sys.path]
        return worker.ask("facts", paths, self._modules, self._packages)

    def _check_versions(self, worker: RayWorker) -> None:
        assert worker.facts is not None
        ours, theirs = versions(self._packages), worker.facts.versions
        differing = [f"{name} {theirs[name]} in place of {ours[name]}" for name in ours if theirs[name] != ours[name]]
        if differing:
            raise RuntimeError(
                f"A worker on {worker.facts.address} has {' and '.join(differing)}. All hosts of a cluster need the"
                " same versions as the main process: install them there, or name them in `runtime_env={'pip': [...]}`."
            )

    def pack(self, pickled: Pickled, kept: KeptSegments) -> SentParcel:
        """Puts a job into Ray's object store, once for all workers."""
        return SentParcel(Parcel.of(pickled))

    def close(self) -> None:
        """Gives all that was reserved back, and ends what was started for it."""
        if not self._has_joined:
            return
        if self._switchboard is not None:
            self._switchboard.close()
        if self._group is not None and ray.is_initialized():
            try:
                remove_placement_group(self._group)
            except RayError as error:
                log.warning("The placement group of the workers could not be removed: %s", error)
        self._group = self._switchboard = self._actor_class = None
        self._workers = []
        self._has_joined = False
        cluster.leave()


def _result(worker: RayWorker, future: Any) -> Any:
    while not future.done():
        wait_until(future, _POLL_S)
    error = future.exception()
    if error is None:
        return future.result()
    hint = ""
    if "No module named" in str(error):
        hint = " Every host needs this package, torch and Lightning; `runtime_env={'pip': [...]}` can bring them."
    raise RuntimeError(f"Worker {worker.rank} does not start on the Ray cluster: {reason_in(error)}{hint}") from error


def _check_has_started(worker: RayWorker, failure: Any) -> None:
    if failure is not None:
        raise RuntimeError(f"Worker {worker.rank} ({worker.where}) cannot start: {failure.trace}")


def _seated(workers: Sequence[RayWorker], main_host: str) -> list[RayWorker]:
    hosts: dict[str, list[RayWorker]] = {}
    for worker in sorted(workers, key=lambda worker: (worker.facts.host != main_host, worker.rank)):  # type: ignore[union-attr]
        assert worker.facts is not None
        hosts.setdefault(worker.facts.host, []).append(worker)
    seated = [worker for of_host in hosts.values() for worker in of_host]
    first = seated[0].facts
    assert first is not None
    address = first.address if len(hosts) > 1 else "127.0.0.1"
    for host_rank, of_host in enumerate(hosts.values()):
        for local_rank, worker in enumerate(of_host):
            worker.rank = seated.index(worker)
            worker.seat = Seat(
                worker.rank, len(seated), local_rank, len(of_host), host_rank, len(hosts), address, first.port
            )
    return seated
