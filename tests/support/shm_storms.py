"""Storms: several threads of each rank start, await and destroy operations of groups over ``shm``, in turns or at once.

A storm is a list of moves, the same on all ranks. In turns, a thread starts an operation when the one before has been
started, so that all ranks keep one order, and another thread may wait for it, or a callback take its result. At once,
all threads start operations that are alike, so that it does not matter which of them meets which. Some groups are
destroyed with operations under way: these end well or with an error, and never with wrong values or not at all.
"""

import random
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_strategies_ext.shm.work import ShmWork
from tests.support.shm_pools import TIMEOUT_S, Pool, start_shm
from tests.support.shm_programs import Operation, difference, start, subgroups_of

NUM_THREADS = 3
#: Groups that a storm destroys and makes anew, besides the one of all ranks and a subgroup that stay.
SHORT_LIVED = 2
HOWS = ["wait", "callback", "wait in vain first"]


@dataclass(frozen=True)
class Move:
    """One step of a storm.

    Attributes:
        operation: What is started.
        starter: Which thread starts it; all at once, several times, if None.
        waiter: Which thread waits for it.
        how: One of :data:`HOWS`.
        destroys: Whether the short-lived group is destroyed after it.
    """

    operation: Operation
    starter: int | None
    waiter: int
    how: str
    destroys: bool


class StormPool(Pool):
    """Ranks that go through storms."""

    @property
    def serves(self) -> Any:
        return serve

    def _wrong(self, programs: Sequence[Any], answers: Sequence[Any]) -> str:
        said = [f"rank {rank}: {a[0] if a else 'no answer'}" for rank, a in enumerate(answers) if not a or a[0]]
        return "\n".join(said)


def serve(pipe: Connection) -> None:
    """What a rank of a pool does: goes through the storms that it is sent, and answers what went wrong."""
    rank = start_shm()
    members = subgroups_of(dist.get_world_size())[0]
    while True:
        try:
            storms = pipe.recv()
        except EOFError:
            return
        problem = ""
        for number, storm in enumerate(storms):
            try:
                problem = Storm(members, random.Random(rank)).go_through(storm)
            except Exception:
                problem = traceback.format_exc()
            if problem:
                problem = f"storm {number}: {problem}\n{storm}"
                break
        pipe.send((problem, []))


class Storm:
    """One storm on one rank."""

    def __init__(self, members: Sequence[int], order: random.Random) -> None:
        self._order = order
        self._groups = {backend: self._make_groups(backend, members) for backend in ("shm", "gloo")}
        self._pools = [ThreadPoolExecutor(1) for _ in range(NUM_THREADS)]
        self._destroyed: list[Any] = []

    def go_through(self, storm: Sequence[Move]) -> str:
        """Returns what went wrong; nothing if all was well."""
        ends = [self._make(move) for move in storm]
        problems = [self._problem_of(move, end) for move, end in zip(storm, ends, strict=True)]
        for pool in self._pools:
            pool.shutdown()
        for backend, groups in self._groups.items():
            dist.barrier(group=groups[0])
            for group in groups[backend == "shm" :]:
                _destroy(group)
        return next(filter(None, problems), "")

    def _make_groups(self, backend: str, members: Sequence[int]) -> list[Any]:
        everyone = dist.group.WORLD if backend == "shm" else self._new_group(backend)
        return [everyone, self._new_group(backend, members), self._new_group(backend)]

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
            for end in ends:  # what comes next must come next on all ranks
                end.exception()
        elif group is not None:
            assert move.starter is not None
            started = self._pools[move.starter].submit(start, move.operation, group).result()
            ends = [self._pools[move.waiter].submit(_end, started, move.how)]
        if move.destroys:
            doomed = self._groups["shm"][SHORT_LIVED]
            self._destroyed.append(doomed)
            _destroy(doomed)
            self._groups["shm"][SHORT_LIVED] = self._new_group("shm")
        return group, ends

    def _several(self, operation: Operation, group: Any, gate: threading.Barrier) -> list[Tensor]:
        gate.wait()
        return [result for _ in range(4) for result in _end(start(operation, group), "wait")]

    def _problem_of(self, move: Move, made: tuple[Any, list["Future[list[Tensor]]"]]) -> str:
        group, ends = made
        if group is None:
            return ""
        beside = self._group_of(move, "gloo")
        expected = start(move.operation, beside)
        theirs = _end(expected, "wait")
        for end in ends:
            if (error := end.exception(2 * TIMEOUT_S)) is not None:
                if isinstance(error, RuntimeError) and group in self._destroyed:
                    continue
                return f"{type(error).__name__}: {error}\n{move}"
            ours = end.result()
            for index in range(0, len(ours), max(1, len(theirs))):
                part = ours[index : index + len(theirs)]
                if wrong := difference(move.operation, dist.get_world_size(beside), part, theirs):
                    return f"{wrong}\n{move}"
        return ""


def _end(started: Any, how: str) -> list[Tensor]:
    for work in started.works:
        if how == "callback" and isinstance(work, ShmWork):
            called: list[int] = []
            work.get_future().then(lambda future: called.append(len(future.value()))).wait()  # noqa: B023
            assert called == [len(work.result())]
        elif how == "wait in vain first" and isinstance(work, ShmWork):
            try:
                work.wait(timedelta(microseconds=1))
            except dist.DistBackendError:
                work.wait()
        else:
            work.wait()
    return [result.detach().clone() for result in started.results()]


def _destroy(group: Any) -> None:
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.destroy_process_group(group)
