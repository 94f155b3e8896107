"""Random programs of collectives, and pools of ranks that run them over ``shm`` and over gloo and compare.

A program is a list of operations, the same on all ranks. Each rank makes its own tensors from the seed of the operation
and its rank, runs the program over gloo once and over shm twice, and reports what differs. A pool's ranks live on from
program to program, since to start them takes longer than to run a thousand programs.
"""

import hashlib
import os
import random
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_strategies_ext.shm.execution import ShmWork
from tests import ranks

SLOT_NUM_BYTES = 64 * 1024
INLINE_NUM_BYTES = 16 * 1024
TIMEOUT_S = 20
FLOATS = ["float32", "float64", "float16", "bfloat16"]
INTEGERS = ["int8", "uint8", "int32", "int64"]
DTYPES = [*FLOATS, *INTEGERS, "bool", "complex64"]
ARITHMETIC = ["SUM", "PRODUCT", "MIN", "MAX"]
BITWISE = ["BAND", "BOR", "BXOR"]
REDUCING = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_reduce_coalesced"]
OBJECTS = ["broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"]
KINDS = [
    *REDUCING,
    *OBJECTS,
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "gather",
    "scatter",
    "barrier",
    "all_to_all_single",
    "send",
]
#: Operations whose result must be the same on all ranks.
SHARED = {
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "broadcast_object_list",
    "all_gather_object",
}
LAYOUTS = ["plain", "transposed", "offset", "scalar"]
WAITS = ["sync", "async", "future"]


