"""Pools of ranks that run programs over gloo once and over ``shm`` twice, and compare; see :mod:`.shm_programs`.

A pool's ranks live on from program to program, since to start them takes longer than to run a thousand programs.
"""

import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_strategies_ext.shm import rendezvous
from tests.support import ranks
from tests.support.shm_programs import SHARED, SLOT_NUM_BYTES, Program, difference, digest, run_program, subgroups_of

TIMEOUT_S = 20
_START_TIMEOUT = timedelta(seconds=120)
#: Of the ranks of a pool, after so many the next one takes itself to be on another host.
PER_HOST = "TESTS_RANKS_PER_HOST"


def start_shm(timeout_s: float = TIMEOUT_S, **options: Any) -> int:
    """Makes a default group over shm in a rank of the harness; returns the rank.

    The ranks meet before, however long it takes until all have been started.
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


class Pool:
    """Ranks that live on from program to program; they are started when first needed, and anew after a failure."""

    def __init__(self, world_size: int, environment: dict[str, str] | None = None) -> None:
        self.world_size = world_size
        self._environment = environment or {}
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    @property
    def serves(self) -> Callable[[Connection], None]:
        """What a rank does."""
        return serve

    def run(self, programs: Sequence[Any]) -> str:
        """Runs programs on all ranks.

        Returns:
            What went wrong in the first that did; empty if nothing did.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send(programs)
        answers: list[Any] = [None] * self.world_size
        deadline = time.monotonic() + 2 * TIMEOUT_S + len(programs)
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = ("died", [])
                if answers[rank][0]:  # the others may wait for it until their timeout
                    deadline = min(deadline, time.monotonic() + 2)
        wrong = self._wrong(programs, answers)
        if wrong:
            self.stop()
        return wrong

    def stop(self) -> None:
        """Ends the ranks."""
        for process in self._processes:
            if process.is_alive():
                ranks.kill_tree(process.pid)
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        port = ranks.free_port()
        self._directory = tempfile.TemporaryDirectory()
        for rank in range(self.world_size):
            ours, theirs = ranks._context.Pipe()
            receiver, sender = ranks._context.Pipe(duplex=False)
            log = Path(self._directory.name, f"rank{rank}.log")
            process = ranks._context.Process(
                target=ranks._rank_main,
                args=(self.serves, (theirs,), rank, self.world_size, port, sender, log, self._environment),
            )
            process.start()
            theirs.close()
            sender.close()
            receiver.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _wrong(self, programs: Sequence[Any], answers: Sequence[Any]) -> str:
        said = [f"rank {rank}: {'no answer' if a is None else a[0]}" for rank, a in enumerate(answers) if not a or a[0]]
        if said:
            return "\n".join(said)
        for number, program in enumerate(programs):
            for place, operation in enumerate(program):
                seen = {answer[1][number][place] for answer in answers} - {None}
                if operation.kind in SHARED and len(seen) > 1:
                    return f"program {number}, operation {place}: ranks have different bits\n{operation}"
        return ""


def serve(pipe: Connection) -> None:
    """What a rank of a pool does: runs what it is sent, and answers what went wrong, and what it has got."""
    os.environ["LIGHTNING_STRATEGIES_EXT_SHM_BYTES"] = str(4 * SLOT_NUM_BYTES)
    rank = start_shm()
    members = subgroups_of(dist.get_world_size())
    timeout = timedelta(seconds=TIMEOUT_S)
    groups = {
        backend: [
            whole,
            *(_member(dist.new_group(some, backend=backend, timeout=timeout), rank, some) for some in members),
        ]
        for backend, whole in (("gloo", dist.new_group(backend="gloo", timeout=timeout)), ("shm", dist.group.WORLD))
    }
    while True:
        try:
            programs = pipe.recv()
        except EOFError:
            return
        digests: list[list[str | None]] = []
        problem = ""
        for number, program in enumerate(programs):
            try:
                problem = _compare(program, groups, digests, random.Random(rank))
            except Exception:
                problem = traceback.format_exc()
            if problem:
                problem = f"program {number}: {problem}"
                break
        pipe.send((problem, digests))


def _member(group: Any, rank: int, members: Sequence[int]) -> Any:
    return group if rank in members else None


def _compare(program: Program, groups: dict[str, list[Any]], digests: list[Any], order: random.Random) -> str:
    theirs = run_program(program, groups["gloo"], order)
    ours = run_program(program, groups["shm"], order)
    again = run_program(program, groups["shm"], order)
    digests.append([])
    for operation, their, our, second in zip(program, theirs, ours, again, strict=True):
        group = groups["shm"][operation.group]
        if group is None:
            digests[-1].append(None)
            continue
        first_bits, second_bits = digest(our), digest(second)
        digests[-1].append(first_bits)
        if first_bits != second_bits:
            return f"other bits the second time\n{operation}"
        if wrong := difference(operation, dist.get_world_size(group), our, their):
            return f"{wrong}\n{operation}"
    return ""


def all_pools(sizes: Sequence[int]) -> Iterator[dict[int, Pool]]:
    """Pools by world size, for a fixture."""
    pools = {size: Pool(size) for size in sizes}
    yield pools
    for pool in pools.values():
        pool.stop()
