"""Failure detector: finds failed ranks from statuses, process exits, link losses, and heartbeat ages."""

import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import psutil

from lightning_strategies_ext._system.connections import HOST_LOSS_TIMEOUT_S
from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.failure.exchange_log import ExchangeLog, describe_difference
from lightning_strategies_ext.failure.rank_status import (
    MAX_RANKS_LISTED,
    Failure,
    FailureKind,
    RankStatus,
    format_ranks,
    merge_stage_exits,
)
from lightning_strategies_ext.failure.thread_activity import ThreadActivity

#: A rank without a heartbeat for this many seconds is unresponsive: stopped, or its GIL is held.
HEARTBEAT_TIMEOUT_S = 2.5
#: Seconds that rank 0 adds to the hang timeout for ranks of other hosts, whose own hosts detect a hang first.
REMOTE_MARGIN_S = 2.0
#: Seconds that a rank waits in a collective for a rank of its host that has exited the stage, or begun the next one.
COLLECTIVE_GRACE_S = 1.5
_IS_TRACED = "is traced"


@dataclass(frozen=True)
class Observation:
    """What one rank has observed of all ranks, at one moment.

    Attributes:
        rank: Global rank of the observer.
        peers: The ranks, by rank.
        statuses: Newest status of each rank, by rank; without ranks whose status is unknown.
        heartbeat_ages: Age of each rank's last heartbeat, in seconds.
        exited_ranks: Ranks whose processes have exited, on other hosts without a goodbye.
        lost_ranks: Ranks of a lost host; empty if no host is lost.
        unknown_ranks: Ranks of other hosts whose first status is still to arrive.
        closed_ranks: Ranks of other hosts that have sent a goodbye.
    """

    rank: int
    peers: Mapping[int, Peer]
    statuses: Mapping[int, RankStatus]
    heartbeat_ages: Mapping[int, float]
    exited_ranks: Collection[int] = ()
    lost_ranks: Sequence[int] = ()
    unknown_ranks: Collection[int] = ()
    closed_ranks: Collection[int] = ()

    def is_local(self, rank: int) -> bool:
        """Whether a rank is on the observer's host."""
        return self.peers[rank].host == self.peers[self.rank].host

    @property
    def own(self) -> RankStatus:
        """Status of the observer."""
        return self.statuses[self.rank]


def detect_failure(
    observed: Observation,
    hang_timeout_s: float | None,
    get_exit_code: Callable[[int], int | None],
    exchange_log: ExchangeLog | None = None,
) -> Failure | None:
    """Returns the first failure: one that a rank has published, or one that failed ranks cannot report; or None.

    Failures in stages before the stage of the observer, which all ranks caught, do not count. :class:`.FailureMonitor`
    describes ``get_exit_code``.
    """
    of_stage = {rank: status for rank, status in observed.statuses.items() if status.stage >= observed.own.stage}
    failure = first_failure(of_stage) or _diagnose_exit(observed, get_exit_code) or _diagnose_host_loss(observed)
    failure = failure or (None if exchange_log is None else diagnose_mismatch(observed, exchange_log))
    return failure or (None if hang_timeout_s is None else _detect_hang(observed, hang_timeout_s))


def _detect_hang(observed: Observation, hang_timeout_s: float) -> Failure | None:
    """Rank 0 knows all statuses and detects every hang; other ranks detect unresponsive ranks that they know of."""
    if len(observed.statuses) < len(observed.peers):
        local = {rank: status for rank, status in observed.statuses.items() if observed.is_local(rank)}
        remote_timeout_s = max(hang_timeout_s, HOST_LOSS_TIMEOUT_S) + REMOTE_MARGIN_S
        for known, timeout_s in (replace(observed, statuses=local), hang_timeout_s), (observed, remote_timeout_s):
            failure = diagnose_hang(known, timeout_s)
            if failure is not None and all(observed.heartbeat_ages[rank] >= timeout_s for rank in failure.ranks):
                return failure
        return None
    failure = diagnose_hang(observed, hang_timeout_s)
    if failure is None or any(map(observed.is_local, failure.ranks)):
        return failure
    # Their own host has more information and reports first if it can; the loss of the host is detected first too.
    extended_timeout_s = hang_timeout_s + REMOTE_MARGIN_S
    failure = diagnose_hang(observed, extended_timeout_s)
    ages_s = [observed.heartbeat_ages[rank] for rank in failure.ranks] if failure is not None else []
    may_be_lost = any(extended_timeout_s <= age_s < HOST_LOSS_TIMEOUT_S + REMOTE_MARGIN_S for age_s in ages_s)
    return None if may_be_lost else failure


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


