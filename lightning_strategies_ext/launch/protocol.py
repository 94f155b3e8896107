"""The messages between the main process and a worker, in the order in which they travel.

::

    main process               worker
    WorkerSetup         →                                once, after the worker has started
                        ←      TaskFailed                if the worker cannot be set up
    Ping                →
                        ←      Pong                      before a worker is used again
    RunTask, the task   →                                a forked worker may inherit the task instead
                        ←      TaskDone, TaskFailed
    PullResult          →                                to a worker that has results, once for each result
                        ←      a result, EndOfResults, TaskFailed
    SaveState           →                                if the results cannot be pulled
                        ←      StateSaved, TaskFailed
    Shutdown            →                                once, at any time

The worker of rank 0 sends what a stage has changed: some :class:`TensorChunk` and one :class:`StageDiff`. After
``predict``, each worker then sends one :class:`PredictionPlan` and some :class:`PredictionChunk`. The result of a
function is one :class:`FunctionResult`, of the worker of rank 0.

A *world* is the fixed set of ranks that are connected with each other. While an elastic task runs, its workers leave
one world and join the next (:mod:`.elastic_pool`)::

                        ←      ReadyToJoin               when the worker is in no world
    RankAssignment      →                                when all workers of the next world are ready
                        ←      JoinedWorld
    WorldMembers        →                                when all have joined, or one has exited
    JoinPending         →                                when another worker waits to join

Messages travel over a channel between two processes of one host (:mod:`.transport.channel`). On Ray, they are calls of
an actor's methods, and messages that cannot wait until a method returns travel over a link (:mod:`.ray.worker_link`):
the messages of an elastic task, :class:`SendSignal`, :class:`PeerLost`, and :class:`WorkerOutput`. A worker on Ray
reports its :class:`WorkerHostInfo` before :class:`WorkerSetup`. A closed channel or link means that the other process
has exited.

A *shared object* is an object that the main process and the worker both have, such as a layer of the module. Messages
refer to it by its number in :class:`.SharedObjects`.
"""

import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_strategies_ext.elastic.membership import Member
from lightning_strategies_ext.exceptions import RankFailedError
from lightning_strategies_ext.failure.failure_monitor import known_failure
from lightning_strategies_ext.failure.failure_report import texts_of_exception
from lightning_strategies_ext.failure.rank_status import Failure as FirstFailure
from lightning_strategies_ext.launch.processes.process_settings import ProcessSettings, RngState
from lightning_strategies_ext.launch.transport.pickling import Pickled, dump
from lightning_strategies_ext.launch.transport.reducers import RaisedException

# --- from the main process to a worker ---


@dataclass(frozen=True)
class WorkerRankInfo:
    """Rank info of a worker, as in torchrun's environment variables; workers of one host need only their rank."""

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
class Ping:
    """Request to reply with :class:`Pong`."""


@dataclass
class RunTask:
    """Request to run a task.

    Attributes:
        settings: State of the main process to apply first.
        is_continuation: Whether this is not the first task of the worker group, so that the process group exists.
        is_inherited: Whether the worker has inherited the task in a fork; otherwise the next message contains it.
        is_joining: Whether the other workers are running the task already.
    """

    settings: ProcessSettings
    is_continuation: bool
    is_inherited: bool = False
    is_joining: bool = False


@dataclass
class PullResult:
    """Request for the next result of a task."""


@dataclass
class SaveState:
    """Request to save the state of the last stage to a file, because it could not be pulled."""

    path: str


@dataclass
class Shutdown:
    """Request to exit."""


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
class WorldMembers:
    """Members of a worker's world, in the order of ranks; None if no world is formed, because a member has exited."""

    members: list[Member] | None


@dataclass
class JoinPending:
    """Notification that another worker waits to join. A worker reads it after it has left its world."""


@dataclass
class SendSignal:
    """Request to send a signal to the worker's own process, on Ray."""

    signum: int


@dataclass
class PeerLost:
    """Notification that another worker of a world has exited, whose host may be lost, on Ray."""

    world_number: int


# --- from a worker to the main process ---


@dataclass(frozen=True)
class WorkerHostInfo:
    """Process and host of a worker on Ray, which only the worker knows.

    Attributes:
        host: Ray's id of the host.
        address: Address of the host that other hosts can reach.
        interface: Network interface with that address, or None if it is unknown.
        port: Port that the worker has reserved.
        versions: Versions of the packages that must be equal in all processes.
    """

    pid: int
    host: str
    address: str
    interface: str | None
    port: int
    versions: dict[str, str]


