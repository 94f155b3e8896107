"""Rank statuses: what each rank publishes about itself, and which ranks have hung according to all statuses.

The functions are pure: they use no processes, no sockets, and no clock, so that tests can try every combination.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from lightning_strategies_ext.failure.ballots import MAX_RANKS_LISTED, StageExit, StageExits, StopDecision, StopVote

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


#: Verb for one hung rank, and for several.
HUNG = "is stuck", "are stuck"
#: Verb for one rank of a lost host, and for several.
LOST = "is lost", "are lost"


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
        verb: What the ranks did or are, such as "failed".
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
    verb: str = "failed"
    job_id: int = 0
    is_self_reported: bool = False
    advice: str = ""

    @property
    def ranks_text(self) -> str:
        """The failed ranks as part of a sentence."""
        return format_ranks(self.ranks)

    @property
    def is_hang(self) -> bool:
        """Whether the ranks hang: other ranks wait for them in a collective."""
        return self.verb in HUNG

    @property
    def is_host_loss(self) -> bool:
        """Whether a host is unreachable, perhaps together with the store."""
        return self.verb in LOST

    @classmethod
    def load(cls, content: dict[str, Any]) -> "Failure":
        """Makes one of what :func:`dataclasses.asdict` gives."""
        return cls(**{**content, "ranks": tuple(content["ranks"]), "frames": tuple(content["frames"])})


@dataclass(frozen=True)
class RankStatus:
    """The status that a rank publishes.

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
        user_frames: Frames of the user's code; empty while the stack changes.
        stack: Stack of the training thread; empty while it changes.
        failure: First failure that the rank knows of.
        stop_vote: Vote of the rank in its newest stop agreement.
        stop_decision: Newest decision of a stop agreement that the rank knows of.
        stage_exit: Newest stage exit of the rank.
        stage_exits: Exits of other ranks from the rank's stage, as far as it knows.
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
        """Where the rank waits, as part of a sentence."""
        return f"in {self.collective or 'a collective'}" if self.state == "running" else "at the end of the stage"

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
    """Age of the last heartbeat of each rank.

    Attributes:
        age_s: Age in seconds, by rank. Time in which this process was suspended does not count.
    """

    age_s: dict[int, float] = field(default_factory=dict)
    _heartbeats: dict[int, int] = field(default_factory=dict)

    def update(self, statuses: Mapping[int, RankStatus], elapsed_s: float) -> None:
        """Updates the ages with new statuses, ``elapsed_s`` seconds after the last update."""
        for rank, status in statuses.items():
            is_new = self._heartbeats.get(rank) != status.heartbeat
            self.age_s[rank] = 0.0 if is_new else self.age_s[rank] + elapsed_s
            self._heartbeats[rank] = status.heartbeat


def format_ranks(ranks: Iterable[int]) -> str:
    """Returns ranks as part of a sentence: "rank 1", "ranks 0-2", "ranks 0, 2, and 5", "ranks 0-7 and 504 more".

    Args:
        ranks: Global ranks, in any order; at least one. The text names at most :data:`MAX_RANKS_LISTED` of them.
    """
    ordered = sorted(set(ranks))
    ranges: list[list[int]] = []
    for rank in ordered[:MAX_RANKS_LISTED]:
        if ranges and ranges[-1][-1] == rank - 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    parts = [str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in ranges]
    if len(ordered) > MAX_RANKS_LISTED:
        parts.append(f"{len(ordered) - MAX_RANKS_LISTED} more")
    listed = " and ".join(parts)
    if len(parts) > 2:
        listed = f"{', '.join(parts[:-1])}, and {parts[-1]}"
    return f"rank {listed}" if len(ordered) == 1 else f"ranks {listed}"


def first_failure(statuses: Mapping[int, RankStatus]) -> Failure | None:
    """Returns the earliest failure that any rank knows of, or None."""
    known = [status.failure for status in statuses.values() if status.failure is not None]
    return min(known, key=lambda failure: (failure.time, failure.ranks), default=None)


def hung_ranks(
    statuses: Mapping[int, RankStatus], heartbeat_ages: Mapping[int, float], hang_timeout_s: float
) -> tuple[int, ...]:
    """Returns the hung ranks: other ranks have waited for them for the hang timeout, and they show no activity.

    A rank waits if it has been in the same collective for the timeout, if it has started more collectives than another
    rank and its stack has not changed, or if it finished the stage that long ago. Time before the end of the stage does
    not count, because the other rank may have waited for this rank then. A rank that computes, or is in a debugger, is
    not hung.

    Args:
        statuses: Statuses of all ranks, by rank.
        heartbeat_ages: Age of each rank's last heartbeat, in seconds.
        hang_timeout_s: Hang timeout, in seconds.

    Returns:
        The ranks that other ranks wait for. All waiting ranks if every rank waits, because they wait in different
        collectives. None if no rank waits, or if a rank that is waited for shows activity.
    """
    stage = max(status.stage for status in statuses.values())
    if any(
        status.state == "failed" or (status.state == "exited" and status.stage < stage) for status in statuses.values()
    ):
        return ()
    running = {rank: status for rank, status in statuses.items() if status.state == "running" or status.stage < stage}
    if not running:
        return ()
    done = [status for rank, status in statuses.items() if rank not in running]
    is_awaited_by_others = any(
        (heartbeat_ages[status.rank] if status.state == "exited" else status.in_collective_s) >= hang_timeout_s
        for status in done
    )
    least = min(status.num_started for status in running.values())

    def waits(rank: int) -> bool:
        status = running[rank]
        is_ahead = status.num_started > least and status.unchanged_s >= hang_timeout_s
        waits = status.state == "running" and (status.in_collective_s >= hang_timeout_s or is_ahead)
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


def format_stacks(statuses: Mapping[int, RankStatus], stuck: Sequence[int], states: Mapping[int, str]) -> str:
    """Returns the stacks of all ranks as text, those of hung ranks first.

    Args:
        statuses: Statuses of all ranks, by rank.
        stuck: Hung ranks.
        states: What is known of processes that are stopped or unresponsive, by rank, as part of a sentence.
    """
    parts = []
    for rank in [*stuck, *(rank for rank in sorted(statuses) if rank not in stuck)]:
        status = statuses[rank]
        what = states.get(rank) or ("is" if rank in stuck else f"waits {status.waits_where}")
        parts.append(
            f"Rank {rank} ({status.stage_and_step or status.state}) {what} at:\n"
            f"{status.stack or '  (its stack is not known)'}\n"
        )
    return "\n".join(parts)
