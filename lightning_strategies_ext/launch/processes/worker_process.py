"""A worker process of this host as the main process sees it: started in one of three ways, asked, watched, ended."""

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

from lightning_strategies_ext import host_store, rank_variables
from lightning_strategies_ext._system.peers import is_running, kill_with_forked_children, start_time
from lightning_strategies_ext.exceptions import WorkerDiedError
from lightning_strategies_ext.launch.processes import fork_server
from lightning_strategies_ext.launch.processes.process_settings import ProcessSettings, is_interactive
from lightning_strategies_ext.launch.processes.worker_interface import EXIT_TIMEOUT_S
from lightning_strategies_ext.launch.processes.worker_main import (
    MAIN_NAME,
    MAIN_PATH,
    WorkerTask,
    command,
    imports_main,
    isolated_exit_handlers,
    serve,
)
from lightning_strategies_ext.launch.protocol import Ping, RunTask, WorkerSetup
from lightning_strategies_ext.launch.transport.channel import Channel, PreparedMessage
from lightning_strategies_ext.launch.transport.memory_files import MemoryFileCache
from lightning_strategies_ext.launch.transport.pickling import (
    MainByValuePickler,
    Pickled,
    SharedObjects,
    dump,
    dump_with,
)

WorkerStartMethod = Literal["spawn", "fork", "forkserver"]


