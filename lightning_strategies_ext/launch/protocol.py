"""The messages between the main process and a worker.

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
    """Where a worker sits among those of all hosts; on one host, its rank says all.

    Attributes:
        rank: Among all.
        world_size: Number of all.
        local_rank: Among those of its host.
        local_world_size: Number of those.
        host_rank: Of its host among hosts.
        num_hosts: Number of hosts.
        address: Where all meet: that of the first worker's host.
        port: The same.
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
    """The first message to a worker: what makes it like the main process.

    Attributes:
        rank: Among the pool's workers.
        preparation: As ``multiprocessing.spawn.get_preparation_data`` gives it; None in a forked worker.
        rank_info: Of a worker that may be on another host than others.
    """

    rank: int
    preparation: dict[str, Any] | None
    rank_info: WorkerRankInfo | None = None


@dataclass
class RunTask:
    """Tells a worker to run a job.

    Attributes:
        is_continuation: Whether the job goes on where an earlier one ended.
        is_inherited: Whether the job is the one that the worker was forked with; otherwise the next message holds it.
        is_joining: Whether the others are in the middle of the job.
    """

    settings: ProcessSettings
    is_continuation: bool
    is_inherited: bool = False
    is_joining: bool = False


class Ping:
    """Asks a worker whether it is there. The worker answers with the same."""


@dataclass
class ReadyToJoin:
    """Says that a worker has left the world that it was in, if it was in one, and waits for a :class:`RankAssignment`.

    Attributes:
        why: What has befallen it, if not all have agreed to leave.
    """

    reason: str | None = None


@dataclass
class RankAssignment:
    """Gives a worker its place in the next world; it answers :class:`JoinedWorld`.

    Attributes:
        rank: None if there is no use for the worker any more.
        size: Number of ranks.
        number: Of the world, also among those of other jobs.
        store: Where the key-value store is that all worlds share: address and port, or the name of a
            :class:`.HostStore` where all workers are on one host.
    """

    rank: int | None
    size: int = 0
    world_number: int = 0
    store: tuple[str, int] | str = ""


@dataclass
class JoinedWorld:
    """Says that a worker has its place.

    Attributes:
        member: What the others should know of it.
    """

    member: Any


@dataclass
class WorldMembers:
    """Tells a worker who is in its world, in the order of ranks; None if one of them has died, and there is none."""

    members: list[Any] | None


class JoinPending:
    """Tells a worker that another waits to join its world. It is read when the world has been left."""


class PullResult:
    """Asks a worker for the next of its job's results."""


@dataclass
class SaveState:
    """Asks a worker to write the state of its stage to a file, since it could not be pulled.

    The worker answers with a :class:`TaskDone`, or a :class:`TaskFailed`.
    """

    path: str


class Shutdown:
    """Tells a worker to end. Also the answer to a :class:`PullResult` when there are no more results."""


@dataclass
class TaskDone:
    """A worker's answer to a job: it has run."""

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
    """A worker's answer to a job: it has failed.

    Attributes:
        pickled: The exception, if it can be pickled; otherwise None.
        summary: Its class, and the first line of its message.
        trace: Its trace, as text.
        time: When, on the clock that all processes of a host share.
        has_results: Whether there are results to pull.
        is_secondary: Whether another rank's failure is why.
        first: What failed first, as far as the worker's watch knows.
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
        """Describes an exception that was caught."""
        headline, trace = texts_of_exception(exception)
        pickled = None
        with suppress(Exception):
            pickled = dump(_Raised(exception), is_return=True)
        lines = headline.partition(f"{type(exception).__qualname__}: ")[2].strip().splitlines()
        summary = ": ".join([type(exception).__qualname__, *lines[:1]])
        is_secondary = isinstance(exception, RankFailedError)
        return cls(pickled, summary, trace, time.monotonic(), has_results, is_secondary, known_failure())

    @property
    def exception(self) -> BaseException | None:
        """The exception, or None if it cannot be rebuilt here."""
        with suppress(Exception):
            loaded = None if self.pickled is None else self.pickled.load()
            return loaded if isinstance(loaded, BaseException) else None
        return None
