"""Diagnosis: failures of ranks that cannot report them, because they have exited, are unreachable, or hang."""

import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import psutil

from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.failure.ballots import MAX_RANKS_LISTED
from lightning_strategies_ext.failure.rank_status import (
    HUNG,
    LOST,
    Failure,
    RankStatus,
    format_ranks,
    format_stacks,
    hung_ranks,
)

_IS_TRACED = "is traced"


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
            f"{format_ranks(waiting)} waited {hang_timeout_s:g} s for {it} {statuses[waiting[0]].waits_where};"
            f" {what or 'no activity was detected'}"
        )
    else:
        headline = f"they waited {hang_timeout_s:g} s for each other, in different collectives"
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
