"""Agreement state: votes and decisions of stop agreements, and stage exits, as plain data with pure functions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: A point in a run, ordered as the run proceeds: (training steps started, evaluation steps started since).
StepIndex = tuple[int, int]
#: Identifier of an agreement: the stage, and the number of earlier agreements in the stage.
AgreementId = tuple[int, int]
#: Number of ranks that a message names, and that a list of stage exits has.
MAX_RANKS_LISTED = 8


@dataclass(frozen=True)
class StopVote:
    """A rank's vote in a stop agreement.

    Attributes:
        agreement_id: Identifier of the agreement.
        is_requested: Whether a stop was requested on this rank.
        last_started_step: Last step that the rank has started; set once the rank waits for the decision.
        is_closed: Whether the rank takes part in the agreement no more.
    """

    agreement_id: AgreementId
    is_requested: bool = False
    last_started_step: StepIndex | None = None
    is_closed: bool = False

    @classmethod
    def load(cls, values: dict[str, Any]) -> "StopVote":
        """Returns the vote that :func:`dataclasses.asdict` and JSON have encoded."""
        return cls(
            **{
                **values,
                "agreement_id": _pair(values["agreement_id"]),
                "last_started_step": values["last_started_step"] and _pair(values["last_started_step"]),
            }
        )


@dataclass(frozen=True)
class StopDecision:
    """Rank 0's decision in a stop agreement.

    Attributes:
        agreement_id: Identifier of the agreement.
        last_step: Step after which all ranks stop; None until all ranks have voted.
    """

    agreement_id: AgreementId
    last_step: StepIndex | None = None

    @classmethod
    def load(cls, values: dict[str, Any]) -> "StopDecision":
        """Returns the decision that :func:`dataclasses.asdict` and JSON have encoded."""
        return cls(_pair(values["agreement_id"]), values["last_step"] and _pair(values["last_step"]))


@dataclass(frozen=True)
class StageExit:
    """The exit of a rank from a stage, after which it takes part in no more collectives of the stage.

    Attributes:
        stage: Number of stages that the rank had begun.
        num_started: Number of collectives that the rank had started.
        has_failed: Whether the rank failed in the stage.
    """

    stage: int
    num_started: int = 0
    has_failed: bool = False


@dataclass(frozen=True)
class StageExits:
    """The exits of several ranks from a stage.

    Attributes:
        stage: Number of stages that the ranks had begun.
        ranks: The first of the ranks, at most eight.
        num_started: Smallest number of collectives that one of the ranks had started.
    """

    stage: int
    ranks: tuple[int, ...]
    num_started: int

    @classmethod
    def load(cls, values: dict[str, Any]) -> "StageExits":
        """Returns the stage exits that :func:`dataclasses.asdict` and JSON have encoded."""
        return cls(**{**values, "ranks": tuple(values["ranks"])})


def decide_last_step(votes: Mapping[int, StopVote | None], before: StopDecision | None) -> StopDecision | None:
    """Decides the first agreement that some rank takes part in.

    Args:
        votes: Votes by rank; None for a rank that has not voted.
        before: Previous decision. It stands, because some ranks may have acted on it.

    Returns:
        The decision, or None if no rank has requested a stop.
    """
    begun = [vote for vote in votes.values() if vote is not None]
    number = min((vote.agreement_id for vote in begun if not vote.is_closed), default=None)
    if before is not None and before.agreement_id == number and before.last_step is not None:
        return before
    here = [vote for vote in begun if vote.agreement_id == number]
    if number is None or not any(vote.is_requested for vote in here):
        return None
    are_all_here = len(begun) == len(votes) and all(vote.agreement_id >= number for vote in begun)
    steps = [vote.last_started_step for vote in here if vote.last_started_step is not None]
    return StopDecision(number, max(steps) if are_all_here and len(steps) == len(here) else None)


def merge_stage_exits(
    known: Iterable[StageExits | None], exited: Mapping[int, StageExit | None], stage: int
) -> StageExits | None:
    """Merges what the ranks know of exits from a stage; exits with a failure do not count.

    Args:
        known: Stage exits that ranks know of.
        exited: Each rank's own stage exit, by rank.
        stage: Number of the stage.

    Returns:
        The stage exits, or None if no rank has exited the stage.
    """
    of_stage = [
        *(one for one in known if one is not None and one.stage == stage),
        *(
            StageExits(stage, (rank,), one.num_started)
            for rank, one in exited.items()
            if one is not None and one.stage == stage and not one.has_failed
        ),
    ]
    if not of_stage:
        return None
    ranks = sorted({rank for one in of_stage for rank in one.ranks})
    return StageExits(stage, tuple(ranks[:MAX_RANKS_LISTED]), min(one.num_started for one in of_stage))


def _pair(values: Any) -> tuple[int, int]:
    first, second = values
    return first, second
