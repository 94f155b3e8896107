"""Messages between the main process and a worker.

The main process sends :class:`WorkerSetup` once, and :class:`RunTask` for each task, followed by the task itself unless
the worker inherited it in a fork. The worker replies with :class:`TaskDone` or :class:`TaskFailed`. The main process
then sends :class:`PullResult` for one result after the other, until the worker replies with :class:`Shutdown`.
:class:`Ping`, :class:`SaveState`, and :class:`Shutdown` come between tasks. A closed channel means that the worker has
exited.

While an elastic task runs (:mod:`.processes.elastic_pool`), a worker sends :class:`ReadyToJoin` when it has left a
world, and :class:`JoinedWorld` when it has received its :class:`RankAssignment` in the next. Then all workers of the
world receive :class:`WorldMembers`.
"""

import pickle
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lightning_strategies_ext.exceptions import RankFailedError
from lightning_strategies_ext.failure.failure_monitor import known_failure
from lightning_strategies_ext.failure.failure_report import texts_of_exception
from lightning_strategies_ext.failure.rank_status import Failure as FirstFailure
from lightning_strategies_ext.launch.processes.process_settings import ProcessSettings, RngState
from lightning_strategies_ext.launch.transport.pickling import Pickled, dump


@dataclass(frozen=True)
class WorkerRankInfo:
    """Rank info of a worker; workers of one host need only their rank.

    Attributes:
        rank: Global rank.
        world_size: Number of ranks.
        local_rank: Rank among the workers of its host.
        local_world_size: Number of workers on its host.
        node_rank: Rank of its host among the hosts.
        num_nodes: Number of hosts.
        main_address: Address of rank 0's host, at which the ranks connect.
        main_port: Port at that address.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    main_address: str
    main_port: int


@dataclass
class WorkerSetup:
    """First message to a worker, which prepares it for tasks.

    Attributes:
        rank: Index of the worker in its pool.
        preparation: Result of ``multiprocessing.spawn.get_preparation_data``; None for a forked worker.
        rank_info: Rank info of a worker that may run on another host, else None.
    """

    rank: int
    preparation: dict[str, Any] | None
    rank_info: WorkerRankInfo | None = None


@dataclass
class RunTask:
    """Request to run a task.

    Attributes:
        settings: State of the main process to apply first.
        is_continuation: Whether the task continues where an earlier one ended.
        is_inherited: Whether the worker has inherited the task in a fork; otherwise the next message contains it.
        is_joining: Whether the other workers are running the task already.
    """

    settings: ProcessSettings
    is_continuation: bool
    is_inherited: bool = False
    is_joining: bool = False


class Ping:
    """Request to reply with the same message."""


@dataclass
class ReadyToJoin:
    """Request for a :class:`RankAssignment`, of a worker that is in no world or has left its world.

    Attributes:
        reason: Why the worker has left its world, if the ranks have not agreed to leave.
    """

    reason: str | None = None


@dataclass
class RankAssignment:
    """Rank of a worker in the next world. The worker replies with :class:`JoinedWorld`.

    Attributes:
        rank: Rank in the world; None if the worker is not needed any more.
        size: Number of ranks.
        world_number: Number of the world, unique among the worlds of all tasks.
        store: Address and port of the store that all worlds share, or the name of a :class:`.HostStore` if all workers
            run on one host.
    """

    rank: int | None
    size: int = 0
    world_number: int = 0
    store: tuple[str, int] | str = ""


@dataclass
class JoinedWorld:
    """Reply to a :class:`RankAssignment`.

    Attributes:
        member: Description of the worker for the other ranks.
    """

    member: Any


@dataclass
class WorldMembers:
    """Members of a worker's world, in the order of ranks; None if no world is formed, because a member has exited."""

    members: list[Any] | None


class JoinPending:
    """Notification that another worker waits to join. A worker reads it after it has left its world."""


class PullResult:
    """Request for the next result of a task."""


@dataclass
class SaveState:
    """Request to save the state of the last stage to a file, because it could not be pulled.

    The worker replies with :class:`TaskDone` or :class:`TaskFailed`.
    """

    path: str


class Shutdown:
    """Request to exit. Also the reply to :class:`PullResult` if no results remain."""


@dataclass
class TaskDone:
    """Reply of a worker that has run a task."""

    rng: RngState


class _Raised:
    """Pickles an exception whose ``__init__`` may take other arguments than it passes to ``Exception``."""

    def __init__(self, exception: BaseException) -> None:
        self._exception = exception

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, self._exception.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _rebuilt(make: Any, arguments: tuple[Any, ...], state: Any = None) -> Any:
    try:
        exception = make(*arguments)
    except TypeError:
        exception = make.__new__(make, *arguments)
    if state is not None:
        exception.__setstate__(state)
    return exception


@dataclass
class TaskFailed:
    """Reply of a worker in which a task has failed.

    Attributes:
        pickled: The exception; None if it cannot be pickled.
        summary: Class of the exception, and the first line of its message.
        traceback: Traceback of the exception, as text.
        time: Time of the failure, on the monotonic clock that the processes of a host share, in seconds.
        has_results: Whether the worker has results to pull.
        is_secondary: Whether the failure of another rank is the cause.
        first_failure: First failure that the worker's failure monitor knows of, or None.
    """

    pickled: Pickled | None
    summary: str
    traceback: str
    time: float
    has_results: bool
    is_secondary: bool
    first_failure: FirstFailure | None = None

    @classmethod
    def of(cls, exception: BaseException, has_results: bool = False) -> "TaskFailed":
        """Returns the reply for an exception."""
        headline, traceback = texts_of_exception(exception)
        pickled = None
        with suppress(Exception):
            pickled = dump(_Raised(exception), is_return=True)
        lines = headline.partition(f"{type(exception).__qualname__}: ")[2].strip().splitlines()
        summary = ": ".join([type(exception).__qualname__, *lines[:1]])
        is_secondary = isinstance(exception, RankFailedError)
        return cls(pickled, summary, traceback, time.monotonic(), has_results, is_secondary, known_failure())

    @property
    def exception(self) -> BaseException | None:
        """The exception, or None if this process cannot rebuild it."""
        with suppress(Exception):
            loaded = None if self.pickled is None else self.pickled.load()
            return loaded if isinstance(loaded, BaseException) else None
        return None
