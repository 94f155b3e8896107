"""Failure detector: finds failed ranks from statuses, process exits, link losses, and heartbeat ages."""

import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import psutil

from lightning_strategies_ext._system.connections import HOST_LOSS_TIMEOUT_S
from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.failure.rank_status import (
    HUNG,
    LOST,
    MAX_RANKS_LISTED,
    Failure,
    RankStatus,
    format_ranks,
)

#: A rank without a heartbeat for this many seconds is unresponsive: stopped, or its GIL is held.
HEARTBEAT_TIMEOUT_S = 2.5
#: Seconds that rank 0 adds to the hang timeout for ranks of other hosts, whose own hosts detect a hang first.
REMOTE_MARGIN_S = 2.0
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
    """

    rank: int
    peers: Mapping[int, Peer]
    statuses: Mapping[int, RankStatus]
    heartbeat_ages: Mapping[int, float]
    exited_ranks: Collection[int] = ()
    lost_ranks: Sequence[int] = ()

    def is_local(self, rank: int) -> bool:
        """Whether a rank is on the observer's host."""
        return self.peers[rank].host == self.peers[self.rank].host


def detect_failure(
    observed: Observation, stage: int, hang_timeout_s: float | None, get_exit_code: Callable[[int], int | None]
) -> Failure | None:
    """Returns the first failure: one that a rank has published, or one that failed ranks cannot report; or None.

    Args:
        observed: Observation of the caller.
        stage: Number of stages that the caller has begun. Failures in earlier stages, which all ranks caught, do not
            count.
        hang_timeout_s: Hang timeout in seconds; None for no limit.
        get_exit_code: Callable that returns the exit code of a process that this process has started, by its pid; None
            if the exit code is unknown.
    """
    of_stage = {rank: status for rank, status in observed.statuses.items() if status.stage >= stage}
    failure = first_failure(of_stage) or diagnose_exit(observed, get_exit_code) or diagnose_host_loss(observed)
    return failure or (None if hang_timeout_s is None else _detect_hang(observed, hang_timeout_s))


def _detect_hang(observed: Observation, hang_timeout_s: float) -> Failure | None:
    """Rank 0 knows all statuses and detects every hang; other ranks detect unresponsive ranks that they know of."""
    if len(observed.statuses) < len(observed.peers):
        local = {rank: status for rank, status in observed.statuses.items() if observed.is_local(rank)}
        return _detect_unresponsive(replace(observed, statuses=local), hang_timeout_s) or _detect_unresponsive(
            observed, max(hang_timeout_s, HOST_LOSS_TIMEOUT_S) + REMOTE_MARGIN_S
        )
    failure = diagnose_hang(observed, hang_timeout_s)
    if failure is None or any(map(observed.is_local, failure.ranks)):
        return failure
    # Their own host has more information and reports first if it can; the loss of the host is detected first too.
    elsewhere_s = hang_timeout_s + REMOTE_MARGIN_S
    failure = diagnose_hang(observed, elsewhere_s)
    ages_s = [observed.heartbeat_ages[rank] for rank in failure.ranks] if failure is not None else []
    may_be_lost = any(elsewhere_s <= age_s < HOST_LOSS_TIMEOUT_S + REMOTE_MARGIN_S for age_s in ages_s)
    return None if may_be_lost else failure


def _detect_unresponsive(observed: Observation, hang_timeout_s: float) -> Failure | None:
    failure = diagnose_hang(observed, hang_timeout_s)
    are_unresponsive = failure is not None and all(
        observed.heartbeat_ages[rank] >= hang_timeout_s for rank in failure.ranks
    )
    return failure if are_unresponsive else None


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


