"""Tests of the selector loop of a thread."""

import socket
import time

from lightning_strategies_ext._system.selector_loop import SelectorLoop


def test_a_callback_for_writability_runs_only_while_it_is_requested() -> None:
    loop, calls = SelectorLoop(), []
    local, remote = socket.socketpair()
    with local, remote:
        loop.add(local, lambda: bool(calls.append("called")) or True)
        loop.wait(0.05)
        assert calls == []
        loop.wait_for_writable(local, is_waiting=True)
        loop.wait()
        assert calls == ["called"]
        loop.wait_for_writable(local, is_waiting=False)
        loop.wait(0.05)
        assert calls == ["called"]
        remote.send(b"x")
        loop.wait()
        assert calls == ["called"] * 2
    loop.close()


def test_wake_ends_a_wait_and_a_closed_loop_accepts_close_and_wake() -> None:
    loop = SelectorLoop()
    loop.wake()
    began = time.monotonic()
    loop.wait(60)
    assert time.monotonic() - began < 30
    loop.close()
    loop.close()
    loop.wake()