@dataclass(frozen=True)
class Operation:
    """One collective.

    Attributes:
        kind: One of :data:`KINDS`.
        group: 0 is the group of all ranks, then come the subgroups.
        op: Name of the reduction.
        num_bytes: Size of each rank's tensor, rounded down to whole elements after ``extra`` elements are added.
        extra: Elements more or less.
        root: A rank of the group, modulo its size.
        waits: How its end is awaited: at once, later, or later through its future.
        seed: Of the numbers in its tensors.
    """

    kind: str
    group: int
    dtype: str
    op: str
    num_bytes: int
    extra: int
    root: int
    layout: str
    waits: str
    seed: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def numel(self) -> int:
        return max(0, self.num_bytes // self.torch_dtype.itemsize + self.extra)


Program = Sequence[Operation]


@dataclass
class Started:
    """An operation under way: its handles, and what it fills."""

    operation: Operation
    works: list[Any]
    results: Callable[[], list[Tensor]]


def subgroups_of(world_size: int) -> list[list[int]]:
    """Two groups of some of the ranks; in a world of five, one of them has one rank only."""
    numbers = random.Random(world_size)
    num_members = [1 if world_size in (1, 5) else 2, max(min(2, world_size), world_size - 1)]
    return [sorted(numbers.sample(range(world_size), number)) for number in num_members]


def run_program(program: Program, groups: Sequence[Any], order: random.Random) -> list[list[Tensor]]:
    """Runs a program and returns what each operation has filled on this rank.

    Args:
        program: What to run.
        groups: All of one backend; None where this rank is no member.
        order: Chooses the order in which handles are waited for; may differ between ranks.
    """
    started = []
    for operation in program:
        group = groups[operation.group]
        started.append(None if group is None else start(operation, group))
    pending = [each for each in started if each is not None]
    order.shuffle(pending)
    for each in pending:
        for work in each.works:
            if each.operation.waits == "future" and isinstance(work, ShmWork):  # not all of gloo's have one
                work.get_future().wait()
            else:
                work.wait()
    return [[] if each is None else [result.detach().clone() for result in each.results()] for each in started]


def start(operation: Operation, group: Any) -> Started:
    """Starts one operation, and waits for it if it is synchronous."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    root = operation.root % size
    results = _KINDS[operation.kind]
    works, filled = results(operation, group, rank, size, dist.get_global_rank(group, root), rank == root)
    return Started(operation, [work for work in works if work is not None], filled)


def make(operation: Operation, rank: int, number: int = 0, numel: int | None = None) -> Tensor:
    """A tensor of one rank, whose numbers do not overflow under a product nor cancel out under a sum."""
    generator = torch.Generator().manual_seed((operation.seed * 64 + rank) * 16 + number)
    dtype = operation.torch_dtype
    numel = operation.numel if numel is None else numel
    layout = operation.layout
    if layout == "scalar":
        numel = 1
    numel_and_more = numel + 3
    if dtype.is_complex or dtype.is_floating_point:
        values = torch.rand(numel_and_more, generator=generator, dtype=torch.float32) + 0.5
        if dtype.is_complex:
            values = torch.complex(values, values.flip(0))
        values = values.to(dtype)
    elif dtype == torch.bool:
        values = torch.rand(numel_and_more, generator=generator) < 0.5
    else:
        low = 0 if dtype == torch.uint8 else -100
        values = torch.randint(low, 100, (numel_and_more,), generator=generator, dtype=dtype)
    if layout == "offset":
        return values[3:]
    values = values[:numel].clone()
    if layout == "scalar":
        return values.reshape(())
    if layout == "transposed" and numel % 2 == 0:
        return values.view(2, -1).t() if numel else values.view(0, 3).t()
    return values


def flattened(operation: Operation, rank: int, number: int = 0, numel: int | None = None) -> Tensor:
    """Like :func:`make`, for what gloo takes only in one row."""
    return make(operation, rank, number, numel).contiguous().view(-1)


def _all_reduce(o: Operation, group: Any, rank: int, size: int, root: int, is_root: bool) -> Any:
    tensor = make(o, rank)
    return [dist.all_reduce(tensor, getattr(ReduceOp, o.op), group, o.waits != "sync")], lambda: [tensor]


def _all_reduce_coalesced(o: Operation, group: Any, rank: int, size: int, root: int, is_root: bool) -> Any:
    tensors = [flattened(o, rank), flattened(o, rank, 1, 5), flattened(o, rank, 2)]
    is_asynchronous = o.waits != "sync"
    if o.seed % 2:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work = dist.all_reduce_coalesced(tensors, getattr(ReduceOp, o.op), group, is_asynchronous)
        if is_asynchronous and not hasattr(work, "wait"):
            work.wait = lambda: None
        return [work if is_asynchronous else None], lambda: tensors
    with dist._coalescing_manager(group=group, async_ops=is_asynchronous) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, getattr(ReduceOp, o.op), group)
    return _works_of(manager, is_asynchronous), lambda: tensors


def _reduce(o: Operation, group: Any, rank: int, size: int, root: int, is_root: bool) -> Any:
    tensor = make(o, rank)
    work = dist.reduce(tensor, root, getattr(ReduceOp, o.op), group, o.waits != "sync")
    return [work], lambda: [tensor] if is_root else []


def _broadcast(o: Operation, group: Any, rank: int, size: int, root: int, is_root: bool) -> Any:
    tensor = make(o, rank)
    return [dist.broadcast(tensor, root, group, o.waits != "sync")], lambda: [tensor]


def _all_gather(o: Operation, group: Any, rank: int, size: int, root: int, is_root: bool) -> Any:
    tensor = make(o, rank).contiguous()
    outputs = [torch.empty_like(tensor) for _ in range(size)]
    return [dist.all_gather(outputs, tensor, group, o.waits != "sync")], lambda: outputs


def _all_gather_into_tensor(o: Operation, group: Any, rank: int, size: int, root: int, is_root: bool) -> Any:
    tensor = flattened(o, rank)
    output = tensor.new_empty(size * tensor.numel())
    return [dist.all_gather_into_tensor(output, tensor, group, o.waits != "sync")], lambda: [output]


def _all_gather_coalesced(o: Operation, group: Any, rank: int, size: int, root: int, is_root: bool) -> Any:
    tensors = [flattened(o, rank), flattened(o, rank, 1, 5)]
    outputs = [tensor.new_empty(size * tensor.numel()) for tensor in tensors]
    is_asynchronous = o.waits != "sync"
    with dist._coalescing_manager(group=group, async_ops=is_asynchronous) as manager:
        for output, tensor in zip(outputs, tensors, strict=True):
            dist.all_gather_into_tensor(output, tensor, group)
    return _works_of(manager, is_asynchronous), lambda: outputs


def _gather(o: Operation, group: Any, rank: int, size: int, root: int, is_root: bool) -> Any:
    tensor = make(o, rank).contiguous()
    outputs = [torch.empty_like(tensor) for _ in range(size)] if is_root else []
    return [dist.gather(tensor, outputs or None, root, group, o.waits != "sync")], lambda: outputs


def _scatter(o: Operation, group: Any, rank: int, size: int, root: int, is_root: bool) -> Any:
    output = torch.empty_like(make(o, rank).contiguous())
    inputs = [make(o, rank, number).contiguous() for number in range(size)] if is_root else None
    return [dist.scatter(output, inputs, root, group, o.waits != "sync")], lambda: [output]


def _reduce_scatter(o: Operation, group: Any, rank: int, size: int, root: int, is_root: bool) -> Any:
    inputs = [flattened(o, rank, number) for number in range(size)]
    output = torch.empty_like(inputs[0])
    work = dist.reduce_scatter(output, inputs, getattr(ReduceOp, o.op), group, o.waits != "sync")
    return [work], lambda: [output]


def _reduce_scatter_tensor(o: Operation, group: Any, rank: int, size: int, root: int, is_root: bool) -> Any:
    whole = torch.cat([flattened(o, rank, number) for number in range(size)])
    output = torch.empty_like(whole[: whole.numel() // size])
    work = dist.reduce_scatter_tensor(output, whole, getattr(ReduceOp, o.op), group, o.waits != "sync")
    return [work], lambda: [output]


def _barrier(o: Operation, group: Any, rank: int, size: int, root: int, is_root: bool) -> Any:
    return [dist.barrier(group, o.waits != "sync")], list


def _all_to_all_single(o: Operation, group: Any, rank: int, size: int, root: int, is_root: bool) -> Any:
    # From rank a to rank b go (a + 2 b) % 3 elements, and some more.
    more = min(o.numel, 1000)
    sent = [(rank + 2 * other) % 3 + more for other in range(size)]
    received = [(other + 2 * rank) % 3 + more for other in range(size)]
    tensor = torch.cat([flattened(o, rank, 0, numel) for numel in sent])
    if o.layout == "scalar":
        sent = received = [1] * size
    output = tensor.new_empty(sum(received))
    return [dist.all_to_all_single(output, tensor, received, sent, group, o.waits != "sync")], lambda: [output]


def _send(o: Operation, group: Any, rank: int, size: int, root: int, is_root: bool) -> Any:
    """Each rank sends to the next and receives from the one before."""
    tensor = make(o, rank).contiguous()
    output = torch.empty_like(tensor)
    if size == 1:
        return [], list
    to = dist.get_global_rank(group, (rank + 1) % size)
    source = dist.get_global_rank(group, (rank - 1) % size)
    works = [dist.isend(tensor, to, group, tag=o.seed % 7), dist.irecv(output, source, group, tag=o.seed % 7)]
    if o.waits == "sync":
        for work in works:
            work.wait()
        works = []
    return works, lambda: [output, tensor]


def _object_of(o: Operation, rank: int, number: int = 0) -> Any:
    return {"rank": rank, "seed": o.seed, "text": "x" * ((o.num_bytes + 37 * rank) % 20_000), "number": number}


def _as_tensor(values: Sequence[Any]) -> list[Tensor]:
    return [torch.frombuffer(bytearray(repr(value).encode()), dtype=torch.uint8) for value in values]


def _broadcast_object_list(o: Operation, group: Any, rank: int, size: int, root: int, is_root: bool) -> Any:
    values = [_object_of(o, rank, number) for number in range(2)]
    dist.broadcast_object_list(values, root, group)
    return [], lambda: _as_tensor(values)


def _all_gather_object(o: Operation, group: Any, rank: int, size: int, root: int, is_root: bool) -> Any:
    values = [None] * size
    dist.all_gather_object(values, _object_of(o, rank), group)
    return [], lambda: _as_tensor(values)


def _gather_object(o: Operation, group: Any, rank: int, size: int, root: int, is_root: bool) -> Any:
    values = [None] * size if is_root else None
    dist.gather_object(_object_of(o, rank), values, root, group)
    return [], lambda: _as_tensor(values or [])


def _scatter_object_list(o: Operation, group: Any, rank: int, size: int, root: int, is_root: bool) -> Any:
    values = [None]
    inputs = [_object_of(o, rank, number) for number in range(size)] if is_root else None
    dist.scatter_object_list(values, inputs, root, group)
    return [], lambda: _as_tensor(values)


def _works_of(manager: Any, is_asynchronous: bool) -> list[Any]:
    return list(manager.works) if is_asynchronous else []


_KINDS = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather_into_tensor_coalesced": _all_gather_coalesced,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "barrier": _barrier,
    "all_to_all_single": _all_to_all_single,
    "send": _send,
    "broadcast_object_list": _broadcast_object_list,
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "scatter_object_list": _scatter_object_list,
}


def difference(operation: Operation, size: int, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> str:
    """What is wrong with shm's results, beside gloo's; empty if nothing is."""
    if len(ours) != len(theirs):
        return f"{len(ours)} results, and gloo has {len(theirs)}"
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        if our.shape != their.shape or our.dtype != their.dtype:
            return f"result {number} is {our.dtype} {our.shape}, and gloo's {their.dtype} {their.shape}"
        if our.dtype == torch.bool:
            # gloo adds them as bytes: a true one may be a 2.
            our, their = bits_of(our) != 0, bits_of(their) != 0
        is_inexact = our.dtype.is_floating_point or our.dtype.is_complex
        is_summed = operation.kind in REDUCING and operation.op in ("SUM", "PRODUCT", "AVG")
        if is_inexact and is_summed and size > 2:
            eps = torch.finfo(our.dtype).eps
            is_right = torch.allclose(our, their, rtol=4 * size * eps, atol=0.0)
        else:
            is_right = torch.equal(bits_of(our), bits_of(their))
        if not is_right:
            wrong = (our != their).flatten().nonzero().flatten()
            place = int(wrong[0]) if wrong.numel() else -1
            values = f"{our.flatten()[place]} and not {their.flatten()[place]}" if wrong.numel() else "other bits"
            return f"result {number} has {wrong.numel()} wrong of {our.numel()}, at {place} {values}"
    return ""


def bits_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in the order of its elements."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def digest(tensors: Sequence[Tensor]) -> str:
    """Tells apart tensors that differ in one bit."""
    total = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        total.update(bits_of(tensor).numpy())
    return total.hexdigest()


def start_shm(timeout_s: float = TIMEOUT_S, **options: Any) -> int:
    """Makes a default group over shm in a rank of the harness; returns the rank."""
    import lightning_strategies_ext.shm as shm

    shm.register()
    rank = int(os.environ["LOCAL_RANK"])
    os.environ["RANK"] = str(rank)
    dist.init_process_group("shm", timeout=timedelta(seconds=timeout_s), **options)
    return rank


class Pool:
    """Ranks that live on from program to program; they are started when first needed, and anew after a failure."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, programs: Sequence[Program]) -> str:
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
                target=ranks._rank_main, args=(serve, (theirs,), rank, self.world_size, port, sender, log)
            )
            process.start()
            theirs.close()
            sender.close()
            receiver.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _wrong(self, programs: Sequence[Program], answers: Sequence[Any]) -> str:
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
