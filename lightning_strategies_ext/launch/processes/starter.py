"""What a pool asks of whatever starts its workers, and of a worker, wherever that runs: two Protocols.

Workers that are processes of this host are in :mod:`.process`, those on a Ray cluster in :mod:`.launch.ray`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from lightning_strategies_ext.exceptions import WorkerDiedError
from lightning_strategies_ext.launch.processes.conditions import Conditions
from lightning_strategies_ext.launch.processes.worker import Job
from lightning_strategies_ext.launch.protocol import Order
from lightning_strategies_ext.launch.transport.messages import Pickled, Shared
from lightning_strategies_ext.launch.transport.segments import KeptSegments

#: How long a worker may take to end, in seconds.
END_S = 3.0


class SentJob(Protocol):
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
    def where(self) -> str:
        """Which process it is, for people."""

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of its own."""

    @property
    def has_come(self) -> bool:
        """Whether it is there; what it was told before, it hears when it is."""

    @property
    def pollable(self) -> list[Any]:
        """What becomes ready when there is an answer, or the worker has died."""

    def send(self, message: Any) -> None:
        """Sends a message.

        Raises:
            OSError: If the worker is gone.
        """

    def give(self, order: Order, job: Any) -> None:
        """Orders it to run a job, a :class:`SentJob`; None is the one that it inherited.

        Raises:
            OSError: If the worker is gone.
        """

    def has_said(self, timeout_s: float | None) -> bool:
        """Waits until there is something to receive, or the worker is gone; False if neither came in time."""

    def receive(self) -> Any:
        """Waits for a message.

        Raises:
            EOFError: If the worker is gone.
        """

    def answer(self) -> Any:
        """Its answer to a job, its death if it died without one, or None for now.

        In a job whose ranks may change also a :class:`.Ready` or :class:`.Arrived`.
        """

    def tell_of_loss(self, world: int) -> None:
        """Says that another worker of its world is gone, where the kernel of its host may not know.

        Args:
            world: The world's number.
        """

    def ping(self) -> None:
        """Asks the worker, which waits for a job, to answer :meth:`is_there`."""

    def is_there(self) -> bool:
        """Waits for the answer to :meth:`ping`; False if the worker ended instead."""

    def is_alive(self) -> bool:
        """Whether it runs."""

    def death(self) -> WorkerDiedError:
        """Describes how it ended; waits a moment for it to have ended."""

    def signal(self, signum: int) -> None:
        """Sends it a signal, if it runs."""

    def wait(self, timeout_s: float) -> None:
        """Waits until it has ended."""

    def kill(self) -> None:
        """Kills it, if it runs."""

    def close(self) -> None:
        """Frees what this process holds for it."""


class Starter(Protocol):
    """What starts the workers of a pool.

    Attributes:
        name: What the user wrote to have it.
        forks: Whether workers are forks of this process, and have what it has.
        ends_by_calls: Whether ending workers takes calls of a library that has locks of its own.
    """

    name: str
    forks: bool
    ends_by_calls: bool

    @property
    def conditions(self) -> type[Conditions]:
        """What makes its workers like the main process."""

    @property
    def kind(self) -> Any:
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

    def start(self, rank: int, num_workers: int, inherited: Job | None) -> Worker:
        """Starts a worker.

        Args:
            rank: Which.
            num_workers: Of how many.
            inherited: A job that it gets by being forked.
        """

    def prepare(self, workers: Sequence[Any]) -> list[Any]:
        """Makes workers that have just been started ready for jobs; returns them in order of ranks."""

    def replace(self, dead: Any, num_workers: int, inherited: Job | None) -> Worker:
        """Starts a worker in the place of one that has died; it gets ready for jobs while others work.

        Args:
            dead: The one that has died, closed.
            num_workers: See :meth:`start`.
            inherited: See :meth:`start`.
        """

    def dump(
        self, obj: Any, shared: Shared | None = None, returning: bool = False, found: dict[int, Any] | None = None
    ) -> Pickled:
        """Pickles a job, see :func:`.messages.dump`."""

    def pack(self, pickled: Pickled, kept: KeptSegments) -> SentJob:
        """Writes a job to where workers find it.

        Args:
            pickled: The job.
            kept: What was sent before.
        """

    def close(self) -> None:
        """Called when all its workers have ended."""
