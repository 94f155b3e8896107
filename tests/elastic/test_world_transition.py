"""A rank that waits for its next world, without processes: which rank saves the commit, and the effect of a SIGTERM."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.elastic import world_transition
from lightning_strategies_ext.elastic.membership import Member
from lightning_strategies_ext.elastic.world_transition import SAVE_AFTER_S, LeaveRequest, WorldTransition
from lightning_strategies_ext.exceptions import TooFewRanksError


class WaitingMembership:
    """A membership in which this rank is the second of its host, and waits for the given times."""

    waiting_reason = "Too few ranks remain."
    sigterm_consequence = "the job ends"
    has_joined = True

    def __init__(self, waits: Callable[[Callable[[float], None]], None]) -> None:
        own = Peer.this_process(1)
        parent = replace(own, rank=0, pid=1, start_time=0.0)  # a process that runs and is not this one
        self.members = [Member(parent), Member(own)]
        self.waits = waits

    def next_rank(self, on_wait: Callable[[float], None]) -> int:
        self.waits(on_wait)
        return 0

    def rendezvous(self, member: Member, on_wait: Callable[[float], None]) -> bool:
        return True


class Saved:
    """A plugin for checkpoints that counts them."""

    def __init__(self) -> None:
        self.paths: list[Path] = []

    def save_checkpoint(self, checkpoint: Any, path: Path) -> None:
        path.write_text("own")
        self.paths.append(path)


def wait(tmp_path: Path, waits: Callable[[Callable[[float], None]], None], request: LeaveRequest) -> list[Path]:
    """Waits for the next world, and returns the checkpoints that this rank has saved."""
    saved = Saved()
    transition = WorldTransition(
        SimpleNamespace(checkpoint_io=saved, apply_rank=lambda: None, detach=lambda: None),  # type: ignore[arg-type]
        SimpleNamespace(default_root_dir=str(tmp_path), global_step=7),  # type: ignore[arg-type]
        WaitingMembership(waits),  # type: ignore[arg-type]
        SimpleNamespace(has_changed=False),  # type: ignore[arg-type]
        SimpleNamespace(shared=object(), step=6, batches=6, build_checkpoint=dict),  # type: ignore[arg-type]
        request,
        1,
    )
    transition.join_next_world()
    return saved.paths


def test_a_rank_saves_the_commit_if_the_lowest_rank_does_not(tmp_path, caplog):
    path = tmp_path / "elastic-step=6.ckpt"
    path.write_text("of an earlier job")

    def wait_long(on_wait: Callable[[float], None]) -> None:
        on_wait(SAVE_AFTER_S + 1)
        assert path.read_text() == "of an earlier job"
        assert not caplog.messages
        on_wait(2 * SAVE_AFTER_S + 1)

    assert wait(tmp_path, wait_long, LeaveRequest()) == [path]
    (message,) = caplog.messages
    assert f"The state at step 6 is saved in {path}" in message


def test_a_checkpoint_of_another_rank_is_named(tmp_path, caplog):
    path = tmp_path / "elastic-step=6.ckpt"

    def wait_for_peer(on_wait: Callable[[float], None]) -> None:
        path.write_text("of the lowest rank")
        on_wait(SAVE_AFTER_S + 1)

    assert wait(tmp_path, wait_for_peer, LeaveRequest()) == []
    (message,) = caplog.messages
    assert f"The state at step 6 is saved in {path}" in message


def test_a_sigterm_while_waiting_saves_the_commit(tmp_path):
    request = LeaveRequest(requested_at=time.monotonic() - 60)
    with pytest.raises(TooFewRanksError, match="step 6 is saved"):
        wait(tmp_path, lambda on_wait: on_wait(0.1), request)
    assert (tmp_path / "elastic-step=6.ckpt").read_text() == "own"


def test_at_the_end_of_a_job_only_the_lowest_rank_saves(tmp_path):
    path = tmp_path / "elastic-step=6.ckpt"
    lowest = threading.Timer(0.3, path.write_text, ["of the lowest rank"])
    lowest.start()
    request = LeaveRequest(requested_at=time.monotonic() - 60)
    with pytest.raises(TooFewRanksError, match="step 6 is saved"):
        wait(tmp_path, lambda on_wait: on_wait(0.1), request)
    lowest.join()
    assert path.read_text() == "of the lowest rank"


def test_a_repeated_request_keeps_the_time_of_the_first(monkeypatch):
    request = LeaveRequest()
    monkeypatch.setattr(world_transition.time, "monotonic", lambda: 100.0)
    request.set(None)
    monkeypatch.setattr(world_transition.time, "monotonic", lambda: 104.0)
    request.set(error := KeyboardInterrupt())
    assert request.is_older_than(3.0)
    assert request.error is error