def first_failure(statuses: Mapping[int, RankStatus]) -> Failure | None:
    """Returns the earliest failure that any rank knows of, or None."""
    known = [status.failure for status in statuses.values() if status.failure is not None]
    return min(known, key=lambda failure: (failure.time, failure.ranks), default=None)


def _diagnose_exit(observed: Observation, get_exit_code: Callable[[int], int | None]) -> Failure | None:
    """Returns the failure of a rank whose process exited in a stage, or before a stage that other ranks have begun."""
    stage = max(status.stage for status in observed.statuses.values())
    for rank in sorted(observed.exited_ranks):
        status, pid = observed.statuses.get(rank, RankStatus(rank)), observed.peers[rank].pid
        if status.stage < stage and status.failure is not None:
            return status.failure
        if status.state == "running" or status.stage < stage:
            headline = f"its process (pid {pid}) {describe_exit(get_exit_code(pid))}"
            return _observed_failure(observed, (rank,), headline, status.stack)
    return None


def describe_exit(exit_code: int | None) -> str:
    """Describes the exit of a process as part of a sentence; ``exit_code`` is None if it is unknown."""
    if exit_code is None:
        return "exited for an unknown reason: killed, crashed, or exited by itself"
    if exit_code >= 0:
        return f"exited in the middle of its work, with exit code {exit_code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"was killed by signal {-exit_code}"


def _diagnose_host_loss(observed: Observation) -> Failure | None:
    """Returns the failure of a lost host with all its ranks, or None."""
    if all(observed.statuses.get(rank, RankStatus(rank)).state == "exited" for rank in observed.lost_ranks):
        return None
    headline = "the host does not respond: the host or its network is down"
    return _observed_failure(observed, observed.lost_ranks, headline, kind="host loss")


def diagnose_mismatch(observed: Observation, exchange_log: ExchangeLog) -> Failure | None:
    """Returns the failure of the observer and a rank whose gradient exchanges differ from the observer's, or None."""
    for rank, status in observed.statuses.items():
        if rank == observed.rank or status.exchanges is None or status.exchanges.stage != observed.own.stage:
            continue
        difference = exchange_log.first_difference(status.exchanges)
        if difference is not None:
            ranks, headline = sorted((observed.rank, rank)), describe_difference(observed.rank, rank, difference)
            return _observed_failure(observed, ranks, headline, kind="mismatch")
    return None


def diagnose_script_end(observed: Observation) -> Failure | None:
    """Returns the failure of the observer, whose script has ended, if other ranks wait for it in a later stage."""
    stage = observed.own.stage
    waiting = [r for r, status in observed.statuses.items() if status.state == "running" and status.stage > stage]
    if not waiting:
        return None
    verb = "waits" if len(waiting) == 1 else "wait"
    headline = f"its script ended while {format_ranks(waiting)} {verb} for it in the next stage"
    failure = _observed_failure(observed, (observed.rank,), headline)
    return replace(failure, stage_and_step="between two stages", frames=(), is_self_reported=True)


def collective_grace_s(observed: Observation) -> float:
    """Returns the seconds that a rank waits in a collective for a rank that has exited the stage, or begun the next.

    Data of a finished collective may still be on its way to another host.
    """
    is_one_host = all(map(observed.is_local, observed.peers))
    return COLLECTIVE_GRACE_S if is_one_host else HOST_LOSS_TIMEOUT_S


