"""Ranks all of which are ended and started anew when one is lost, as torchrun's agents do: who they are."""

from collections.abc import Callable

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_strategies_ext.elastic.membership import Member

_LEFT = 128 + 15


class NoNotices:
    """Nobody comes or goes: the agents end all ranks first."""

    have_come = False

    def close(self) -> None:
        """Does nothing."""


class RestartedMembership:
    """See :class:`.membership.Membership`.

    Args:
        members: All ranks, each with the newest commit that it has found.

    Attributes:
        members: See there.
        is_entered: See there.
    """

    waiting_for = "torchrun starts all ranks anew"
    no_place = "torchrun starts all ranks anew"
    on_sigterm = None

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.is_entered = True

    def next_rank(self, while_waiting: Callable[[float], None]) -> int | None:
        """Ends this rank, when all have agreed to leave: the next world has other processes.

        Raises:
            SIGTERMException: Always, so that the exit code tells torchrun that this is not the end.
        """
        raise SIGTERMException(_LEFT)

    def rendezvous(self, member: Member, while_waiting: Callable[[float], None]) -> bool:
        """Never comes to it."""
        raise NotImplementedError

    def leave(self, *, agreed: bool) -> None:
        """Does nothing: the process group ends with the process."""

    def is_loss(self, error: BaseException) -> bool:
        """False: this rank ends with the one that is lost."""
        return False

    def notices(self) -> NoNotices:
        """There will be none."""
        return NoNotices()
