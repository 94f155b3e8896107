"""Starts workers on a Ray cluster: a placement group, an actor in each of its bundles, and a rank for each actor."""

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
from typing_extensions import override

from lightning_strategies_ext import rank_variables
from lightning_strategies_ext.interpreters import current_options_as_variables
from lightning_strategies_ext.launch.processes.process_settings import RemoteProcessSettings, selected
from lightning_strategies_ext.launch.processes.worker_interface import WorkerStarter, WorkerState
from lightning_strategies_ext.launch.processes.worker_main import WorkerTask
from lightning_strategies_ext.launch.protocol import WorkerRankInfo, WorkerSetup
from lightning_strategies_ext.launch.ray import cluster
from lightning_strategies_ext.launch.ray.actor import WorkerActor, versions
from lightning_strategies_ext.launch.ray.cluster import ResourceDemand
from lightning_strategies_ext.launch.ray.link_relay import RelayedLinkServer
from lightning_strategies_ext.launch.ray.payloads import RayPayload, RayPickler
from lightning_strategies_ext.launch.ray.ray_worker import RayWorker, SentPayload, reason_from_ray, wait_until
from lightning_strategies_ext.launch.ray.worker_link import LinkServer
from lightning_strategies_ext.launch.transport.memory_files import MemoryFileCache
from lightning_strategies_ext.launch.transport.pickling import Pickled

log = logging.getLogger(__name__)

#: Seconds after which a warning is logged that the cluster lacks free resources.
_WARN_AFTER_S = 5.0
_POLL_S = 0.2
_PACKAGES = ("lightning_strategies_ext", "torch", "cloudpickle")


