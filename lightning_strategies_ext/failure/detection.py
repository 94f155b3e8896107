"""What a rank sees of others that cannot say it themselves: that they are dead, out of reach, or stuck."""

import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import psutil

from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.failure.rank_status import HUNG, LOST, Failure, RankStatus, format_stacks, hung_ranks

_IS_TRACED = "is traced"


def diagnose_exit(
    signs: Mapping[int, RankStatus], died: Sequence[Peer], get_exit_code: Callable[[int], int | None], reported_by: int
) -> Failure | None:
    """The failure of a rank whose process has ended in a stage, or before one that others have begun.

    Args:
        signs: Of all ranks.
        died: The ranks whose processes have ended.
        get_exit_code: Tells the exit code of a process that this one has started, by its pid; None if it does not know.
        reported_by: This rank.
    """
    stage = max(sign.stage for sign in signs.values())
    for peer in died:
        sign = signs.get(peer.rank, RankStatus(peer.rank))
        if sign.stage < stage and sign.failure is not None:
            return sign.failure
        if sign.state == "running" or sign.stage < stage:
            headline = f"its process (pid {peer.pid}) {describe_exit(get_exit_code(peer.pid))}"
            return _observed_failure((peer.rank,), sign, headline, reported_by, sign.stack, peer.host_name)
    return None


def describe_exit(exit_code: int | None) -> str:
    """In words, how a process has ended; None where that is not known."""
    if exit_code is None:
        return "is gone: it was killed, crashed, or ended by itself"
    if exit_code >= 0:
        return f"ended in the middle of its work, with exit code {exit_code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"was killed by signal {-exit_code}"


def diagnose_host_loss(
    ranks: Sequence[int], signs: Mapping[int, RankStatus], peers: Mapping[int, Peer], reported_by: int
) -> Failure | None:
    """The failure of a host that has fallen silent, with all its ranks.

    Args:
        ranks: Those of such a host; none if there is none.
        signs: Of all ranks that are known of.
        peers: All ranks.
        reported_by: This rank.
    """
    if all(signs.get(rank, RankStatus(rank)).state == "exited" for rank in ranks):
        return None
    verb = LOST[len(ranks) > 1]
    headline = "the host answers nothing any more: it is down, or the network between is"
    first = signs.get(ranks[0], RankStatus(ranks[0]))
    return _observed_failure(tuple(ranks), first, headline, reported_by, host=peers[ranks[0]].host_name, verb=verb)


def diagnose_script_end(rank: int, waiting: Sequence[int]) -> Failure:
    """The failure of this rank, whose script has come to its end before a stage that others have begun."""
    who = " and ".join(f"rank {other}" for other in sorted(waiting))
    headline = f"its script has come to its end, and {who} wait{'s' if len(waiting) == 1 else ''} for it in a stage"
    return replace(
        _observed_failure((rank,), RankStatus(rank, stage_and_step="between two stages"), headline, rank),
        is_self_reported=True,
    )


def ranks_done_with_stage(signs: Mapping[int, RankStatus], stage: int) -> set[int]:
    """The ranks that are done with a stage, in whatever way."""
    return {
        rank
        for rank, sign in signs.items()
        if sign.state == "exited"
        or sign.stage > stage
        or (sign.state in ("finished", "failed") and sign.stage == stage)
    }


def diagnose_hang(
    signs: Mapping[int, RankStatus],
    heartbeat_ages: Mapping[int, float],
    hang_timeout_s: float,
    peers: Mapping[int, Peer],
    reported_by: int,
) -> Failure | None:
    """The failure of ranks that others wait for in vain, see :func:`.stuck_ranks`.

    Args:
        signs: Of all ranks.
        heartbeat_ages: For how long each has said nothing, in seconds.
        hang_timeout_s: For how long they may stay away, in seconds.
        peers: These ranks.
        reported_by: This rank.
    """
    ranks = hung_ranks(signs, heartbeat_ages, hang_timeout_s)
    states = {
        rank: _process_state(peers[rank], peers[reported_by].host, heartbeat_ages[rank] >= hang_timeout_s)
        for rank in ranks
    }
    if not ranks or _IS_TRACED in states.values():
        return None
    states = {rank: state for rank, state in states.items() if state}
    waiting = [rank for rank in sorted(signs) if rank not in ranks]
    if waiting:
        who = " and ".join(f"rank {rank}" for rank in waiting)
        has = "has" if len(waiting) == 1 else "have"
        it = "it" if len(ranks) == 1 else "them"
        what = "; ".join(f"rank {rank} {state}" for rank, state in states.items()) or "no move was seen in that time"
        headline = f"{who} {has} waited {hang_timeout_s:g} s for {it} {signs[waiting[0]].waits_where}; {what}"
    else:
        headline = f"they have waited {hang_timeout_s:g} s for each other, in collectives that are not the same"
    verb = HUNG[len(ranks) > 1]
    where = format_stacks(signs, ranks, states)
    return _observed_failure(ranks, signs[ranks[0]], headline, reported_by, where, peers[ranks[0]].host_name, verb)


def _process_state(peer: Peer, own_host: str, is_silent: bool) -> str:
    if peer.host != own_host:
        return "says nothing: it is stopped, or something in it holds Python's lock" if is_silent else ""
    status = None
    with suppress(psutil.Error, OSError):
        status = psutil.Process(peer.pid).status()
    if status == psutil.STATUS_TRACING_STOP:
        return _IS_TRACED
    if status == psutil.STATUS_STOPPED:
        return f"is stopped (`kill -CONT {peer.pid}` would let it go on)"
    return "does not answer: something in it holds Python's lock" if is_silent else ""


def _observed_failure(
    ranks: tuple[int, ...],
    sign: RankStatus,
    headline: str,
    reported_by: int,
    details: str = "",
    host: str | None = None,
    verb: str = "failed",
) -> Failure:
    host = socket.gethostname() if host is None else host
    return Failure(
        ranks, host, time.time(), sign.stage_and_step, headline, sign.user_frames, details, reported_by, verb
    )
