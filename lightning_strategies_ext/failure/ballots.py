"""Ballots: what ranks say of when they stop and of who has left, and what follows from what all say.

Nothing here talks to anybody or looks at a clock.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: A point in a run, ordered as the run proceeds: (training steps started, evaluation steps started since).
Step = tuple[int, int]
#: Which agreement: the stage, and how many there were before in it.
Number = tuple[int, int]
#: How many of those that have left are named.
_MOST_NAMED = 8


@dataclass(frozen=True)
class Ballot:
    """A rank's part in an agreement on a SIGTERM.

    Attributes:
        number: Of the agreement.
        is_requested: Whether this rank was asked to stop.
        step: The last that it has begun; said once it begins no other before it is told which is the last of all.
        is_over: Whether it takes part no more.
    """

    number: Number
    is_requested: bool = False
    step: Step | None = None
    is_over: bool = False

    @classmethod
    def load(cls, values: dict[str, Any]) -> "Ballot":
        """Makes one of what :func:`dataclasses.asdict` and JSON give."""
        return cls(**{**values, "number": _pair(values["number"]), "step": values["step"] and _pair(values["step"])})


@dataclass(frozen=True)
class Decision:
    """What the first rank says once any has been asked to stop.

    Attributes:
        number: Of the agreement.
        last_step: Before whose next one all stop; None until all have said where they are.
    """

    number: Number
    last_step: Step | None = None

    @classmethod
    def load(cls, values: dict[str, Any]) -> "Decision":
        """Makes one of what :func:`dataclasses.asdict` and JSON give."""
        return cls(_pair(values["number"]), values["last_step"] and _pair(values["last_step"]))


@dataclass(frozen=True)
class Departed:
    """Says of a rank that it takes part in no more collectives of a stage.

    Attributes:
        stage: Counts those that it has begun.
        num_begun: How many collectives it had begun by then.
        has_failed: Whether it failed in it.
    """

    stage: int
    num_begun: int = 0
    has_failed: bool = False


@dataclass(frozen=True)
class Departures:
    """Says of all ranks which have left a stage.

    Attributes:
        stage: See :class:`Departed`.
        ranks: They, or the first of them where they are many.
        num_begun: The fewest collectives that any of them had begun by then.
    """

    stage: int
    ranks: tuple[int, ...]
    num_begun: int

    @classmethod
    def load(cls, values: dict[str, Any]) -> "Departures":
        """Makes one of what :func:`dataclasses.asdict` and JSON give."""
        return cls(**{**values, "ranks": tuple(values["ranks"])})


def decide(ballots: Mapping[int, Ballot | None], before: Decision | None) -> Decision | None:
    """What the ranks have agreed on, in the first agreement that is not over for all.

    Args:
        ballots: Of all ranks.
        before: What was said before: it stands, since some may have acted upon it.

    Returns:
        It; None if nobody was asked to stop.
    """
    begun = [ballot for ballot in ballots.values() if ballot is not None]
    number = min((ballot.number for ballot in begun if not ballot.is_over), default=None)
    if before is not None and before.number == number and before.last_step is not None:
        return before
    here = [ballot for ballot in begun if ballot.number == number]
    if number is None or not any(ballot.is_requested for ballot in here):
        return None
    are_all_here = len(begun) == len(ballots) and all(ballot.number >= number for ballot in begun)
    steps = [ballot.step for ballot in here if ballot.step is not None]
    return Decision(number, max(steps) if are_all_here and len(steps) == len(here) else None)


def add_departures(
    known: Iterable[Departures | None], departed: Mapping[int, Departed | None], stage: int
) -> Departures | None:
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
            Departures(stage, (rank,), one.num_begun)
            for rank, one in departed.items()
            if one is not None and one.stage == stage and not one.has_failed
        ),
    ]
    if not of_stage:
        return None
    ranks = sorted({rank for one in of_stage for rank in one.ranks})
    return Departures(stage, tuple(ranks[:_MOST_NAMED]), min(one.num_begun for one in of_stage))


def _pair(values: Any) -> tuple[int, int]:
    first, second = values
    return first, second