def diagnose_exit(observed: Observation, get_exit_code: Callable[[int], int | None]) -> Failure | None:
    """Returns the failure of a rank whose process exited in a stage, or before a stage that other ranks have begun.

    Args:
        observed: Observation of the caller.
        get_exit_code: Callable that returns the exit code of a process that this process has started, by its pid; None
            if the exit code is unknown.
    """
    stage = max(status.stage for status in observed.statuses.values())
    for rank in sorted(observed.exited_ranks):
        status, peer = observed.statuses.get(rank, RankStatus(rank)), observed.peers[rank]
        if status.stage < stage and status.failure is not None:
            return status.failure
        if status.state == "running" or status.stage < stage:
            headline = f"its process (pid {peer.pid}) {describe_exit(get_exit_code(peer.pid))}"
            return _observed_failure((rank,), status, headline, observed.rank, status.stack, peer.host_name)
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


def diagnose_host_loss(observed: Observation) -> Failure | None:
    """Returns the failure of a lost host with all its ranks, or None."""
    ranks, statuses = observed.lost_ranks, observed.statuses
    if all(statuses.get(rank, RankStatus(rank)).state == "exited" for rank in ranks):
        return None
    verb, host = LOST[len(ranks) > 1], observed.peers[ranks[0]].host_name
    headline = "the host does not respond: the host or its network is down"
    first = statuses.get(ranks[0], RankStatus(ranks[0]))
    return _observed_failure(tuple(ranks), first, headline, observed.rank, host=host, verb=verb)


def diagnose_script_end(rank: int, waiting: Sequence[int]) -> Failure:
    """Returns the failure of this rank, whose script has ended before a stage that other ranks have begun."""
    verb = "waits" if len(waiting) == 1 else "wait"
    headline = f"its script ended while {format_ranks(waiting)} {verb} for it in the next stage"
    return replace(
        _observed_failure((rank,), RankStatus(rank, stage_and_step="between two stages"), headline, rank),
        is_self_reported=True,
    )


def ranks_done_with_stage(statuses: Mapping[int, RankStatus], stage: int) -> set[int]:
    """Returns the ranks that have finished a stage, failed in it, or exited."""
    return {
        rank
        for rank, status in statuses.items()
        if status.state == "exited"
        or status.stage > stage
        or (status.state in ("finished", "failed") and status.stage == stage)
    }


def diagnose_hang(observed: Observation, hang_timeout_s: float) -> Failure | None:
    """Returns the failure of hung ranks (:func:`hung_ranks`) among those with a known status, or None."""
    statuses, peers, ages_s = observed.statuses, observed.peers, observed.heartbeat_ages
    ranks = hung_ranks(statuses, ages_s, hang_timeout_s)
    states = {
        rank: _process_state(peers[rank], observed.is_local(rank), ages_s[rank] >= hang_timeout_s) for rank in ranks
    }
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
        headline = f"they waited {hang_timeout_s:g} s for each other in different collectives (`hang_timeout`)"
    verb = HUNG[len(ranks) > 1]
    where = format_stacks(statuses, ranks, states)
    return _observed_failure(ranks, statuses[ranks[0]], headline, observed.rank, where, peers[ranks[0]].host_name, verb)


def _process_state(peer: Peer, is_local: bool, is_unresponsive: bool) -> str:
    if not is_local:
        return (
            "sends no heartbeats: the process is stopped, or a library in it holds the GIL" if is_unresponsive else ""
        )
    status = None
    with suppress(psutil.Error, OSError):
        status = psutil.Process(peer.pid).status()
    if status == psutil.STATUS_TRACING_STOP:
        return _IS_TRACED
    if status == psutil.STATUS_STOPPED:
        return f"is stopped (`kill -CONT {peer.pid}` continues it)"
    return "sends no heartbeats: a library in it holds the GIL" if is_unresponsive else ""


def _observed_failure(
    ranks: tuple[int, ...],
    status: RankStatus,
    headline: str,
    reported_by: int,
    details: str = "",
    host: str | None = None,
    verb: str = "failed",
) -> Failure:
    host = socket.gethostname() if host is None else host
    return Failure(
        ranks, host, time.time(), status.stage_and_step, headline, status.user_frames, details, reported_by, verb
    )


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
