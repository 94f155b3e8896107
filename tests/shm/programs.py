"""Random programs of collectives, and the comparison of the results of two runs.

    operation = Operation("all_reduce", 0, "float32", "SUM", 4000, 0, 0, "plain", "async", seed=1)
    over_shm, over_gloo = (run_program([operation], groups[backend], random.Random()) for backend in ("shm", "gloo"))
    assert not difference(operation, world_size, over_shm[0], over_gloo[0])

A program is a list of operations, identical on all ranks. Each rank creates its tensors from the seed of the operation
and its rank. :mod:`tests.shm.start` starts the ranks.
"""

import hashlib
import random
import warnings
from collections.abc import Sequence
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
#: Whether gloo supports all compared operations. Before torch 2.9, gloo cannot average, and has no reduce-scatter of
#: lists, or ignores its operation and sums.
GLOO_IS_WHOLE = torch.__version__ >= "2.9"
FLOAT_OPS = [*ARITHMETIC, "AVG"] if GLOO_IS_WHOLE else ARITHMETIC
SCATTERING = ["reduce_scatter", "reduce_scatter_tensor"] if GLOO_IS_WHOLE else []
REDUCING = ["all_reduce", "reduce", *SCATTERING, "all_reduce_coalesced"]
OBJECTS = ["broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"]
GATHERING = ["all_gather", "all_gather_into_tensor", "all_gather_into_tensor_coalesced"]
KINDS = [*REDUCING, *OBJECTS, "broadcast", *GATHERING, "gather", "scatter", "barrier", "all_to_all_single", "send"]
#: Operations that gloo does not support for complex numbers.
REAL_ONLY = {"gather"} if GLOO_IS_WHOLE else {"gather", "reduce", "broadcast"}
#: Operations whose results must be identical on all ranks.
SHARED = {"all_reduce", "all_reduce_coalesced", "broadcast", *GATHERING, "broadcast_object_list", "all_gather_object"}
LAYOUTS = ["plain", "transposed", "offset", "scalar"]
WAITS = ["sync", "async", "future"]


