"""Failures of ``shm`` process groups: no rank hangs, and the error names the failed rank."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_strategies_ext.shm.creation import ShmOptions
from lightning_strategies_ext.shm.native_build import NATIVE_VARIABLE
from tests.shm.start import start_shm
from tests.support import ranks
from tests.support.private_dev_shm import private_shared_memory
from tests.support.ranks import outcomes_of_ranks, run_ranks, start_command

NUM_LARGE = 1_000_000
VARIABLE = "LIGHTNING_STRATEGIES_EXT_SHM_SEGMENT_BYTES"


@pytest.fixture(autouse=True, params=["compiled", "in rounds"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Selects the implementation of all-reduces; other collectives use rounds."""
    monkeypatch.setitem(ranks.rank_environment, NATIVE_VARIABLE, "1" if request.param == "compiled" else "0")
    return request.param


def pids_of_ranks(rank: int) -> list[int]:
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    return pids


def error_of(function, *args, **kwargs) -> tuple[str, float]:
    """Returns the text of the error that a call raises, and the duration of the call."""
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        function(*args, **kwargs)
    return str(caught.value), time.monotonic() - start


def exit_while_others_wait(numel: int, is_asynchronous: bool) -> tuple[str, float, int]:
    rank = start_shm()
    last = dist.get_world_size() - 1
    killed_pid = pids_of_ranks(rank)[last]
    tensor = torch.ones(numel)
    for _ in range(3):
        dist.all_reduce(tensor)
    if rank == last:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    if is_asynchronous:
        error, seconds = error_of(dist.all_reduce(tensor, async_op=True).wait)
    else:
        error, seconds = error_of(dist.all_reduce, tensor)
    return error, seconds, killed_pid


@pytest.mark.processes
@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize(("world_size", "numel"), [(2, 1), (2, NUM_LARGE), (3, 1), (3, NUM_LARGE)])
def test_a_wait_for_a_killed_rank_raises_at_once_and_names_the_rank(world_size: int, numel: int, is_asynchronous: bool):
    outcomes = outcomes_of_ranks(exit_while_others_wait, numel, is_asynchronous, world_size=world_size)
    assert outcomes[-1].exit_code == -signal.SIGKILL
    for outcome in outcomes[:-1]:
        assert outcome.value is not None, outcome
        error, seconds, killed_pid = outcome.value
        assert f"rank {world_size - 1} (pid {killed_pid})" in error
        assert seconds < 5


def exit_with_a_running_child() -> tuple[str, float]:
    rank = start_shm()
    pids: list[int | None] = [None, None]
    child = os.fork() if rank == 1 else None
    if child == 0:
        time.sleep(60)  # like DataLoader workers, which exit later
        os._exit(0)
    dist.all_gather_object(pids, child)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert pids[1] is not None
    try:
        return error_of(dist.all_reduce, torch.ones(4))
    finally:
        os.kill(pids[1], signal.SIGKILL)


@pytest.mark.processes
def test_the_exit_of_a_rank_is_detected_while_its_child_runs():
    error, seconds = outcomes_of_ranks(exit_with_a_running_child)[0].value
    assert "rank 1 (pid" in error
    assert seconds < 5


def reduce_in_a_child() -> tuple[int, float]:
    rank = start_shm()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    child = os.fork() if rank == 1 else 0
    if rank == 1 and child == 0:
        try:
            dist.all_reduce(tensor)
        except dist.DistBackendError as error:
            os._exit(7 if "forked" in str(error) else 8)
        os._exit(9)
    exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else 7
    dist.all_reduce(tensor)
    return exit_code, tensor.item()


@pytest.mark.processes
def test_a_forked_child_cannot_call_collectives_of_its_parent():
    assert run_ranks(reduce_in_a_child) == [(7, 4.0)] * 2


def reduce_after_the_end() -> str:
    start_shm()
    group = dist.group.WORLD
    group.allreduce([torch.ones(1)]).wait()
    dist.destroy_process_group()
    group.shutdown()  # the second shutdown; before torch 2.6, the first one
    return error_of(group.allreduce([torch.ones(1)]).wait)[0]


@pytest.mark.processes
def test_a_group_that_was_shut_down_raises_an_error_about_it():
    assert all("it was shut down" in text for text in run_ranks(reduce_after_the_end))


def leave_while_another_waits(reason: str) -> tuple[str, float]:
    rank = start_shm()
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)
        if reason == "destroyed":
            dist.destroy_process_group()
        return "", 0.0
    return error_of(dist.all_reduce, torch.ones(4))


