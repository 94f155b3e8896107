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
from lightning_strategies_ext.interpreters import current_options_as_variables
from lightning_strategies_ext.launch.processes.worker_main import WorkerTask
from lightning_strategies_ext.launch.protocol import WorkerRankInfo, WorkerSetup
from lightning_strategies_ext.launch.ray import cluster
from lightning_strategies_ext.launch.ray.actor import WorkerActor, versions
from lightning_strategies_ext.launch.ray.link_relay import RelayedLinkServer
from lightning_strategies_ext.launch.ray.payloads import RayPayload, dump_for_ray
from lightning_strategies_ext.launch.ray.ray_worker import RayWorker, SentPayload, reason_from_ray, wait_until
from lightning_strategies_ext.launch.ray.remote_settings import RemoteProcessSettings, selected
from lightning_strategies_ext.launch.ray.resource_demand import ResourceDemand
from lightning_strategies_ext.launch.ray.worker_link import LinkServer
from lightning_strategies_ext.launch.transport.memory_files import MemoryFileCache
from lightning_strategies_ext.launch.transport.pickling import Pickled

log = logging.getLogger(__name__)

#: After how long it is said that the cluster has no room, in seconds.
_WARN_AFTER_S = 5.0
_POLL_S = 0.2
_PACKAGES = ("lightning_strategies_ext", "torch", "cloudpickle")


