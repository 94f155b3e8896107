"""Worlds of an elastic pool, with workers that are scripts in this process: exits and messages at chosen moments."""

import re
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from lightning_strategies_ext.exceptions import WorkerDiedError, WorkerRaisedError
from lightning_strategies_ext.launch.processes import elastic_pool
from lightning_strategies_ext.launch.processes.elastic_pool import RestartPolicy, run_elastic
from lightning_strategies_ext.launch.processes.pool import TaskOutcome, WorkerPool
from lightning_strategies_ext.launch.processes.process_settings import ProcessSettings, RngState
from lightning_strategies_ext.launch.processes.worker_interface import Worker, WorkerStarter, WorkerState
from lightning_strategies_ext.launch.protocol import (
    JoinedWorld,
    JoinPending,
    RankAssignment,
    ReadyToJoin,
    RunTask,
    Shutdown,
    TaskDone,
    TaskFailed,
    WorldMembers,
)

SETTINGS = ProcessSettings("/", {}, RngState.now(), 1)
DONE = TaskDone(SETTINGS.rng)


class ScriptedWorker(Worker):
    """A scripted worker: ``script(worker, message)`` answers messages of a pool, or the worker sends a usual reply."""

    def __init__(self, rank: int, name: str, script: Callable[["ScriptedWorker", Any], bool]) -> None:
        self.rank = rank
        self.name = name
        self.script = script
        self.has_exited = False
        self.num_polls = 0
        self.sent: list[Any] = []
        self.replies: list[Any] = []
        self.always_ready, other = socket.socketpair()
        other.close()

    @property
    def waitables(self) -> list[Any]:
        return [self.always_ready]

    def _send(self, message: Any, task: Any) -> None:
        self.sent.append(message)
        if self.script(self, message):
            return
        if isinstance(message, RunTask) or message == WorldMembers(None):
            self.replies.append(ReadyToJoin())
        elif isinstance(message, RankAssignment):
            self.replies.append(DONE if message.rank is None else joined(self))
        elif isinstance(message, WorldMembers):
            self.replies.append(DONE)

    def _next_message(self) -> Any:
        self.num_polls += 1
        assert self.num_polls < 1000, "the pool waits for a worker that waits for the pool"
        return self.replies.pop(0) if self.replies else None

    def exit(self) -> None:
        self.has_exited = True
        self.replies.append(WorkerDiedError(f"rank {self.rank} was killed", self.rank, 4711, -9, "SIGKILL"))

    def is_alive(self) -> bool:
        return not self.has_exited

    def kill(self) -> None:
        self.has_exited = True

    def close(self) -> None:
        self.enter(WorkerState.EXITED)
        self.always_ready.close()

    def wait(self, timeout_s: float) -> None:
        pass


class ScriptedStarter(WorkerStarter):
    """A starter that starts scripted workers, named a, b, c, ... in the order in which they start."""

    address = None
    closes_through_library = False

    def __init__(self, script: Callable[[ScriptedWorker, Any], bool]) -> None:
        self.script = script
        self.started: dict[str, ScriptedWorker] = {}

    def _start(self, rank: int) -> ScriptedWorker:
        name = "abcdefgh"[len(self.started)]
        worker = self.started[name] = ScriptedWorker(rank, name, self.script)
        worker.enter(WorkerState.IDLE)
        return worker

    def start(self, num_workers: int, inherited_task: Any) -> Iterator[ScriptedWorker]:
        return map(self._start, range(num_workers))

    def replace(self, exited: Any, workers: Sequence[Any]) -> ScriptedWorker:
        return self._start(exited.rank)

    def close(self) -> None:
        pass


class Run:
    """A task on scripted workers. A test's script sees the workers that were started so far."""

    def __init__(self, num_workers: int, script: Callable[[ScriptedWorker, Any], bool], **policy: Any) -> None:
        starter = ScriptedStarter(script)
        self.workers = starter.started
        self._pool = WorkerPool(num_workers, starter)
        self._policy = RestartPolicy(**{"min_workers": 1, "max_restarts": 3, "window_s": 60, **policy})

    def outcome(self) -> TaskOutcome:
        settings = [SETTINGS] * len(self.workers)
        try:
            return run_elastic(self._pool, object(), settings, False, self._policy)  # type: ignore[arg-type]
        finally:
            self._pool.close()


