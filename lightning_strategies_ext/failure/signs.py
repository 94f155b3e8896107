"""Signs of life: what each rank says of itself, and what follows from what all say.

Nothing here talks to anybody or looks at a clock, so that what is taken for a failure can be tried without processes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from lightning_strategies_ext.failure.ballots import Ballot, Decision, Departed, Departures

#: In a stage; done with it; failed in it; the process has come to its end.
State = Literal["running", "left", "failed", "ended"]


class Progress:
    """How far this rank is among its collectives; engines that know say it in a subclass."""

    def num_begun(self) -> int:
        """How many collectives this rank has begun; zero where the backend does not count."""
        return 0

    def waiting_for(self) -> Any:
        """The operation that this rank waits for, if it does and its backend knows."""
        return None


#: The verb of ranks that do not come to a collective, of one and of several.
STUCK = "is stuck", "are stuck"
#: That of ranks whose host answers no more.
LOST = "is lost", "are lost"


@dataclass(frozen=True)
class Failure:
    """Why ranks end: the first thing that went wrong.

    Attributes:
        ranks: Those that failed; several if they are stuck together.
        host: Name of the host of the first.
        time: When, in seconds since the epoch.
        where: Stage and step.
        headline: In a line, what happened.
        frames: Of the user's code, where it happened, the outermost first.
        details: The whole trace, or the stacks of all ranks.
        by: The rank that says it.
        verb: What the ranks did, or are.
        job: Process id of the first rank, which tells jobs of one directory apart; 0 where ranks have not met.
        is_said: Whether the rank says it of itself, by an exception or the end of its script; else a watch has seen it,
            its own perhaps.
        advice: What the user can do about it, in a line, where that is known.
    """

    ranks: tuple[int, ...]
    host: str
    time: float
    where: str
    headline: str
    frames: tuple[str, ...] = ()
    details: str = ""
    by: int = 0
    verb: str = "failed"
    job: int = 0
    is_said: bool = False
    advice: str = ""

    @property
    def named_ranks(self) -> str:
        """The ranks, as in a sentence."""
        return " and ".join(f"rank {rank}" for rank in self.ranks)

    @property
    def is_stuck(self) -> bool:
        """Whether the ranks did not come to a collective."""
        return self.verb in STUCK

    @property
    def is_loss(self) -> bool:
        """Whether a host answers no more, and perhaps the store with it."""
        return self.verb in LOST

    @classmethod
    def load(cls, content: dict[str, Any]) -> "Failure":
        """Makes one of what :func:`dataclasses.asdict` gives."""
        return cls(**{**content, "ranks": tuple(content["ranks"]), "frames": tuple(content["frames"])})


@dataclass(frozen=True)
class Sign:
    """What a rank says of itself.

    Attributes:
        rank: Global rank.
        beats: How often it has said something.
        state: See :data:`State`.
        stage: Counts the stages that it has begun.
        where: Stage and step, for people.
        num_begun: How many collectives it has begun; 0 where its backend does not count.
        waits_s: For how long it has been in the same collective, or done with the stage, in seconds.
        still_s: For how long its thread has been at the same place, in seconds.
        idle_s: For how long it has been there and has computed next to nothing, in seconds.
        is_debugged: Whether somebody looks at it in a debugger.
        collective: The one that it waits in, if that is known.
        frames: Where it is in the user's code; only said if it is still.
        stack: Where it is; only said if it is still.
        failure: What it knows to have failed first.
        ballot: Its part in the agreement on a SIGTERM that it has begun last.
        decision: What it knows of what the ranks have agreed on.
        departed: The stage that it has left last.
        departures: Who has left the stage that it is in, as far as it knows.
    """

    rank: int
    beats: int = 0
    state: State = "running"
    stage: int = 0
    where: str = ""
    num_begun: int = 0
    waits_s: float = 0.0
    still_s: float = 0.0
    idle_s: float = 0.0
    is_debugged: bool = False
    collective: str = ""
    frames: tuple[str, ...] = ()
    stack: str = ""
    failure: Failure | None = None
    ballot: Ballot | None = None
    decision: Decision | None = None
    departed: Departed | None = None
    departures: Departures | None = None

    @property
    def waits_where(self) -> str:
        """Where it waits, as in a sentence."""
        return f"in {self.collective or 'a collective'}" if self.state == "running" else "at the end of the stage"

    @property
    def of_agreement(self) -> tuple[object, ...]:
        """What others are to know at once."""
        return self.ballot, self.decision, self.departed, self.departures

    def dump(self, max_num_bytes: int) -> bytes:
        """As bytes, with its long texts cut where there is no room."""
        content = json.dumps(asdict(self)).encode()
        if len(content) <= max_num_bytes:
            return content
        failure = self.failure and replace(self.failure, details=self.failure.details[-4000:])
        shorter = replace(self, stack=self.stack[-2000:], frames=self.frames[-10:], failure=failure)
        content = json.dumps(asdict(shorter)).encode()
        if len(content) <= max_num_bytes:
            return content
        failure = failure and replace(failure, details="", frames=(), headline=failure.headline[:1000])
        return json.dumps(asdict(replace(shorter, stack="", frames=(), failure=failure))).encode()

    @classmethod
    def load(cls, content: bytes) -> "Sign":
        """Makes one of what :meth:`dump` gives."""
        return cls.of(json.loads(content))

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Sign":
        """Makes one of what :func:`dataclasses.asdict` gives."""
        loaded = {name: values[name] and load(values[name]) for name, load in _LOADED.items()}
        return cls(**{**values, **loaded, "frames": tuple(values["frames"])})


_LOADED: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "failure": Failure.load,
    "ballot": Ballot.load,
    "decision": Decision.load,
    "departed": lambda values: Departed(**values),
    "departures": Departures.load,
}


@dataclass
class Silence:
    """For how long each rank has said nothing.

    Attributes:
        seconds: By rank; counted while this process itself ran.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    _beats: dict[int, int] = field(default_factory=dict)

    def note(self, signs: Mapping[int, Sign], elapsed_s: float) -> None:
        """Takes what is said now, so long after the last time."""
        for rank, sign in signs.items():
            is_new = self._beats.get(rank) != sign.beats
            self.seconds[rank] = 0.0 if is_new else self.seconds[rank] + elapsed_s
            self._beats[rank] = sign.beats


