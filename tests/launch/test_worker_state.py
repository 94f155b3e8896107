"""The states of a worker, and the replies and calls that change the state."""

import socket
import subprocess
from itertools import product
from typing import Any

import psutil
import pytest
import torch

from lightning_strategies_ext import DDPSpawnStrategy
from lightning_strategies_ext.exceptions import WorkerDiedError
from lightning_strategies_ext.launch.processes.pool import WorkerPool
from lightning_strategies_ext.launch.processes.process_settings import ProcessSettings, RngState
from lightning_strategies_ext.launch.processes.worker_interface import Worker, WorkerState
from lightning_strategies_ext.launch.processes.worker_process import ProcessStarter, WorkerProcess
from lightning_strategies_ext.launch.protocol import ReadyToJoin, RunTask, TaskDone, TaskFailed
from lightning_strategies_ext.launch.transport.channel import Channel

STARTING, IDLE, RUNNING, FAILED, EXITED = WorkerState
ALLOWED = {
    *((STARTING, after) for after in (IDLE, EXITED)),
    *((IDLE, after) for after in (RUNNING, FAILED, EXITED)),
    *((RUNNING, after) for after in (IDLE, FAILED, EXITED)),
    (FAILED, EXITED),
}
TASK = RunTask(ProcessSettings("/", {}, RngState.now(), 1), is_continuation=False)
FAILURE = TaskFailed(None, "ValueError", "text", 0.0, has_results=False, is_secondary=False)


class ScriptedWorker(Worker):
    """A worker that returns the given replies, one after the other."""

    def __init__(self, *replies: Any) -> None:
        self.rank = 3
        self.replies = [*replies]
        self.submitted: list[RunTask] = []

    def _send(self, message: Any, task: Any) -> None:
        self.submitted.append(message)

    def _next_message(self) -> Any:
        return self.replies.pop(0)


@pytest.mark.parametrize(("before", "after"), product(WorkerState, WorkerState), ids=lambda state: state.value)
def test_a_worker_enters_the_states_of_the_table_only(before: WorkerState, after: WorkerState) -> None:
    worker = ScriptedWorker()
    worker.state = before
    if before is after or (before, after) in ALLOWED:
        worker.enter(after)
        assert worker.state is after
    else:
        with pytest.raises(RuntimeError, match=f"worker 3 is {before.value} and cannot become {after.value}"):
            worker.enter(after)
        assert worker.state is before


@pytest.mark.parametrize(
    ("reply", "state"),
    [
        (TaskDone(RngState.now()), IDLE),
        (FAILURE, FAILED),
        (WorkerDiedError("killed", 3, 4711, -9), EXITED),
        (ReadyToJoin(), RUNNING),
        (None, RUNNING),
    ],
    ids=lambda value: type(value).__name__,
)
def test_replies_to_a_task_change_the_state(reply: Any, state: WorkerState) -> None:
    worker = ScriptedWorker(reply)
    worker.enter(IDLE)
    worker.submit(TASK, None)
    assert (worker.state, worker.submitted) == (RUNNING, [TASK])
    assert worker.next_reply() is reply
    assert worker.state is state


def test_a_worker_that_is_starting_keeps_a_task_and_one_that_has_failed_takes_none() -> None:
    worker = ScriptedWorker(FAILURE)
    worker.submit(TASK, None)
    assert worker.state is STARTING
    worker.enter(IDLE)
    worker.next_reply()  # its setup has failed
    with pytest.raises(RuntimeError, match="worker 3 is failed and cannot become running"):
        worker.submit(TASK, None)


def raise_on_rank_1() -> int:
    if torch.distributed.get_rank() == 1:
        raise ValueError("on rank 1")
    return 7


@pytest.mark.processes
@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_processes_pass_through_the_states(start_method: Any) -> None:
    strategy = DDPSpawnStrategy(start_method=start_method, parallel_devices=[torch.device("cpu")] * 2)
    assert strategy.spawn(torch.distributed.get_world_size) == 2
    pool = strategy.launcher.workers.pool
    workers = [*pool.workers]
    assert [worker.state for worker in workers] == [IDLE, IDLE]
    with pytest.raises(Exception, match="on rank 1"):
        strategy.spawn(raise_on_rank_1)
    assert [worker.state for worker in workers] == [EXITED, EXITED]
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.processes
def test_a_worker_that_has_closed_its_channel_and_does_not_exit_counts_as_exited() -> None:
    local, remote = socket.socketpair()
    remote.close()
    with subprocess.Popen(["sleep", "60"]) as process:
        worker = WorkerProcess(0, Channel(local), process.pid, process.poll)
        try:
            assert isinstance(worker.wait_for_message(30), WorkerDiedError)
        finally:
            process.kill()
            worker.close()


@pytest.mark.processes
def test_no_process_remains_if_a_worker_cannot_be_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[WorkerProcess] = []

    def interrupt(worker: WorkerProcess, message: Any) -> None:
        started.append(worker)
        raise KeyboardInterrupt

    monkeypatch.setattr(WorkerProcess, "send", interrupt)
    with pytest.raises(KeyboardInterrupt):
        WorkerPool(2, ProcessStarter("spawn", "lightning_strategies_ext.pytorch"))
    (worker,) = started
    assert worker.state is EXITED
    assert not psutil.pid_exists(worker.pid)