@pytest.mark.processes
@pytest.mark.parametrize("reason", ["destroyed", "returned"])
def test_a_wait_for_a_rank_that_leaves_the_group_raises(reason: str):
    error, seconds = run_ranks(leave_while_another_waits, reason)[0]
    assert re.search(r"rank 1 \(pid \d+\) has (left|ended)", error)
    assert seconds < 5


def leave_while_another_is_late(reason: str) -> tuple[str, float]:
    rank = start_shm()
    dist.barrier()
    if rank == 1:
        time.sleep(6)
    if rank == 2:
        time.sleep(0.3)
        if reason == "destroyed":
            dist.destroy_process_group()
        elif reason == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    return error_of(dist.all_reduce, torch.ones(4)) if rank == 0 else ("", 0.0)


@pytest.mark.processes
@pytest.mark.parametrize("reason", ["destroyed", "returned", "killed"])
def test_a_wait_for_an_exited_rank_raises_at_once_though_another_rank_is_late(reason: str):
    first = outcomes_of_ranks(leave_while_another_is_late, reason, world_size=3)[0]
    assert first.value is not None, first
    error, seconds = first.value
    assert re.search(r"rank 2 \(pid \d+\) has (left|ended)", error)
    assert seconds < 4


def end_while_another_does_not_run() -> float:
    rank = start_shm()
    pids = pids_of_ranks(rank)
    tensor = torch.full((3,), rank + 1.0)
    if rank == 0:
        dist.all_reduce(tensor)  # sleeps until SIGSTOP
        return tensor[0].item()
    time.sleep(0.3)
    os.kill(pids[0], signal.SIGSTOP)
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {pids[0]}"])
    dist.all_reduce(tensor)
    os._exit(0)


@pytest.mark.processes
def test_a_contribution_of_a_rank_that_has_exited_counts():
    first = outcomes_of_ranks(end_while_another_does_not_run)[0]
    assert first.value == 3.0, first


def sleep_too_long(reason: str) -> tuple[str, float, str, float]:
    rank = start_shm(timeout_s=2)
    pids = pids_of_ranks(rank)
    dist.barrier()
    if rank == 1:
        if reason == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(5)
        return "", 0.0, "", 0.0
    first = error_of(dist.all_reduce, torch.ones(4))
    time.sleep(1.5)  # so that all ranks reach their timeout
    again = error_of(dist.all_reduce, torch.ones(4))
    if reason == "stopped" and rank == 0:
        os.kill(pids[1], signal.SIGKILL)
    return *first, *again


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("reason", ["asleep", "stopped"])
def test_a_timeout_names_the_late_rank_and_the_group_is_unusable_afterwards(reason: str, world_size: int):
    outcomes = outcomes_of_ranks(sleep_too_long, reason, world_size=world_size)
    for outcome in outcomes:
        if outcome.rank == 1:
            continue
        assert outcome.value is not None, outcome
        error, seconds, again, again_seconds = outcome.value
        assert "rank 1 (pid" in error
        assert 1.5 < seconds < 3.5
        assert "has failed before" in again
        assert "rank 1 (pid" in again
        assert again_seconds < 0.5


def wait_for_a_rank_after_another_has_left() -> tuple[str, float]:
    rank = start_shm(timeout_s=2)
    dist.barrier()
    if rank == 1:
        time.sleep(6)
        return "", 0.0
    if rank == 2:
        dist.all_reduce(torch.ones(1), async_op=True)
        time.sleep(0.2)
        dist.destroy_process_group()
        return "", 0.0
    return error_of(dist.all_reduce, torch.ones(1))


@pytest.mark.processes
def test_a_timeout_holds_though_another_rank_has_sent_its_part_and_exited():
    outcome = outcomes_of_ranks(wait_for_a_rank_after_another_has_left, world_size=3)[0]
    assert outcome.value is not None, outcome
    error, seconds = outcome.value
    assert re.search(r"rank [12] \(pid", error)
    assert seconds < 3.5


def fail_asynchronously() -> list[str]:
    rank = start_shm(timeout_s=10)
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    works = [dist.all_reduce(torch.ones(size), async_op=True) for size in (1, NUM_LARGE, 1)]
    errors = []
    with pytest.raises(Exception, match="rank 1") as caught:
        works[0].get_future().wait()
    errors.append(str(caught.value))
    for work in works:
        errors.append(error_of(work.wait)[0])
        assert work.is_completed()
        assert not work.is_success()
    errors.append(error_of(dist.barrier)[0])
    return errors


