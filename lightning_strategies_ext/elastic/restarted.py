"""Ranks all of which are ended and started anew when one is lost, as torchrun's agents do: who they are."""

from collections.abc import Callable

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_strategies_ext.elastic.membership import Member

_LEFT = 128 + 15


class RestartListener:
    """Nobody comes or goes: the agents end all ranks first."""

    has_changed = False

    def close(self) -> None:
        """Does nothing."""


class RestartedMembership:
    """See :class:`.membership.Membership`.

    Args:
        members: All ranks, each with the newest commit that it has found.

    Attributes:
        members: See there.
        has_joined: See there.
    """

    waiting_reason = "torchrun starts all ranks anew"
    no_rank_reason = "torchrun starts all ranks anew"
    sigterm_consequence = None

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.has_joined = True

    def next_rank(self, on_wait: Callable[[float], None]) -> int | None:
        """Ends this rank, when all have agreed to leave: the next world has other processes.

        Raises:
            SIGTERMException: Always, so that the exit code tells torchrun that this is not the end.
        """
        raise SIGTERMException(_LEFT)

    def rendezvous(self, member: Member, on_wait: Callable[[float], None]) -> bool:
        """Never comes to it."""
        raise NotImplementedError

    def leave(self, *, agreed: bool) -> None:
        """Does nothing: the process group ends with the process."""

    def is_peer_loss(self, error: BaseException) -> bool:
        """False: this rank ends with the one that is lost."""
        return False

    def listen(self) -> RestartListener:
        """There will be none."""
        return RestartListener()
