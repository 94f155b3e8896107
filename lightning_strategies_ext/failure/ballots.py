"""Ballots: what ranks say of when they stop and of who has left, and what follows from what all say.

Nothing here talks to anybody or looks at a clock.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: A point in a run, ordered as the run proceeds: (training steps started, evaluation steps started since).
StepIndex = tuple[int, int]
#: Which agreement: the stage, and how many there were before in it.
AgreementId = tuple[int, int]
#: How many of those that have left are named.
_MAX_RANKS_LISTED = 8


@dataclass(frozen=True)
class StopVote:
    """A rank's part in an agreement on a SIGTERM.

    Attributes:
        agreement_id: Of the agreement.
        is_requested: Whether this rank was asked to stop.
        last_started_step: The last that it has begun; said once it begins no other before it is told which is the
            last of all.
        is_closed: Whether it takes part no more.
    """

    agreement_id: AgreementId
    is_requested: bool = False
    last_started_step: StepIndex | None = None
    is_closed: bool = False

    @classmethod
    def load(cls, values: dict[str, Any]) -> "StopVote":
        """Makes one of what :func:`dataclasses.asdict` and JSON give."""
        return cls(
            **{
                **values,
                "agreement_id": _pair(values["agreement_id"]),
                "last_started_step": values["last_started_step"] and _pair(values["last_started_step"]),
            }
        )


@dataclass(frozen=True)
class StopDecision:
    """What the first rank says once any has been asked to stop.

    Attributes:
        agreement_id: Of the agreement.
        last_step: Before whose next one all stop; None until all have said where they are.
    """

    agreement_id: AgreementId
    last_step: StepIndex | None = None

    @classmethod
    def load(cls, values: dict[str, Any]) -> "StopDecision":
        """Makes one of what :func:`dataclasses.asdict` and JSON give."""
        return cls(_pair(values["agreement_id"]), values["last_step"] and _pair(values["last_step"]))


@dataclass(frozen=True)
class StageExit:
    """Says of a rank that it takes part in no more collectives of a stage.

    Attributes:
        stage: Counts those that it has begun.
        num_started: How many collectives it had begun by then.
        has_failed: Whether it failed in it.
    """

    stage: int
    num_started: int = 0
    has_failed: bool = False


@dataclass(frozen=True)
class StageExits:
    """Says of all ranks which have left a stage.

    Attributes:
        stage: See :class:`Departed`.
        ranks: They, or the first of them where they are many.
        num_started: The fewest collectives that any of them had begun by then.
    """

    stage: int
    ranks: tuple[int, ...]
    num_started: int

    @classmethod
    def load(cls, values: dict[str, Any]) -> "StageExits":
        """Makes one of what :func:`dataclasses.asdict` and JSON give."""
        return cls(**{**values, "ranks": tuple(values["ranks"])})


def decide_last_step(ballots: Mapping[int, StopVote | None], before: StopDecision | None) -> StopDecision | None:
    """What the ranks have agreed on, in the first agreement that is not over for all.

    Args:
        ballots: Of all ranks.
        before: What was said before: it stands, since some may have acted upon it.

    Returns:
        It; None if nobody was asked to stop.
    """
    begun = [ballot for ballot in ballots.values() if ballot is not None]
    number = min((ballot.agreement_id for ballot in begun if not ballot.is_closed), default=None)
    if before is not None and before.agreement_id == number and before.last_step is not None:
        return before
    here = [ballot for ballot in begun if ballot.agreement_id == number]
    if number is None or not any(ballot.is_requested for ballot in here):
        return None
    are_all_here = len(begun) == len(ballots) and all(ballot.agreement_id >= number for ballot in begun)
    steps = [ballot.last_started_step for ballot in here if ballot.last_started_step is not None]
    return StopDecision(number, max(steps) if are_all_here and len(steps) == len(here) else None)


def merge_stage_exits(
    known: Iterable[StageExits | None], departed: Mapping[int, StageExit | None], stage: int
) -> StageExits | None:
    """Who has left a stage in good order.

    Args:
        known: What ranks know of that.
        departed: What ranks say of themselves.
        stage: The stage.

    Returns:
        They; None if nobody has.
    """
    of_stage = [
        *(one for one in known if one is not None and one.stage == stage),
        *(
            StageExits(stage, (rank,), one.num_started)
            for rank, one in departed.items()
            if one is not None and one.stage == stage and not one.has_failed
        ),
    ]
    if not of_stage:
        return None
    ranks = sorted({rank for one in of_stage for rank in one.ranks})
    return StageExits(stage, tuple(ranks[:_MAX_RANKS_LISTED]), min(one.num_started for one in of_stage))


def _pair(values: Any) -> tuple[int, int]:
    first, second = values
    return first, second