@dataclass(frozen=True)
class Operation:
    """One collective.

    Attributes:
        kind: One of :data:`KINDS`.
        group: 0 is the group of all ranks; larger numbers are subgroups.
        op: Name of the reduction.
        num_bytes: Size of each rank's tensor, rounded down to whole elements after ``extra`` elements are added.
        extra: Number of additional elements; may be negative.
        root: A rank of the group, modulo the size of the group.
        waits: How a rank waits for the operation: immediately, later, or later through its future.
        seed: Seed of the numbers in the tensors.
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
    """An operation in progress: its handles, and the tensors that it fills."""

    operation: Operation
    works: list[Any]
    filled: Sequence[Tensor]

    def results(self) -> list[Tensor]:
        """Returns copies of the filled tensors; the operation has ended."""
        return [tensor.detach().clone() for tensor in self.filled]


def subgroups_of(world_size: int) -> list[list[int]]:
    """Returns two subgroups; with five ranks, one subgroup has only one rank."""
    numbers = random.Random(world_size)
    num_members = [1 if world_size in (1, 5) else 2, max(min(2, world_size), world_size - 1)]
    return [sorted(numbers.sample(range(world_size), number)) for number in num_members]


def run_program(program: Program, groups: Sequence[Any], order: random.Random) -> list[list[Tensor]]:
    """Runs a program, and returns the filled tensors of each operation on this rank.

    Args:
        program: The program.
        groups: Process groups of one backend; None if this rank is not a member.
        order: Selects the order of the waits; may differ between ranks.
    """
    started = [
        None if groups[operation.group] is None else start(operation, groups[operation.group]) for operation in program
    ]
    pending = [each for each in started if each is not None]
    order.shuffle(pending)
    for each in pending:
        for work in each.works:
            if each.operation.waits == "future" and isinstance(work, ShmWork):  # not all handles of gloo have a future
                work.get_future().wait()
            else:
                work.wait()
    return [[] if each is None else each.results() for each in started]


def start(operation: Operation, group: Any) -> Started:
    """Starts one operation, and waits for it if it is synchronous."""
    works, filled = getattr(_Call(operation, group), operation.kind)()
    return Started(operation, [work for work in works if work is not None], filled)


class _Call:
    """The call of an operation on one rank. Each kind has a method, which returns handles and the filled tensors."""

    def __init__(self, operation: Operation, group: Any) -> None:
        self.operation, self.group = operation, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.root = dist.get_global_rank(group, operation.root % self.size)
        self.is_root = self.rank == operation.root % self.size
        self.is_async = operation.waits != "sync"
        self.op = getattr(ReduceOp, operation.op)

    def tensor(self, number: int = 0, numel: int | None = None) -> Tensor:
        """Returns a tensor of this rank, whose products do not overflow, and whose sums do not cancel out."""
        operation = self.operation
        is_scalar = operation.layout == "scalar"
        numel = 1 if is_scalar else operation.numel if numel is None else numel
        seed = (operation.seed * 64 + self.rank) * 16 + number
        values = _numbers(seed, operation.torch_dtype, numel + 3)
        if operation.layout == "offset":
            return values.clone()[3:]
        values = values[:numel].clone()
        if is_scalar:
            return values.reshape(())
        if operation.layout == "transposed" and numel % 2 == 0:
            return values.view(2, -1).t() if numel else values.view(0, 3).t()
        return values

    def row(self, number: int = 0, numel: int | None = None) -> Tensor:
        """Returns a flat contiguous tensor of this rank, which gloo requires in some operations."""
        return self.tensor(number, numel).contiguous().view(-1)

    def object(self, number: int = 0) -> Any:
        seed = self.operation.seed
        text = "x" * ((self.operation.num_bytes + 37 * self.rank) % 20_000)
        return {"rank": self.rank, "seed": seed, "text": text, "number": number}

    def all_reduce(self) -> Any:
        tensor = self.tensor()
        return [dist.all_reduce(tensor, self.op, self.group, self.is_async)], [tensor]

    def all_reduce_coalesced(self) -> Any:
        tensors = [self.row(), self.row(1, 5), self.row(2)]
        if self.operation.seed % 2:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                work = dist.all_reduce_coalesced(tensors, self.op, self.group, self.is_async)
            if self.is_async and not hasattr(work, "wait"):
                work.wait = lambda: None
            return [work if self.is_async else None], tensors
        with dist._coalescing_manager(group=self.group, async_ops=self.is_async) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor, self.op, self.group)
        return manager.works if self.is_async else [], tensors

    def reduce(self) -> Any:
        tensor = self.tensor()
        work = dist.reduce(tensor, self.root, self.op, self.group, self.is_async)
        return [work], [tensor] if self.is_root else []

    def broadcast(self) -> Any:
        tensor = self.tensor()
        return [dist.broadcast(tensor, self.root, self.group, self.is_async)], [tensor]

    def all_gather(self) -> Any:
        tensor = self.tensor().contiguous()
        outputs = [torch.empty_like(tensor) for _ in range(self.size)]
        return [dist.all_gather(outputs, tensor, self.group, self.is_async)], outputs

    def all_gather_into_tensor(self) -> Any:
        tensor = self.row()
        output = tensor.new_empty(self.size * tensor.numel())
        return [dist.all_gather_into_tensor(output, tensor, self.group, self.is_async)], [output]

    def all_gather_into_tensor_coalesced(self) -> Any:
        tensors = [self.row(), self.row(1, 5)]
        outputs = [tensor.new_empty(self.size * tensor.numel()) for tensor in tensors]
        # Several concurrent operations of gloo sometimes cause a segmentation fault in gloo's threads: observed with
        # torch 2.13 and three ranks, without this package, within seconds. Sequential operations do not.
        is_async = self.is_async and dist.get_backend(self.group) == "shm"
        with dist._coalescing_manager(group=self.group, async_ops=is_async) as manager:
            for output, tensor in zip(outputs, tensors, strict=True):
                dist.all_gather_into_tensor(output, tensor, self.group)
        return manager.works if is_async else [], outputs

    def gather(self) -> Any:
        tensor = self.tensor().contiguous()
        outputs = [torch.empty_like(tensor) for _ in range(self.size)] if self.is_root else []
        return [dist.gather(tensor, outputs or None, self.root, self.group, self.is_async)], outputs

    def scatter(self) -> Any:
        output = torch.empty_like(self.tensor().contiguous())
        inputs = [self.tensor(number).contiguous() for number in range(self.size)] if self.is_root else None
        return [dist.scatter(output, inputs, self.root, self.group, self.is_async)], [output]

    def reduce_scatter(self) -> Any:
        inputs = [self.row(number) for number in range(self.size)]
        output = torch.empty_like(inputs[0])
        return [dist.reduce_scatter(output, inputs, self.op, self.group, self.is_async)], [output]

    def reduce_scatter_tensor(self) -> Any:
        whole = torch.cat([self.row(number) for number in range(self.size)])
        output = torch.empty_like(whole[: whole.numel() // self.size])
        return [dist.reduce_scatter_tensor(output, whole, self.op, self.group, self.is_async)], [output]

    def barrier(self) -> Any:
        return [dist.barrier(self.group, self.is_async)], []

    def all_to_all_single(self) -> Any:
        # Rank a sends (a + 2 b) % 3 elements to rank b, and further elements.
        more = min(self.operation.numel, 1000)
        sent = [(self.rank + 2 * other) % 3 + more for other in range(self.size)]
        received = [(other + 2 * self.rank) % 3 + more for other in range(self.size)]
        tensor = torch.cat([self.row(0, numel) for numel in sent])
        if self.operation.layout == "scalar":
            sent = received = [1] * self.size
        output = tensor.new_empty(sum(received))
        return [dist.all_to_all_single(output, tensor, received, sent, self.group, self.is_async)], [output]

    def send(self) -> Any:
        """Sends a tensor to the next rank, and receives a tensor from the previous rank."""
        if self.size == 1:
            return [], []
        tensor = self.tensor().contiguous()
        output = torch.empty_like(tensor)
        after, before = (dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (1, -1))
        tag = self.operation.seed % 7
        works = [dist.isend(tensor, after, self.group, tag=tag), dist.irecv(output, before, self.group, tag=tag)]
        while not self.is_async and works:
            works.pop(0).wait()
        return works, [output, tensor]

    def broadcast_object_list(self) -> Any:
        values = [self.object(number) for number in range(2)]
        dist.broadcast_object_list(values, self.root, self.group)
        return [], _as_tensors(values)

    def all_gather_object(self) -> Any:
        values = [None] * self.size
        dist.all_gather_object(values, self.object(), self.group)
        return [], _as_tensors(values)

    def gather_object(self) -> Any:
        values = [None] * self.size if self.is_root else None
        dist.gather_object(self.object(), values, self.root, self.group)
        return [], _as_tensors(values or [])

    def scatter_object_list(self) -> Any:
        values = [None]
        inputs = [self.object(number) for number in range(self.size)] if self.is_root else None
        dist.scatter_object_list(values, inputs, self.root, self.group)
        return [], _as_tensors(values)


@lru_cache(maxsize=256)  # for a program that is run several times
def _numbers(seed: int, dtype: torch.dtype, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex or dtype.is_floating_point:
        values = torch.rand(numel, generator=generator, dtype=torch.float32) + 0.5
        return (torch.complex(values, values.flip(0)) if dtype.is_complex else values).to(dtype)
    if dtype == torch.bool:
        return torch.rand(numel, generator=generator) < 0.5
    return torch.randint(0 if dtype == torch.uint8 else -100, 100, (numel,), generator=generator, dtype=dtype)


def _as_tensors(values: Sequence[Any]) -> list[Tensor]:
    return [torch.frombuffer(bytearray(repr(value).encode()), dtype=torch.uint8) for value in values]


def difference(operation: Operation, size: int, over_shm: Sequence[Tensor], over_gloo: Sequence[Tensor]) -> str:
    """Describes a difference between the results of shm and gloo; empty if there is none."""
    if len(over_shm) != len(over_gloo):
        return f"{len(over_shm)} results, but gloo has {len(over_gloo)}"
    for number, (of_shm, of_gloo) in enumerate(zip(over_shm, over_gloo, strict=True)):
        if of_shm.shape != of_gloo.shape or of_shm.dtype != of_gloo.dtype:
            return f"result {number} is {of_shm.dtype} {of_shm.shape}, but gloo's is {of_gloo.dtype} {of_gloo.shape}"
        if of_shm.dtype == torch.bool:
            # gloo adds booleans as bytes: True may be a 2.
            of_shm, of_gloo = bits_of(of_shm) != 0, bits_of(of_gloo) != 0
        is_inexact = of_shm.dtype.is_floating_point or of_shm.dtype.is_complex
        is_summed = operation.kind in REDUCING and operation.op in ("SUM", "PRODUCT", "AVG")
        if is_inexact and is_summed and size > 2:
            eps = torch.finfo(of_shm.dtype).eps
            is_right = torch.allclose(of_shm, of_gloo, rtol=4 * size * eps, atol=0.0)
        else:
            is_right = torch.equal(bits_of(of_shm), bits_of(of_gloo))
        if not is_right:
            differing = (of_shm != of_gloo).flatten().nonzero().flatten()
            index = int(differing[0]) if differing.numel() else -1
            values = f"{of_shm.flatten()[index]}, not {of_gloo.flatten()[index]}" if differing.numel() else "other bits"
            return f"result {number} has {differing.numel()} wrong elements of {of_shm.numel()}, at {index} {values}"
    return ""


def bits_of(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor, in the order of its elements."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def digest(tensors: Sequence[Tensor]) -> str:
    """Returns a digest of tensors, which differs if the tensors differ in one bit."""
    total = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        total.update(bits_of(tensor).numpy())
    return total.hexdigest()
