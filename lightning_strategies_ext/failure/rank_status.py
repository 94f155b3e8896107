"""Signs of life: what each rank says of itself, and what follows from what all say.

Nothing here talks to anybody or looks at a clock, so that what is taken for a failure can be tried without processes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from lightning_strategies_ext.failure.ballots import StageExit, StageExits, StopDecision, StopVote

#: In a stage; done with it; failed in it; the process has come to its end.
RankState = Literal["running", "finished", "failed", "exited"]


class CollectiveProgress:
    """How far this rank is among its collectives; engines that know say it in a subclass."""

    def num_started(self) -> int:
        """How many collectives this rank has begun; zero where the backend does not count."""
        return 0

    def pending_work(self) -> Any:
        """The operation that this rank waits for, if it does and its backend knows."""
        return None


#: The verb of ranks that do not come to a collective, of one and of several.
HUNG = "is stuck", "are stuck"
#: That of ranks whose host answers no more.
LOST = "is lost", "are lost"


@dataclass(frozen=True)
class Failure:
    """Why ranks end: the first thing that went wrong.

    Attributes:
        ranks: Those that failed; several if they are stuck together.
        host: Name of the host of the first.
        time: When, in seconds since the epoch.
        stage_and_step: Stage and step.
        headline: In a line, what happened.
        user_frames: Of the user's code, where it happened, the outermost first.
        details: The whole trace, or the stacks of all ranks.
        reported_by: The rank that says it.
        verb: What the ranks did, or are.
        job_id: Process id of the first rank, which tells jobs of one directory apart; 0 where ranks have not met.
        is_self_reported: Whether the rank says it of itself, by an exception or the end of its script; else a watch
            has seen it, its own perhaps.
        advice: What the user can do about it, in a line, where that is known.
    """

    ranks: tuple[int, ...]
    host: str
    time: float
    stage_and_step: str
    headline: str
    frames: tuple[str, ...] = ()
    details: str = ""
    reported_by: int = 0
    verb: str = "failed"
    job_id: int = 0
    is_self_reported: bool = False
    advice: str = ""

    @property
    def ranks_text(self) -> str:
        """The ranks, as in a sentence."""
        return " and ".join(f"rank {rank}" for rank in self.ranks)

    @property
    def is_hang(self) -> bool:
        """Whether the ranks did not come to a collective."""
        return self.verb in HUNG

    @property
    def is_host_loss(self) -> bool:
        """Whether a host answers no more, and perhaps the store with it."""
        return self.verb in LOST

    @classmethod
    def load(cls, content: dict[str, Any]) -> "Failure":
        """Makes one of what :func:`dataclasses.asdict` gives."""
        return cls(**{**content, "ranks": tuple(content["ranks"]), "frames": tuple(content["frames"])})


@dataclass(frozen=True)
class RankStatus:
    """What a rank says of itself.

    Attributes:
        rank: Global rank.
        heartbeat: How often it has said something.
        state: See :data:`State`.
        stage: Counts the stages that it has begun.
        stage_and_step: Stage and step, for people.
        num_started: How many collectives it has begun; 0 where its backend does not count.
        in_collective_s: For how long it has been in the same collective, or done with the stage, in seconds.
        unchanged_s: For how long its thread has been at the same place, in seconds.
        idle_s: For how long it has been there and has computed next to nothing, in seconds.
        is_in_debugger: Whether somebody looks at it in a debugger.
        collective: The one that it waits in, if that is known.
        user_frames: Where it is in the user's code; only said if it is still.
        stack: Where it is; only said if it is still.
        failure: What it knows to have failed first.
        stop_vote: Its part in the agreement on a SIGTERM that it has begun last.
        stop_decision: What it knows of what the ranks have agreed on.
        stage_exit: The stage that it has left last.
        stage_exits: Who has left the stage that it is in, as far as it knows.
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
    user_frames: tuple[str, ...] = ()
    stack: str = ""
    failure: Failure | None = None
    stop_vote: StopVote | None = None
    stop_decision: StopDecision | None = None
    stage_exit: StageExit | None = None
    stage_exits: StageExits | None = None

    @property
    def waits_where(self) -> str:
        """Where it waits, as in a sentence."""
        return f"in {self.collective or 'a collective'}" if self.state == "running" else "at the end of the stage"

    @property
    def agreement_state(self) -> tuple[object, ...]:
        """What others are to know at once."""
        return self.stop_vote, self.stop_decision, self.stage_exit, self.stage_exits

    def dump(self, max_num_bytes: int) -> bytes:
        """As bytes, with its long texts cut where there is no room."""
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
        """Makes one of what :meth:`dump` gives."""
        return cls.from_dict(json.loads(content))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RankStatus":
        """Makes one of what :func:`dataclasses.asdict` gives."""
        loaded = {name: values[name] and load(values[name]) for name, load in _LOADED.items()}
        return cls(**{**values, **loaded, "user_frames": tuple(values["user_frames"])})


