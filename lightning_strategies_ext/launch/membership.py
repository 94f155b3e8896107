"""A worker of an elastic ``fit`` among the others, which the main process numbers: see :mod:`.elastic.membership`."""

import select
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any, TypeVar

from lightning_strategies_ext.elastic.membership import Member, MembershipLostError
from lightning_strategies_ext.launch.protocol import Arrived, Members, Notice, Place, Ready
from lightning_strategies_ext.launch.transport.channel import JobChannel

T = TypeVar("T")

_POLL_S = 0.1


class Notices:
    """Hears that a worker waits to join: there is a message, which is read when the world has been left."""

    def __init__(self, channel: JobChannel) -> None:
        self._poll = select.poll()
        self._poll.register(channel.socket, select.POLLIN)

    @property
    def have_come(self) -> bool:
        """Whether one does."""
        return bool(self._poll.poll(0))

    @have_come.setter
    def have_come(self, have_come: bool) -> None:
        pass  # the next that comes is another message

    def close(self) -> None:
        """Hears no more."""


class WorkerMembership:
    """See :class:`.elastic.membership.Membership`.

    Args:
        channel: To the main process.
        joins: Whether the others are in the middle of a world.
        join: Called with this rank's place, and who the ranks are, when all are there; lets it talk to the others.
        leave: Called with whether all leave together; ends that.
        is_loss: See there.

    Attributes:
        members: See there.
        is_entered: See there.
    """

    waiting_for = (
        "The main process starts a worker in the place of one that died, and with fewer than `min_workers` the others"
        " wait for it."
    )
    no_place = "another has failed, or the stage has ended"
    on_sigterm = None

    def __init__(
        self,
        channel: JobChannel,
        joins: bool,
        join: Callable[[Place, Sequence[Member]], None],
        leave: Callable[[bool], None],
        is_loss: Callable[[BaseException], bool],
    ) -> None:
        self._channel = channel
        self._join = join
        self._leave = leave
        self._is_loss = is_loss
        self.members: list[Member] = []
        self.is_entered = not joins
        self._place = Place(None)
        self._why: str | None = None

    @property
    def rank(self) -> int:
        """Of this worker, in its world."""
        assert self._place.rank is not None
        return self._place.rank

    def is_in(self, world: int) -> bool:
        """Whether this worker has a place in a world, by its number; from any thread."""
        return self._place.rank is not None and self._place.number == world

    def next_rank(self, while_waiting: Callable[[float], None]) -> int | None:
        """Asks for a place; None if the main process has none any more."""
        self._channel.send(Ready(self._why))
        self._place = self._receive(Place, while_waiting)
        return self._place.rank

    def rendezvous(self, member: Member, while_waiting: Callable[[float], None]) -> bool:
        """Waits until all ranks are there, then joins their process group."""
        self._channel.send(Arrived(member))
        members = self._receive(Members, while_waiting).members
        if members is None:
            return False
        self._why = None
        try:
            self._join(self._place, members)
        except Exception as error:
            if not self.is_loss(error):
                raise
            self._leave(False)
            return False
        self.members = members
        return True

    def leave(self, *, agreed: bool) -> None:
        """Ends the connections to the others."""
        self._leave(agreed)

    def is_loss(self, error: BaseException) -> bool:
        """Whether an exception says that another rank is gone; then the main process will be told of it."""
        if not self._is_loss(error):
            return False
        self._why = f"{type(error).__name__}: {error}"
        return True

    def notices(self) -> Notices:
        """Begins to hear of workers that wait to join."""
        return Notices(self._channel)

    def _receive(self, kind: type[T], while_waiting: Callable[[float], None]) -> T:
        started = time.monotonic()
        while True:
            if wait([self._channel.socket], _POLL_S):
                message: Any = self._received()
                if isinstance(message, kind):
                    return message
                assert isinstance(message, Notice), message
            while_waiting(time.monotonic() - started)

    def _received(self) -> Any:
        try:
            return self._channel.receive()
        except (EOFError, OSError) as error:
            raise MembershipLostError("The main process does not answer") from error
