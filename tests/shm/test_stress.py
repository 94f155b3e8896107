"""Random stress tests of the ``shm`` process group: threads, callbacks, subgroups, destroyed groups.

A workload is a list of moves, identical on all ranks. In most moves, one thread starts an operation after the previous
operation has started, so that all ranks have one order. Another thread may wait for the operation, or a callback may
receive its result. In other moves, all threads start equal operations, which may be paired in any order. Some groups
are destroyed during operations: these operations must succeed or raise an error, without wrong values and hangs.
"""

import os
import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_strategies_ext.shm.work import ShmWork
from tests.shm.programs import (
    GLOO_IS_WHOLE,
    INLINE_NUM_BYTES,
    LAYOUTS,
    SLOT_NUM_BYTES,
    Operation,
    difference,
    start,
    subgroups_of,
)
from tests.shm.start import TIMEOUT_S, start_shm
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("implementation")]

#: ``SHM_STORMS=100`` multiplies the number of workloads, for example for a night.
FACTOR = int(os.environ.get("SHM_STORMS", "1"))
NUM_EXAMPLES = {2: 6, 3: 5}
KINDS = ["all_reduce", "all_reduce", "broadcast", "all_gather", "reduce", "barrier"]
KINDS += ["reduce_scatter_tensor"] if GLOO_IS_WHOLE else []
NUM_THREADS = 3
#: Groups that a workload destroys and creates again, in addition to the permanent group of all ranks and a subgroup.
SHORT_LIVED = 2
WAITS = ["wait", "callback", "wait too briefly first"]


@dataclass(frozen=True)
class Move:
    """One step of a workload.

    Attributes:
        operation: The operation to start.
        starter: Thread that starts the operation; if None, all threads start it several times.
        waiter: Thread that waits for the operation.
        how: One of :data:`WAITS`.
        destroys: Whether the short-lived group is destroyed after the operation.
    """

    operation: Operation
    starter: int | None
    waiter: int
    wait: str
    destroys: bool


def run_workloads(workloads: Sequence[Sequence[Move]]) -> None:
    """Runs workloads on one rank."""
    rank = start_shm()
    members = subgroups_of(dist.get_world_size())[0]
    for number, workload in enumerate(workloads):
        problem = Workload(members, random.Random(rank)).run(workload)
        assert not problem, f"workload {number}: {problem}\n{workload}"
    dist.barrier()


class Workload:
    """A workload on one rank."""

    def __init__(self, members: Sequence[int], order: random.Random) -> None:
        self._order = order
        self._groups = {backend: self._make_groups(backend, members) for backend in ("shm", "gloo")}
        self._pools = [ThreadPoolExecutor(1) for _ in range(NUM_THREADS)]
        self._destroyed: list[Any] = []

    def run(self, workload: Sequence[Move]) -> str:
        """Returns a description of a problem, or an empty text."""
        ends = [self._make(move) for move in workload]
        problems = [self._problem_of(move, end) for move, end in zip(workload, ends, strict=True)]
        for pool in self._pools:
            pool.shutdown()
        for backend, groups in self._groups.items():
            dist.barrier(group=groups[0])
            for group in groups[backend == "shm" :]:
                _destroy(group)
        return next(filter(None, problems), "")

    def _make_groups(self, backend: str, members: Sequence[int]) -> list[Any]:
        all_ranks = dist.group.WORLD if backend == "shm" else self._new_group(backend)
        return [all_ranks, self._new_group(backend, members), self._new_group(backend)]

    @staticmethod
    def _new_group(backend: str, members: Sequence[int] | None = None) -> Any:
        return dist.new_group(members, backend=backend, timeout=timedelta(seconds=TIMEOUT_S))

    def _group_of(self, move: Move, backend: str) -> Any:
        group = self._groups[backend][move.operation.group]
        return None if group is dist.GroupMember.NON_GROUP_MEMBER else group

    def _make(self, move: Move) -> tuple[Any, list["Future[list[Tensor]]"]]:
        group = self._group_of(move, "shm")
        ends: list[Future[list[Tensor]]] = []
        if group is not None and move.starter is None:
            gate = threading.Barrier(NUM_THREADS)
            ends = [pool.submit(self._several, move.operation, group, gate) for pool in self._pools]
            for end in ends:  # the next operation must be the same on all ranks
                end.exception()
        elif group is not None:
            assert move.starter is not None
            started = self._pools[move.starter].submit(start, move.operation, group).result()
            ends = [self._pools[move.waiter].submit(_finish, started, move.wait)]
        if move.destroys:
            destroyed = self._groups["shm"][SHORT_LIVED]
            self._destroyed.append(destroyed)
            _destroy(destroyed)
            self._groups["shm"][SHORT_LIVED] = self._new_group("shm")
        return group, ends

    def _several(self, operation: Operation, group: Any, gate: threading.Barrier) -> list[Tensor]:
        gate.wait()
        return [result for _ in range(4) for result in _finish(start(operation, group), "wait")]

    def _problem_of(self, move: Move, made: tuple[Any, list["Future[list[Tensor]]"]]) -> str:
        group, ends = made
        if group is None:
            return ""
        gloo_group = self._group_of(move, "gloo")
        expected = start(move.operation, gloo_group)
        over_gloo = _finish(expected, "wait")
        for end in ends:
            if (error := end.exception(2 * TIMEOUT_S)) is not None:
                if isinstance(error, RuntimeError) and group in self._destroyed:
                    continue
                return f"{type(error).__name__}: {error}\n{move}"
            over_shm = end.result()
            for index in range(0, len(over_shm), max(1, len(over_gloo))):
                part = over_shm[index : index + len(over_gloo)]
                if wrong := difference(move.operation, dist.get_world_size(gloo_group), part, over_gloo):
                    return f"{wrong}\n{move}"
        return ""