@pytest.mark.processes
def test_handles_and_futures_of_failed_operations_raise():
    outcome = outcomes_of_ranks(fail_asynchronously)[0]
    assert outcome.value is not None, outcome
    assert all(re.search(r"rank 1 \(pid \d+\)", error) for error in outcome.value)
    assert all("has failed before" in error for error in outcome.value[2:])


def fail_in_one_group() -> float:
    rank = start_shm()
    pair = dist.new_group([0, 1], backend="shm")
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    error_of(dist.all_reduce, torch.ones(1))
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor, group=pair)
    return tensor.item()


@pytest.mark.processes
def test_groups_of_running_ranks_continue():
    outcomes = outcomes_of_ranks(fail_in_one_group, world_size=3)
    assert [outcome.value for outcome in outcomes[:2]] == [3.0, 3.0], str(outcomes[0])


def name_global_ranks() -> str:
    rank = start_shm()
    pair = dist.new_group([1, 2], backend="shm")
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(dist.barrier, group=pair)[0] if rank == 1 else ""


@pytest.mark.processes
def test_ranks_of_a_subgroup_are_named_as_in_the_default_group():
    assert "rank 2 (pid" in outcomes_of_ranks(name_global_ranks, world_size=3)[1].value


ENDLESS_SCRIPT = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("shm", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=3)
print("ready", flush=True)
while True:
    dist.all_reduce(torch.ones(300_000))
"""


@pytest.mark.processes
def test_no_shared_memory_remains_after_all_ranks_are_killed(tmp_path: Path):
    (tmp_path / "rank.py").write_text(ENDLESS_SCRIPT)
    with private_shared_memory() as shared_memory:
        free = shared_memory.free_num_bytes()
        command = [*shared_memory.prefix, sys.executable, tmp_path / "rank.py", f"file://{tmp_path}/store"]
        processes = [start_command(*command, rank) for rank in range(3)]
        try:
            for process in processes:
                while (line := process.stdout.readline()) and "ready" not in line:
                    pass
                assert line, "a rank has ended before it was ready"
            time.sleep(0.2)
            assert shared_memory.free_num_bytes() < free - 1_000_000, "the ranks have another /dev/shm"
        finally:
            for process in processes:
                process.kill()
        for process in processes:
            process.communicate(timeout=10)
        shared_memory.wait_until_empty()


def start_with_too_much(num_bytes: int) -> tuple[list[float], bool]:
    os.environ[VARIABLE] = str(num_bytes)
    rank = start_shm()
    tensor = torch.full((3,), rank + 1.0)
    dist.all_reduce(tensor)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    gathered = [None] * 2
    dist.all_gather_object(gathered, rank)
    dist.barrier()
    dist.destroy_process_group()
    return tensor.tolist(), gathered == [0, 1]


@pytest.mark.processes
def test_without_space_in_shared_memory_the_group_uses_gloo_and_logs_it_once():
    outcomes = outcomes_of_ranks(start_with_too_much, 10**15)
    assert [outcome.value for outcome in outcomes] == [([6.0] * 3, True)] * 2, str(outcomes[0])
    messages = [
        [line for line in outcome.output.splitlines() if "falling back to gloo" in line] for outcome in outcomes
    ]
    assert [len(lines) for lines in messages] == [1, 0]
    assert "/dev/shm" in messages[0][0]


@pytest.mark.parametrize("value", ["much", "", "1.5", "1000", "-1"])
def test_a_bad_size_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch, value: str):
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ValueError, match=VARIABLE):
        ShmOptions()


@pytest.mark.parametrize("value", ["much", 1000, -1])
def test_a_bad_size_in_the_options_is_refused(value):
    with pytest.raises(ValueError, match="segment_num_bytes"):
        ShmOptions(segment_num_bytes=value)


def start_with(options) -> int:
    start_shm(pg_options=options)
    tensor = torch.ones(300_000)
    dist.all_reduce(tensor)
    return int(tensor.sum())


@pytest.mark.processes
def test_options_set_the_size():
    assert run_ranks(start_with, ShmOptions(segment_num_bytes=200_000)) == [600_000] * 2


@pytest.mark.processes
def test_options_of_another_kind_are_refused():
    for outcome in outcomes_of_ranks(start_with, {"segment_num_bytes": 1}):
        assert outcome.error is not None
        assert "TypeError" in outcome.error
        assert "ShmOptions" in outcome.error