def joined(worker: ScriptedWorker) -> JoinedWorld:
    """Uses the worker's name as the member."""
    return JoinedWorld(worker.name)  # type: ignore[arg-type]


def worlds(worker: ScriptedWorker) -> list[str]:
    """Members of the worlds that the worker was in."""
    return ["".join(map(str, message.members)) for message in worker.sent if getattr(message, "members", None)]


def test_a_lost_worker_is_replaced_and_the_next_world_has_the_replacement() -> None:
    def script(worker: ScriptedWorker, message: Any) -> bool:
        if message != WorldMembers(["a", "b", "c"]):  # type: ignore[list-item]
            return False
        worker.exit() if worker.name == "b" else worker.replies.append(ReadyToJoin("lost rank 1"))
        return True

    run = Run(3, script, min_workers=3)
    outcome = run.outcome()
    assert outcome.error is None
    assert outcome.has_results == {0, 1, 2}
    assert {name: worlds(worker) for name, worker in run.workers.items()} == {
        "a": ["abc", "acd"],
        "b": ["abc"],
        "c": ["abc", "acd"],
        "d": ["acd"],
    }
    assert run.workers["d"].sent[0] == RunTask(SETTINGS, False, is_joining=True)


def test_a_worker_that_starts_slowly_joins_at_a_step_of_the_others() -> None:
    def script(worker: ScriptedWorker, message: Any) -> bool:
        if message == WorldMembers(["a", "b"]):  # type: ignore[list-item]
            worker.exit() if worker.name == "b" else worker.replies.append(ReadyToJoin("lost rank 1"))
        elif message == WorldMembers(["a"]):  # type: ignore[list-item]
            run.workers["c"].replies.append(ReadyToJoin())
        elif isinstance(message, JoinPending):
            worker.replies.append(ReadyToJoin())
        else:
            return isinstance(message, RunTask) and message.is_joining
        return True

    run = Run(2, script)
    outcome = run.outcome()
    assert (outcome.error, outcome.has_results) == (None, {0, 1})
    assert worlds(run.workers["a"]) == ["ab", "a", "ac"]


def test_a_worker_that_leaves_its_world_is_restarted_once_it_has_exited() -> None:
    def script(worker: ScriptedWorker, message: Any) -> bool:
        if message == WorldMembers(["a", "b", "c"]):  # type: ignore[list-item]
            worker.replies.append(TaskFailed.from_exception(KeyError()) if worker.name == "b" else ReadyToJoin())
        elif message == Shutdown():
            worker.has_exited = True
        elif message == WorldMembers(["a", "c"]):  # type: ignore[list-item]
            assert run.workers["b"].sent[-1] == Shutdown()
        elif isinstance(message, JoinPending):
            for other in (run.workers["a"], run.workers["c"]):
                other.replies.append(ReadyToJoin())
        else:
            return False
        return True

    run = Run(3, script, leaves_by=(KeyError,))
    outcome = run.outcome()
    assert (outcome.error, outcome.has_results) == (None, {0, 1, 2})
    assert worlds(run.workers["a"]) == ["abc", "ac", "acd"]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"max_restarts": 0}, r"(?s)rank 1 was killed.*`max_restarts=0` within 60 s"),
        (
            {"min_workers": 2, "wait_timeout_s": 0.0},
            r"(?s)Only 1 of `min_workers=2` .* and worker 1 \(pid 0\) .*killed",
        ),
    ],
)
def test_too_many_exits_fail_the_task(monkeypatch: pytest.MonkeyPatch, policy: dict[str, Any], message: str) -> None:
    monkeypatch.setattr(elastic_pool, "GRACE_S", 0.0)  # the replacement never replies

    def script(worker: ScriptedWorker, message: Any) -> bool:
        if message == WorldMembers(["a", "b"]):  # type: ignore[list-item]
            worker.exit() if worker.name == "b" else worker.replies.append(ReadyToJoin("lost rank 1"))
            return True
        return isinstance(message, RunTask) and message.is_joining

    outcome = Run(2, script, **policy).outcome()
    assert re.search(message, str(outcome.error))


