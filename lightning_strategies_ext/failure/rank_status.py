"""Rank statuses: what each rank publishes about itself for the other ranks, as plain data."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, Literal

from lightning_strategies_ext.failure.exchange_log import ExchangeSummary

#: In a stage, finished with the stage, failed in the stage, or exiting.
RankState = Literal["running", "finished", "failed", "exited"]


class CollectiveProgress:
    """Progress of this rank's collectives. Engines that know it override the methods."""

    def num_started(self) -> int:
        """Returns the number of collectives that this rank has started; 0 if the backend does not count them."""
        return 0

    def pending_work(self) -> Any:
        """Returns the operation that this rank waits for, or None if it waits for none or the backend does not know."""
        return None


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


@dataclass(frozen=True)
class StopDecision:
    """Rank 0's decision in a stop agreement.

    Attributes:
        agreement_id: Identifier of the agreement.
        last_step: Step after which all ranks stop; None until all ranks have voted.
    """

    agreement_id: AgreementId
    last_step: StepIndex | None = None


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
        num_ranks: Number of all ranks, as far as it is known.
        num_started: Smallest number of collectives that one of the ranks had started.
    """

    stage: int
    ranks: tuple[int, ...]
    num_ranks: int
    num_started: int


#: An exception or an exit; ranks that other ranks wait for; the ranks of an unreachable host; ranks whose gradient
#: exchanges differ.
FailureKind = Literal["failed", "hang", "host loss", "mismatch"]
#: Verbs for one rank, and for several.
_VERBS = {
    "failed": ("failed", "failed"),
    "hang": ("is stuck", "are stuck"),
    "host loss": ("is lost", "are lost"),
    "mismatch": ("differs", "differ"),
}


@dataclass(frozen=True)
class Failure:
    """A failure of one or more ranks, for which all ranks exit.

    Attributes:
        ranks: Failed ranks; several if they hang together, or were on one lost host.
        host: Host name of the first failed rank.
        time: Time of the failure, in seconds since the epoch.
        stage_and_step: Stage and step of the first failed rank, as text.
        headline: One line that says what happened.
        frames: Frames of the user's code at the failure, outermost first, each as ``file:line in function``.
        details: The whole traceback, or the stacks of all ranks.
        reported_by: Rank that reports the failure.
        kind: Kind of the failure.
        job_id: Process id of the first rank, which distinguishes jobs that share a directory; 0 before ranks connect.
        is_self_reported: Whether the failed rank reports the failure, by an exception or the end of its script.
            Otherwise a failure monitor has detected it.
        advice: One line that says what the user can do; empty if no advice is known.
    """

    ranks: tuple[int, ...]
    host: str
    time: float
    stage_and_step: str
    headline: str
    frames: tuple[str, ...] = ()
    details: str = ""
    reported_by: int = 0
    kind: FailureKind = "failed"
    job_id: int = 0
    is_self_reported: bool = False
    advice: str = ""

    @property
    def ranks_text(self) -> str:
        """The failed ranks as part of a sentence."""
        return format_ranks(self.ranks)

    @property
    def verb(self) -> str:
        """What the ranks did or are, such as "failed"."""
        return _VERBS[self.kind][len(self.ranks) > 1]

    @property
    def unresponsive_ranks(self) -> tuple[int, ...]:
        """The failed ranks, unless they run and exit by themselves."""
        return () if self.kind == "mismatch" else self.ranks

    @property
    def unable_to_report(self) -> tuple[int, ...]:
        """The failed ranks, unless they report the failure themselves."""
        return () if self.is_self_reported else self.unresponsive_ranks


@dataclass
class RankStatus:
    """The status that a rank publishes. The rank updates its own status in place; received statuses do not change.

    Attributes:
        rank: Global rank.
        heartbeat: Number of publications.
        state: State of the rank.
        stage: Number of stages that the rank has begun.
        stage_and_step: Stage and step, as text.
        num_started: Number of collectives that the rank has started; 0 if its backend does not count them.
        in_collective_s: Seconds in the same collective, or since the end of the stage.
        unchanged_s: Seconds for which the stack of the training thread has not changed.
        idle_s: Seconds of these in which the thread was idle as well.
        is_in_debugger: Whether the training thread is in a Python debugger.
        collective: Name of the collective that the rank waits in; empty if unknown.
        call_site: The user's call in which the rank waits; empty if unknown.
        user_frames: Frames of the user's code; empty while the stack changes.
        stack: Stack of the training thread; empty while it changes.
        failure: First failure that the rank knows of.
        stop_vote: Vote of the rank in its newest stop agreement.
        stop_decision: Newest decision of a stop agreement that the rank knows of.
        stage_exit: Newest stage exit of the rank.
        stage_exits: Exits of other ranks from the rank's stage, as far as it knows.
        exchanges: Gradient exchanges of the rank in its stage; None if its engine compares them in the exchange.
    """

    rank: int
    heartbeat: int = 0
    state: RankState = "running"
    stage: int = 0
    stage_and_step: str = ""
    num_started: int = 0
    in_collective_s: float = 0.0
    unchanged_s: float = 0.0
    idle_s: float = 0.0
    is_in_debugger: bool = False
    collective: str = ""
    call_site: str = ""
    user_frames: tuple[str, ...] = ()
    stack: str = ""
    failure: Failure | None = None
    stop_vote: StopVote | None = None
    stop_decision: StopDecision | None = None
    stage_exit: StageExit | None = None
    stage_exits: StageExits | None = None
    exchanges: ExchangeSummary | None = None

    @property
    def waits_where(self) -> str:
        """Where the rank waits, as part of a sentence."""
        if self.state != "running":
            return "at the end of the stage"
        return f"in {self.collective or 'a collective'}" + (f" at {self.call_site}" if self.call_site else "")

    @property
    def agreement_state(self) -> tuple[object, ...]:
        """The fields that other ranks need at once."""
        return self.stop_vote, self.stop_decision, self.stage_exit, self.stage_exits

    def dump(self, max_num_bytes: int) -> bytes:
        """Returns the status as JSON of at most ``max_num_bytes`` bytes; long texts are cut if necessary."""
        content = json.dumps(asdict(self)).encode()
        if len(content) <= max_num_bytes:
            return content
        failure = self.failure and replace(self.failure, details=self.failure.details[-4000:])
        shorter = replace(self, stack=self.stack[-2000:], user_frames=self.user_frames[-10:], failure=failure)
        content = json.dumps(asdict(shorter)).encode()
        if len(content) <= max_num_bytes:
            return content
        failure = failure and replace(failure, details="", frames=(), headline=failure.headline[:1000])
        return json.dumps(asdict(replace(shorter, stack="", user_frames=(), failure=failure))).encode()

    @classmethod
    def load(cls, content: bytes) -> "RankStatus":
        """Returns the status that :meth:`dump` has encoded."""
        values = json.loads(content)
        for name, record in _RECORDS.items():
            if values[name] is not None:
                values[name] = record(**_with_tuples(values[name]))
        return cls(**_with_tuples(values))


_RECORDS: Mapping[str, Callable[..., Any]] = {
    "failure": Failure,
    "stop_vote": StopVote,
    "stop_decision": StopDecision,
    "stage_exit": StageExit,
    "stage_exits": StageExits,
    "exchanges": ExchangeSummary,
}


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    """Replaces lists, as which JSON has encoded tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def format_ranks(ranks: Iterable[int], num_ranks: int = 0) -> str:
    """Returns ranks as part of a sentence: "rank 1", "ranks 0-2", "ranks 0, 2, and 5", "ranks 0-7 and 504 more".

    Args:
        ranks: Global ranks, in any order; at least one. The text names at most :data:`MAX_RANKS_LISTED` of them.
        num_ranks: Number of all ranks, if it is larger than that of ``ranks``.
    """
    ordered = sorted(set(ranks))
    num_ranks = max(num_ranks, len(ordered))
    parts = []
    for _, group in groupby(enumerate(ordered[:MAX_RANKS_LISTED]), lambda item: item[1] - item[0]):  # consecutive
        run = [rank for _, rank in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    if num_ranks > len(ordered[:MAX_RANKS_LISTED]):
        parts.append(f"{num_ranks - len(ordered[:MAX_RANKS_LISTED])} more")
    listed = " and ".join(parts) if len(parts) < 3 else f"{', '.join(parts[:-1])}, and {parts[-1]}"
    return f"rank {listed}" if num_ranks == 1 else f"ranks {listed}"


def merge_stage_exits(statuses: Collection[RankStatus], stage: int) -> StageExits | None:
    """Merges what ranks know of exits from a stage, except those with a failure; None if no rank has exited it."""
    of_stage = [status.stage_exits for status in statuses if status.stage_exits and status.stage_exits.stage == stage]
    for status in statuses:
        own = status.stage_exit
        if own is not None and own.stage == stage and not own.has_failed:
            of_stage.append(StageExits(stage, (status.rank,), 1, own.num_started))
    if not of_stage:
        return None
    ranks = sorted({rank for exits in of_stage for rank in exits.ranks})
    num_ranks = max(len(ranks), *(exits.num_ranks for exits in of_stage))
    return StageExits(stage, tuple(ranks[:MAX_RANKS_LISTED]), num_ranks, min(exits.num_started for exits in of_stage))
