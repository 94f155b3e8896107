"""Collectives over torch.distributed, and the progress of a rank in them.

``TORCH_DISTRIBUTED_DEBUG=DETAIL`` makes torch detect tensors of different shapes in all of these collectives.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_strategies_ext.collectives.base import Collectives
from lightning_strategies_ext.failure.failure_monitor import lone_call_text
from lightning_strategies_ext.failure.rank_status import CollectiveProgress
from lightning_strategies_ext.identities import FIELDS, IdentityKind, current
from lightning_strategies_ext.shm.process_group import ShmProcessGroup
from lightning_strategies_ext.torch_distributed import process_group

#: Size of an int64, in bytes.
_WORD_NUM_BYTES = 8
_VALUES, _LOGGED_VALUES = int(IdentityKind.VALUES), int(IdentityKind.LOGGED_VALUES)
_OPS = {
    "sum": ReduceOp.SUM,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
    "band": ReduceOp.BAND,
    "bor": ReduceOp.BOR,
    "bxor": ReduceOp.BXOR,
}
#: Options of a sum that is complete when the call returns.
_SUM_NOW = dist.AllreduceOptions()
if hasattr(_SUM_NOW, "asyncOp"):  # torch before 2.8 has no such option
    _SUM_NOW.asyncOp = False


# torch 2.13 deprecates the older name.
_all_gather_single: Callable[..., Any] = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)


class TorchCollectives(Collectives):
    """Collectives of one rank of a torch.distributed process group.

    Args:
        device: Callable that returns the device of this rank; called when an operation must create a tensor.
    """

    extra_reduce_ops = {"band": "band", "bor": "bor", "bxor": "bxor"}  # noqa: RUF012

    def rank(self, group: Any = None) -> int | None:
        """Returns this rank's number in a process group; None if it is not in the group, or there is no group."""
        if not process_group.is_initialized():
            return None
        rank = dist.get_rank(group)
        return None if rank < 0 else rank

    def world_size(self, group: Any = None) -> int:
        """Returns the number of ranks of a process group."""
        return dist.get_world_size(group)

    def start_all_reduce(self, tensor: Tensor, op: str, name: str) -> Callable[[], None]:
        """Starts to reduce a tensor in place over all ranks; returns a callable that waits for the result.

        torch.distributed matches operations by their order; ``name`` only gives the operation its identity.
        """
        if self.compare is not None:
            self.compare(f"all_reduce ({op}) of {name}", tensor)
        before, current.identity = current.identity, _identity_of(name)
        try:
            wait: Callable[[], None] = dist.all_reduce(tensor, _OPS[op], async_op=True).wait
        finally:
            current.identity = before
        return wait

    def start_all_gather(self, output: Tensor, tensor: Tensor, name: str) -> Callable[[], None]:
        """Starts to gather one tensor from each rank; returns a callable that waits for the output.

        The native library of ``shm`` sums integers but has no all-gather. Therefore the output is a sum, to which each
        rank contributes its tensor, and zeros in place of the other tensors. The sum takes a tenth of the time of an
        all-gather in rounds. It is complete when this method returns, because a thread that waited for it would take
        longer than the wait.
        """
        if self.compare is not None:
            self.compare(f"all_gather of {name}", tensor)
        group: Any = dist.group.WORLD
        before, current.identity = current.identity, _identity_of(name)
        try:
            if not isinstance(group, ShmProcessGroup) or not group.is_compiled or tensor.nbytes % _WORD_NUM_BYTES:
                wait: Callable[[], None] = _all_gather_single(output, tensor, async_op=True).wait
                return wait
            words = output if output.dtype is torch.int64 else output.view(torch.uint8).view(torch.int64)
            # A tensor that is this rank's part of the output is in place, between zeros.
            if tensor.data_ptr() != output.data_ptr() + group.rank() * tensor.nbytes:
                words.zero_().view(group.size(), -1)[group.rank()] = tensor.view(torch.uint8).view(torch.int64)
            work = group.allreduce([words], _SUM_NOW)
            if not work.is_success():
                work.wait()
            return _finish_nothing
        finally:
            current.identity = before

    def barrier(self, name: str | None = None) -> None:
        """Returns when all ranks have called it.

        Args:
            name: Name of the barrier in the error if it fails.
        """
        if not process_group.is_initialized():
            return
        if self.compare is not None:
            self.compare("barrier")
        try:
            self._wait_for_all()
        except RuntimeError as error:
            label = f"barrier {name}" if name else "barrier"
            raise RuntimeError(f"Rank {dist.get_rank()}: {label} failed: {error}{lone_call_text()}") from error

    def _wait_for_all(self) -> None:
        try:
            dist.barrier(device_ids=[self._device().index] if dist.get_backend() == "nccl" else None)
        except RuntimeError as error:
            if "PrivateUse1HooksInterface" not in str(error):
                raise
            # torch queries the accelerator first. This fails if a plugin for other devices has renamed torch's backend
            # for them and registered no hooks (torch 2.13). `item()` blocks until the reduction is complete.
            reduced = torch.zeros(1, device=self._device())
            dist.all_reduce(reduced)
            reduced.item()

    def _all_reduce(self, tensor: Tensor, op: str, group: Any) -> None:
        before = current.identity
        current.identity = before if before & FIELDS[0] > _VALUES else _VALUES
        try:
            if op != "mean":
                dist.all_reduce(tensor, op=_OPS[op], group=group)
            elif dist.get_backend(group) == "nccl":  # of torch's backends, only NCCL has AVG
                dist.all_reduce(tensor, op=ReduceOp.AVG, group=group)
            else:
                dist.all_reduce(tensor, op=ReduceOp.SUM, group=group)
                tensor.div_(dist.get_world_size(group))
        except RuntimeError:
            moved = self._moved(tensor, group)
            if moved is None:
                raise
            self._all_reduce(moved, op, group)
            tensor.copy_(moved)
        finally:
            current.identity = before

    def _all_gather(self, output: Tensor, tensor: Tensor, group: Any) -> None:
        if tensor.is_cpu and process_group.is_executed_by_gloo(group):
            self._check_sizes(tensor, group)
        try:
            _all_gather_single(output, tensor, group=group)
        except RuntimeError:
            moved = self._moved(tensor, group)
            if moved is None:
                raise
            gathered = moved.new_empty(output.shape)
            _all_gather_single(gathered, moved, group=group)
            output.copy_(gathered)

    def _moved(self, tensor: Tensor, group: Any) -> Tensor | None:
        """Copies a host tensor, for which a collective has raised, to the device of this rank.

        torch raises before it sends anything if a group, such as a group of NCCL, has no backend for host tensors. A
        check after the error costs nothing in groups that have such a backend.

        Returns:
            The copy; None if the collective has raised for another reason.
        """
        ranks: Any = group or dist.group.WORLD
        device = self._device()
        if not tensor.is_cpu or device.type == "cpu" or tensor.device in ranks._device_types:
            return None
        return tensor.to(device)

    def _check_sizes(self, tensor: Tensor, group: Any) -> None:
        # gloo aborts the process if sizes differ, and returns at once on a rank whose tensor is empty.
        sizes = torch.empty(dist.get_world_size(group), dtype=torch.int64)
        _all_gather_single(sizes, torch.tensor([tensor.numel()]), group=group)
        if (sizes != tensor.numel()).any():
            listed = ", ".join(f"rank {rank}: {size}" for rank, size in enumerate(sizes.tolist()))
            raise ValueError(
                f"`all_gather`: the ranks have tensors of different shapes, with these numbers of elements: {listed}."
                " Give all ranks tensors of the same shape, for example by padding them."
            )

    def _broadcast(self, tensors: Iterable[Tensor], src: int) -> None:
        """Broadcasts tensors as bytes: each backend lacks some dtype. NCCL sends host tensors through the device."""
        works = []
        for tensor in tensors:
            sent = tensor.contiguous().reshape(-1).view(torch.uint8)
            if tensor.device.type == "cpu" and dist.get_backend() == "nccl":
                sent = sent.to(self._device())
            work = dist.broadcast(sent, src, async_op=True)
            if sent.data_ptr() == tensor.data_ptr():
                works.append(work)
                continue
            work.wait()  # before the next tensor, because the copies may not fit into memory together
            if dist.get_rank() != src:
                tensor.copy_(sent.to(tensor.device).view(tensor.dtype).reshape(tensor.shape))
        for work in works:
            work.wait()


class DefaultGroupProgress(CollectiveProgress):
    """Progress of this process in the default group."""

    def num_started(self) -> int:
        """Returns how many collectives this rank has started in the group; 0 if the backend does not count them."""
        group: Any = dist.group.WORLD
        if not dist.is_initialized() or isinstance(group, ShmProcessGroup):
            return 0
        try:
            return int(group._get_sequence_number_for_group())
        except RuntimeError:
            return 0

    def pending_work(self) -> Any:
        """Returns the operation of ``shm`` that this rank waits for; None if there is none."""
        group: Any = dist.group.WORLD
        return group.current_work if dist.is_initialized() and isinstance(group, ShmProcessGroup) else None


def _identity_of(name: str) -> int:
    return _LOGGED_VALUES if name.startswith("logged_values") else 0


def _finish_nothing() -> None:
    """Does nothing: the operation is complete already."""