def first_failure(signs: Mapping[int, Sign]) -> Failure | None:
    """The earliest failure that any rank knows of."""
    known = [sign.failure for sign in signs.values() if sign.failure is not None]
    return min(known, key=lambda failure: (failure.time, failure.ranks), default=None)


def stuck_ranks(signs: Mapping[int, Sign], silence: Mapping[int, float], patience_s: float) -> tuple[int, ...]:
    """The ranks that others wait for in vain: they do not move, and have not for as long as one has patience.

    A rank waits if it has been in one collective for so long, has begun more collectives than another and is still, or
    has been done with the stage for so long. The time before the end of the stage does not count, because the other
    rank may have waited for this one then. One that computes does come, however long it takes; one in a debugger, too.

    Args:
        signs: Of all ranks.
        silence: For how long each has said nothing, in seconds.
        patience_s: For how long they may stay away, in seconds.

    Returns:
        Those that do not come; all that wait if none is missing, since they wait in different places; none if nobody
        waits or one that is missing moves.
    """
    stage = max(sign.stage for sign in signs.values())
    if any(sign.state == "failed" or (sign.state == "ended" and sign.stage < stage) for sign in signs.values()):
        return ()
    running = {rank: sign for rank, sign in signs.items() if sign.state == "running" or sign.stage < stage}
    if not running:
        return ()
    done = [sign for rank, sign in signs.items() if rank not in running]
    is_awaited_by_others = any(
        (silence[sign.rank] if sign.state == "ended" else sign.waits_s) >= patience_s for sign in done
    )
    least = min(sign.num_begun for sign in running.values())

    def waits(rank: int) -> bool:
        sign = running[rank]
        is_ahead = sign.num_begun > least and sign.still_s >= patience_s
        waits = sign.state == "running" and (sign.waits_s >= patience_s or is_ahead)
        return waits and silence[rank] < patience_s

    waiting = {rank for rank in running if waits(rank)}
    missing = [rank for rank in running if rank not in waiting]
    if not missing:
        return tuple(sorted(waiting))
    if not waiting and not is_awaited_by_others:
        return ()
    if any(running[rank].is_debugged for rank in missing):
        return ()
    is_lost = all(silence[rank] >= patience_s or running[rank].idle_s >= patience_s for rank in missing)
    return tuple(sorted(missing)) if is_lost else ()


def where_all_are(signs: Mapping[int, Sign], stuck: Sequence[int], states: Mapping[int, str]) -> str:
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
            f"Rank {rank} ({sign.where or sign.state}) {what} at:\n{sign.stack or '  (its stack is not known)'}\n"
        )
    return "\n".join(parts)