class RayStarter:
    """See :class:`.WorkerStarter`.

    Args:
        demand: What each worker needs.
        address: See :func:`.cluster.connect`.
        runtime_env: What workers find on their hosts, as Ray takes it.
        environment_variables: Names of variables that workers receive, see :func:`.remote_settings.selected`.
        timeout_s: How long to wait for room in the cluster.
        modules: What workers import before they get a job: the Lightning that the main process has.
        is_elastic: Whether workers may be replaced in the middle of a job.
    """

    name = "strategy='ddp_ray_ext'"
    forks = False
    closes_through_library = True
    settings_class = RemoteProcessSettings
    dump = staticmethod(dump_for_ray)

    def __init__(
        self,
        demand: ResourceDemand,
        address: str | None,
        runtime_env: dict[str, Any] | None,
        environment_variables: Sequence[str] | None,
        timeout_s: float,
        modules: Sequence[str],
        is_elastic: bool = False,
    ) -> None:
        self._demand = demand
        self._address = address
        self._runtime_env = runtime_env
        self._environment_variables = environment_variables
        self._timeout_s = timeout_s
        self._modules = list(modules)
        self._is_elastic = is_elastic
        self._packages = [*_PACKAGES, *(module.partition(".")[0] for module in modules)]
        self._group: Any = None
        self._link_server: LinkServer | RelayedLinkServer | None = None
        self._has_joined = False
        self._actor_class: Any = None
        self._is_env_of_actors = False  # the job has the runtime environment if this process has started the job
        self._number = 0  # of workers so far
        self._workers: list[RayWorker] = []  # by bundle, the newest of each

    def __getstate__(self) -> dict[str, Any]:
        nothing: dict[str, Any] = {"_group": None, "_link_server": None, "_actor_class": None, "_workers": []}
        return {**vars(self), **nothing, "_has_joined": False}

    @property
    def reuse_key(self) -> Any:
        """What has to be alike in two of them for the workers of one to be of use to the other."""
        demand = self._demand
        bundles = sorted(demand.bundle.items()), demand.placement_strategy
        return "ray", self._address, repr(self._runtime_env), bundles, self._is_elastic

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of the main process that its workers receive."""
        return selected(rank_variables.environment_for_ranks(), self._environment_variables)

    def num_cpus(self, num_workers: int) -> int:
        """How many CPUs a worker has for its computations."""
        return max(1, int(self._demand.num_cpus))

    @property
    def address(self) -> str:
        """Of this process's host, as the workers reach it."""
        assert self._link_server is not None
        return self._link_server.address[0]

    def check_can_start(self) -> None:
        """Does nothing: what a cluster can give is known when it is joined."""

    def start(self, rank: int, num_workers: int, inherited_task: WorkerTask | None) -> RayWorker:
        """Starts a worker, the first one when the cluster has room for all.

        Raises:
            ValueError: If the cluster has less than they need.
            RuntimeError: If it cannot be reached, or others do not leave room in time.
        """
        if not self._has_joined:
            has_connected = cluster.connect(self._address, self._demand, num_workers, self._runtime_env)
            self._has_joined = True
            self._is_env_of_actors = not has_connected
            self._actor_class = ray.remote(WorkerActor)
            is_ray_client = cluster.is_ray_client()
            if is_ray_client and self._is_elastic:
                raise RuntimeError(
                    "`elastic=True` with Ray Client: workers meet in the main process, which they cannot reach there."
                    " Run the script in the cluster, by `ray job submit` or on one of its hosts, or leave it out."
                )
            self._reserve(num_workers)
            self._link_server = RelayedLinkServer() if is_ray_client else LinkServer(ray.util.get_node_ip_address())
            self._workers = []
        worker = self._start(rank, rank)
        self._workers.append(worker)
        return worker

    def _start(self, rank: int, bundle: int) -> RayWorker:
        assert self._link_server is not None
        options: dict[str, Any] = {
            "num_cpus": self._demand.num_cpus,
            "num_gpus": self._demand.num_gpus,
            "resources": dict(self._demand.resources),
            **self._runtime_env_option(),
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=False
            ),
        }
        self._number += 1
        return RayWorker(rank, self._number, bundle, self._link_server, options, self._actor_class, self._is_elastic)

    def _runtime_env_option(self) -> dict[str, Any]:
        """Returns the option with the runtime environment of an actor; Ray completes it with that of the job."""
        variables = (self._runtime_env or {}).get("env_vars", {})
        options = {name: value for name, value in current_options_as_variables().items() if name not in variables}
        environment = dict((self._runtime_env or {}) if self._is_env_of_actors else {})
        if options:
            environment["env_vars"] = {**options, **environment.get("env_vars", {})}
        return {"runtime_env": environment} if environment else {}

    def _reserve(self, num_workers: int) -> None:
        demand = self._demand
        self._group = placement_group([demand.bundle] * num_workers, strategy=demand.placement_strategy)
        started, has_warned = time.monotonic(), False
        while not self._group.wait(_POLL_S):
            waited = time.monotonic() - started
            if waited > self._timeout_s:
                raise RuntimeError(
                    f"The Ray cluster has had no room for {num_workers} workers with {demand.bundle} each for"
                    f" {waited:.0f} s (`timeout`): free are {cluster.free_resources_text()}. Others use the rest."
                )
            if waited > _WARN_AFTER_S and not has_warned:
                log.warning(
                    "Waiting for room in the Ray cluster for %d workers with %s each; free are %s.",
                    num_workers,
                    demand.bundle,
                    cluster.free_resources_text(),
                )
                has_warned = True

    def prepare(self, workers: Sequence[RayWorker]) -> list[RayWorker]:
        """Waits until all workers are there, and gives each its seat: those of the main process's host come first.

        Raises:
            RuntimeError: If one does not come, or has other versions of what must be alike.
        """
        asked = [(worker, self._request_info(worker)) for worker in workers]
        for worker, future in asked:
            worker.info = _result(worker, future)
            self._check_versions(worker)
        ranked = _with_rank_info(workers, ray.get_runtime_context().get_node_id())
        started = [
            (worker, worker.call("start", WorkerSetup(worker.rank, None, worker.rank_info))) for worker in ranked
        ]
        for worker, future in started:
            _check_has_started(worker, _result(worker, future))
        return ranked

    def replace(self, dead: RayWorker, num_workers: int, inherited_task: WorkerTask | None) -> RayWorker:
        """Starts a worker in the bundle of one that has died, on another host if Ray has had to move the bundle."""
        worker = self._workers[dead.bundle] = self._start(dead.rank, dead.bundle)
        worker.start_up(self._startup_steps(worker, num_workers))
        return worker

    def _startup_steps(self, worker: RayWorker, num_workers: int) -> Generator["Future[Any]", Any, None]:
        worker.info = yield self._request_info(worker)
        self._check_versions(worker)
        info = worker.info
        assert info is not None
        others = [other for other in self._workers if other is not worker and other.info is not None]
        num_here = sum(other.is_alive() and other.info.host == info.host for other in others)  # type: ignore[union-attr]
        # Until it has joined the others it is none of them, and not the first, whose part in that is done.
        worker.rank_info = WorkerRankInfo(
            max(1, worker.rank), num_workers, num_here, num_here + 1, 0, 1, info.address, info.port
        )
        _check_has_started(worker, (yield worker.call("start", WorkerSetup(worker.rank, None, worker.rank_info))))

    def _request_info(self, worker: RayWorker) -> Any:
        paths = [os.path.abspath(path) for path in sys.path]
        return worker.call("info", paths, self._modules, self._packages)

    def _check_versions(self, worker: RayWorker) -> None:
        assert worker.info is not None
        ours, theirs = versions(self._packages), worker.info.versions
        differing = [f"{name} {theirs[name]} in place of {ours[name]}" for name in ours if theirs[name] != ours[name]]
        if differing:
            raise RuntimeError(
                f"A worker on {worker.info.address} has {' and '.join(differing)}. All hosts of a cluster need the"
                " same versions as the main process: install them there, or name them in `runtime_env={'pip': [...]}`."
            )

    def pack(self, pickled: Pickled, cache: MemoryFileCache) -> SentPayload:
        """Puts a job into Ray's object store, once for all workers."""
        return SentPayload(RayPayload.of(pickled))

    def close(self) -> None:
        """Gives all that was reserved back, and ends what was started for it."""
        if not self._has_joined:
            return
        if self._link_server is not None:
            self._link_server.close()
        if self._group is not None and ray.is_initialized():
            try:
                remove_placement_group(self._group)
            except RayError as error:
                log.warning("The placement group of the workers could not be removed: %s", error)
        self._group = self._link_server = self._actor_class = None
        self._workers = []
        self._has_joined = False
        cluster.disconnect()


