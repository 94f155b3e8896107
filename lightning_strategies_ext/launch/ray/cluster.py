"""The Ray cluster of this process: the one it is connected to, one it is told of, or one of its own on this machine.

Ray is one per process. What the user has connected stays; what is connected or started here is left or ended with the
last pool that uses it.
"""

import importlib.util
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from lightning_strategies_ext.interpreters import module_path
from lightning_strategies_ext.launch.ray.resource_demand import ResourceDemand
from lightning_strategies_ext.registry import UnavailableHereError

log = logging.getLogger(__name__)

#: The extra that brings Ray.
EXTRA = "lightning-strategies-ext[ray]"
#: Ray's sockets are in its directory, and the path of one must not be longer than 107 characters.
_MOST_CHARACTERS = 36
#: Connections that are attempted to Ray Client's proxy while it fails to start a server; each takes up to 40 s.
_ATTEMPTS = 3
_ONLY_THIS_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"

_lock = threading.RLock()
_users = 0
_directory: str | None = None
_session: str | None = None
_address: str | None = None


def check_ray_installed() -> None:
    """Refuses to go on without Ray.

    Raises:
        UnavailableHereError: If it is not installed; names the extra.
    """
    try:
        with _preserved_sigterm_handler():
            import ray
    except ImportError as error:
        raise UnavailableHereError(
            f"`strategy='ddp_ray_ext'` needs Ray, which cannot be imported ({error}). Install it:"
            f" `pip install '{EXTRA}'`, on every host of the cluster in the same version."
        ) from error
    if not hasattr(ray, "is_initialized"):  # a folder of that name beside the script
        raise UnavailableHereError(
            f"`strategy='ddp_ray_ext'` needs Ray, and `import ray` gives {list(ray.__path__)}, which is something else."
            f" Install it: `pip install '{EXTRA}'`."
        )


def is_client_address(address: str | None) -> bool:
    """Whether an address is that of a server of Ray Client."""
    return address is not None and address.startswith("ray://")


def check_address(address: Any) -> None:
    """Refuses an address that no cluster is reached by from here.

    Raises:
        TypeError: If it is neither a string nor None.
        UnavailableHereError: If it is that of a server of Ray Client, and what Ray needs for that is not installed.
    """
    if address is not None and not isinstance(address, str):
        raise TypeError(f"`address` must be None, 'auto', 'local', 'host:port' or 'ray://host:port', got {address!r}.")
    if is_client_address(address) and importlib.util.find_spec("grpc") is None:
        raise UnavailableHereError(
            f"`address={address!r}` needs Ray Client. Install it: `pip install 'ray[client]'`, here and on the head of"
            " the cluster."
        )


def unreachable_message(address: str, error: Exception) -> str:
    """What to say where nobody answers."""
    wants_token = (
        " If one is there, it may want a token, as Ray 2.60 does by default: set `RAY_AUTH_MODE=token` before Ray is"
        " imported, and put its token into `~/.ray/auth_token`."
    )
    return (
        f"`address={address!r}`: no Ray cluster is there ({error}). Start one with `ray start --head`, or leave the"
        " argument out to have one on this machine for as long as it is needed."
        + (wants_token if is_client_address(address) and not os.environ.get("RAY_AUTH_MODE") else "")
    )


def connect(address: str | None, demand: ResourceDemand, num_workers: int, runtime_env: dict[str, Any] | None) -> bool:
    """Connects this process to a cluster, or starts one; :func:`disconnect` is to be called as often.

    Args:
        address: "auto" for the cluster that this machine belongs to, ``"host:port"`` for another, "local" for a new one
            on this machine, ``"ray://host:port"`` for one that is reached by Ray Client. None is the one that this
            process is connected to, else that of ``RAY_ADDRESS``, else a new one.
        demand: What each worker needs.
        num_workers: How many.
        runtime_env: See ``ray.init``; of the job, if this call connects.

    Returns:
        Whether this call has connected it.

    Raises:
        ValueError: If the workers do not fit, or this process is connected to another cluster.
        RuntimeError: If the cluster cannot be reached.
    """
    import ray

    global _users, _directory, _session, _address
    with _lock:
        if ray.is_initialized():
            if _session != _this_session():
                _forget()  # the user has left ours, and has connected to another since
            if not _users or address != _address:
                _check_same_cluster(address)
            demand.check_fits(num_workers, host_resources(), "the Ray cluster")
            if _users:
                _users += 1
            return False
        _forget()
        asked, address = address, address or os.environ.get("RAY_ADDRESS") or "local"
        check_address(address)
        if address == "local":
            here = _this_machine()
            demand.check_fits(num_workers, [here], "this machine")
            _directory = _start(here, runtime_env)
        else:
            try:
                _connect(address, runtime_env)
            except (ConnectionError, TimeoutError) as error:
                raise RuntimeError(unreachable_message(address, error)) from error
        _users, _session, _address = 1, _this_session(), asked
        try:
            demand.check_fits(num_workers, host_resources(), "the Ray cluster")
        except ValueError:
            disconnect()
            raise
        return True


