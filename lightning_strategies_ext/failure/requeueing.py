"""Requeueing by SLURM: when any rank is told that the job's time is nearly over, all save, before the same step.

Lightning saves in the signal handler, wherever a rank is just then, and meets the others in a barrier: one that is a
step ahead waits there for those that wait for it in the step's all-reduce. Here the signal is one more reason for the
agreement that a SIGTERM has (:mod:`.stop_agreement`).
"""

from collections.abc import Callable


class RequeueAgreement:
    """One rank's part in it, for one stage.

    Args:
        requeue: Saves, and has SLURM queue the job again; called by all ranks together.
        is_requested: Whether this rank was told so before the stage began.

    Attributes:
        is_requested: Whether this rank was told, and the others may not know yet.
        is_agreed: Whether all ranks know.
    """

    def __init__(self, carry_out: Callable[[], None], *, is_requested: bool = False) -> None:
        self._carry_out = carry_out
        self.is_requested = is_requested
        self.is_agreed = False

    def agree(self, decide_any: Callable[[bool], bool]) -> None:
        """Lets all ranks know what any was told. Called by all ranks together.

        Args:
            decide_any: Whether any rank says yes; a collective.
        """
        is_requested, self.is_requested = self.is_requested, False  # a signal may come while the ranks decide
        self.is_agreed |= decide_any(is_requested)

    def requeue(self) -> None:
        """Does it. Called by all ranks together; it is for all that any was told by then."""
        self._carry_out()
        self.is_agreed = self.is_requested = False