class LoneBarrierDetector:
    """Detects that this rank alone waits in a barrier between two stages, because another rank is in the next stage."""

    def __init__(self) -> None:
        self._call: int | None = None
        self._in_call_s = 0.0

    def is_found(self, observed: Observation, activity: ThreadActivity, elapsed_s: float) -> bool:
        """Returns whether this rank has waited long enough, ``elapsed_s`` seconds after the last call; once."""
        own, statuses = observed.own, observed.statuses.values()
        has_next = any(status.state == "running" and status.stage > own.stage for status in statuses)
        call = activity.barrier_call() if own.state == "finished" and has_next else None
        self._in_call_s = self._in_call_s + elapsed_s if call is not None and call == self._call else 0.0
        self._call = call
        if self._in_call_s < collective_grace_s(observed):
            return False
        self._call = None
        return True


def ranks_done_with_stage(observed: Observation) -> set[int]:
    """Returns the ranks that have finished the stage of the observer, failed in it, or exited."""
    stage = observed.own.stage
    return {
        rank
        for rank, status in observed.statuses.items()
        if status.state == "exited"
        or status.stage > stage
        or (status.state in ("finished", "failed") and status.stage == stage)
    }


def ranks_in_stage(observed: Observation) -> tuple[set[int], set[int]]:
    """Returns the other ranks that have not exited the stage that the observer has exited.

    Returns:
        The ranks that may still exit the stage, and the ranks that failed in it or whose processes have exited.
    """
    if observed.own.stage_exit is None:
        return set(), set()
    stage, staying, failed = observed.own.stage_exit.stage, set[int](), set[int]()
    known = {*observed.statuses, *filter(observed.is_local, observed.peers), *observed.unknown_ranks}
    for rank in known - {observed.rank}:
        status = observed.statuses.get(rank, RankStatus(rank))
        if status.stage_exit is not None and status.stage_exit.stage >= stage:
            failed |= {rank} if status.stage_exit.has_failed and status.stage_exit.stage == stage else set()
        elif status.state in ("failed", "exited") or rank in observed.exited_ranks:
            failed.add(rank)
        elif status.stage <= stage:
            staying.add(rank)
    return staying.difference(observed.closed_ranks), failed


def is_reporter(observed: Observation, failure: Failure) -> bool:
    """Whether the observer prints the report of a failure: the lowest rank that can."""
    stage = observed.own.stage
    unable = {
        rank
        for rank, status in observed.statuses.items()
        if status.state in ("finished", "exited") or (status.state == "running" and status.stage > stage)
    }
    # A launcher may terminate ranks that have exited the stage as soon as this rank exits.
    exits = merge_stage_exits(observed.statuses.values(), stage)
    unable.update(failure.unable_to_report, () if exits is None else exits.ranks)
    return observed.rank <= min(observed.peers.keys() - unable or failure.ranks)


def diagnose_hang(observed: Observation, hang_timeout_s: float) -> Failure | None:
    """Returns the failure of hung ranks (:func:`hung_ranks`) among those with a known status, or None."""
    statuses, ages_s = observed.statuses, observed.heartbeat_ages
    ranks = hung_ranks(statuses, ages_s, hang_timeout_s)
    states = {rank: _process_state(observed, rank, ages_s[rank] >= hang_timeout_s) for rank in ranks}
    if not ranks or _IS_TRACED in states.values():
        return None
    states = {rank: state for rank, state in states.items() if state}
    waiting = [rank for rank in sorted(statuses) if rank not in ranks]
    if waiting:
        it = "it" if len(ranks) == 1 else "them"
        what = "; ".join(f"rank {rank} {state}" for rank, state in list(states.items())[:MAX_RANKS_LISTED])
        headline = (
            f"{format_ranks(waiting)} waited {hang_timeout_s:g} s for {it} {statuses[waiting[0]].waits_where}"
            f" (`hang_timeout`); {what or 'no activity was detected'}"
        )
    else:
        sites = [f"rank {rank} at {statuses[rank].call_site}" for rank in ranks if statuses[rank].call_site]
        headline = f"they waited {hang_timeout_s:g} s for each other in different collectives (`hang_timeout`)"
        if sites:
            headline += f": {'; '.join(sites[:MAX_RANKS_LISTED])}"
    return _observed_failure(observed, ranks, headline, _format_stacks(statuses, ranks, states), "hang")