def disconnect() -> None:
    """Called when a pool does not need the cluster any more; ends what was connected or started by :func:`connect`."""
    import ray

    global _users
    with _lock:
        if not _users:
            return
        _users -= 1
        if _users:
            return
        if ray.is_initialized() and _session == _this_session():
            with _preserved_sigterm_handler(), suppress(Exception):
                ray.shutdown()
        _forget()


def _forget() -> None:
    """Lets go of what was joined before, which is not there any more."""
    global _users, _directory, _session
    _users, _session = 0, None
    if _directory is not None:
        shutil.rmtree(_directory, ignore_errors=True)
        _directory = None


def host_resources() -> list[dict[str, float]]:
    """The resources of each host that is there."""
    import ray

    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def free_resources_text() -> str:
    """What is not in use, for people."""
    import ray

    free = ray.available_resources()
    unsaid = ("node:", "memory", "object_store", "bundle_group")
    named = {name: amount for name, amount in free.items() if not name.startswith(unsaid) and "_group_" not in name}
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(named.items())) or "nothing"


def is_ray_client() -> bool:
    """Whether this process is connected through Ray Client, and outside of the cluster."""
    from ray.util.client import ray as client

    return bool(client.is_connected())


def _this_session() -> str:
    """What tells the connection of this process to a cluster from others that it had before."""
    import ray

    context = ray.get_runtime_context()
    return f"{context.gcs_address} {context.get_job_id()}"


def _check_same_cluster(address: str | None) -> None:
    import ray

    there = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", there):
        raise ValueError(
            f"`address={address!r}`: this process is connected to the Ray cluster at {there} already, and can be to one"
            " only. Leave the argument out, or call `ray.shutdown()` first."
        )


def _this_machine() -> dict[str, float]:
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"CPU": float(num_cpus), "GPU": float(torch.cuda.device_count())}


def _connect(address: str, runtime_env: dict[str, Any] | None) -> None:
    """Connects this process to the cluster at ``address``.

    Ray Client's proxy forks a server for each client, and that process fails now and then before it runs: the proxy
    has other threads in gRPC (Ray 2.60; 1 of 20 connections). ``ray.init`` raises ConnectionAbortedError then, and the
    next attempt gets a new server.
    """
    import ray

    for attempt in range(_ATTEMPTS):
        try:
            with _preserved_sigterm_handler():
                ray.init(
                    address=address,
                    runtime_env=runtime_env,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                    job_config=None if is_client_address(address) else _job_config(),
                )
        except ConnectionAbortedError as error:
            if not is_client_address(address) or attempt == _ATTEMPTS - 1:
                raise
            log.info("Ray Client's proxy at %s did not start a server (%s); connecting again", address, error)
        else:
            return


def _start(here: dict[str, float], runtime_env: dict[str, Any] | None) -> str | None:
    import ray

    directory = None
    if "RAY_TMPDIR" not in os.environ:
        parent = tempfile.gettempdir()
        directory = tempfile.mkdtemp(prefix="ray-", dir=parent if len(parent) + 14 <= _MOST_CHARACTERS else "/tmp")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's default is 15: beside any other busy process, workers would train at a small fraction of their speed.
    os.environ.setdefault("RAY_worker_niceness", "0")
    log.info("Ray is started on this machine, with %d CPUs and %d GPUs", here["CPU"], here["GPU"])
    try:
        with _preserved_sigterm_handler(), _only_this_machine():
            ray.init(
                address="local",
                num_cpus=int(here["CPU"]),
                num_gpus=int(here["GPU"]),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
                runtime_env=runtime_env,
                job_config=_job_config(),
                _temp_dir=directory,
            )
    except BaseException:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        raise
    return directory


def _job_config() -> Any:
    """Returns a job whose workers search the working directory for modules only if the main process does.

    Ray searches that directory first in each worker, and other users may write to it. Ray has no argument for this: it
    adds the directory to a private list of the job (read in 2.60).
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
    """Lets Ray that is started in it listen at 127.0.0.1 only.

    Ray (read in 2.60) has no argument for that: it turns ``_node_ip_address="127.0.0.1"`` into an address that others
    reach. It has a switch, meant for firewalls on other systems, which it reads when it is imported, here and in the
    processes that it starts; ``ray._private.ray_constants`` has what it has read.
    """
    before = os.environ.get(_ONLY_THIS_MACHINE)
    os.environ[_ONLY_THIS_MACHINE] = "0"
    constants: Any = sys.modules.get("ray._private.ray_constants")
    was_enabled = getattr(constants, "ENABLE_RAY_CLUSTER", None)
    if constants is not None and was_enabled is not None:
        constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        if constants is not None and was_enabled is not None:
            constants.ENABLE_RAY_CLUSTER = was_enabled
        if before is None:
            del os.environ[_ONLY_THIS_MACHINE]
        else:
            os.environ[_ONLY_THIS_MACHINE] = before


@contextmanager
def _preserved_sigterm_handler() -> Generator[None, None, None]:
    """Keeps Ray from handling SIGTERM in this process: the pool does, and tells its workers."""
    is_main = threading.current_thread() is threading.main_thread()
    usual = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if is_main and usual is not None:
            signal.signal(signal.SIGTERM, usual)
