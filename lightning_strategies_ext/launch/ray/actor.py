"""The actor that runs a worker on Ray: each call of its method ``handle`` answers one message of the main process."""

import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import ray

from lightning_strategies_ext._system.connections import release_ports, reserve_port
from lightning_strategies_ext.launch.processes.worker_main import WorkerService, WorkerSession
from lightning_strategies_ext.launch.protocol import RunTask, TaskFailed, TensorChunk, WorkerSetup
from lightning_strategies_ext.launch.ray.payloads import ActorReply, RayPayload
from lightning_strategies_ext.launch.ray.worker_link import MainLink
from lightning_strategies_ext.launch.transport.pickling import dump, use_remote_main


@dataclass(frozen=True)
class WorkerHostInfo:
    """Process and host of a worker on Ray, which only the worker knows.

    Attributes:
        pid: Process id.
        host: Ray's id of the host.
        address: Address of the host that other hosts can reach.
        interface: Network interface with that address, or None if it is unknown.
        port: Port that the worker has reserved.
        versions: Versions of the packages that must be equal in all processes.
    """

    pid: int
    host: str
    address: str
    interface: str | None
    port: int
    versions: dict[str, str]


class WorkerActor:
    """A worker. Ray calls its methods one after the other in the main thread, which receives signals.

    The arguments are those of :class:`.MainLink`.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, number: int) -> None:
        gc.disable()  # as in `worker_main.command`
        self._link = MainLink(address, secret, number)
        self._service: WorkerService | None = None
        self._rest: Iterator[Any] = iter(())

    def info(self, paths: Sequence[str], modules: Sequence[str], packages: Sequence[str]) -> WorkerHostInfo:
        """Imports the modules that tasks need, and returns information about the worker.

        Args:
            paths: Module search path of the main process. Those that exist here are appended to the worker's.
            modules: Names of the modules to import.
            packages: Names of the packages whose versions are returned.
        """
        sys.path.extend(path for path in paths if path not in sys.path and os.path.exists(path))
        for module in modules:
            importlib.import_module(module)
        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        port = reserve_port(address)
        return WorkerHostInfo(
            os.getpid(), context.get_node_id(), address, _interface_with(address), port, versions(packages)
        )

    def start(self, start: WorkerSetup) -> TaskFailed | None:
        """Prepares the worker for tasks; returns the failure if that fails, else None."""
        use_remote_main()
        info = start.rank_info
        if info is None or info.rank > 0 or info.num_nodes == 1:  # this rank serves no store at the port
            release_ports()
        _restore_signal_handling()
        self._service = WorkerService(WorkerSession(start, self._link.channel))
        return self._service.set_up(start)

    def handle(self, message: Any, task: RayPayload | None = None) -> ActorReply:
        """Handles a message of the main process, and returns the reply. A :class:`.RunTask` comes with its task."""
        assert self._service is not None
        self.finish_reply()
        if isinstance(message, RunTask):
            assert task is not None
        self._rest = self._service.handle(message, (task or RayPayload(b"")).to_received_message)
        del task
        reply = next(self._rest)
        try:
            pickled = dump(reply, is_return=True)
        except Exception as exception:
            reply = self._service.fail_unsent_result(exception)
            pickled = dump(reply, is_return=True)
        return ActorReply(RayPayload.of(pickled), isinstance(reply, TensorChunk), self._link.flush())

    def finish_reply(self) -> None:
        """Completes the handling of the last message after its reply; exits if the worker is finished."""
        for _ in self._rest:
            pass
        if self._service is not None and self._service.is_finished:
            self.end()

    def end(self) -> None:
        """Shuts down the worker and exits."""
        self._rest = iter(())
        self._service = None
        gc.collect()  # shuts down DataLoader workers
        self._link.flush()
        ray.actor.exit_actor()


def _restore_signal_handling() -> None:
    """Lets this process receive the link's signals like a worker without Ray, and no Ctrl-C from a terminal.

    Ray starts workers with SIGINT blocked. Its handler of SIGTERM exits, and Lightning would call it in addition to its
    own.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Returns the versions of packages by name, and imports them."""
    return {name: str(getattr(importlib.import_module(name), "__version__", "?")) for name in packages}


def _interface_with(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    return None
