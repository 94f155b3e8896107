"""Random programs of collectives, and what tells the results of two runs apart.

A program is a list of operations, the same on all ranks. Each rank makes its own tensors from the seed of the operation
and its rank. The ranks are those of :mod:`tests.support.shm_pools`.
"""

import hashlib
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_strategies_ext.shm.work import ShmWork

SLOT_NUM_BYTES = 64 * 1024
INLINE_NUM_BYTES = 16 * 1024
FLOATS = ["float32", "float64", "float16", "bfloat16"]
INTEGERS = ["int8", "uint8", "int32", "int64"]
DTYPES = [*FLOATS, *INTEGERS, "bool", "complex64"]
ARITHMETIC = ["SUM", "PRODUCT", "MIN", "MAX"]
BITWISE = ["BAND", "BOR", "BXOR"]
#: Whether gloo does all that is compared with it. Before torch 2.9 it has no reduce-scatter of lists, or sums in one
#: whatever it is asked for, and averages nowhere.
GLOO_IS_WHOLE = torch.__version__ >= "2.9"
FLOAT_OPS = [*ARITHMETIC, "AVG"] if GLOO_IS_WHOLE else ARITHMETIC
SCATTERING = ["reduce_scatter", "reduce_scatter_tensor"] if GLOO_IS_WHOLE else []
REDUCING = ["all_reduce", "reduce", *SCATTERING, "all_reduce_coalesced"]
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
#: Operations that gloo does not do with complex numbers.
REAL_ONLY = {"gather"} if GLOO_IS_WHOLE else {"gather", "reduce", "broadcast"}
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
    numel = operation.numel if numel is None else numel
    layout = operation.layout
    if layout == "scalar":
        numel = 1
    values = _numbers((operation.seed * 64 + rank) * 16 + number, operation.torch_dtype, numel + 3)
    if layout == "offset":
        return values.clone()[3:]
    values = values[:numel].clone()
    if layout == "scalar":
        return values.reshape(())
    if layout == "transposed" and numel % 2 == 0:
        return values.view(2, -1).t() if numel else values.view(0, 3).t()
    return values


@lru_cache(maxsize=256)  # for a program that is run several times
def _numbers(seed: int, dtype: torch.dtype, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex or dtype.is_floating_point:
        values = torch.rand(numel, generator=generator, dtype=torch.float32) + 0.5
        if dtype.is_complex:
            values = torch.complex(values, values.flip(0))
        return values.to(dtype)
    if dtype == torch.bool:
        return torch.rand(numel, generator=generator) < 0.5
    return torch.randint(0 if dtype == torch.uint8 else -100, 100, (numel,), generator=generator, dtype=dtype)


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
    # Several of gloo's under way at once end the process now and then, by a segmentation fault in gloo's threads: seen
    # with torch 2.13, three ranks and nothing of ours, within seconds. One after the other does not.
    is_asynchronous = o.waits != "sync" and dist.get_backend(group) == "shm"
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
