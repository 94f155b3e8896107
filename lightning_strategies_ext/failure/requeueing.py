"""Requeue agreement: when SLURM signals any rank that the time of the job ends, all ranks save before the same step.

Lightning saves in the signal handler, at the current position of each rank, and the ranks synchronize in a barrier. A
rank that is one step ahead waits there for ranks that wait for it in the all-reduce of the step. Here the signal is a
further reason for a stop agreement (:mod:`.stop_agreement`).
"""

from collections.abc import Callable


class RequeueAgreement:
    """One rank's part in the agreement, for one stage.

    Args:
        carry_out: Callable that saves a checkpoint and requeues the job; all ranks call it together.
        is_requested: Whether this rank received the signal before the stage.

    Attributes:
        is_requested: Whether this rank has received the signal and the other ranks may not know it.
        is_agreed: Whether all ranks know of the signal.
    """

    def __init__(self, carry_out: Callable[[], None], *, is_requested: bool = False) -> None:
        self._carry_out = carry_out
        self.is_requested = is_requested
        self.is_agreed = False

    def agree(self, decide_any: Callable[[bool], bool]) -> None:
        """Determines whether any rank has received the signal. Collective: all ranks call it.

        Args:
            decide_any: Collective that returns whether the argument is True on any rank.
        """
        is_requested, self.is_requested = self.is_requested, False  # a signal may arrive while the ranks decide
        self.is_agreed |= decide_any(is_requested)

    def requeue(self) -> None:
        """Saves a checkpoint and requeues the job. Collective: all ranks call it."""
        self._carry_out()
        self.is_agreed = self.is_requested = False
