"""Contracts between launchers and strategies, for the Trainer and for Fabric, and what a strategy uses in a worker.

In a worker, a strategy receives a :class:`WorkerContext` and, in elastic training, a :class:`WorkerMembership`.
"""

import select
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, Protocol, TypeVar

from lightning.fabric.plugins import CheckpointIO
from torch import Tensor
from typing_extensions import override

from lightning_strategies_ext.elastic.membership import Member, Membership, MembershipListener, MembershipServiceError
from lightning_strategies_ext.launch.processes.elastic_pool import RestartPolicy
from lightning_strategies_ext.launch.protocol import (
    JoinedWorld,
    JoinPending,
    RankAssignment,
    ReadyToJoin,
    WorkerRankInfo,
    WorldMembers,
)
from lightning_strategies_ext.launch.transport.channel import TaskChannel
from lightning_strategies_ext.launch.transport.memory_files import ReceivedBuffers

T = TypeVar("T")

_POLL_S = 0.1


@contextmanager
def announcing_failures(strategy: Any) -> Generator[None, None, None]:
    """Announces an exception of the context to the other ranks, and raises the exception that the user should see."""
    try:
        yield
    except BaseException as exception:
        # Before the callbacks' `on_exception`, which may take long, for example to save a checkpoint with a barrier.
        explained = strategy.explain_exception(exception)
        strategy.announce_failure(explained)
        if explained is exception:
            raise
        raise explained from exception


class StrategyWithRanks(Protocol):
    """A strategy that has ranks."""

    cluster_environment: Any  # a ClusterEnvironment; None until the Trainer or Fabric has chosen one

    @property
    def num_processes(self) -> int:
        """Number of ranks on this host."""

    @property
    def num_nodes(self) -> int:
        """Number of hosts."""


class StrategyWithWorkers(StrategyWithRanks, Protocol):
    """A strategy whose ranks are workers."""

    @property
    def keep_workers(self) -> bool:
        """Whether workers stay for the next stage."""

    @property
    def process_group_settings(self) -> tuple[Any, ...]:
        """Settings that determine the process group of the ranks; strategies with equal settings can share workers."""


class LaunchableStrategy(StrategyWithRanks, Protocol):
    """A strategy of the Trainer."""

    optimizers: list[Any]
    lr_scheduler_configs: list[Any]
    checkpoint_io: CheckpointIO

    @property
    def has_joined(self) -> bool:
        """Whether this process has connected to the other ranks."""

    def check_before_launch(self, trainer: Any) -> None:
        """Rejects a stage that cannot work, before processes start."""

    def announce_failure(self, exception: BaseException) -> None:
        """Notifies the other ranks that this rank has failed."""

    def explain_exception(self, exception: BaseException) -> BaseException:
        """Returns the exception that the user should see."""


class StageStrategy(LaunchableStrategy, StrategyWithWorkers, Protocol):
    """A strategy of the Trainer whose stages run in workers."""

    @property
    def restart_policy(self) -> RestartPolicy | None:
        """Limits for exits of workers during ``fit``; None if ``fit`` fails when any worker exits."""

    def wrap_stage(self, trainer: Any) -> AbstractContextManager[None]:
        """Returns the context in which the main process runs a stage."""

    def post_dispatch(self, trainer: Any) -> None:
        """Called in the main process after a stage, when its results have been applied."""


# --- in a worker ---


@dataclass
class WorkerContext:
    """Context of a strategy in a worker.

    Attributes:
        is_continuation: Whether this stage continues where an earlier stage of the same Trainer ended.
        received: Memory files of the received message, to find changed tensors.
        channel: Channel to the main process, for an elastic stage.
        is_joining: Whether the other ranks are in the middle of the stage.
        rank_info: Rank info of a worker that may be on another host than other workers.
    """

    is_continuation: bool
    received: ReceivedBuffers = field(default_factory=ReceivedBuffers)
    channel: TaskChannel | None = None
    is_joining: bool = False
    rank_info: WorkerRankInfo | None = None

    def are_unchanged(self, tensors: Iterable[Tensor]) -> bool:
        """Whether tensors have the values that the main process has sent to all workers; False if that is unknown."""
        return all(self.received.is_unchanged(tensor) for tensor in tensors)


