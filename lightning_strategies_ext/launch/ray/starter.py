"""Starts workers on a Ray cluster: a placement group, an actor in each of its bundles, and a rank for each actor."""

import logging
import os
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import ray
from ray.cloudpickle import CloudPickler
from ray.exceptions import RayError
from ray.util.client import ray as ray_client
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from typing_extensions import override

from lightning_strategies_ext import rank_variables
from lightning_strategies_ext._system.interpreters import current_options_as_variables
from lightning_strategies_ext.launch.processes.process_settings import RemoteProcessSettings, selected
from lightning_strategies_ext.launch.processes.worker_interface import WorkerStarter, WorkerState
from lightning_strategies_ext.launch.processes.worker_main import WorkerTask
from lightning_strategies_ext.launch.protocol import WorkerHostInfo, WorkerRankInfo, WorkerSetup
from lightning_strategies_ext.launch.ray import cluster
from lightning_strategies_ext.launch.ray.actor import LinkRelayActor, RayPayload, WorkerActor, versions
from lightning_strategies_ext.launch.ray.cluster import ResourceDemand
from lightning_strategies_ext.launch.ray.ray_worker import (
    RayWorker,
    SentPayload,
    free_resources_text,
    reason_from_ray,
    wait_until,
)
from lightning_strategies_ext.launch.ray.worker_link import LinkServer, RelayedLinkServer
from lightning_strategies_ext.launch.transport.memory_files import MemoryFileCache
from lightning_strategies_ext.launch.transport.pickling import MainByValuePickler, Pickled
from lightning_strategies_ext.launch.transport.reducers import by_value_table

log = logging.getLogger(__name__)

#: Seconds after which a warning is logged that the cluster lacks free resources.
_WARN_AFTER_S = 5.0
#: Seconds without a call after which a main process outside the cluster counts as exited; Ray reconnects within 30 s.
_MAIN_PROCESS_TIMEOUT_S = 60.0
_POLL_S = 0.2
_PACKAGES = ("lightning_strategies_ext", "torch", "cloudpickle")


class RayPickler(MainByValuePickler):
    """Pickler that also pickles Ray's own objects, for a reader without the user's ``__main__``."""

    # Ray registers reducers of its own objects in this table, above all of references to its object store.
    dispatch_table = by_value_table(CloudPickler)
    sends_descriptors = False


