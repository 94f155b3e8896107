"""Interfaces of workers and of their starters, through which a pool uses them.

:mod:`.worker_process` implements both for processes of this host, :mod:`.launch.ray` for workers on a Ray cluster.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

from lightning_strategies_ext.exceptions import WorkerDiedError
from lightning_strategies_ext.launch.processes.process_settings import ProcessSettings
from lightning_strategies_ext.launch.processes.worker_main import WorkerTask
from lightning_strategies_ext.launch.protocol import MessageToWorker, RunTask, TaskDone, TaskFailed
from lightning_strategies_ext.launch.transport.memory_files import MemoryFileCache
from lightning_strategies_ext.launch.transport.pickling import MessagePickler, Pickled

#: Seconds that a worker has to exit.
EXIT_TIMEOUT_S = 3.0


class WorkerState(Enum):
    """State of a worker, local, forked, elastic, or on Ray. Only starting and connecting differ between them.

    ========  ====================================================  =======================
    state     entered when                                          next states
    ========  ====================================================  =======================
    STARTING  its process is started                                IDLE, EXITED
    IDLE      its setup is sent, or it has replied ``TaskDone``     RUNNING, FAILED, EXITED
    RUNNING   a task is submitted                                   IDLE, FAILED, EXITED
    FAILED    its setup or a task has failed; it may have results   EXITED
    EXITED    its exit is detected, or it is closed
    ========  ====================================================  =======================
    """

    STARTING = "starting"
    IDLE = "idle"
    RUNNING = "running"
    FAILED = "failed"
    EXITED = "exited"


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


class SentTask(Protocol):
    """A task that was serialized once, for all workers."""

    def close(self) -> None:
        """Releases the serialized task. Workers that have received it keep it."""


class Worker(Protocol):
    """A worker, as the main process controls it.

    Attributes:
        rank: Index of the worker in its pool.
        state: State of the worker.
    """

    rank: int
    state: WorkerState = WorkerState.STARTING

    def enter(self, state: WorkerState) -> None:
        """Changes the state. The same state again is a no-op.

        Raises:
            RuntimeError: If no worker in the current state can enter the new one.
        """
        if state is not self.state and state not in _NEXT_STATES[self.state]:
            raise RuntimeError(f"worker {self.rank} is {self.state.value} and cannot become {state.value}")
        self.state = state

    @property
    def pid(self) -> int:
        """Process ID on the worker's host; 0 if it is not known yet."""

    @property
    def description(self) -> str:
        """Text that identifies the process in messages, such as "pid 4711"."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of this worker alone."""

    @property
    def is_connected(self) -> bool:
        """Whether the worker is ready to receive; messages that were sent before wait until it is."""

    @property
    def waitables(self) -> list[Any]:
        """Objects for ``multiprocessing.connection.wait``, ready when a reply has arrived or the worker has exited."""

    def send(self, message: MessageToWorker) -> None:
        """Sends a message.

        Raises:
            OSError: If the worker has exited.
        """

    def submit(self, order: RunTask, task: Any) -> None:
        """Sends the request to run a task, and the task, a :class:`SentTask`; None if the worker has inherited it.

        Raises:
            OSError: If the worker has exited.
        """
        if self.state is not WorkerState.STARTING:
            self.enter(WorkerState.RUNNING)
        self._submit(order, task)

    def _submit(self, order: RunTask, task: Any) -> None:
        """Sends a task, or keeps it until the worker has started."""

    def poll(self, timeout_s: float | None) -> bool:
        """Waits until a message has arrived or the worker has exited; returns False if neither happens in time."""

    def receive(self) -> Any:
        """Waits for a message and returns it.

        Raises:
            EOFError: If the worker has exited.
        """

    def next_reply(self) -> Any:
        """Returns the reply to a task, the :meth:`exit_error` if the worker has exited without one, or None for now.

        The replies of an elastic task include :class:`.ReadyToJoin` and :class:`.JoinedWorld`.
        """
        reply = self._next_reply()
        state = _STATES_AFTER_REPLIES.get(type(reply))
        if state is not None:
            self.enter(state)
        return reply

    def _next_reply(self) -> Any:
        """Returns what :meth:`next_reply` returns."""

    def notify_peer_loss(self, world: int) -> None:
        """Notifies the worker that another worker of its world has exited, if its kernel may not detect that.

        Args:
            world: Number of the world.
        """

    def ping(self) -> None:
        """Requests a reply for :meth:`is_responsive` from the worker, which waits for a task."""

    def is_responsive(self) -> bool:
        """Whether the worker replies to :meth:`ping`. Waits until it replies or exits."""

    def is_alive(self) -> bool:
        """Whether the worker runs."""

    def exit_error(self) -> WorkerDiedError:
        """Returns an error that describes how the worker exited. Waits briefly until that is known."""

    def signal(self, signum: int) -> None:
        """Sends a signal to the worker if it runs."""

    def wait(self, timeout_s: float) -> None:
        """Waits until the worker has exited, at most for the given seconds."""

    def kill(self) -> None:
        """Kills the worker if it runs, and waits until it has exited, at most :data:`EXIT_TIMEOUT_S`."""

    def close(self) -> None:
        """Releases what the main process holds for the worker."""


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

    def start(self, rank: int, num_workers: int, inherited_task: WorkerTask | None) -> Worker:
        """Starts a worker.

        Args:
            rank: Index of the worker in its pool.
            num_workers: Number of workers in the pool.
            inherited_task: Task that the worker inherits in a fork.
        """

    def prepare(self, workers: Sequence[Any]) -> list[Any]:
        """Prepares new workers for tasks, and returns them in the order of their ranks."""

    def replace(self, dead: Any, num_workers: int, inherited_task: WorkerTask | None) -> Worker:
        """Starts a worker that replaces an exited one, and prepares it for tasks while the other workers run.

        Args:
            dead: The worker that has exited, closed.
            num_workers: Number of workers in the pool.
            inherited_task: Task that the worker inherits in a fork.
        """

    def pack(self, pickled: Pickled, cache: MemoryFileCache) -> SentTask:
        """Writes a pickled task to memory that all workers can read.

        Args:
            pickled: The task.
            cache: Memory of earlier tasks, which is reused for buffers that have not changed.
        """

    def close(self) -> None:
        """Releases what the starter holds. Called when all its workers have exited."""
