"""Membership of a worker in an elastic ``fit``: the main process assigns the ranks. See :mod:`.elastic.membership`."""

import select
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any, TypeVar

from typing_extensions import override

from lightning_strategies_ext.elastic.membership import Member, Membership, MembershipListener, MembershipServiceError
from lightning_strategies_ext.launch.protocol import JoinedWorld, JoinPending, RankAssignment, ReadyToJoin, WorldMembers
from lightning_strategies_ext.launch.transport.channel import TaskChannel

T = TypeVar("T")

_POLL_S = 0.1


class JoinRequestListener(MembershipListener):
    """Detects that a worker waits to join: a message has arrived, which is read after this rank has left its world."""

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
    """Membership of a worker.

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
    def leave(self, *, agreed: bool) -> None:
        self._leave(agreed)

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
                message: Any = self._receive_message()
                if isinstance(message, kind):
                    return message
                assert isinstance(message, JoinPending), message
            on_wait(time.monotonic() - started)

    def _receive_message(self) -> Any:
        try:
            return self._channel.receive()
        except (EOFError, OSError) as error:
            raise MembershipServiceError("The main process has closed the connection") from error