class WorkerProcess:
    """One worker process.

    Args:
        rank: Its local rank.
        start_method: See :class:`.WorkerPool`.
        inherited_task: See :class:`.WorkerPool`.

    Attributes:
        channel: What it is talked to over.
        pid: Its process id.
    """

    def __init__(self, rank: int, start_method: WorkerStartMethod, inherited_task: WorkerTask | None) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        with theirs:
            start = {"spawn": self._spawn, "fork": self._fork, "forkserver": self._fork_from_server}[start_method]
            self.pid, self._exit_code = start(theirs, inherited_task)
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
        server = fork_server.get()
        pid = server.fork(theirs)
        return pid, lambda: server.exit_code(pid)

    @property
    def description(self) -> str:
        """Which process it is, for people."""
        return f"pid {self.pid}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of its own: none."""
        return {}

    @property
    def is_connected(self) -> bool:
        """True: what it is told waits for it."""
        return True

    @property
    def waitables(self) -> list[Any]:
        """What becomes ready when there is an answer, or the worker has died."""
        return [self.channel] if self._pidfd is None else [self.channel, self._pidfd]

    def send(self, message: Any) -> None:
        """Sends a message.

        Raises:
            OSError: If the worker is gone.
        """
        self.channel.send(message)

    def submit(self, order: RunTask, task: PreparedMessage | None) -> None:
        """Orders it to run a job; None is the one that it inherited.

        Raises:
            OSError: If the worker is gone.
        """
        self.channel.send(order)
        if task is not None:
            task.send(self.channel)

    def poll(self, timeout_s: float | None) -> bool:
        """Waits until there is something to receive, or the worker is gone; False if neither came in time."""
        return bool(wait([self.channel.socket], timeout_s))

    def receive(self) -> Any:
        """Waits for a message.

        Raises:
            EOFError: If the worker is gone.
        """
        return self.channel.receive()

    def next_reply(self) -> Any:
        """The worker's answer to a job, its death if it died without one, or None for now.

        In a job whose ranks may change also a :class:`.ReadyToJoin` or :class:`.JoinedWorld`.
        """
        is_dead = not self.is_alive()  # asked first: a worker that answers and then dies has answered
        if wait([self.channel.socket], 0):
            with suppress(EOFError, OSError):
                return self.channel.receive()
        return self.exit_error() if is_dead else None

    def notify_peer_loss(self, world: int) -> None:
        """Does nothing: the kernel lets whoever waits for a process of this host know that it is gone."""

    def ping(self) -> None:
        """Asks the worker, which waits for a job, to answer :meth:`is_responsive`."""
        with suppress(OSError):
            self.channel.send(Ping())

    def is_responsive(self) -> bool:
        """Waits for the answer to :meth:`ping`; False if the worker ended instead.

        A worker that was killed still counts as a running process for a moment; it does not answer any more.
        """
        while True:
            wait(self.waitables, 1.0)  # its dataloaders' workers may hold its end of the channel open
            is_dead = not self.is_alive()
            if wait([self.channel.socket], 0):
                with suppress(EOFError, OSError):
                    return isinstance(self.channel.receive(), Ping)
                return False
            if is_dead:
                return False

    def is_alive(self) -> bool:
        """Whether the process runs."""
        if self._pidfd is not None:
            return not wait([self._pidfd], 0)
        return is_running(self.pid, self._started)

    def exit_error(self) -> WorkerDiedError:
        """Describes how the worker ended; waits a moment for it to have ended."""
        self.wait(1.0)
        code = self._exit_code()
        name = None
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            how = f"was killed by {name}"
            if name == "SIGKILL":
                how += "; the kernel does that when memory runs out"
        else:
            how = "ended" if code is None else f"ended with exit code {code}"
        message = f"rank {self.rank} (pid {self.pid}) {how}, in the middle of its work."
        return WorkerDiedError(message, self.rank, self.pid, -1 if code is None else code, name)

    def signal(self, signum: int) -> None:
        """Sends it a signal, if it runs."""
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def wait(self, timeout_s: float) -> None:
        """Waits until the process has ended."""
        if self._pidfd is not None:
            wait([self._pidfd], timeout_s)
            return
        deadline = time.monotonic() + timeout_s
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)

    def kill(self) -> None:
        """Kills the process, if it runs, and the workers of its loaders."""
        if self.is_alive():
            kill_with_forked_children(self.pid)
        self.wait(EXIT_TIMEOUT_S)

    def close(self) -> None:
        """Frees what this process holds for it."""
        self._exit_code()  # reaps it
        with suppress(OSError):
            self.channel.socket.shutdown(socket.SHUT_RDWR)
        self.channel.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class ProcessStarter:
    """Starts workers on this host, see :class:`.WorkerStarter`.

    Args:
        start_method: "spawn" starts Python anew for each; "fork" forks this process; "forkserver" forks a process
            that has imported torch and Lightning.
    """

    settings_class = ProcessSettings
    address = None if host_store.is_available() else "127.0.0.1"
    closes_through_library = False

    def __init__(self, start_method: WorkerStartMethod) -> None:
        self._start_method: WorkerStartMethod = start_method
        self.name = f"start_method={start_method!r}"
        self.forks = start_method == "fork"

    @property
    def reuse_key(self) -> Any:
        """What has to be alike in two of them for the workers of one to be of use to the other."""
        return self._start_method

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of the main process that its workers receive: all but a rank's own."""
        return rank_variables.environment_for_ranks()

    def num_cpus(self, num_workers: int) -> int:
        """How many CPUs a worker has for its computations: its share of those of this process."""
        num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, num_cpus // num_workers)

    def check_can_start(self) -> None:
        """Rejects a fork of a process that has used a GPU, or that multiprocessing allows no children.

        Raises:
            RuntimeError: If this process is one of them.
        """
        if self.forks and multiprocessing.current_process().daemon:
            raise RuntimeError(
                "`start_method='fork'`: multiprocessing allows this process no children, because it is a daemon, as the"
                " workers of a `multiprocessing.Pool` are. Use `strategy='ddp_spawn_ext'` here, or replace the"
                " pool by a `concurrent.futures.ProcessPoolExecutor`."
            )
        if self.forks and torch.cuda.is_initialized():
            raise RuntimeError(
                "`start_method='fork'`: this process has used a GPU already, and its forks could not. Use"
                " `strategy='ddp_spawn_ext'`, whose workers are no forks of it; or restart the notebook or script and"
                " leave the GPU alone until training starts."
            )

    def start(self, rank: int, num_workers: int, inherited_task: WorkerTask | None) -> WorkerProcess:
        """Starts a worker."""
        return WorkerProcess(rank, self._start_method, inherited_task)

    def prepare(self, workers: Sequence[WorkerProcess]) -> list[WorkerProcess]:
        """Makes workers that have just been started like this process."""
        preparation = None if self.forks else _preparation()
        for worker in workers:
            with suppress(OSError):  # it died at once: who waits for its answer finds out why
                worker.send(WorkerSetup(worker.rank, preparation))
        return list(workers)

    def replace(self, dead: WorkerProcess, num_workers: int, inherited_task: WorkerTask | None) -> WorkerProcess:
        """Starts a worker in the place of one that has died."""
        (worker,) = self.prepare([self.start(dead.rank, num_workers, inherited_task)])
        return worker

    def dump(
        self,
        obj: Any,
        shared: SharedObjects | None = None,
        is_return: bool = False,
        received_objects: dict[int, Any] | None = None,
    ) -> Pickled:
        """Pickles a job, with what is defined in ``__main__`` if workers cannot import that."""
        if self.forks or imports_main(_preparation()):
            return dump(obj, shared, is_return, received_objects)
        return dump_with(MainByValuePickler, obj, shared, is_return, received_objects)

    def pack(self, pickled: Pickled, cache: MemoryFileCache) -> PreparedMessage:
        """Writes a job into memory that workers can map."""
        return PreparedMessage(pickled, cache)

    def close(self) -> None:
        """Does nothing: the fork server is that of all pools."""


def _preparation() -> dict[str, Any]:
    preparation = multiprocessing.spawn.get_preparation_data("lightning-strategies-ext worker")
    preparation["authkey"] = bytes(preparation["authkey"])
    # The script that `python -i` has run is not all that is defined here; one that was piped in is in no file.
    if is_interactive() or not os.path.exists(preparation.get(MAIN_PATH, "/")):
        preparation.pop(MAIN_NAME, None)
        preparation.pop(MAIN_PATH, None)
    return preparation


def _serve_in_own_session(theirs: socket.socket, main_pid: int, inherited_task: WorkerTask | None) -> None:
    os.setsid()
    with isolated_exit_handlers():
        serve(theirs, main_pid, inherited_task)
