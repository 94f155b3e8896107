"""Interfaces of workers and of their starters, through which a pool uses them.

:mod:`.worker_process` implements both for processes of this host, :mod:`.launch.ray` for workers on a Ray cluster.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import Enum
from math import inf
from multiprocessing.connection import wait
from typing import Any, Protocol

from lightning_strategies_ext.exceptions import WorkerDiedError
from lightning_strategies_ext.launch.processes.process_settings import ProcessSettings
from lightning_strategies_ext.launch.processes.worker_main import WorkerTask
from lightning_strategies_ext.launch.protocol import MessageToWorker, RunTask, TaskDone, TaskFailed
from lightning_strategies_ext.launch.transport.memory_files import MemoryFileCache
from lightning_strategies_ext.launch.transport.pickling import MessagePickler, Pickled

#: Reply to a task, or the error that describes how the worker has exited without one.
TaskReply = TaskDone | TaskFailed | WorkerDiedError

#: Seconds that a worker has to exit.
EXIT_TIMEOUT_S = 3.0
_POLL_S = 1.0


class WorkerState(Enum):
    """State of a worker, local, forked, elastic, or on Ray. Only starting and connecting differ between them."""

    STARTING = "starting"  # its process is started
    IDLE = "idle"  # its setup is sent, or it has replied `TaskDone`
    RUNNING = "running"  # a task is submitted
    FAILED = "failed"  # its setup or a task has failed; it may have results
    EXITED = "exited"  # its exit is detected, or it is closed


_NEXT_STATES = {
    WorkerState.STARTING: {WorkerState.IDLE, WorkerState.EXITED},
    WorkerState.IDLE: {WorkerState.RUNNING, WorkerState.FAILED, WorkerState.EXITED},
    WorkerState.RUNNING: {WorkerState.IDLE, WorkerState.FAILED, WorkerState.EXITED},
    WorkerState.FAILED: {WorkerState.EXITED},
    WorkerState.EXITED: set(),
}
_STATES_AFTER_REPLIES = {
    TaskDone: WorkerState.IDLE,
    TaskFailed: WorkerState.FAILED,
    WorkerDiedError: WorkerState.EXITED,
}


class Worker(Protocol):
    """A worker, as the main process controls it.

    Attributes:
        rank: Index of the worker in its pool.
        pid: Process ID on the worker's host; 0 if it is not known yet.
        state: State of the worker.
        reply: Reply to the last task, or the error that describes the exit of the worker; None if it has not replied.
        replied_at: Time at which the reply was received, on the monotonic clock, in seconds.
    """

    rank: int
    pid: int = 0
    state: WorkerState = WorkerState.STARTING
    reply: TaskReply | None = None
    replied_at: float = inf

    @property
    def description(self) -> str:
        """Text that identifies the process in messages, such as "pid 4711"."""
        return f"pid {self.pid}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of this worker alone."""
        return {}

    @property
    def has_results(self) -> bool:
        """Whether the worker has results to pull."""
        return isinstance(self.reply, TaskDone) or (isinstance(self.reply, TaskFailed) and self.reply.has_results)

    def enter(self, state: WorkerState) -> None:
        """Changes the state. The same state again is a no-op.

        Raises:
            RuntimeError: If no worker in the current state can enter the new one.
        """
        if state is not self.state and state not in _NEXT_STATES[self.state]:
            raise RuntimeError(f"worker {self.rank} is {self.state.value} and cannot become {state.value}")
        self.state = state

    # --- messages ---

    def send(self, message: MessageToWorker) -> None:
        """Sends a message. After an exit of the worker, the message is dropped, and the next reply reports the exit."""
        with suppress(OSError):
            self._send(message, None)

    def submit(self, order: RunTask, task: Any) -> None:
        """Sends the request to run a task, and the task, a :class:`SentTask`; None if the worker has inherited it."""
        self.reply = None
        if self.state is not WorkerState.STARTING:
            self.enter(WorkerState.RUNNING)
        with suppress(OSError):
            self._send(order, task)

    def next_reply(self) -> Any:
        """Returns the reply to a task, a WorkerDiedError if the worker has exited without one, or None for now.

        The replies of an elastic task include :class:`.ReadyToJoin` and :class:`.JoinedWorld`.
        """
        reply = self._next_message()
        if type(reply) in _STATES_AFTER_REPLIES:
            self.reply, self.replied_at = reply, time.monotonic()  # set first, because Ctrl-C may interrupt this method
            self.enter(_STATES_AFTER_REPLIES[type(reply)])
        return reply

    def wait_for_message(self, timeout_s: float | None = None) -> Any:
        """Returns the next message, a WorkerDiedError if the worker exits without one, or None after the timeout."""
        deadline = inf if timeout_s is None else time.monotonic() + timeout_s
        while (message := self._next_message()) is None and time.monotonic() < deadline:
            wait(self.waitables, max(0.0, min(_POLL_S, deadline - time.monotonic())))
        return message

    @property
    def waitables(self) -> list[Any]:
        """Objects for ``multiprocessing.connection.wait``, ready when a reply has arrived or the worker has exited."""

    def notify_peer_loss(self, world: int) -> None:
        """Notifies the worker that another worker of the given world has exited, if its kernel may not detect that."""
        return

    def _send(self, message: MessageToWorker, task: Any) -> None:
        """Sends a message, with a task if it requests to run one, or keeps the task until the worker has started.

        Raises:
            OSError: If the worker has exited.
        """

    def _next_message(self) -> Any:
        """Returns the next message, a WorkerDiedError if the worker has exited without one, or None for now."""

    # --- exit ---

    def is_alive(self) -> bool:
        """Whether the worker runs."""

    def signal(self, signum: int) -> None:
        """Sends a signal to the worker if it runs."""

    def wait(self, timeout_s: float) -> None:
        """Waits until the worker has exited, at most for the given seconds."""

    def kill(self) -> None:
        """Kills the worker if it runs, and waits until it has exited, at most :data:`EXIT_TIMEOUT_S`."""

    def close(self) -> None:
        """Releases what the main process holds for the worker."""


