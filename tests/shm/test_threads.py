"""``shm`` process groups with several threads, waits with timeouts, and destruction during operations."""

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext.shm.native_build import NATIVE_VARIABLE
from tests.shm.start import start_shm
from tests.support import ranks
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True, params=["compiled", "in rounds"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Selects the implementation of all-reduces; other collectives use rounds."""
    monkeypatch.setitem(ranks.rank_environment, NATIVE_VARIABLE, "1" if request.param == "compiled" else "0")
    return request.param


def in_threads(function: Callable[[int], Any], num_threads: int) -> list[Any]:
    """Returns the values of a function in several threads; raises an exception of one of the threads."""
    values: list[Any] = [None] * num_threads
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            values[number] = function(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return values


def reduce_in_threads(num_rounds: int, numel: int) -> int:
    """Returns the number of wrong sums. All threads reduce equal tensors, so any pairing of operations is correct."""
    rank, size = start_shm(), dist.get_world_size()

    def reduce(number: int) -> int:
        wrong = 0
        for index in range(num_rounds):
            tensor = torch.full((numel,), rank + 1.0)
            work = dist.all_reduce(tensor, async_op=(index + number) % 2 == 0)
            if rank == 0 and index % 50 == 0:
                time.sleep(0.001)
            if work is not None:
                work.wait()
            wrong += int((tensor != size * (size + 1) / 2).sum())
        return wrong

    return sum(in_threads(reduce, 2))


@pytest.mark.parametrize(("world_size", "numel"), [(2, 50_000), (3, 3)])
def test_two_threads_that_use_one_group_get_the_right_sums(world_size: int, numel: int):
    num_rounds = 1000 if numel < 10 else 400
    assert run_ranks(reduce_in_threads, num_rounds, numel, world_size=world_size) == [0] * world_size


def reduce_with_options_without_async_op() -> tuple[list[float], bool]:
    rank = start_shm()
    group, options = dist.group.WORLD, dist.AllreduceOptions()
    # Since torch 2.8, the options of all-reduces and barriers contain whether the caller waits.
    options_without_async_op = SimpleNamespace(reduceOp=ReduceOp.SUM, timeout=options.timeout)
    one, other = torch.full((5,), rank + 1.0), torch.full((2, 3), rank + 1.0).t()
    works = [
        group.allreduce([one], options_without_async_op),
        group.allreduce([other], options_without_async_op),
        group.allreduce_coalesced([one], options_without_async_op),
        group.barrier(options_without_async_op),
    ]
    for work in works:
        work.wait()
    return [one[0].item(), other[0, 0].item()], all(work.is_completed() for work in works)


def test_options_without_async_op_return_a_handle():
    assert run_ranks(reduce_with_options_without_async_op) == [([6.0, 3.0], True)] * 2


def join_with_handles_in_cxx() -> list[float]:
    rank = start_shm()
    model = DistributedDataParallel(nn.Linear(2, 1))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    # Each step passes the handle of an all-reduce to DDP's reducer, which waits for it in the backward pass.
    with model.join(divide_by_initial_world_size=False):
        for _ in range(3 + 2 * rank):
            model(torch.full((4, 2), rank + 1.0)).mean().backward()
    return [round(value, 5) for value in model.module.weight.grad.flatten().tolist()]


def test_a_handle_that_only_cxx_code_keeps_can_be_waited_for():
    # Three steps with the mean of 1 and 2, and two last steps of rank 1 only.
    assert run_ranks(join_with_handles_in_cxx)[1] == [3 * 1.5 + 2 * 2.0] * 2


def destroy_with_pending_operations(has_waited: bool) -> list[str]:
    rank = start_shm()
    dist.barrier()
    if rank == 1:
        time.sleep(1)
        return []
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(3)]
    works += [dist.barrier(async_op=True), dist.broadcast(torch.ones(4), 1, async_op=True)]
    futures = [work.get_future().then(lambda future: future.value()) for work in works]
    ended = threading.Event()
    futures[-1].add_done_callback(lambda _: ended.set())
    if has_waited:
        time.sleep(0.1)
    dist.destroy_process_group()
    assert ended.wait(10), "a future has not ended"
    errors = []
    for future in futures:
        with pytest.raises(RuntimeError) as caught:
            future.wait()
        errors.append(str(caught.value))
    return errors


@pytest.mark.parametrize("has_waited", [False, True])
def test_futures_of_pending_operations_fail_when_the_group_is_destroyed(has_waited: bool):
    errors = run_ranks(destroy_with_pending_operations, has_waited)[0]
    assert len(errors) == 5
    assert all("shut down" in error or "left" in error or "ended" in error for error in errors), errors


def fork_while_a_thread_waits() -> tuple[int, float]:
    rank = start_shm()
    dist.barrier()
    tensor = torch.ones(3)
    if rank == 1:
        time.sleep(2)
        dist.all_reduce(tensor)
        return 0, tensor[0].item()
    thread = threading.Thread(target=dist.all_reduce, args=(tensor,))
    thread.start()
    time.sleep(0.3)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # kills the child if it waits for the thread, which a fork does not copy
        try:
            dist.all_reduce(torch.ones(3))
        except dist.DistBackendError as error:
            os._exit(7 if "forked" in str(error) else 8)
        os._exit(9)
    thread.join()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), tensor[0].item()


def test_a_child_forked_during_an_operation_gets_an_error_that_it_was_forked():
    assert run_ranks(fork_while_a_thread_waits) == [(7, 2.0), (0, 2.0)]


def wait_too_short() -> tuple[str, float, float]:
    rank = start_shm()
    tensor = torch.full((3,), rank + 1.0)
    if rank == 1:
        time.sleep(1)
    work = dist.all_reduce(tensor, async_op=True)
    seconds, error = 0.0, ""
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(dist.DistBackendError) as caught:
            work.wait(timedelta(seconds=0.2))
        seconds, error = time.monotonic() - start, str(caught.value)
    work.wait()
    dist.all_reduce(tensor)
    return error, seconds, tensor[0].item()


def test_a_wait_with_too_short_a_timeout_raises_and_the_operation_continues():
    (error, seconds, total), (_, _, other) = run_ranks(wait_too_short)
    assert (total, other) == (6.0, 6.0)
    assert "rank 1 (pid" in error
    assert "0:00:00.2" in error
    assert seconds < 0.9


def set_the_timeout_of_a_group_that_works(seconds: float) -> tuple[str, float]:
    rank = start_shm(timeout_s=60)
    dist.barrier()
    if rank == 1:
        time.sleep(3)
        return "", 0.0
    _set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(torch.ones(3))
    return str(caught.value), time.monotonic() - start


def test_a_new_timeout_holds_for_the_next_operation():
    error, seconds = run_ranks(set_the_timeout_of_a_group_that_works, 0.5)[0]
    assert "rank 1 (pid" in error
    assert " timeout " in error
    assert 0.4 < seconds < 2.5


def queue_behind_one_that_has_more_time() -> tuple[float, str]:
    rank = start_shm(timeout_s=60)
    dist.barrier()
    if rank == 1:
        time.sleep(3)
        return 0.0, ""
    dist.all_reduce(torch.ones(3), async_op=True)
    _set_pg_timeout(timedelta(seconds=0.5), dist.group.WORLD)
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        dist.barrier()
    return time.monotonic() - start, str(caught.value)


def test_the_timeout_of_an_operation_excludes_earlier_operations():
    seconds, error = run_ranks(queue_behind_one_that_has_more_time)[0]
    assert 0.4 < seconds < 2.5
    assert "barrier" in error


def wait_for_a_late_rank_for_days(days: float) -> float:
    rank = start_shm(timeout_s=days * 86_400)
    if rank == 1:
        time.sleep(0.5)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.barrier()
    return tensor.sum().item()


@pytest.mark.parametrize("days", [30, 10_000])
def test_a_timeout_may_be_longer_than_a_system_call_takes(days: float):
    assert run_ranks(wait_for_a_late_rank_for_days, days) == [6.0] * 2