@dataclass(eq=False)
class RayStarter(WorkerStarter):
    """Starts workers on a Ray cluster.

    Attributes:
        demand: Resources of each worker.
        cluster_address: Address of the cluster, see :func:`.cluster.connect`.
        runtime_env: Ray's runtime environment of the workers.
        environment_variables: Names of variables that workers receive, see :func:`.process_settings.selected`.
        timeout_s: Seconds to wait for free resources in the cluster.
        modules: Modules that workers import before the first task: the Lightning package of the main process.
        is_elastic: Whether workers may be replaced while a task runs.
    """

    demand: ResourceDemand
    cluster_address: str | None
    runtime_env: dict[str, Any] | None
    environment_variables: Sequence[str] | None
    timeout_s: float
    modules: Sequence[str]
    is_elastic: bool = False

    name = "strategy='ddp_ray_ext'"
    forks = False
    closes_through_library = True
    settings_class = RemoteProcessSettings
    pickler = RayPickler

    def __post_init__(self) -> None:
        self._packages = [*_PACKAGES, *(module.partition(".")[0] for module in self.modules)]
        self._stack: ExitStack | None = None  # closes the attributes below; set by `start`
        self._group: Any = None
        self._link_server: LinkServer | RelayedLinkServer | None = None
        self._actor_class: Any = None
        self._is_env_of_actors = False  # Ray's job has the runtime environment if this process has started the job
        self._number = 0  # number of workers started so far

    @property
    @override
    def reuse_key(self) -> Any:
        demand = self.demand
        bundles = sorted(demand.bundle.items()), demand.placement_strategy
        return "ray", self.cluster_address, repr(self.runtime_env), bundles, self.is_elastic

    @override
    def environment(self) -> dict[str, str]:
        return selected(rank_variables.environment_for_ranks(), self.environment_variables)

    @override
    def num_cpus(self, num_workers: int) -> int:
        return max(1, int(self.demand.num_cpus))

    @property
    @override
    def address(self) -> str:
        assert self._link_server is not None
        return self._link_server.address[0]

    @override
    def check_can_start(self) -> None:
        """No-op: the resources of the cluster are known only after connecting to it."""

    @override
    def start(self, num_workers: int, inherited_task: WorkerTask | None) -> Iterator[RayWorker]:
        """Connects to the cluster, waits for the resources of all workers, and yields the workers as they start.

        At the end all have started and have ranks, the first ones on the main process's host.

        Raises:
            ValueError: If the workers do not fit into the cluster.
            RuntimeError: If the cluster cannot be reached, or lacks free resources until the timeout; if a worker does
                not start, or has different versions of packages.
        """
        has_connected = cluster.connect(self.cluster_address, self.demand, num_workers, self.runtime_env)
        self._stack = ExitStack()
        self._stack.callback(cluster.disconnect)
        self._is_env_of_actors = not has_connected
        is_ray_client = bool(ray_client.is_connected())
        if is_ray_client and self.is_elastic:
            raise RuntimeError(
                "`elastic=True` cannot be combined with Ray Client: workers connect to a store in the main process,"
                " which they cannot reach outside the cluster. Run the script in the cluster, with `ray job submit`"
                " or on one of its hosts, or omit the argument."
            )
        self._reserve(num_workers)
        if is_ray_client:
            relay_class = ray.remote(LinkRelayActor).options(num_cpus=0, max_concurrency=4)
            self._link_server = RelayedLinkServer(relay_class.remote(_MAIN_PROCESS_TIMEOUT_S))
        else:
            self._link_server = LinkServer(ray.util.get_node_ip_address())
        self._stack.callback(self._link_server.close)
        self._actor_class = ray.remote(WorkerActor)
        workers = []
        for rank in range(num_workers):
            workers.append(self._start(rank, rank))
            yield workers[-1]
        self._prepare(workers)

    def _start(self, rank: int, bundle: int) -> RayWorker:
        assert self._link_server is not None
        options: dict[str, Any] = {
            "num_cpus": self.demand.num_cpus,
            "num_gpus": self.demand.num_gpus,
            "resources": dict(self.demand.resources),
            **self._runtime_env_option(),
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=False
            ),
        }
        self._number += 1
        return RayWorker(rank, self._number, bundle, self._link_server, options, self._actor_class, self.is_elastic)

    def _runtime_env_option(self) -> dict[str, Any]:
        """Returns the option with the runtime environment of an actor; Ray completes it with that of the job."""
        variables = (self.runtime_env or {}).get("env_vars", {})
        options = {name: value for name, value in current_options_as_variables().items() if name not in variables}
        environment = dict((self.runtime_env or {}) if self._is_env_of_actors else {})
        if options:
            environment["env_vars"] = {**options, **environment.get("env_vars", {})}
        return {"runtime_env": environment} if environment else {}

    def _reserve(self, num_workers: int) -> None:
        assert self._stack is not None
        demand = self.demand
        self._group = placement_group([demand.bundle] * num_workers, strategy=demand.placement_strategy)
        self._stack.callback(_remove, self._group)
        started, has_warned = time.monotonic(), False
        while not self._group.wait(_POLL_S):
            waited = time.monotonic() - started
            if waited > self.timeout_s:
                raise RuntimeError(
                    f"The Ray cluster had too few free resources for {num_workers} workers with {demand.bundle} each"
                    f" for {waited:.0f} s (`timeout`), because other jobs use them. Free resources:"
                    f" {free_resources_text()}. Increase the timeout, or request fewer resources."
                )
            if waited > _WARN_AFTER_S and not has_warned:
                log.warning(
                    "Waiting until the Ray cluster has the resources for %d workers with %s each. Free resources: %s.",
                    num_workers,
                    demand.bundle,
                    free_resources_text(),
                )
                has_warned = True

    def _prepare(self, workers: Sequence[RayWorker]) -> None:
        requested = [(worker, self._request_info(worker)) for worker in workers]
        for worker, future in requested:
            self._set_info(worker, _result(worker, future))
        _assign_ranks(workers, ray.get_runtime_context().get_node_id())
        for worker, future in [(worker, _request_start(worker)) for worker in workers]:
            _check_has_started(worker, _result(worker, future))
            worker.enter(WorkerState.IDLE)

    @override
    def replace(self, exited: RayWorker, workers: Sequence[RayWorker]) -> RayWorker:
        """Starts a worker in the bundle of one that has exited, on another host if Ray had to move the bundle."""
        worker = self._start(exited.rank, exited.bundle)
        worker.start_up(self._startup_steps(worker, workers))
        return worker

    def _startup_steps(self, worker: RayWorker, workers: Sequence[RayWorker]) -> Generator["Future[Any]", Any, None]:
        info: WorkerHostInfo = yield self._request_info(worker)
        self._set_info(worker, info)
        others = [other for other in workers if other is not worker and other.is_alive()]
        num_local = sum(other.info is not None and other.info.host == info.host for other in others)
        # Preliminary, until the worker joins a world. Not rank 0, whose role during the startup is over.
        worker.rank_info = WorkerRankInfo(
            max(1, worker.rank), len(workers), num_local, num_local + 1, 0, 1, info.address, info.port
        )
        _check_has_started(worker, (yield _request_start(worker)))

    def _request_info(self, worker: RayWorker) -> Any:
        paths = [os.path.abspath(path) for path in sys.path]
        return worker.call("info", paths, self.modules, self._packages)

    def _set_info(self, worker: RayWorker, info: WorkerHostInfo) -> None:
        worker.info, worker.pid = info, info.pid
        required, found = versions(self._packages), info.versions
        differing = [f"{name} {found[name]} instead of {own}" for name, own in required.items() if found[name] != own]
        if differing:
            raise RuntimeError(
                f"A worker on {info.address} has {' and '.join(differing)}. All hosts of the cluster need the"
                " versions of the main process: install them there, or list them in `runtime_env={'pip': [...]}`."
            )

    @override
    def pack(self, pickled: Pickled, cache: MemoryFileCache) -> SentPayload:
        return SentPayload(RayPayload(pickled.data, pickled.buffers))

    @override
    def close(self) -> None:
        if self._stack is not None:
            self._stack.close()
        self._stack = self._group = self._link_server = self._actor_class = None


def _remove(group: Any) -> None:
    if ray.is_initialized():
        try:
            remove_placement_group(group)
        except RayError as error:
            log.warning("The placement group of the workers could not be removed: %s", error)


def _request_start(worker: RayWorker) -> Any:
    return worker.call("start", WorkerSetup(worker.rank, None, worker.rank_info))


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


def _assign_ranks(workers: Sequence[RayWorker], main_host: str) -> None:
    hosts: dict[str, list[RayWorker]] = {}
    for worker in sorted(workers, key=lambda worker: (worker.info.host != main_host, worker.rank)):  # type: ignore[union-attr]
        assert worker.info is not None
        hosts.setdefault(worker.info.host, []).append(worker)
    ranked = [worker for host_workers in hosts.values() for worker in host_workers]
    first = ranked[0].info
    assert first is not None
    address = first.address if len(hosts) > 1 else "127.0.0.1"
    for node_rank, host_workers in enumerate(hosts.values()):
        for local_rank, worker in enumerate(host_workers):
            worker.rank = ranked.index(worker)
            worker.rank_info = WorkerRankInfo(
                worker.rank, len(ranked), local_rank, len(host_workers), node_rank, len(hosts), address, first.port
            )