def _result(worker: RayWorker, future: Any) -> Any:
    while not future.done():
        wait_until(future, _POLL_S)
    error = future.exception()
    if error is None:
        return future.result()
    hint = ""
    if "No module named" in str(error):
        hint = " Every host needs this package, torch and Lightning; `runtime_env={'pip': [...]}` can bring them."
    raise RuntimeError(
        f"Worker {worker.rank} does not start on the Ray cluster: {reason_from_ray(error)}{hint}"
    ) from error


def _check_has_started(worker: RayWorker, failure: Any) -> None:
    if failure is not None:
        raise RuntimeError(f"Worker {worker.rank} ({worker.description}) cannot start: {failure.traceback}")


def _with_rank_info(workers: Sequence[RayWorker], main_host: str) -> list[RayWorker]:
    hosts: dict[str, list[RayWorker]] = {}
    for worker in sorted(workers, key=lambda worker: (worker.info.host != main_host, worker.rank)):  # type: ignore[union-attr]
        assert worker.info is not None
        hosts.setdefault(worker.info.host, []).append(worker)
    ranked = [worker for of_host in hosts.values() for worker in of_host]
    first = ranked[0].info
    assert first is not None
    address = first.address if len(hosts) > 1 else "127.0.0.1"
    for node_rank, of_host in enumerate(hosts.values()):
        for local_rank, worker in enumerate(of_host):
            worker.rank = ranked.index(worker)
            worker.rank_info = WorkerRankInfo(
                worker.rank, len(ranked), local_rank, len(of_host), node_rank, len(hosts), address, first.port
            )
    return ranked
