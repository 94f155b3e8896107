"""The connection of this process to a Ray cluster: the user's cluster, or one that this module starts on this machine.

Before workers start, :class:`ResourceDemand` checks whether the cluster can ever run them.

This module imports Ray only within functions.

A process has at most one connection to Ray. A connection that the user has opened stays open. A connection that this
module has opened is closed with the last pool that uses it. A cluster that this module has started then exits.
"""

import importlib.util
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lightning_strategies_ext._system.interpreters import module_path
from lightning_strategies_ext.registry import StrategyUnavailableError

PlacementStrategy = Literal["PACK", "SPREAD"]

log = logging.getLogger(__name__)

#: Requirement of the extra `ray` of this package.
REQUIREMENT = "ray>=2.60,<3"
#: Maximum length of the path of Ray's directory: the paths of sockets in it must not exceed 107 characters.
_MAX_PATH_CHARACTERS = 36
#: Attempts to connect through Ray Client's proxy while it fails to start a server; each takes up to 40 s.
_CLIENT_ATTEMPTS = 3
#: Granularity of Ray's amounts of resources.
_STEP = 1e-4
_ONLY_THIS_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"

_lock = threading.RLock()
_num_users = 0  # number of `connect` calls without a call of `disconnect`
_directory: str | None = None  # directory of the cluster that this module has started
_session: str | None = None  # identifier of the connection that this module has opened
_address: str | None = None  # argument with which this module has opened the connection


