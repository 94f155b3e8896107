"""Membership under torchrun: when a rank is lost, torchrun restarts the processes of all ranks."""

from collections.abc import Callable

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_strategies_ext.elastic.membership import SIGTERM_EXIT_CODE, Member


class NoChangeListener:
    """A listener that detects no change: torchrun restarts all ranks instead."""

    has_changed = False

    def close(self) -> None:
        """A no-op."""


class TorchrunMembership:
    """A :class:`.membership.Membership` of a process that is in one world only.

    Args:
        members: All ranks, each with the newest commit of its host.
    """

    waiting_reason = "torchrun restarts all ranks."
    no_rank_reason = "torchrun restarts all ranks"
    sigterm_consequence = None

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.has_joined = True

    def next_rank(self, on_wait: Callable[[float], None]) -> int | None:
        """Makes this process exit, after all ranks have left the world: the next world has other processes.

        Raises:
            SIGTERMException: Always; its exit code makes torchrun restart the ranks.
        """
        raise SIGTERMException(SIGTERM_EXIT_CODE)

    def rendezvous(self, member: Member, on_wait: Callable[[float], None]) -> bool:
        """Not called, because :meth:`next_rank` raises."""
        raise NotImplementedError

    def leave(self, *, is_coordinated: bool) -> None:
        """A no-op: the exit of the process closes its process group."""

    def is_peer_loss(self, error: BaseException) -> bool:
        """Returns False: torchrun terminates this rank after another rank is lost."""
        return False

    def listen(self) -> NoChangeListener:
        """Returns a listener that detects nothing."""
        return NoChangeListener()
