"""Membership of ranks that torchrun's agents all restart when one rank is lost."""

from collections.abc import Callable

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_strategies_ext.elastic.membership import Member

_SIGTERM_EXIT_CODE = 128 + 15


class RestartListener:
    """Never detects a change: the agents restart all ranks instead."""

    has_changed = False

    def close(self) -> None:
        """A no-op."""


class TorchrunMembership:
    """A :class:`.membership.Membership` for the life of this process, which is in one world.

    Args:
        members: All ranks, each with the newest commit that it has found.
    """

    waiting_reason = "torchrun restarts all ranks"
    no_rank_reason = "torchrun restarts all ranks"
    sigterm_consequence = None

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.has_joined = True

    def next_rank(self, on_wait: Callable[[float], None]) -> int | None:
        """Ends this rank, after all have agreed to leave: the next world has other processes.

        Raises:
            SIGTERMException: Always, so that the exit code makes torchrun restart the ranks.
        """
        raise SIGTERMException(_SIGTERM_EXIT_CODE)

    def rendezvous(self, member: Member, on_wait: Callable[[float], None]) -> bool:
        """Not called, because :meth:`next_rank` raises."""
        raise NotImplementedError

    def leave(self, *, is_coordinated: bool) -> None:
        """A no-op: the process group ends with the process."""

    def is_peer_loss(self, error: BaseException) -> bool:
        """False: torchrun ends this rank together with the lost one."""
        return False

    def listen(self) -> RestartListener:
        """Returns a listener that detects nothing."""
        return RestartListener()
