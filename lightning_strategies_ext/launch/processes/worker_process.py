"""Worker processes of this host: the three ways to start them, and the error that describes how one has exited."""

import multiprocessing
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any, Literal

import torch
from typing_extensions import override

from lightning_strategies_ext import host_store, rank_variables
from lightning_strategies_ext._system.peers import is_running, kill_with_forked_children, start_time
from lightning_strategies_ext.exceptions import WorkerDiedError
from lightning_strategies_ext.launch.processes import fork_server, worker_main
from lightning_strategies_ext.launch.processes.process_settings import ProcessSettings
from lightning_strategies_ext.launch.processes.worker_interface import (
    EXIT_TIMEOUT_S,
    Worker,
    WorkerStarter,
    WorkerState,
)
from lightning_strategies_ext.launch.processes.worker_main import WorkerTask
from lightning_strategies_ext.launch.protocol import MessageToWorker, WorkerSetup
from lightning_strategies_ext.launch.transport.channel import Channel, PreparedMessage
from lightning_strategies_ext.launch.transport.memory_files import MemoryFileCache
from lightning_strategies_ext.launch.transport.pickling import MainByValuePickler, MessagePickler, Pickled

WorkerStartMethod = Literal["spawn", "fork", "forkserver"]

#: Seconds that a worker has to exit after it has closed its channel, before it counts as exited.
_EXIT_AFTER_CLOSE_S = 1.0


