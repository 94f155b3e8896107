"""Worker processes of this host, and the three ways to start them."""

import multiprocessing
import multiprocessing.spawn
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any, Literal

import torch
from typing_extensions import override

from lightning_strategies_ext import host_store, rank_variables
from lightning_strategies_ext._system.peers import is_running, kill_with_forked_children, start_time
from lightning_strategies_ext.exceptions import WorkerDiedError
from lightning_strategies_ext.launch.processes import fork_server
from lightning_strategies_ext.launch.processes.process_settings import ProcessSettings, is_interactive
from lightning_strategies_ext.launch.processes.worker_interface import (
    EXIT_TIMEOUT_S,
    Worker,
    WorkerStarter,
    WorkerState,
)
from lightning_strategies_ext.launch.processes.worker_main import (
    MAIN_NAME,
    MAIN_PATH,
    WorkerTask,
    command,
    imports_main,
    isolated_exit_handlers,
    serve,
)
from lightning_strategies_ext.launch.protocol import MessageToWorker, Ping, Pong, RunTask, WorkerSetup
from lightning_strategies_ext.launch.transport.channel import Channel, PreparedMessage
from lightning_strategies_ext.launch.transport.memory_files import MemoryFileCache
from lightning_strategies_ext.launch.transport.pickling import MainByValuePickler, MessagePickler, Pickled

WorkerStartMethod = Literal["spawn", "fork", "forkserver"]