@dataclass(frozen=True)
class ResourceDemand:
    """Resources of each worker, and the placement of workers on hosts.

    Attributes:
        num_cpus: CPUs per worker; a fraction if several workers share one.
        num_gpus: GPUs per worker.
        resources: Further resources per worker, by their names in the cluster.
        placement_strategy: "PACK" places workers on as few hosts as possible, "SPREAD" on as many.
    """

    num_cpus: float = 1
    num_gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    placement_strategy: PlacementStrategy = "PACK"

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one worker, as a bundle of a Ray placement group."""
        needed = {"CPU": float(self.num_cpus), "GPU": float(self.num_gpus), **self.resources}
        return {name: amount for name, amount in needed.items() if amount}

    def check_fits(self, num_workers: int, hosts: Sequence[Mapping[str, float]], cluster: str) -> None:
        """Rejects more workers than the cluster can ever run at once.

        Args:
            num_workers: Number of workers.
            hosts: Resources of each host of the cluster.
            cluster: Name of the cluster in the error message.

        Raises:
            ValueError: If the workers do not fit; the message has the numbers.
        """
        for name, amount in self.bundle.items():
            needed, available = amount * num_workers, sum(host.get(name, 0.0) for host in hosts)
            if needed > available + _STEP:
                raise ValueError(
                    f"`num_workers={num_workers}` workers with `{self._argument(name)}` need"
                    f" {_amount_text(name, needed)}, but {cluster} has {available:g}. Request fewer workers, or less"
                    " per worker (with a fraction, several workers share one), or add hosts to the cluster."
                )
        capacities = [
            min((math.floor(host.get(name, 0.0) / amount + _STEP) for name, amount in self.bundle.items()), default=0)
            for host in hosts
        ]
        if sum(capacities) < num_workers:
            needs = " and ".join(_amount_text(name, amount) for name, amount in self.bundle.items())
            raise ValueError(
                f"`num_workers={num_workers}` workers that each need {needs} do not fit into {cluster}: its"
                f" {len(hosts)} hosts can run {' + '.join(map(str, capacities))} of them, because a worker cannot"
                " span hosts. Request fewer workers, or less per worker."
            )

    def _argument(self, name: str) -> str:
        if name in ("CPU", "GPU"):
            return f"num_{name.lower()}s_per_worker={self.bundle[name]:g}"
        return f"resources_per_worker={{{name!r}: {self.resources[name]:g}}}"


def _amount_text(name: str, amount: float) -> str:
    if name in ("CPU", "GPU"):
        return f"{amount:g} {name}{'s' * (amount != 1)}"
    return f"{amount:g} of {name!r}"


def check_ray_installed() -> None:
    """Checks that Ray is installed.

    Raises:
        StrategyUnavailableError: If it is not; the message names the requirement.
    """
    try:
        with _preserved_sigterm_handler():
            import ray
    except ImportError as error:
        raise StrategyUnavailableError(
            f"`strategy='ddp_ray_ext'` needs Ray, which cannot be imported ({error}). Install the same"
            f" version on every host of the cluster: `pip install '{REQUIREMENT}'`."
        ) from error
    if not hasattr(ray, "is_initialized"):  # a directory with this name next to the script
        raise StrategyUnavailableError(
            f"`strategy='ddp_ray_ext'` needs Ray, but `import ray` imports {list(ray.__path__)}, which is not Ray."
            f" Install Ray: `pip install '{REQUIREMENT}'`."
        )


def is_client_address(address: str | None) -> bool:
    """Whether an address is that of a Ray Client server."""
    return address is not None and address.startswith("ray://")


def check_address(address: Any) -> None:
    """Checks the argument `address`.

    Raises:
        TypeError: If it is neither a string nor None.
        StrategyUnavailableError: If it is the address of a Ray Client server, and Ray Client is not installed.
    """
    if address is not None and not isinstance(address, str):
        raise TypeError(f"`address` must be None, 'auto', 'local', 'host:port' or 'ray://host:port', got {address!r}.")
    if is_client_address(address) and importlib.util.find_spec("grpc") is None:
        raise StrategyUnavailableError(
            f"`address={address!r}` needs Ray Client, which is not installed. Install it here and on the head of the"
            " cluster: `pip install 'ray[client]'`."
        )


def unreachable_message(address: str, error: Exception) -> str:
    """Returns the error message for a cluster that does not respond."""
    token_hint = (
        " A running cluster may require a token, as Ray 2.60 does by default: set `RAY_AUTH_MODE=token` before Ray is"
        " imported, and put the token of the cluster into `~/.ray/auth_token`."
    )
    return (
        f"`address={address!r}`: no Ray cluster responds ({error}). Start one with `ray start --head`, or omit the"
        " argument to use a temporary one on this machine."
        + (token_hint if is_client_address(address) and not os.environ.get("RAY_AUTH_MODE") else "")
    )


def connect(address: str | None, demand: ResourceDemand, num_workers: int, runtime_env: dict[str, Any] | None) -> bool:
    """Connects this process to a cluster, or starts one. Each call needs one call of :func:`disconnect`.

    Args:
        address: "auto" for the cluster of this machine, ``"host:port"`` for another cluster, "local" for a new one on
            this machine, ``"ray://host:port"`` for one that is reached through Ray Client. None for the cluster that
            this process is connected to, else that of ``RAY_ADDRESS``, else a new one.
        demand: Resources of each worker.
        num_workers: Number of workers.
        runtime_env: Runtime environment of Ray's job, as in ``ray.init``. Used only if this call connects.

    Returns:
        Whether this call has connected the process.

    Raises:
        ValueError: If the workers do not fit, or this process is connected to another cluster.
        RuntimeError: If the cluster cannot be reached.
    """
    import ray

    global _num_users, _session, _address
    with _lock:
        if ray.is_initialized():
            if _session != _this_session():
                _reset()  # the user has closed that connection and opened another
            current = ray.get_runtime_context().gcs_address
            if address not in (None, "auto", current) and not (_num_users and address == _address):
                raise ValueError(
                    f"`address={address!r}`: this process is already connected to the Ray cluster at {current}, and"
                    " Ray allows one connection per process. Omit the argument, or call `ray.shutdown()` first."
                )
            demand.check_fits(num_workers, host_resources(), "the Ray cluster")
            if _num_users:
                _num_users += 1
            return False
        _reset()
        requested, address = address, address or os.environ.get("RAY_ADDRESS") or "local"
        check_address(address)
        if address == "local":
            _start(demand, num_workers, runtime_env)
        else:
            _connect(address, runtime_env)
        _num_users, _session, _address = 1, _this_session(), requested
        try:
            demand.check_fits(num_workers, host_resources(), "the Ray cluster")
        except ValueError:
            disconnect()
            raise
        return True


def disconnect() -> None:
    """Reverts one call of :func:`connect`. The last call closes the connection, and ends a cluster started for it."""
    import ray

    global _num_users
    with _lock:
        if not _num_users:
            return
        _num_users -= 1
        if _num_users:
            return
        if ray.is_initialized() and _session == _this_session():
            with _preserved_sigterm_handler(), suppress(Exception):
                ray.shutdown()
        _reset()


def _reset() -> None:
    """Resets the state of a closed connection, and removes the directory of its cluster."""
    global _num_users, _directory, _session
    _num_users, _session = 0, None
    if _directory is not None:
        shutil.rmtree(_directory, ignore_errors=True)
        _directory = None


def host_resources() -> list[dict[str, float]]:
    """Returns the resources of each running host of the cluster."""
    import ray

    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def _this_session() -> str:
    """Returns an identifier of this process's current connection to a cluster."""
    import ray

    context = ray.get_runtime_context()
    return f"{context.gcs_address} {context.get_job_id()}"