class InWorkerStrategy(LaunchableStrategy, Protocol):
    """A strategy of the Trainer in a worker."""

    def enter_worker(self, context: WorkerContext) -> None:
        """Receives the context of the worker. Called before all other methods."""

    def setup_distributed(self) -> None:
        """Joins the process group."""

    def end_stage(self) -> None:
        """Finishes a stage, after all of its hooks."""

    def request_interrupt(self) -> None:
        """Requests that all ranks stop before the same step, as after Ctrl-C."""


class JoinRequestListener(MembershipListener):
    """Detects that a worker waits to join: its message has arrived. It is read after this rank has left its world."""

    def __init__(self, channel: TaskChannel) -> None:
        self._poll = select.poll()
        self._poll.register(channel.socket, select.POLLIN)

    @property
    @override
    def has_changed(self) -> bool:
        return bool(self._poll.poll(0))

    @has_changed.setter
    def has_changed(self, has_changed: bool) -> None:
        pass  # the next request arrives as another message

    @override
    def close(self) -> None:
        """A no-op: the listener owns no resources."""


class WorkerMembership(Membership):
    """Membership of a worker in an elastic ``fit``: the main process assigns the ranks.

    Args:
        channel: Channel to the main process.
        is_joining: Whether the other workers are in a world already.
        join: Called with this rank's assignment and the members, when all are ready; connects this rank to the others.
        leave: Called with whether all ranks leave together; closes the connections to the other ranks.
        is_peer_loss: Returns whether an exception is caused by the exit of another rank.
    """

    waiting_reason = (
        "The main process restarts a worker that has exited, and fewer than `min_workers` workers wait for it."
    )
    no_rank_reason = "another rank has failed, or the stage has finished"
    sigterm_consequence = None

    def __init__(
        self,
        channel: TaskChannel,
        is_joining: bool,
        join: Callable[[RankAssignment, Sequence[Member]], None],
        leave: Callable[[bool], None],
        is_peer_loss: Callable[[BaseException], bool],
    ) -> None:
        self._channel = channel
        self._join = join
        self._leave = leave
        self._is_peer_loss = is_peer_loss
        self.members: list[Member] = []
        self.has_joined = not is_joining
        self._assignment = RankAssignment(None)
        self._leave_reason: str | None = None  # for the main process, if a peer was lost

    @property
    def rank(self) -> int:
        """Rank of this worker in its world."""
        assert self._assignment.rank is not None
        return self._assignment.rank

    def is_member_of(self, world: int) -> bool:
        """Whether this worker has a rank in the world with the given number. Any thread may call this."""
        return self._assignment.rank is not None and self._assignment.world_number == world

    @override
    def next_rank(self, on_wait: Callable[[float], None]) -> int | None:
        self._channel.send(ReadyToJoin(self._leave_reason))
        self._assignment = self._receive(RankAssignment, on_wait)
        return self._assignment.rank

    @override
    def rendezvous(self, member: Member, on_wait: Callable[[float], None]) -> bool:
        self._channel.send(JoinedWorld(member))
        members = self._receive(WorldMembers, on_wait).members
        if members is None:
            return False
        self._leave_reason = None
        try:
            self._join(self._assignment, members)
        except Exception as error:
            if not self.is_peer_loss(error):
                raise
            self._leave(False)
            return False
        self.members = members
        return True

    @override
    def leave(self, *, is_coordinated: bool) -> None:
        self._leave(is_coordinated)

    @override
    def is_peer_loss(self, error: BaseException) -> bool:
        if not self._is_peer_loss(error):
            return False
        self._leave_reason = f"{type(error).__name__}: {error}"
        return True

    @override
    def listen(self) -> JoinRequestListener:
        return JoinRequestListener(self._channel)

    def _receive(self, kind: type[T], on_wait: Callable[[float], None]) -> T:
        started = time.monotonic()
        while True:
            if wait([self._channel.socket], _POLL_S):
                try:
                    message = self._channel.receive()
                except (EOFError, OSError) as error:
                    raise MembershipServiceError("The main process has closed the connection") from error
                if isinstance(message, kind):
                    return message
                assert isinstance(message, JoinPending), message
            on_wait(time.monotonic() - started)