class WorkerProcess(Worker):
    """A worker process of this host.

    Args:
        rank: Local rank of the worker.
        start_method: Start method, see :class:`ProcessStarter`.
        preloaded: Module that the fork server imports, see :class:`ProcessStarter`.
        inherited_task: Task that the worker inherits in a fork.

    Attributes:
        channel: Channel to the worker.
    """

    def __init__(
        self, rank: int, start_method: WorkerStartMethod, preloaded: str, inherited_task: WorkerTask | None
    ) -> None:
        self.rank = rank
        self._preloaded = preloaded
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        with theirs:
            start = {"spawn": self._spawn, "fork": self._fork, "forkserver": self._fork_from_server}[start_method]
            self._pid, self._exit_code = start(theirs, inherited_task)
        self._started = start_time(self.pid)
        self._pidfd: int | None = None
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):
                self._pidfd = os.pidfd_open(self.pid)

    def _spawn(self, theirs: socket.socket, inherited_task: WorkerTask | None) -> tuple[int, Callable[[], int | None]]:
        process = subprocess.Popen(
            command(theirs, os.getpid()),
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        return process.pid, process.poll

    def _fork(self, theirs: socket.socket, inherited_task: WorkerTask | None) -> tuple[int, Callable[[], int | None]]:
        process = multiprocessing.get_context("fork").Process(
            target=_serve_in_own_session, args=(theirs, os.getpid(), inherited_task)
        )
        process.start()
        assert process.pid is not None
        return process.pid, lambda: process.exitcode

    def _fork_from_server(
        self, theirs: socket.socket, inherited_task: WorkerTask | None
    ) -> tuple[int, Callable[[], int | None]]:
        server = fork_server.get(self._preloaded)
        pid = server.fork(theirs)
        return pid, lambda: server.exit_code(pid)

    @property
    @override
    def pid(self) -> int:
        return self._pid

    @property
    @override
    def description(self) -> str:
        return f"pid {self.pid}"

    @property
    @override
    def environment(self) -> dict[str, str]:
        return {}

    @property
    @override
    def is_connected(self) -> bool:
        return True  # the socket buffers messages until the worker reads them

    @property
    @override
    def waitables(self) -> list[Any]:
        return [self.channel] if self._pidfd is None else [self.channel, self._pidfd]

    @override
    def send(self, message: MessageToWorker) -> None:
        self.channel.send(message)

    @override
    def _submit(self, order: RunTask, task: PreparedMessage | None) -> None:
        self.channel.send(order)
        if task is not None:
            task.send(self.channel)

    @override
    def poll(self, timeout_s: float | None) -> bool:
        return bool(wait([self.channel.socket], timeout_s))

    @override
    def receive(self) -> Any:
        return self.channel.receive()

    @override
    def _next_reply(self) -> Any:
        has_exited = not self.is_alive()  # checked first: the worker may reply and then exit
        if wait([self.channel.socket], 0):
            with suppress(EOFError, OSError):
                return self.channel.receive()
        return self.exit_error() if has_exited else None

    @override
    def notify_peer_loss(self, world: int) -> None:
        """A no-op: the kernel reports the exit of a process to the other processes of its host."""

    @override
    def ping(self) -> None:
        with suppress(OSError):
            self.channel.send(Ping())

    @override
    def is_responsive(self) -> bool:
        # Not by `is_alive` alone: a worker that was killed still counts as a running process for a moment.
        while True:
            wait(self.waitables, 1.0)  # DataLoader workers may hold the worker's end of the channel open
            has_exited = not self.is_alive()
            if wait([self.channel.socket], 0):
                with suppress(EOFError, OSError):
                    return isinstance(self.channel.receive(), Pong)
                return False
            if has_exited:
                return False

    @override
    def is_alive(self) -> bool:
        if self._pidfd is not None:
            return not wait([self._pidfd], 0)
        return is_running(self.pid, self._started)

    @override
    def exit_error(self) -> WorkerDiedError:
        self.wait(1.0)
        code = self._exit_code()
        how = "exited" if code is None else f"exited with exit code {code}"
        name, hint = None, ""
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            how = f"was killed by {name}"
            hint = " The kernel sends SIGKILL when memory runs out." if name == "SIGKILL" else ""
        message = f"rank {self.rank} (pid {self.pid}) {how} in the middle of its work.{hint}"
        return WorkerDiedError(message, self.rank, self.pid, -1 if code is None else code, name)

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
        self._exit_code()  # reaps the process
        with suppress(OSError):
            self.channel.socket.shutdown(socket.SHUT_RDWR)
        self.channel.close()
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
        return None if self.forks or imports_main(_preparation()) else MainByValuePickler

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
                "`start_method='fork'`: multiprocessing allows this process no children, because it is a daemon, like"
                " the workers of a `multiprocessing.Pool`. Use `strategy='ddp_spawn_ext'`, or replace the pool by a"
                " `concurrent.futures.ProcessPoolExecutor`."
            )
        if self.forks and torch.cuda.is_initialized():
            raise RuntimeError(
                "`start_method='fork'`: this process has used a GPU already, so its forks cannot use one. Use"
                " `strategy='ddp_spawn_ext'`, which does not fork this process, or restart the notebook or script and"
                " do not use a GPU before training starts."
            )

    @override
    def start(self, rank: int, num_workers: int, inherited_task: WorkerTask | None) -> WorkerProcess:
        return WorkerProcess(rank, self._start_method, self._preloaded, inherited_task)

    @override
    def prepare(self, workers: Sequence[WorkerProcess]) -> list[WorkerProcess]:
        preparation = None if self.forks else _preparation()
        for worker in workers:
            with suppress(OSError):  # it has exited: `next_reply` returns the reason
                worker.send(WorkerSetup(worker.rank, preparation))
            worker.enter(WorkerState.IDLE)  # the socket keeps messages until the worker reads them
        return list(workers)

    @override
    def replace(self, dead: WorkerProcess, num_workers: int, inherited_task: WorkerTask | None) -> WorkerProcess:
        (worker,) = self.prepare([self.start(dead.rank, num_workers, inherited_task)])
        return worker

    @override
    def pack(self, pickled: Pickled, cache: MemoryFileCache) -> PreparedMessage:
        return PreparedMessage(pickled, cache)

    @override
    def close(self) -> None:
        """A no-op: all pools share the fork server."""


def _preparation() -> dict[str, Any]:
    preparation = multiprocessing.spawn.get_preparation_data("lightning-strategies-ext worker")
    preparation["authkey"] = bytes(preparation["authkey"])
    # After `python -i`, more is defined in `__main__` than by the script. A script that was piped in has no file.
    if is_interactive() or not os.path.exists(preparation.get(MAIN_PATH, "/")):
        preparation.pop(MAIN_NAME, None)
        preparation.pop(MAIN_PATH, None)
    return preparation


def _serve_in_own_session(theirs: socket.socket, main_pid: int, inherited_task: WorkerTask | None) -> None:
    os.setsid()
    with isolated_exit_handlers():
        serve(theirs, main_pid, inherited_task)
