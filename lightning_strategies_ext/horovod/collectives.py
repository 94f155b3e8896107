"""Collectives over Horovod. A group is a Horovod process set, and all of its ranks call each collective (no ``join``).

Horovod matches the operations of different ranks by name. Its default names contain a counter. They differ between
ranks after some ranks have used a process set alone, and they never recur, so Horovod's response cache is never hit.
The names here are fixed: at most one operation per name is pending at a time.
"""

import zlib
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor
from torch.nn import Module

from lightning_strategies_ext.collectives.base import Collectives, names_excluded_from_ddp
from lightning_strategies_ext.failure.failure_monitor import lone_call_text
from lightning_strategies_ext.horovod.synchronize import synchronize

_OPS = {
    "mean": hvd.Average,
    "sum": hvd.Sum,
    "min": hvd.Min,
    "max": hvd.Max,
    "product": hvd.Product,
    "adasum": hvd.Adasum,
}


class HorovodCollectives(Collectives):
    """Collectives of one rank over Horovod.

    Args:
        device: Returns the device of this rank; called when an operation must create a tensor.
    """

    extra_reduce_ops = {"adasum": "adasum", "average": "mean"}  # noqa: RUF012
    gathers_different_lengths = True
    native_dtypes = frozenset({torch.float16, torch.float32, torch.float64, torch.int32, torch.int64})

    def rank(self, group: Any = None) -> int | None:
        """Returns this rank's index in a process set; None if the set excludes it, or Horovod is not initialized."""
        if not hvd.is_initialized():
            return None
        process_set = _process_set(group)
        return process_set.rank() if process_set.included() else None

    def world_size(self, group: Any = None) -> int:
        """Returns the number of ranks of a process set."""
        return int(_process_set(group).size())

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers one tensor from each rank.

        Args:
            tensor: Tensor of any dtype; all ranks have the same dtype. Shapes may differ in the first dimension.
            group: Process set; None for all ranks.
            sync_grads: Whether the result carries gradients: each rank's input then receives the sum, over all ranks,
                of the gradients with respect to its part.

        Returns:
            Tensor of shape ``(world_size, ...)``, in rank order, if all ranks have the same shape; otherwise the
            tensors concatenated along the first dimension. The input if Horovod is not initialized.
        """
        if self.rank(group) is None:
            return tensor
        if self.compare is not None and self.has_all_ranks(group):
            self.compare("all_gather", tensor[:0])
        gathered, rows = _GatherRows.apply(tensor, self, group)  # type: ignore[no-untyped-call]
        if not sync_grads:
            gathered = gathered.detach()
        if tensor.ndim == 0 or len(set(rows)) == 1:
            return gathered.view(len(rows), *tensor.shape)  # type: ignore[no-any-return]
        return gathered  # type: ignore[no-any-return]

    def gather_list(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """Gathers one tensor from each rank into a list, as torchmetrics expects. First dimensions may differ."""
        gathered, rows = self.gather_rows(tensor, group)
        return [part.view(tensor.shape) if tensor.ndim == 0 else part for part in gathered.split(rows)]

    def barrier(self, name: str | None = None) -> None:
        """Blocks until all ranks have called it.

        Args:
            name: Name of the barrier in the error message.
        """
        rank = self.rank()
        if rank is None:
            return
        if self.compare is not None:
            self.compare("barrier")
        try:  # not `hvd.barrier`, which always waits in `synchronize`
            synchronize(hvd.allreduce_async_(torch.zeros(1), name="lightning_strategies_ext.barrier", op=hvd.Sum))
        except RuntimeError as error:
            label = f"barrier {name}" if name else "barrier"
            raise RuntimeError(f"Rank {rank}: {label} failed: {error}{lone_call_text()}") from error

    def gather_rows(self, tensor: Tensor, group: Any = None) -> tuple[Tensor, list[int]]:
        """Gathers tensors whose first dimensions may differ.

        The sizes are gathered concurrently with the data and add no latency.

        Returns:
            The tensors concatenated along the first dimension, and the number of rows of each rank.
        """
        with torch.inference_mode(False):  # Horovod resizes the output on its background thread
            return self._gather_rows(tensor.clone() if tensor.is_inference() else tensor, _process_set(group))

    def _gather_rows(self, tensor: Tensor, process_set: Any) -> tuple[Tensor, list[int]]:
        rows = tensor.reshape(1, *tensor.shape) if tensor.ndim == 0 else tensor
        num_rows = torch.tensor([len(rows)], dtype=torch.int64)
        name = f"lightning_strategies_ext.gather.{process_set.process_set_id}"
        sizes_handle = hvd.allgather_async(num_rows, name=f"{name}.sizes", process_set=process_set)
        flat = rows.detach().contiguous().view(len(rows), prod(rows.shape[1:]))
        is_native = flat.dtype in self.native_dtypes
        wire = flat if is_native else flat.view(torch.uint8)
        data_handle = hvd.allgather_async(wire, name=name, process_set=process_set)
        gathered = synchronize(data_handle, process_set)
        sizes = synchronize(sizes_handle, process_set).tolist()
        return gathered.view(tensor.dtype).view(sum(sizes), *rows.shape[1:]), sizes

    def start_all_reduce(self, tensor: Tensor, op: str, name: str) -> Callable[[], None]:
        """Starts the reduction of a tensor over all ranks, in place; the returned function waits for it."""
        if self.compare is not None:
            self.compare(f"all_reduce ({op}) of {name}", tensor)
        handle = hvd.allreduce_async_(tensor, name=f"lightning_strategies_ext.{name}", op=_OPS[op])

        def finish() -> None:
            synchronize(handle)

        return finish

    def start_all_gather(self, output: Tensor, tensor: Tensor, name: str) -> Callable[[], None]:
        """Starts to gather one tensor from each rank; the returned function waits and fills the output."""
        if self.compare is not None:
            self.compare(f"all_gather of {name}", tensor)
        with torch.inference_mode(False):  # Horovod resizes the output on its background thread
            sent = (tensor.clone() if tensor.is_inference() else tensor).view(torch.uint8)
            handle = hvd.allgather_async(sent, name=f"lightning_strategies_ext.{name}")

        def finish() -> None:
            output.copy_(synchronize(handle).view(output.dtype))

        return finish

    def _all_reduce(self, tensor: Tensor, op: str, group: Any) -> None:
        process_set = _process_set(group)
        name = f"lightning_strategies_ext.reduce.{process_set.process_set_id}"
        handle = hvd.allreduce_async_(tensor, name=name, op=_OPS[op], process_set=process_set)
        synchronize(handle, process_set)

    def _all_gather(self, output: Tensor, tensor: Tensor, group: Any) -> None:
        output.copy_(self.gather_rows(tensor, group)[0])

    def broadcast_buffers(
        self, module: Module, process_set: Any = None, src: int | None = None, *, is_known_to_match: bool = False
    ) -> None:
        """Overwrites a module's buffers with those of one rank. Collective: all ranks of the process set call it.

        Buffers that the module excludes from DDP are skipped.

        Args:
            module: The module with the buffers.
            process_set: Participating ranks; None for all ranks.
            src: Global rank of the source; the lowest rank of the process set by default.
            is_known_to_match: Whether the ranks are known to have buffers of equal names, shapes, and dtypes. Otherwise
                the ranks compare them first, and skip buffers that some rank lacks.
        """
        if self.rank(process_set) is None or self.world_size(process_set) == 1:
            return
        excluded = names_excluded_from_ddp(module)
        named = [
            (name, buffer.data) for name, buffer in module.named_buffers() if name not in excluded
        ]  # `data`, to bypass autograd
        if not is_known_to_match:
            keys = [zlib.crc32(f"{name} {tuple(buffer.shape)} {buffer.dtype}".encode()) for name, buffer in named]
            gathered, sizes = self.gather_rows(torch.tensor(keys, dtype=torch.int64), process_set)
            of_ranks = [part.tolist() for part in gathered.split(sizes)]
            of_all = set(keys).intersection(*of_ranks)
            own = dict(zip(keys, named, strict=True))
            named = [own[key] for key in of_ranks[0] if key in of_all]
        ranks = range(self.world_size()) if process_set is None else process_set.ranks
        self._broadcast([buffer for _, buffer in named], min(ranks) if src is None else src, process_set)

    def _broadcast(self, tensors: Iterable[Tensor], src: int, group: Any = None) -> None:
        handles, copies = [], []
        for index, tensor in enumerate(tensors):
            wire = tensor
            if tensor.dtype not in self.native_dtypes or not tensor.is_contiguous():
                wire = tensor.contiguous().view(-1).view(torch.uint8)
                copies.append((tensor, wire))
            if wire.numel():
                name = f"lightning_strategies_ext.broadcast.{index}"
                handles.append(hvd.broadcast_async_(wire, src, name=name, process_set=_process_set(group)))
        for handle in handles:
            synchronize(handle, group)
        for tensor, wire in copies:
            if wire.data_ptr() != tensor.data_ptr():
                tensor.copy_(wire.view(tensor.dtype).view(tensor.shape))


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, collectives: HorovodCollectives, group: Any) -> tuple[Tensor, list[int]]:
        gathered, rows = collectives.gather_rows(tensor, group)
        ctx.collectives, ctx.group, ctx.rows, ctx.shape = collectives, group, rows, tensor.shape
        return gathered, rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = ctx.collectives.reduce(grads[0].clone(memory_format=torch.contiguous_format), ctx.group, "sum")
        rank = ctx.collectives.rank(ctx.group)
        return total.narrow(0, sum(ctx.rows[:rank]), ctx.rows[rank]).view(ctx.shape), None, None


def _process_set(group: Any) -> Any:
    if group is None:
        return hvd.global_process_set
    if not isinstance(group, hvd.ProcessSet):
        raise TypeError(f"`group` must be a horovod.torch.ProcessSet, or None for all ranks, got {group!r}.")
    return group