class WorkerProcess(Worker):
    """A worker process of this host.

    Args:
        rank: Local rank of the worker.
        channel: Channel to the worker.
        pid: Process ID of the worker.
        exit_code: Returns the exit code, negative for a signal; None if it is not known. Reaps the process.
    """

    def __init__(self, rank: int, channel: Channel, pid: int, exit_code: Callable[[], int | None]) -> None:
        self.rank = rank
        self.pid = pid
        self._channel = channel
        self._exit_code = exit_code
        self._started = start_time(pid)
        self._pidfd: int | None = None
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):
                self._pidfd = os.pidfd_open(pid)

    @property
    @override
    def waitables(self) -> list[Any]:
        return [self._channel] if self._pidfd is None else [self._channel, self._pidfd]

    @override
    def _send(self, message: MessageToWorker, task: PreparedMessage | None) -> None:
        self._channel.send(message)
        if task is not None:
            task.send(self._channel)

    @override
    def _next_message(self) -> Any:
        has_exited = not self.is_alive()  # checked first: the worker may reply and then exit
        if wait([self._channel.socket], 0):
            try:
                return self._channel.receive()
            except (EOFError, OSError):  # it exits, before or within a message
                self.wait(_EXIT_AFTER_CLOSE_S)
                return self._exit_error()
        return self._exit_error() if has_exited else None

    def _exit_error(self) -> WorkerDiedError:
        code = self._exit_code()
        outcome = "exited" if code is None else f"exited with exit code {code}"
        name, hint = None, ""
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            outcome = f"was killed by {name}"
            hint = " The kernel sends SIGKILL when memory runs out." if name == "SIGKILL" else ""
        message = f"rank {self.rank} ({self.description}) {outcome} in the middle of its work.{hint}"
        return WorkerDiedError(message, self.rank, self.pid, -1 if code is None else code, name)

    @override
    def is_alive(self) -> bool:
        return is_running(self.pid, self._started) if self._pidfd is None else not wait([self._pidfd], 0)

    @override
    def signal(self, signum: int) -> None:
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    @override
    def wait(self, timeout_s: float) -> None:
        if self._pidfd is not None:
            wait([self._pidfd], timeout_s)
            return
        deadline = time.monotonic() + timeout_s
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)

    @override
    def kill(self) -> None:
        if self.is_alive():
            kill_with_forked_children(self.pid)
        self.wait(EXIT_TIMEOUT_S)

    @override
    def close(self) -> None:
        self.enter(WorkerState.EXITED)
        self._exit_code()
        with suppress(OSError):
            self._channel.socket.shutdown(socket.SHUT_RDWR)
        self._channel.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class ProcessStarter(WorkerStarter):
    """Starts workers on this host.

    Args:
        start_method: "spawn" starts a new interpreter for each worker, "fork" forks this process, "forkserver" forks a
            process that has imported torch and Lightning.
        preloaded: Module that imports all that workers run. The fork server imports it before it forks.
    """

    settings_class = ProcessSettings
    address = None if host_store.is_available() else "127.0.0.1"
    closes_through_library = False

    def __init__(self, start_method: WorkerStartMethod, preloaded: str) -> None:
        self._start_method: WorkerStartMethod = start_method
        self._preloaded = preloaded
        self.name = f"start_method={start_method!r}"
        self.forks = start_method == "fork"

    @property
    @override
    def reuse_key(self) -> Any:
        return self._start_method

    @property
    @override
    def pickler(self) -> type[MessagePickler] | None:
        is_main_known = self.forks or worker_main.imports_main(worker_main.preparation_data())
        return None if is_main_known else MainByValuePickler

    @override
    def environment(self) -> dict[str, str]:
        return rank_variables.environment_for_ranks()

    @override
    def num_cpus(self, num_workers: int) -> int:
        num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, num_cpus // num_workers)

    @override
    def check_can_start(self) -> None:
        if self.forks and multiprocessing.current_process().daemon:
            raise RuntimeError(
                "`start_method='fork'`: this process cannot start children, because it is a daemon, like"
                " the workers of a `multiprocessing.Pool`. Use `strategy='ddp_spawn_ext'`, or replace the pool by a"
                " `concurrent.futures.ProcessPoolExecutor`."
            )
        if self.forks and torch.cuda.is_initialized():
            raise RuntimeError(
                "`start_method='fork'`: this process has already used a GPU, so its forks cannot use one. Use"
                " `strategy='ddp_spawn_ext'`, which does not fork this process, or restart the notebook or script and"
                " do not use a GPU before training starts."
            )

    @override
    def start(self, num_workers: int, inherited_task: WorkerTask | None) -> Iterator[WorkerProcess]:
        return (self._start(rank, inherited_task) for rank in range(num_workers))

    @override
    def replace(self, exited: WorkerProcess, workers: Sequence[WorkerProcess]) -> WorkerProcess:
        return self._start(exited.rank, None)

    def _start(self, rank: int, inherited_task: WorkerTask | None) -> WorkerProcess:
        setup = WorkerSetup(rank, None if self.forks else worker_main.preparation_data())
        parent_end, child_end = socket.socketpair()
        with child_end:
            pid, exit_code = self._start_process(child_end, inherited_task)
        worker = WorkerProcess(rank, Channel(parent_end), pid, exit_code)
        try:
            worker.send(setup)
            worker.enter(WorkerState.IDLE)  # the socket keeps messages until the worker reads them
        except BaseException:  # the pool does not have the worker yet
            worker.kill()
            worker.close()
            raise
        return worker

    def _start_process(
        self, child_end: socket.socket, inherited_task: WorkerTask | None
    ) -> tuple[int, Callable[[], int | None]]:
        """Starts a process that serves a channel; returns its process ID, and a function that returns its exit code."""
        if self._start_method == "forkserver":
            server = fork_server.get(self._preloaded)
            pid = server.fork(child_end)
            return pid, lambda: server.exit_code(pid)
        if self._start_method == "fork":
            arguments = child_end, os.getpid(), inherited_task
            fork = multiprocessing.get_context("fork").Process(target=_serve_in_own_session, args=arguments)
            fork.start()
            assert fork.pid is not None
            return fork.pid, lambda: fork.exitcode
        command = worker_main.command(child_end, os.getpid())
        process = subprocess.Popen(command, pass_fds=[child_end.fileno()], start_new_session=True)
        return process.pid, process.poll

    @override
    def pack(self, pickled: Pickled, cache: MemoryFileCache) -> PreparedMessage:
        return PreparedMessage(pickled, cache)

    @override
    def close(self) -> None:
        """A no-op: all pools share the fork server."""


def _serve_in_own_session(*arguments: Any) -> None:
    os.setsid()
    worker_main.serve_in_fork(*arguments)