def _finish(started: Any, wait: str) -> list[Tensor]:
    for work in started.works:
        if wait == "callback" and isinstance(work, ShmWork):
            called: list[int] = []
            work.get_future().then(lambda future: called.append(len(future.value()))).wait()  # noqa: B023
            assert called == [len(work.result())]
        elif wait == "wait too briefly first" and isinstance(work, ShmWork):
            try:
                work.wait(timedelta(microseconds=1))
            except dist.DistBackendError:
                work.wait()
        else:
            work.wait()
    return started.results()


def _destroy(group: Any) -> None:
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.destroy_process_group(group)


@st.composite
def moves(draw: st.DrawFn) -> Move:
    waits = draw(st.sampled_from(["sync", "async", "async", "async"]))
    group = draw(st.integers(0, SHORT_LIVED))
    destroys = draw(st.integers(0, 7)) == 0
    operation = Operation(
        kind=draw(st.sampled_from(KINDS)),
        group=group,
        dtype=draw(st.sampled_from(["float32", "int64", "bfloat16"])),
        op=draw(st.sampled_from(["SUM", "SUM", "MAX"])),
        num_bytes=draw(st.sampled_from([8, 4000, INLINE_NUM_BYTES, SLOT_NUM_BYTES, 20 * SLOT_NUM_BYTES])),
        extra=draw(st.integers(0, 1)),
        root=draw(st.integers(0, 2)),
        layout=draw(st.sampled_from(LAYOUTS)),
        waits=waits,
        seed=draw(st.integers(0, 1000)),
    )
    return Move(
        operation,
        starter=draw(st.sampled_from([None, *range(NUM_THREADS)])),
        waiter=draw(st.integers(0, NUM_THREADS - 1)),
        wait=draw(st.sampled_from(WAITS)),
        destroys=destroys,
    )


WORKLOADS = st.lists(st.lists(moves(), min_size=3, max_size=12), min_size=2, max_size=5)


@pytest.mark.timeout(900 * FACTOR)
@pytest.mark.parametrize("world_size", NUM_EXAMPLES)
def test_a_random_workload_gives_the_results_of_gloo_on_every_rank(world_size: int):
    @settings(
        max_examples=FACTOR * NUM_EXAMPLES[world_size],
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(WORKLOADS)
    def check(workloads: list[list[Move]]) -> None:
        run_ranks(run_workloads, workloads, world_size=world_size)

    check()
