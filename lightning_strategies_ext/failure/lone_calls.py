"""Lone calls: what the error of a collective says if only this rank has called it."""

from lightning_strategies_ext.failure.failure_detector import describe_others
from lightning_strategies_ext.failure.failure_monitor import current_monitor


def lone_call_text() -> str:
    """Returns sentences with the user's call and what the other ranks did instead; empty if they may have called it."""
    monitor = current_monitor()
    others = "" if monitor is None else describe_others(monitor.observe())
    if not others or monitor is None:
        return ""
    site = monitor.call_site()
    called = f" Rank {monitor.rank} has called it at {site}." if site else ""
    return f"{called} Meanwhile, {others}. Call it on all ranks."