def _connect(address: str, runtime_env: dict[str, Any] | None) -> None:
    """Connects this process to the cluster at ``address``.

    Ray Client's proxy forks a server for each client. The server sometimes fails before it runs, because the proxy has
    other threads in gRPC (Ray 2.60; 1 of 20 connections). ``ray.init`` then raises ConnectionAbortedError, and the next
    attempt gets a new server.
    """
    is_client = is_client_address(address)
    num_attempts = _CLIENT_ATTEMPTS if is_client else 1
    for attempt in range(num_attempts):
        try:
            _initialize(address=address, runtime_env=runtime_env, job_config=None if is_client else _job_config())
            return
        except (ConnectionError, TimeoutError) as error:
            if not isinstance(error, ConnectionAbortedError) or attempt == num_attempts - 1:
                raise RuntimeError(unreachable_message(address, error)) from error
            log.info("Ray Client's proxy at %s did not start a server (%s). Connecting again.", address, error)


def _start(demand: ResourceDemand, num_workers: int, runtime_env: dict[str, Any] | None) -> None:
    global _directory
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_gpus = torch.cuda.device_count()
    demand.check_fits(num_workers, [{"CPU": num_cpus, "GPU": num_gpus}], "this machine")
    if "RAY_TMPDIR" not in os.environ:
        parent = tempfile.gettempdir()
        parent = parent if len(parent) + 14 <= _MAX_PATH_CHARACTERS else "/tmp"
        _directory = tempfile.mkdtemp(prefix="ray-", dir=parent)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # With Ray's default, 15, workers train at a small fraction of their speed next to any other busy process.
    os.environ.setdefault("RAY_worker_niceness", "0")
    log.info("Starting Ray on this machine with %d CPUs and %d GPUs.", num_cpus, num_gpus)
    try:
        with _only_this_machine():
            _initialize(
                address="local",
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                include_dashboard=False,
                runtime_env=runtime_env,
                job_config=_job_config(),
                _temp_dir=_directory,
            )
    except BaseException:
        _reset()
        raise


def _initialize(**arguments: Any) -> None:
    import ray

    with _preserved_sigterm_handler():
        ray.init(log_to_driver=False, logging_level=logging.WARNING, **arguments)


def _job_config() -> Any:
    """Returns a job configuration with which workers search the working directory only if this process does.

    By default, Ray's workers search it first for modules, and other users may have write access to it. Ray has no
    argument that prevents this: it adds the directory to a private list of the configuration (read in 2.60).
    """
    from ray.job_config import JobConfig

    class WithoutWorkingDirectory(JobConfig):  # type: ignore[misc]
        def _serialize(self) -> Any:
            searched = set(module_path())
            workers: list[str] = self._py_driver_sys_path
            workers[:] = [path for path in workers if path in searched]
            return super()._serialize()

    return WithoutWorkingDirectory()


@contextmanager
def _only_this_machine() -> Generator[None, None, None]:
    """Makes Ray listen at 127.0.0.1 only, if it is started in this context.

    Ray (read in 2.60) has no argument for this: it replaces ``_node_ip_address="127.0.0.1"`` by an address that other
    hosts reach. It has a switch, meant for firewalls on other systems, which it reads at its import, in this process
    and in those that it starts; ``ray._private.ray_constants`` holds the value.
    """
    constants: Any = sys.modules.get("ray._private.ray_constants")
    before, was_enabled = os.environ.get(_ONLY_THIS_MACHINE), getattr(constants, "ENABLE_RAY_CLUSTER", None)
    os.environ[_ONLY_THIS_MACHINE] = "0"
    if was_enabled is not None:
        constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        if was_enabled is not None:
            constants.ENABLE_RAY_CLUSTER = was_enabled
        if before is None:
            del os.environ[_ONLY_THIS_MACHINE]
        else:
            os.environ[_ONLY_THIS_MACHINE] = before


@contextmanager
def _preserved_sigterm_handler() -> Generator[None, None, None]:
    """Restores the handler of SIGTERM that Ray replaces: the pool handles SIGTERM, and forwards it to its workers."""
    is_main = threading.current_thread() is threading.main_thread()
    previous = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if is_main and previous is not None:
            signal.signal(signal.SIGTERM, previous)
