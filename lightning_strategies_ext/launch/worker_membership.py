"""A worker of an elastic ``fit`` among the others, which the main process numbers: see :mod:`.elastic.membership`."""

import select
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any, TypeVar

from lightning_strategies_ext.elastic.membership import Member, MembershipServiceError
from lightning_strategies_ext.launch.protocol import JoinedWorld, JoinPending, RankAssignment, ReadyToJoin, WorldMembers
from lightning_strategies_ext.launch.transport.channel import TaskChannel

T = TypeVar("T")

_POLL_S = 0.1


class JoinRequestListener:
    """Hears that a worker waits to join: there is a message, which is read when the world has been left."""

    def __init__(self, channel: TaskChannel) -> None:
        self._poll = select.poll()
        self._poll.register(channel.socket, select.POLLIN)

    @property
    def has_changed(self) -> bool:
        """Whether one does."""
        return bool(self._poll.poll(0))

    @has_changed.setter
    def has_changed(self, has_changed: bool) -> None:
        pass  # the next that comes is another message

    def close(self) -> None:
        """Hears no more."""


class WorkerMembership:
    """See :class:`.elastic.membership.Membership`.

    Args:
        channel: To the main process.
        is_joining: Whether the others are in the middle of a world.
        join: Called with this rank's place, and who the ranks are, when all are there; lets it talk to the others.
        leave: Called with whether all leave together; ends that.
        is_peer_loss: See there.

    Attributes:
        members: See there.
        has_joined: See there.
    """

    waiting_reason = (
        "The main process starts a worker in the place of one that died, and with fewer than `min_workers` the others"
        " wait for it."
    )
    no_rank_reason = "another has failed, or the stage has ended"
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
        self._leave_reason: str | None = None

    @property
    def rank(self) -> int:
        """Of this worker, in its world."""
        assert self._assignment.rank is not None
        return self._assignment.rank

    def is_member_of(self, world: int) -> bool:
        """Whether this worker has a place in a world, by its number; from any thread."""
        return self._assignment.rank is not None and self._assignment.world_number == world

    def next_rank(self, on_wait: Callable[[float], None]) -> int | None:
        """Asks for a place; None if the main process has none any more."""
        self._channel.send(ReadyToJoin(self._leave_reason))
        self._assignment = self._receive(RankAssignment, on_wait)
        return self._assignment.rank

    def rendezvous(self, member: Member, on_wait: Callable[[float], None]) -> bool:
        """Waits until all ranks are there, then joins their process group."""
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

    def leave(self, *, agreed: bool) -> None:
        """Ends the connections to the others."""
        self._leave(agreed)

    def is_peer_loss(self, error: BaseException) -> bool:
        """Whether an exception says that another rank is gone; then the main process will be told of it."""
        if not self._is_peer_loss(error):
            return False
        self._leave_reason = f"{type(error).__name__}: {error}"
        return True

    def listen(self) -> JoinRequestListener:
        """Begins to hear of workers that wait to join."""
        return JoinRequestListener(self._channel)

    def _receive(self, kind: type[T], on_wait: Callable[[float], None]) -> T:
        started = time.monotonic()
        while True:
            if wait([self._channel.socket], _POLL_S):
                message: Any = self._received()
                if isinstance(message, kind):
                    return message
                assert isinstance(message, JoinPending), message
            on_wait(time.monotonic() - started)

    def _received(self) -> Any:
        try:
            return self._channel.receive()
        except (EOFError, OSError) as error:
            raise MembershipServiceError("The main process does not answer") from error