class SentTask(Protocol):
    """A task that was serialized once, for all workers."""

    def close(self) -> None:
        """Releases the serialized task. Workers that have received it keep it."""


class WorkerStarter(Protocol):
    """Starts the workers of a pool.

    Attributes:
        name: Argument with which the user has selected the starter, such as "start_method='fork'"; for messages.
        forks: Whether workers are forks of this process and inherit its objects.
        closes_through_library: Whether closing workers calls a library that has locks of its own.
    """

    name: str
    forks: bool
    closes_through_library: bool

    @property
    def settings_class(self) -> type[ProcessSettings]:
        """Class of the settings that a worker applies before each task."""

    @property
    def reuse_key(self) -> Any:
        """Key by which two starters are equal if the workers of one can run the tasks of the other."""

    @property
    def address(self) -> str | None:
        """Address at which workers reach this host; None if they run on it and use a :class:`.HostStore`."""

    @property
    def pickler(self) -> type[MessagePickler] | None:
        """Class of the pickler of tasks, see :func:`.pickling.dump`."""

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of this process that its workers receive."""

    def num_cpus(self, num_workers: int) -> int:
        """Returns the number of CPUs that a worker has for its computations."""

    def check_can_start(self) -> None:
        """Checks that workers can be started from this process.

        Raises:
            RuntimeError: If they cannot.
        """

    def start(self, num_workers: int, inherited_task: WorkerTask | None) -> Iterator[Worker]:
        """Yields workers as they start; forks inherit the task. At the end, all have ranks and are ready for tasks."""

    def replace(self, exited: Any, workers: Sequence[Any]) -> Worker:
        """Starts a worker that replaces an exited one, and prepares it for tasks while the other workers run."""

    def pack(self, pickled: Pickled, cache: MemoryFileCache) -> SentTask:
        """Writes a pickled task to memory that all workers can read.

        Args:
            pickled: The task.
            cache: Memory of earlier tasks, which is reused for buffers that have not changed.
        """

    def close(self) -> None:
        """Releases what the starter holds. Called when all its workers have exited."""