_LOADED: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "failure": Failure.load,
    "stop_vote": StopVote.load,
    "stop_decision": StopDecision.load,
    "stage_exit": lambda values: StageExit(**values),
    "stage_exits": StageExits.load,
}


@dataclass
class HeartbeatAges:
    """For how long each rank has said nothing.

    Attributes:
        age_s: By rank; counted while this process itself ran.
    """

    age_s: dict[int, float] = field(default_factory=dict)
    _heartbeats: dict[int, int] = field(default_factory=dict)

    def update(self, signs: Mapping[int, RankStatus], elapsed_s: float) -> None:
        """Takes what is said now, so long after the last time."""
        for rank, sign in signs.items():
            is_new = self._heartbeats.get(rank) != sign.heartbeat
            self.age_s[rank] = 0.0 if is_new else self.age_s[rank] + elapsed_s
            self._heartbeats[rank] = sign.heartbeat


def first_failure(signs: Mapping[int, RankStatus]) -> Failure | None:
    """The earliest failure that any rank knows of."""
    known = [sign.failure for sign in signs.values() if sign.failure is not None]
    return min(known, key=lambda failure: (failure.time, failure.ranks), default=None)


def hung_ranks(
    signs: Mapping[int, RankStatus], heartbeat_ages: Mapping[int, float], hang_timeout_s: float
) -> tuple[int, ...]:
    """The ranks that others wait for in vain: they do not move, and have not for as long as one has patience.

    A rank waits if it has been in one collective for so long, has begun more collectives than another and is still, or
    has been done with the stage for so long. The time before the end of the stage does not count, because the other
    rank may have waited for this one then. One that computes does come, however long it takes; one in a debugger, too.

    Args:
        signs: Of all ranks.
        heartbeat_ages: For how long each has said nothing, in seconds.
        hang_timeout_s: For how long they may stay away, in seconds.

    Returns:
        Those that do not come; all that wait if none is missing, since they wait in different places; none if nobody
        waits or one that is missing moves.
    """
    stage = max(sign.stage for sign in signs.values())
    if any(sign.state == "failed" or (sign.state == "exited" and sign.stage < stage) for sign in signs.values()):
        return ()
    running = {rank: sign for rank, sign in signs.items() if sign.state == "running" or sign.stage < stage}
    if not running:
        return ()
    done = [sign for rank, sign in signs.items() if rank not in running]
    is_awaited_by_others = any(
        (heartbeat_ages[sign.rank] if sign.state == "exited" else sign.in_collective_s) >= hang_timeout_s
        for sign in done
    )
    least = min(sign.num_started for sign in running.values())

    def waits(rank: int) -> bool:
        sign = running[rank]
        is_ahead = sign.num_started > least and sign.unchanged_s >= hang_timeout_s
        waits = sign.state == "running" and (sign.in_collective_s >= hang_timeout_s or is_ahead)
        return waits and heartbeat_ages[rank] < hang_timeout_s

    waiting = {rank for rank in running if waits(rank)}
    missing = [rank for rank in running if rank not in waiting]
    if not missing:
        return tuple(sorted(waiting))
    if not waiting and not is_awaited_by_others:
        return ()
    if any(running[rank].is_in_debugger for rank in missing):
        return ()
    is_lost = all(heartbeat_ages[rank] >= hang_timeout_s or running[rank].idle_s >= hang_timeout_s for rank in missing)
    return tuple(sorted(missing)) if is_lost else ()


def format_stacks(signs: Mapping[int, RankStatus], stuck: Sequence[int], states: Mapping[int, str]) -> str:
    """The stacks of all ranks, those first that others wait for.

    Args:
        signs: Of all ranks.
        stuck: Those that others wait for.
        states: Of processes that are stopped or do not answer, in words.
    """
    parts = []
    for rank in [*stuck, *(rank for rank in sorted(signs) if rank not in stuck)]:
        sign = signs[rank]
        what = states.get(rank) or ("is" if rank in stuck else f"waits {sign.waits_where}")
        parts.append(
            f"Rank {rank} ({sign.stage_and_step or sign.state}) {what} at:\n"
            f"{sign.stack or '  (its stack is not known)'}\n"
        )
    return "\n".join(parts)