def test_the_error_of_a_worker_fails_the_task_and_the_others_receive_no_rank() -> None:
    def script(worker: ScriptedWorker, message: Any) -> bool:
        if message == WorldMembers(["a", "b"]):  # type: ignore[list-item]
            worker.replies.append(
                TaskFailed.from_exception(ValueError("wrong")) if worker.name == "a" else ReadyToJoin()
            )
            return True
        return False

    run = Run(2, script)
    outcome = run.outcome()
    assert isinstance(outcome.error, WorkerRaisedError)
    assert outcome.error.error_index == 0
    assert outcome.has_results == {1}
    assert RankAssignment(None) in run.workers["b"].sent


def test_a_worker_that_fails_while_it_waits_for_a_rank_receives_none_after_its_reply() -> None:
    def script(worker: ScriptedWorker, message: Any) -> bool:
        if message == WorldMembers(["a", "b"]):  # type: ignore[list-item]
            if worker.name == "b":
                worker.exit()
            else:
                worker.replies += [
                    ReadyToJoin("b is lost"),
                    None,
                    TaskFailed.from_exception(OSError("no space"), has_results=True),
                ]
            return True
        if worker.name == "c":
            worker.replies += [*[None] * 20, TaskFailed.from_exception(OSError("too late to join"))]
        return worker.name == "c"

    run = Run(2, script, min_workers=2)
    outcome = run.outcome()
    assert isinstance(outcome.error, WorkerRaisedError)
    assert outcome.has_results == {0}
    assert RankAssignment(None) not in run.workers["a"].sent


def test_the_first_exit_is_the_cause_if_the_replacement_exits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(worker: ScriptedWorker, message: Any) -> bool:
        if message == WorldMembers(["a", "b"]):  # type: ignore[list-item]
            if worker.name == "b":
                worker.exit()
            else:
                worker.replies += [*[None] * 6, TaskFailed.from_exception(OSError("lost"))]
            return True
        if worker.name == "c":
            worker.has_exited = True
            worker.replies.append(WorkerDiedError("rank 1 exited with exit code 1", 1, 4711, 1, None))
        return worker.name in ("c", "d")

    monkeypatch.setattr(elastic_pool, "GRACE_S", 0)  # d never replies
    assert str(Run(2, script).outcome().error).startswith("rank 1 was killed")


def test_a_late_reply_for_a_world_that_was_given_up_does_not_enter_the_next_world() -> None:
    def script(worker: ScriptedWorker, message: Any) -> bool:
        num_ranks = sum(isinstance(sent, RankAssignment) for sent in worker.sent)
        if message == WorldMembers(["a", "b", "c"]):  # type: ignore[list-item]
            worker.exit() if worker.name == "b" else worker.replies.extend([ReadyToJoin()] * (worker.name == "c"))
        elif isinstance(message, RunTask) and worker.name == "d":
            for ready in (run.workers["a"], worker):  # so that the next world has these workers and c
                ready.replies.append(ReadyToJoin())
        elif isinstance(message, RankAssignment) and (worker.name, num_ranks) == ("c", 2):
            worker.exit()
        elif isinstance(message, RankAssignment) and (worker.name, num_ranks) == ("d", 1):
            pass  # it replies late, as follows
        elif isinstance(message, RankAssignment) and (worker.name, num_ranks) == ("a", 3):
            run.workers["d"].replies.append(joined(run.workers["d"]))
        elif message == WorldMembers(None) and worker.name == "d":
            run.workers["a"].replies.append(joined(run.workers["a"]))
        else:
            return False
        return True

    run = Run(3, script)
    outcome = run.outcome()
    assert outcome.error is None
    assert worlds(run.workers["a"]) == ["abc", "ae"]
    assert worlds(run.workers["d"]) == []
