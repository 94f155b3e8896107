"""Starts ranks with an ``shm`` default process group, and runs programs once over gloo and twice over ``shm``.

def add_up():
    rank = start_shm()
    ...

run_ranks(add_up)
check_programs([program], world_size=3)  # a program of :mod:`.programs`
"""

import os
import random
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_strategies_ext.shm import rendezvous
from tests.shm.programs import SHARED, SLOT_NUM_BYTES, Program, difference, digest, run_program, subgroups_of
from tests.support.ranks import LIMIT_S, run_ranks

TIMEOUT_S = 60
_START_TIMEOUT = timedelta(seconds=LIMIT_S)
#: Name of an environment variable of ranks: the number of ranks per host, if ranks simulate several hosts.
PER_HOST = "TESTS_RANKS_PER_HOST"


def start_shm(timeout_s: float = TIMEOUT_S, **options: Any) -> int:
    """Creates a default group over shm in a rank of :mod:`tests.support.ranks`; returns the rank.

    Before, the function waits until all ranks have started.
    """
    rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["RANK"] = str(rank)
    if per_host := int(os.environ.get(PER_HOST, 0)):
        rendezvous.host_identity = lambda: f"host {rank // per_host}"
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, world_size, is_master=rank == 0, timeout=_START_TIMEOUT)
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    dist.init_process_group("shm", store=store, rank=rank, world_size=world_size, timeout=timeout, **options)
    return rank


def check_programs(programs: Sequence[Program], world_size: int) -> None:
    """Fails unless ``shm`` has gloo's results, and bitwise identical results in both runs and on all ranks."""
    digests = run_ranks(_compare, programs, world_size=world_size, timeout_s=LIMIT_S + len(programs))
    for number, program in enumerate(programs):
        for index, operation in enumerate(program):
            seen = {of_rank[number][index] for of_rank in digests} - {None}
            is_right = operation.kind not in SHARED or len(seen) <= 1
            assert is_right, f"program {number}, operation {index}: ranks have different bits\n{operation}"


def _compare(programs: Sequence[Program]) -> list[list[str | None]]:
    """Runs programs on one rank; returns a digest of each result, None if the rank is not a member of the group."""
    os.environ["LIGHTNING_STRATEGIES_EXT_SHM_SEGMENT_BYTES"] = str(4 * SLOT_NUM_BYTES)
    order = random.Random(start_shm())
    timeout = timedelta(seconds=TIMEOUT_S)
    groups = {"gloo": [dist.new_group(backend="gloo", timeout=timeout)], "shm": [dist.group.WORLD]}
    for backend, of_backend in groups.items():
        for members in subgroups_of(dist.get_world_size()):
            group = dist.new_group(members, backend=backend, timeout=timeout)
            of_backend.append(group if dist.get_rank() in members else None)
    digests = []
    for number, program in enumerate(programs):
        over_gloo = run_program(program, groups["gloo"], order)
        over_shm = run_program(program, groups["shm"], order)
        again = run_program(program, groups["shm"], order)
        digests.append([digest(each) for each in over_shm])
        for index, operation in enumerate(program):
            if (group := groups["shm"][operation.group]) is None:
                digests[-1][index] = None
                continue
            problem = difference(operation, dist.get_world_size(group), over_shm[index], over_gloo[index])
            assert not problem, f"program {number}: {problem}\n{operation}"
            is_same = digests[-1][index] == digest(again[index])
            assert is_same, f"program {number}: different bits in the second run\n{operation}"
    dist.barrier()
    return digests