class RayStarter(WorkerStarter):
    """Starts workers on a Ray cluster.

    Args:
        demand: Resources of each worker.
        address: Address of the cluster, see :func:`.cluster.connect`.
        runtime_env: Ray's runtime environment of the workers.
        environment_variables: Names of variables that workers receive, see :func:`.process_settings.selected`.
        timeout_s: Seconds to wait for free resources in the cluster.
        modules: Modules that workers import before the first task: the Lightning package of the main process.
        is_elastic: Whether workers may be replaced while a task runs.
    """

    name = "strategy='ddp_ray_ext'"
    forks = False
    closes_through_library = True
    settings_class = RemoteProcessSettings
    pickler = RayPickler

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
        self._is_env_of_actors = False  # Ray's job has the runtime environment if this process has started the job
        self._number = 0  # of workers started so far
        self._workers: list[RayWorker] = []  # the newest worker of each bundle

    def __getstate__(self) -> dict[str, Any]:
        nothing: dict[str, Any] = {"_group": None, "_link_server": None, "_actor_class": None, "_workers": []}
        return {**vars(self), **nothing, "_has_joined": False}

    @property
    @override
    def reuse_key(self) -> Any:
        demand = self._demand
        bundles = sorted(demand.bundle.items()), demand.placement_strategy
        return "ray", self._address, repr(self._runtime_env), bundles, self._is_elastic

    @override
    def environment(self) -> dict[str, str]:
        return selected(rank_variables.environment_for_ranks(), self._environment_variables)

    @override
    def num_cpus(self, num_workers: int) -> int:
        return max(1, int(self._demand.num_cpus))

    @property
    @override
    def address(self) -> str:
        assert self._link_server is not None
        return self._link_server.address[0]

    @override
    def check_can_start(self) -> None:
        """No-op: the resources of the cluster are known only after connecting to it."""

    @override
    def start(self, rank: int, num_workers: int, inherited_task: WorkerTask | None) -> RayWorker:
        """Starts a worker. The first call connects to the cluster, and waits for the resources of all workers.

        Raises:
            ValueError: If the workers do not fit into the cluster.
            RuntimeError: If the cluster cannot be reached, or lacks free resources until the timeout.
        """
        if not self._has_joined:
            has_connected = cluster.connect(self._address, self._demand, num_workers, self._runtime_env)
            self._has_joined = True
            self._is_env_of_actors = not has_connected
            self._actor_class = ray.remote(WorkerActor)
            is_ray_client = cluster.is_ray_client()
            if is_ray_client and self._is_elastic:
                raise RuntimeError(
                    "`elastic=True` cannot be combined with Ray Client: workers connect to a store in the main process,"
                    " which they cannot reach outside the cluster. Run the script in the cluster, with `ray job submit`"
                    " or on one of its hosts, or leave out the argument."
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
                    f"The Ray cluster had too few free resources for {num_workers} workers with {demand.bundle} each"
                    f" for {waited:.0f} s (`timeout`), because other jobs use them. Free resources:"
                    f" {cluster.free_resources_text()}. Increase the timeout, or request fewer resources."
                )
            if waited > _WARN_AFTER_S and not has_warned:
                log.warning(
                    "Waiting until the Ray cluster has the resources for %d workers with %s each. Free resources: %s.",
                    num_workers,
                    demand.bundle,
                    cluster.free_resources_text(),
                )
                has_warned = True

    @override
    def prepare(self, workers: Sequence[RayWorker]) -> list[RayWorker]:
        """Waits until all workers have started, and assigns ranks, first to workers on the main process's host.

        Raises:
            RuntimeError: If a worker does not start, or has different versions of packages.
        """
        requested = [(worker, self._request_info(worker)) for worker in workers]
        for worker, future in requested:
            worker.info = _result(worker, future)
            self._check_versions(worker)
        ranked = _with_rank_info(workers, ray.get_runtime_context().get_node_id())
        started = [
            (worker, worker.call("start", WorkerSetup(worker.rank, None, worker.rank_info))) for worker in ranked
        ]
        for worker, future in started:
            _check_has_started(worker, _result(worker, future))
            worker.enter(WorkerState.IDLE)
        return ranked

    @override
    def replace(self, dead: RayWorker, num_workers: int, inherited_task: WorkerTask | None) -> RayWorker:
        """Starts a worker in the bundle of one that has exited, on another host if Ray had to move the bundle."""
        worker = self._workers[dead.bundle] = self._start(dead.rank, dead.bundle)
        worker.start_up(self._startup_steps(worker, num_workers))
        return worker

    def _startup_steps(self, worker: RayWorker, num_workers: int) -> Generator["Future[Any]", Any, None]:
        worker.info = yield self._request_info(worker)
        self._check_versions(worker)
        info = worker.info
        assert info is not None
        others = [other for other in self._workers if other is not worker and other.info is not None]
        num_local = sum(other.is_alive() and other.info.host == info.host for other in others)  # type: ignore[union-attr]
        # Preliminary, until the worker joins a world. Not rank 0, whose role during the startup is over.
        worker.rank_info = WorkerRankInfo(
            max(1, worker.rank), num_workers, num_local, num_local + 1, 0, 1, info.address, info.port
        )
        _check_has_started(worker, (yield worker.call("start", WorkerSetup(worker.rank, None, worker.rank_info))))

    def _request_info(self, worker: RayWorker) -> Any:
        paths = [os.path.abspath(path) for path in sys.path]
        return worker.call("info", paths, self._modules, self._packages)

    def _check_versions(self, worker: RayWorker) -> None:
        assert worker.info is not None
        required, found = versions(self._packages), worker.info.versions
        differing = [f"{name} {found[name]} instead of {own}" for name, own in required.items() if found[name] != own]
        if differing:
            raise RuntimeError(
                f"A worker on {worker.info.address} has {' and '.join(differing)}. All hosts of the cluster need the"
                " versions of the main process: install them there, or list them in `runtime_env={'pip': [...]}`."
            )

    @override
    def pack(self, pickled: Pickled, cache: MemoryFileCache) -> SentPayload:
        return SentPayload(RayPayload.of(pickled))

    @override
    def close(self) -> None:
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
        hint = " Every host needs this package, torch, and Lightning; `runtime_env={'pip': [...]}` can install them."
    raise RuntimeError(
        f"Worker {worker.rank} did not start on the Ray cluster: {reason_from_ray(error)}{hint}"
    ) from error


def _check_has_started(worker: RayWorker, failure: Any) -> None:
    if failure is not None:
        raise RuntimeError(f"Worker {worker.rank} ({worker.description}) did not start: {failure.traceback}")


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