def _process_state(observed: Observation, rank: int, is_unresponsive: bool) -> str:
    pid, is_local, status = observed.peers[rank].pid, observed.is_local(rank), None
    with suppress(psutil.Error, OSError):
        status = psutil.Process(pid).status() if is_local else None
    if status == psutil.STATUS_TRACING_STOP:
        return _IS_TRACED
    if status == psutil.STATUS_STOPPED:
        return f"is stopped (`kill -CONT {pid}` continues it)"
    reason = "a library in it holds the GIL" if is_local else "the process is stopped, or a library in it holds the GIL"
    return f"sends no heartbeats: {reason}" if is_unresponsive else ""


def _observed_failure(
    observed: Observation, ranks: Sequence[int], headline: str, details: str = "", kind: FailureKind = "failed"
) -> Failure:
    first = observed.statuses.get(ranks[0], RankStatus(ranks[0]))
    return Failure(
        ranks=tuple(ranks),
        host=observed.peers[ranks[0]].host_name,
        time=time.time(),
        stage_and_step=first.stage_and_step,
        headline=headline,
        frames=first.user_frames,
        details=details,
        reported_by=observed.rank,
        kind=kind,
        job_id=observed.peers[min(observed.peers)].pid,
    )


def hung_ranks(
    statuses: Mapping[int, RankStatus], heartbeat_ages: Mapping[int, float], hang_timeout_s: float
) -> tuple[int, ...]:
    """Returns the hung ranks: other ranks have waited for them for the hang timeout, and they show no activity.

    A rank waits if it has been in the same collective for the timeout, if it has started more collectives than another
    rank and its stack has not changed, or if it finished the stage that long ago. Time before the end of the stage does
    not count, because the other rank may have waited for this rank then. A rank that computes, or is in a debugger, is
    not hung.

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
    done = [status for rank, status in statuses.items() if rank not in running]
    is_awaited_by_done = any(
        (heartbeat_ages[status.rank] if status.state == "exited" else status.in_collective_s) >= hang_timeout_s
        for status in done
    )
    least = min((status.num_started for status in running.values()), default=0)

    def waits(rank: int) -> bool:
        status = running[rank]
        is_ahead = status.num_started > least and status.unchanged_s >= hang_timeout_s
        waits = status.state == "running" and (status.in_collective_s >= hang_timeout_s or is_ahead)
        return waits and heartbeat_ages[rank] < hang_timeout_s

    def is_inactive(rank: int) -> bool:
        status = running[rank]
        is_idle = heartbeat_ages[rank] >= hang_timeout_s or status.idle_s >= hang_timeout_s
        return is_idle and not status.is_in_debugger

    waiting = [rank for rank in sorted(running) if waits(rank)]
    missing = [rank for rank in sorted(running) if rank not in waiting]
    if not missing:
        return tuple(waiting)
    return tuple(missing) if (waiting or is_awaited_by_done) and all(map(is_inactive, missing)) else ()


def _format_stacks(statuses: Mapping[int, RankStatus], hung: Sequence[int], states: Mapping[int, str]) -> str:
    """Returns the stacks of all ranks as text, those of hung ranks first; ``states`` are those of their processes."""
    parts = []
    for rank in [*hung, *(rank for rank in sorted(statuses) if rank not in hung)]:
        status = statuses[rank]
        what = states.get(rank) or ("is" if rank in hung else f"waits {status.waits_where}")
        parts.append(
            f"Rank {rank} ({status.stage_and_step or status.state}) {what} at:\n"
            f"{status.stack or '  (its stack is not known)'}\n"
        )
    return "\n".join(parts)
