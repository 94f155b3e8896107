"""What runs in a worker on Ray: an actor, whose one method at a time answers one message of the main process."""

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
from lightning_strategies_ext.launch.processes.worker_main import WorkerService, WorkerState
from lightning_strategies_ext.launch.protocol import RunTask, TaskFailed, WorkerSetup
from lightning_strategies_ext.launch.ray.payloads import ActorReply, RayPayload
from lightning_strategies_ext.launch.ray.worker_link import MainLink
from lightning_strategies_ext.launch.transport.pickling import dump, use_remote_main


@dataclass(frozen=True)
class WorkerHostInfo:
    """What only a worker knows of its place.

    Attributes:
        pid: Its process id.
        host: Ray's id of its host.
        address: Of its host, as others reach it.
        interface: The network interface with that address, if it can be found.
        port: One that it has reserved.
        versions: Of the packages that have to be alike.
    """

    pid: int
    host: str
    address: str
    interface: str | None
    port: int
    versions: dict[str, str]


class WorkerActor:
    """A worker. Ray calls its methods one after the other, in the main thread, where signals arrive.

    Args:
        address: See :class:`.MainLink`.
        secret: See :class:`.MainLink`.
        number: See :class:`.MainLink`.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, number: int) -> None:
        gc.disable()  # see `worker.command`
        self._link = MainLink(address, secret, number)
        self._service: WorkerService | None = None
        self._rest: Iterator[Any] = iter(())

    def info(self, paths: Sequence[str], modules: Sequence[str], packages: Sequence[str]) -> WorkerHostInfo:
        """Tells where it is, when it has imported what jobs need.

        Args:
            paths: Where the main process finds modules; last here, as far as there are such directories.
            modules: Which to import.
            packages: Whose versions to tell.
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
        """Gets ready for jobs; returns why that has failed, if it has."""
        use_remote_main()
        info = start.rank_info
        if info is None or info.rank > 0 or info.num_nodes == 1:  # it serves no store at the port
            release_ports()
        _restore_signal_handling()
        self._service = WorkerService(WorkerState(start, self._link.channel))
        return self._service.set_up(start)

    def handle(self, message: Any, task: RayPayload | None = None) -> ActorReply:
        """Answers a message.

        Args:
            message: The message.
            task: What follows an :class:`.RunTask`.
        """
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
        return ActorReply(RayPayload.of(pickled), getattr(reply, "is_only_read", False), self._link.flush())

    def finish_reply(self) -> None:
        """Does what is left to do after an answer."""
        for _ in self._rest:
            pass
        if self._service is not None and self._service.is_finished:
            self.end()

    def end(self) -> None:
        """Ends the worker in good order."""
        self._rest = iter(())
        self._service = None
        gc.collect()  # ends the workers of dataloaders
        self._link.flush()
        ray.actor.exit_actor()


def _restore_signal_handling() -> None:
    """Lets this worker hear what comes over the line, as one that is no child of Ray does, and no Ctrl-C of a terminal.

    Ray starts workers with SIGINT blocked, and handles SIGTERM by an exit, which Lightning would call beside its own.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])


def versions(packages: Sequence[str]) -> dict[str, str]:
    """The versions of packages that are imported here."""
    return {name: str(getattr(importlib.import_module(name), "__version__", "?")) for name in packages}


def _interface_with(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return str(name)
    return None
