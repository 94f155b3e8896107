"""What a pool asks of whatever starts its workers, and of a worker, wherever that runs: two Protocols.

Workers that are processes of this host are in :mod:`.worker_process`, those on a Ray cluster in :mod:`.launch.ray`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from lightning_strategies_ext.exceptions import WorkerDiedError
from lightning_strategies_ext.launch.processes.process_settings import ProcessSettings
from lightning_strategies_ext.launch.processes.worker_main import WorkerTask
from lightning_strategies_ext.launch.protocol import RunTask
from lightning_strategies_ext.launch.transport.memory_files import MemoryFileCache
from lightning_strategies_ext.launch.transport.pickling import Pickled, SharedObjects

#: How long a worker may take to end, in seconds.
EXIT_TIMEOUT_S = 3.0


class SentTask(Protocol):
    """A job that was written once, for all workers."""

    def close(self) -> None:
        """Lets go of it; what was sent stays valid."""


class Worker(Protocol):
    """A worker as the main process sees it.

    Attributes:
        rank: Among the pool's workers.
    """

    rank: int

    @property
    def pid(self) -> int:
        """Its process id, on its host."""

    @property
    def description(self) -> str:
        """Which process it is, for people."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of its own."""

    @property
    def is_connected(self) -> bool:
        """Whether it is there; what it was told before, it hears when it is."""

    @property
    def waitables(self) -> list[Any]:
        """What becomes ready when there is an answer, or the worker has died."""

    def send(self, message: Any) -> None:
        """Sends a message.

        Raises:
            OSError: If the worker is gone.
        """

    def submit(self, order: RunTask, task: Any) -> None:
        """Orders it to run a job, a :class:`SentTask`; None is the one that it inherited.

        Raises:
            OSError: If the worker is gone.
        """

    def poll(self, timeout_s: float | None) -> bool:
        """Waits until there is something to receive, or the worker is gone; False if neither came in time."""

    def receive(self) -> Any:
        """Waits for a message.

        Raises:
            EOFError: If the worker is gone.
        """

    def next_reply(self) -> Any:
        """Its answer to a job, its death if it died without one, or None for now.

        In a job whose ranks may change also a :class:`.ReadyToJoin` or :class:`.JoinedWorld`.
        """

    def notify_peer_loss(self, world: int) -> None:
        """Says that another worker of its world is gone, where the kernel of its host may not know.

        Args:
            world: The world's number.
        """

    def ping(self) -> None:
        """Asks the worker, which waits for a job, to answer :meth:`is_responsive`."""

    def is_responsive(self) -> bool:
        """Waits for the answer to :meth:`ping`; False if the worker ended instead."""

    def is_alive(self) -> bool:
        """Whether it runs."""

    def exit_error(self) -> WorkerDiedError:
        """Describes how it ended; waits a moment for it to have ended."""

    def signal(self, signum: int) -> None:
        """Sends it a signal, if it runs."""

    def wait(self, timeout_s: float) -> None:
        """Waits until it has ended."""

    def kill(self) -> None:
        """Kills it, if it runs."""

    def close(self) -> None:
        """Frees what this process holds for it."""


class WorkerStarter(Protocol):
    """What starts the workers of a pool.

    Attributes:
        name: What the user wrote to have it.
        forks: Whether workers are forks of this process, and have what it has.
        closes_through_library: Whether ending workers takes calls of a library that has locks of its own.
    """

    name: str
    forks: bool
    closes_through_library: bool

    @property
    def settings_class(self) -> type[ProcessSettings]:
        """What makes its workers like the main process."""

    @property
    def reuse_key(self) -> Any:
        """What has to be alike in two of them for the workers of one to be of use to the other."""

    @property
    def address(self) -> str | None:
        """Of this process's host, as the workers reach it; None if they share it and use a :class:`.HostStore`."""

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of the main process that its workers receive."""

    def num_cpus(self, num_workers: int) -> int:
        """How many CPUs a worker has for its computations."""

    def check_can_start(self) -> None:
        """Refuses to start workers where that cannot work.

        Raises:
            RuntimeError: If it cannot.
        """

    def start(self, rank: int, num_workers: int, inherited_task: WorkerTask | None) -> Worker:
        """Starts a worker.

        Args:
            rank: Which.
            num_workers: Of how many.
            inherited_task: A job that it gets by being forked.
        """

    def prepare(self, workers: Sequence[Any]) -> list[Any]:
        """Makes workers that have just been started ready for jobs; returns them in order of ranks."""

    def replace(self, dead: Any, num_workers: int, inherited_task: WorkerTask | None) -> Worker:
        """Starts a worker in the place of one that has died; it gets ready for jobs while others work.

        Args:
            dead: The one that has died, closed.
            num_workers: See :meth:`start`.
            inherited_task: See :meth:`start`.
        """

    def dump(
        self,
        obj: Any,
        shared: SharedObjects | None = None,
        is_return: bool = False,
        received_objects: dict[int, Any] | None = None,
    ) -> Pickled:
        """Pickles a job, see :func:`.pickling.dump`."""

    def pack(self, pickled: Pickled, cache: MemoryFileCache) -> SentTask:
        """Writes a job to where workers find it.

        Args:
            pickled: The job.
            cache: What was sent before.
        """

    def close(self) -> None:
        """Called when all its workers have ended."""
