"""Lone calls: what the error of a collective says if other ranks have not called it."""

from lightning_strategies_ext.failure.failure_detector import Observation, describe_others
from lightning_strategies_ext.failure.failure_monitor import current_monitor
from lightning_strategies_ext.failure.failure_report import advise, is_timeout
from lightning_strategies_ext.failure.rank_status import format_ranks


def lone_call_text() -> str:
    """Returns sentences with the user's call and what the other ranks did instead; empty if they may have called it."""
    monitor = current_monitor()
    others = "" if monitor is None else describe_others(monitor.observe())
    if not others or monitor is None:
        return ""
    site = monitor.call_site()
    called = f" Rank {monitor.rank} has called it at {site}." if site else ""
    return f"{called} Meanwhile, {others}. Call it on all ranks."


def advise_on_timeout(exception: BaseException) -> None:
    """Puts the ranks that have not joined a collective before the message of its timeout. Otherwise a no-op."""
    monitor = current_monitor()
    if monitor is not None and is_timeout(exception) and (text := describe_absent(monitor.observe())):
        advise(exception, text)


def describe_absent(observed: Observation) -> str:
    """Returns the ranks of the observer's stage that wait in no collective, as sentences; empty without such ranks.

    The observer has waited in a collective until its timeout.
    """
    own = observed.own
    absent = [
        status
        for rank, status in sorted(observed.statuses.items())
        if rank != own.rank
        and (status.state, status.stage) == ("running", own.stage)
        and not status.in_collective_s
        and status.num_started <= own.num_started
    ]
    if not absent:
        return ""
    first, ranks = absent[0], format_ranks(status.rank for status in absent)
    where = first.user_frames[-1] if first.user_frames else first.stage_and_step
    return (
        f"{ranks[0].upper()}{ranks[1:]} {'has' if len(absent) == 1 else 'have'} not joined a collective in which rank"
        f" {own.rank} has waited until its timeout. Rank {first.rank} runs {where}. If this takes longer than the"
        " argument `timeout`, increase the argument."
    )