@dataclass
class Pong:
    """Reply to :class:`Ping`."""


@dataclass
class TaskDone:
    """Reply of a worker that has run a task."""

    rng: RngState


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
    def from_exception(cls, exception: BaseException, has_results: bool = False) -> "TaskFailed":
        """Returns the reply for an exception."""
        headline, traceback = texts_of_exception(exception)
        pickled = None
        with suppress(Exception):
            pickled = dump(RaisedException(exception), is_return=True)
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


@dataclass
class StateSaved:
    """Reply to :class:`SaveState`."""


@dataclass
class TensorChunk:
    """A result: tensors of the module, or slices of large ones.

    Attributes:
        tensors: Tensors by name, shape of the whole tensor, and index of the slice's first element in the flattened
            tensor, which is None for a whole tensor.
    """

    tensors: dict[tuple[str, torch.Size, int | None], Tensor]


@dataclass
class EncodedValue:
    """A value for the main process, and the new states of the shared objects that it contains.

    Attributes:
        value: The value. It refers to shared objects by their numbers.
        states: Lists of pairs (number, state), one pair for each shared object that no earlier value has. The first
            list has the objects in ``value``, and each further list has those in the states of the list before.
    """

    value: Pickled
    states: list[Pickled]


@dataclass
class StageDiff:
    """A result: the changes of a stage, without the tensors of its module; the last result before any predictions.

    Attributes:
        classes: (number of a shared object, its new class).
        attributes: (number of a shared object, attribute, value); the value is None if the attribute was removed.
        training: Changes of the module's tree; after ``fit`` also optimizers, schedulers, and the state of the gradient
            exchange. They are encoded together, because they refer to each other.
        modes: Attribute ``training`` of each submodule by name.
        trainable: ``requires_grad`` of each parameter by name.
        loaders: Positions of the training loaders that have a ``state_dict``.
        precision: State of the precision plugin.
        queue: Items that ``add_to_queue`` has put.
        value: Return value of the stage.
        lost: (number of a shared object, attribute, reason why it cannot be transferred).
        shares: (number of a shared object, attribute) of data that a callback has collected from this rank's samples.
    """

    classes: list[tuple[int, Pickled]]
    attributes: list[tuple[int, str, EncodedValue | None]]
    training: EncodedValue | None
    modes: dict[str, bool]
    trainable: dict[str, bool]
    loaders: EncodedValue | None
    precision: EncodedValue | None
    queue: list[EncodedValue] = field(default_factory=list)
    value: EncodedValue | None = None
    lost: list[tuple[int, str, str]] = field(default_factory=list)
    shares: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class PredictionPlan:
    """A result: the order of the predictions of a rank, which follow, for each DataLoader.

    Attributes:
        keys: Positions of each batch's samples in the dataset.
        batch_sizes: Sizes of full batches.
    """

    keys: list[list[list[int]]]
    batch_sizes: list[int]


@dataclass
class PredictionChunk:
    """A result: predictions of some batches."""

    outputs: list[Pickled]


@dataclass
class FunctionResult:
    """A result: the return value of a function."""

    value: Any


@dataclass
class EndOfResults:
    """Reply to :class:`PullResult` if no results remain."""


@dataclass
class ReadyToJoin:
    """Request for a :class:`RankAssignment`, with the reason if the worker left its world without an agreement."""

    reason: str | None = None


@dataclass
class JoinedWorld:
    """Reply to a :class:`RankAssignment`, with the description of the worker for the other ranks."""

    member: Member


@dataclass
class WorkerOutput:
    """Output that a worker on Ray has written to standard error or to standard output."""

    is_error: bool
    data: bytes


MessageToWorker = (
    WorkerSetup | Ping | RunTask | PullResult | SaveState | Shutdown | RankAssignment | WorldMembers | JoinPending
)
#: Messages to workers on Ray that travel over the link.
LinkMessageToWorker = RankAssignment | WorldMembers | JoinPending | SendSignal | PeerLost
LinkMessageToMain = ReadyToJoin | JoinedWorld | WorkerOutput
LinkMessage = LinkMessageToWorker | LinkMessageToMain
