"""Repeated tests of the ``shm`` process group: ranks are killed at random moments, groups are created and destroyed.

``SHM_SOAK_ROUNDS=1000`` sets the number of rounds of killed ranks, for example for a night; 12 rounds take 10 seconds.
"""

import gc
import os
import random
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from lightning_strategies_ext.shm.native_build import NATIVE_VARIABLE
from tests.shm.start import start_shm
from tests.support import ranks
from tests.support.ranks import outcomes_of_ranks, run_ranks

pytestmark = pytest.mark.processes

NUM_ROUNDS = int(os.environ.get("SHM_SOAK_ROUNDS", "12"))
NUM_BATCHES = 5


def reduce_until_a_rank_exits(seed: int, num_killed: int) -> tuple[str, float, int]:
    """Runs collectives as in training; some ranks kill themselves at a random moment, also during an operation."""
    rank = start_shm(timeout_s=20)
    size = dist.get_world_size()
    killed = random.Random(seed).sample(range(size), num_killed)
    delay = random.Random(seed * 8 + rank).uniform(0.0, 0.2)
    subgroup = dist.new_group(backend="shm")
    dist.barrier()
    if rank in killed:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    sizes = random.Random(seed)
    last_success = time.monotonic()
    try:
        for step in range(1_000_000):
            numel = sizes.choice([0, 1, 1000, 5000, 50_000, 600_000])
            works = [
                dist.all_reduce(torch.ones(numel), async_op=True),
                dist.broadcast(torch.ones(numel), step % size, group=subgroup, async_op=True),
            ]
            gathered = [torch.empty(numel // 4) for _ in range(size)]
            dist.all_gather(gathered, torch.ones(numel // 4))
            for work in works:
                work.wait()
            last_success = time.monotonic()
    except dist.DistBackendError as error:
        return str(error), time.monotonic() - last_success, step
    return "no rank was killed", 0.0, step


@pytest.mark.timeout(900 + 10 * NUM_ROUNDS)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_the_other_ranks_exit_within_seconds_of_any_kill(is_compiled: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ranks.rank_environment, NATIVE_VARIABLE, str(int(is_compiled)))
    for number in range(NUM_ROUNDS):
        size = 2 + number % 3
        num_killed = 1 + (number // 3) % (size - 1)
        outcomes = outcomes_of_ranks(reduce_until_a_rank_exits, number, num_killed, world_size=size)
        report = f"round {number}:\n" + "\n".join(map(str, outcomes))
        killed = [outcome for outcome in outcomes if outcome.exit_code == -signal.SIGKILL]
        remaining = [outcome for outcome in outcomes if outcome.exit_code == 0]
        # A victim may have detected the exit of another victim, and exited, before its SIGKILL.
        assert killed, report
        assert len(killed) + len(remaining) == size, report
        for outcome in remaining:
            error, seconds, _ = outcome.value
            assert "rank " in error, report
            assert seconds < 6, report


def make_and_destroy_groups(num_groups: int) -> list[tuple[int, int, int]]:
    rank = start_shm()
    counts = []
    for number in range(num_groups):
        group = dist.new_group(backend="shm")
        tensor = torch.full((20_000,), rank + 1.0)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        if number % 2 == rank:
            time.sleep(0.001)  # so that some operations need a thread
        work.wait()
        assert tensor[0] == 3.0
        dist.destroy_process_group(group)
        del group, work
        if number % (num_groups // NUM_BATCHES) == num_groups // NUM_BATCHES - 1:
            dist.barrier()
            gc.collect()
            time.sleep(0.05)
            counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), num_mapped()))
    return counts


def num_mapped() -> int:
    """Returns the number of segments that this process has mapped."""
    with open("/proc/self/maps") as maps:
        return sum("/dev/shm/" in line for line in maps)


def test_groups_that_are_destroyed_leave_no_descriptor_no_thread_and_no_memory():
    for counts in run_ranks(make_and_destroy_groups, 200):
        fds, threads, segments = zip(*counts, strict=True)
        assert max(fds) - fds[0] <= 4, counts
        assert max(threads) - threads[0] <= 2, counts
        assert max(segments) - segments[0] <= 2, counts
