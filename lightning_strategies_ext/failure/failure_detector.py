"""Failure detector: finds failed ranks from statuses, process exits, link losses, and heartbeat ages."""

import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from lightning_strategies_ext.failure.exit_tracker import ExitTracker
    from lightning_strategies_ext.failure.local_status import LocalStatus
    from lightning_strategies_ext.failure.remote_status import RemoteStatus

#: A rank without a heartbeat for this many seconds is unresponsive: stopped, or its GIL is held.
HEARTBEAT_TIMEOUT_S = 2.5
#: Seconds that rank 0 adds to the hang timeout for ranks of other hosts, whose own hosts detect a hang first.
REMOTE_MARGIN_S = 2.0
_IS_TRACED = "is traced"


class FailureDetector:
    """Detects failures of other ranks. It never blocks and has no lock: the caller serializes the calls.

    Args:
        rank: Global rank of this process.
        peers: All ranks.
        local_peers: Ranks of this host.
        local_status: Statuses of the ranks of this host.
        hosts: Statuses of other hosts; None if all ranks are on this host.
        exit_tracker: Tracker of the other processes of this host.
        get_exit_code: Callable that returns the exit code of a process that this process has started, by its pid; None
            if the exit code is unknown.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, Peer],
        local_peers: Mapping[int, Peer],
        local_status: "LocalStatus",
        hosts: "RemoteStatus | None",
        exit_tracker: "ExitTracker",
        get_exit_code: Callable[[int], int | None],
    ) -> None:
        self._rank = rank
        self._peers = peers
        self._local_peers = local_peers
        self._local_status = local_status
        self._remote_status = hosts
        self._exit_tracker = exit_tracker
        self._get_exit_code = get_exit_code
        self._heartbeat_ages = HeartbeatAges()

    def statuses(self) -> dict[int, RankStatus]:
        """Returns the newest status of each rank, by rank; without ranks whose status is unknown."""
        return {
            **(self._remote_status.statuses if self._remote_status is not None else {}),
            **self._local_status.read(),
        }

    def update(self, elapsed_s: float) -> dict[int, RankStatus]:
        """Returns the statuses and updates the heartbeat ages, ``elapsed_s`` seconds after the last update."""
        statuses = self.statuses()
        self._heartbeat_ages.update(statuses, elapsed_s)
        return statuses

    def unresponsive_local_peers(self, ranks: Iterable[int]) -> list[Peer]:
        """Returns those of some ranks that are on this host and unresponsive, so that they cannot exit themselves."""
        here = [self._local_peers[rank] for rank in ranks if rank in self._local_peers and rank != self._rank]
        return [peer for peer in here if self._heartbeat_ages.age_s.get(peer.rank, 0) >= HEARTBEAT_TIMEOUT_S]

    def ranks_in_stage(self, stage: int) -> tuple[set[int], set[int]]:
        """Returns the other ranks that have not exited a stage.

        Args:
            stage: Stage that this rank has exited.

        Returns:
            The ranks that may still exit the stage, and the ranks that failed in it or whose processes have exited.
        """
        # Before the statuses are read: a rank may publish its stage exit and then exit its process.
        died = {rank for rank, peer in self._local_peers.items() if not peer.is_running()}
        statuses = self.statuses()
        known = {*statuses, *self._local_peers}
        if self._remote_status is not None:
            died |= self._remote_status.disconnected_ranks()
            known |= self._remote_status.unknown_ranks()  # a stage may be shorter than the interval of statuses
        staying: set[int] = set()
        failed: set[int] = set()
        for rank in known - {self._rank}:
            status = statuses.get(rank, RankStatus(rank))
            departed = status.stage_exit
            if departed is not None and departed.stage >= stage:
                failed |= {rank} if departed.has_failed and departed.stage == stage else set()
            elif status.state in ("failed", "exited") or rank in died:
                failed.add(rank)
            elif status.stage <= stage:
                staying.add(rank)
        return staying - (set() if self._remote_status is None else self._remote_status.closed_ranks()), failed

    def detect(self, statuses: Mapping[int, RankStatus], hang_timeout_s: float | None) -> Failure | None:
        """Returns a failure that other ranks cannot report themselves, or None.

        Args:
            statuses: Statuses that :meth:`update` returned.
            hang_timeout_s: Hang timeout in seconds; None for no limit.
        """
        died = self._exit_tracker.exited_ranks() | (
            set() if self._remote_status is None else self._remote_status.disconnected_ranks()
        )
        peers = [self._peers[rank] for rank in sorted(died)]
        failure = diagnose_exit(statuses, peers, self._get_exit_code, self._rank)
        if failure is None and self._remote_status is not None:
            failure = diagnose_host_loss(self._remote_status.lost_ranks(), statuses, self._peers, self._rank)
        return failure or (None if hang_timeout_s is None else self._detect_hang(statuses, hang_timeout_s))

    def _detect_hang(self, statuses: Mapping[int, RankStatus], hang_timeout_s: float) -> Failure | None:
        """Rank 0 knows all statuses and detects every hang; other ranks detect unresponsive ranks that they know of."""
        if len(statuses) < len(self._peers):
            here = {rank: status for rank, status in statuses.items() if rank in self._local_peers}
            return self._detect_unresponsive(here, hang_timeout_s) or self._detect_unresponsive(
                statuses, max(hang_timeout_s, HOST_LOSS_TIMEOUT_S) + REMOTE_MARGIN_S
            )
        failure = self._diagnose_hang(statuses, hang_timeout_s)
        if failure is None or any(rank in self._local_peers for rank in failure.ranks):
            return failure
        # Their own host has more information and reports first if it can; the loss of the host is detected first too.
        elsewhere_s = hang_timeout_s + REMOTE_MARGIN_S
        failure = self._diagnose_hang(statuses, elsewhere_s)
        silent_s = [self._heartbeat_ages.age_s[rank] for rank in failure.ranks] if failure is not None else []
        return (
            None
            if any(elsewhere_s <= seconds < HOST_LOSS_TIMEOUT_S + REMOTE_MARGIN_S for seconds in silent_s)
            else failure
        )

    def _diagnose_hang(self, statuses: Mapping[int, RankStatus], hang_timeout_s: float) -> Failure | None:
        return diagnose_hang(statuses, self._heartbeat_ages.age_s, hang_timeout_s, self._peers, self._rank)

    def _detect_unresponsive(self, statuses: Mapping[int, RankStatus], hang_timeout_s: float) -> Failure | None:
        failure = self._diagnose_hang(statuses, hang_timeout_s)
        are_silent = failure is not None and all(
            self._heartbeat_ages.age_s[rank] >= hang_timeout_s for rank in failure.ranks
        )
        return failure if are_silent else None


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


def diagnose_exit(
    statuses: Mapping[int, RankStatus],
    exited: Sequence[Peer],
    get_exit_code: Callable[[int], int | None],
    reported_by: int,
) -> Failure | None:
    """Returns the failure of a rank whose process exited in a stage, or before a stage that other ranks have begun.

    Args:
        statuses: Statuses of all ranks, by rank.
        exited: Ranks whose processes have exited.
        get_exit_code: Callable that returns the exit code of a process that this process has started, by its pid; None
            if the exit code is unknown.
        reported_by: Global rank of the caller.
    """
    stage = max(status.stage for status in statuses.values())
    for peer in exited:
        status = statuses.get(peer.rank, RankStatus(peer.rank))
        if status.stage < stage and status.failure is not None:
            return status.failure
        if status.state == "running" or status.stage < stage:
            headline = f"its process (pid {peer.pid}) {describe_exit(get_exit_code(peer.pid))}"
            return _observed_failure((peer.rank,), status, headline, reported_by, status.stack, peer.host_name)
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


def diagnose_host_loss(
    ranks: Sequence[int], statuses: Mapping[int, RankStatus], peers: Mapping[int, Peer], reported_by: int
) -> Failure | None:
    """Returns the failure of a lost host with all its ranks, or None.

    Args:
        ranks: Ranks of the lost host; empty if no host is lost.
        statuses: Known statuses, by rank.
        peers: All ranks.
        reported_by: Global rank of the caller.
    """
    if all(statuses.get(rank, RankStatus(rank)).state == "exited" for rank in ranks):
        return None
    verb = LOST[len(ranks) > 1]
    headline = "the host does not respond: the host or its network is down"
    first = statuses.get(ranks[0], RankStatus(ranks[0]))
    return _observed_failure(tuple(ranks), first, headline, reported_by, host=peers[ranks[0]].host_name, verb=verb)


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


def diagnose_hang(
    statuses: Mapping[int, RankStatus],
    heartbeat_ages: Mapping[int, float],
    hang_timeout_s: float,
    peers: Mapping[int, Peer],
    reported_by: int,
) -> Failure | None:
    """Returns the failure of hung ranks, see :func:`.hung_ranks`, or None.

    Args:
        statuses: Statuses of all ranks, by rank.
        heartbeat_ages: Age of each rank's last heartbeat, in seconds.
        hang_timeout_s: Hang timeout, in seconds.
        peers: The same ranks.
        reported_by: Global rank of the caller.
    """
    ranks = hung_ranks(statuses, heartbeat_ages, hang_timeout_s)
    states = {
        rank: _process_state(peers[rank], peers[reported_by].host, heartbeat_ages[rank] >= hang_timeout_s)
        for rank in ranks
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
    return _observed_failure(ranks, statuses[ranks[0]], headline, reported_by, where, peers[ranks[0]].host_name, verb)


def _process_state(peer: Peer, own_host: str, is_unresponsive: bool) -> str:
    if peer.host != own_host:
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
