"""Collectives over torch.distributed: reduce, all_gather, broadcast, barrier and the agreement on a boolean.

Each costs the round trips its meaning needs and no more: no barrier before a reduction (Lightning's own runs one), one
broadcast for a small object (torch's ``broadcast_object_list`` takes two and a size exchange), one gather straight into
the stacked result. In a process that belongs to no process group each returns its input.

Not promised: tensors of different shapes on different ranks. Finding out would cost a round trip per call; torch's
``TORCH_DISTRIBUTED_DEBUG=DETAIL`` does it when asked.
"""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_strategies_ext import process_group

T = TypeVar("T")

#: What `reduce_op` may be as a string.
REDUCE_OPS: dict[str, Any] = {
    "mean": ReduceOp.AVG,
    "avg": ReduceOp.AVG,
    "sum": ReduceOp.SUM,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
    "prod": ReduceOp.PRODUCT,
    "band": ReduceOp.BAND,
    "bor": ReduceOp.BOR,
    "bxor": ReduceOp.BXOR,
}

#: What gloo and NCCL both reduce and gather. To be reduced, everything else travels as a wider type that holds each of
#: its values; to be gathered, as its bytes.
_NATIVE = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64}
)
_WIDER = {torch.bool: torch.uint8, torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}

#: Size of the first message of an object broadcast, in bytes: a length, then as much of the pickle as fits. Loopback
#: and Ethernet take as long for 1 KiB as for one byte, and Lightning's booleans, paths and step counts fit.
_FIRST_MESSAGE_BYTES = 1024
_LENGTH_BYTES = 8
_INLINE_BYTES = _FIRST_MESSAGE_BYTES - _LENGTH_BYTES


class TorchCollectives:
    """The collectives of one rank.

    Args:
        device: Gives the device of this rank; asked when an operation must create a tensor of its own.
    """

    def __init__(self, device: Callable[[], torch.device]) -> None:
        self._device = device

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over ranks; every rank gets the result.

        As in Lightning, a contiguous tensor of a type that the backend reduces is overwritten with the result. Use the
        returned tensor: in all other cases it is a new one.

        Args:
            tensor: Any shape, layout and dtype, the same on all ranks. What is not a tensor is returned unchanged.
            group: Process group, default all ranks. A rank outside it gets its input back.
            reduce_op: A key of :data:`REDUCE_OPS` in any case, a ``ReduceOp``, or None for the mean.

        Returns:
            The reduced tensor, of the input's dtype; but the mean of integers or booleans is of the default float
            dtype, and the sum of booleans is an int64 count, as with ``torch.mean`` and ``torch.sum``.

        Raises:
            ValueError: If ``reduce_op`` is unknown, or has no meaning for the dtype.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        op = _parse_reduce_op(reduce_op)
        if not process_group.is_initialized() or dist.get_rank(group) < 0:
            return tensor
        if tensor.dtype in _NATIVE and tensor.is_contiguous() and (tensor.is_floating_point() or op != ReduceOp.AVG):
            _all_reduce(tensor.detach(), op, group)
            return tensor
        return _reduce_copy(tensor.detach(), op, group)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers one tensor from each rank.

        Args:
            tensor: Shape ``(...)``, any dtype, the same on all ranks.
            group: Process group, default all ranks.
            sync_grads: Whether the result carries gradients: each rank's input then receives the sum, over all ranks,
                of the gradients with respect to its slice.

        Returns:
            Shape ``(world_size, ...)``, in rank order. Without a process group: the input.
        """
        if not process_group.is_initialized() or dist.get_rank(group) < 0:
            return tensor
        if sync_grads:
            gathered: Tensor = _AllGather.apply(tensor, group)  # type: ignore[no-untyped-call]
            return gathered
        return _gather(tensor.detach(), group)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Gives every rank the object of rank ``src``.

        Objects whose pickle is under 1 KiB take one round trip, larger ones two.

        Args:
            obj: On rank ``src`` any picklable object; ignored elsewhere.
            src: Global rank.

        Raises:
            ValueError: If there is no rank ``src``.
            RuntimeError: On every rank, if the object cannot be pickled or (on the rank concerned) unpickled.
        """
        if not process_group.is_initialized():
            return obj
        world_size = dist.get_world_size()
        if not 0 <= src < world_size:
            raise ValueError(f"`src={src}`: there are {world_size} ranks; use one from 0 to {world_size - 1}.")
        if dist.get_rank() == src:
            self._send_object(obj, src)
            return obj
        received: T = self._receive_object(src)
        return received

    def barrier(self, name: str | None = None) -> None:
        """Returns when every rank has called it.

        Args:
            name: Shown in the error if the barrier fails.
        """
        if not process_group.is_initialized():
            return
        try:
            dist.barrier(device_ids=[self._device().index] if dist.get_backend() == "nccl" else None)
        except RuntimeError as error:
            label = f"barrier {name}" if name else "barrier"
            raise RuntimeError(f"Rank {dist.get_rank()}: {label} failed: {error}") from error

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agrees on a decision in one round trip.

        Args:
            decision: Of this rank.
            all: True asks whether all ranks say yes, False whether any does.
        """
        if not process_group.is_initialized():
            return bool(decision)
        vote = torch.tensor(int(decision), dtype=torch.int32, device=self._device())
        dist.all_reduce(vote, op=ReduceOp.MIN if all else ReduceOp.MAX)
        return bool(vote.item())

    def broadcast_module(self, module: torch.nn.Module, src: int = 0) -> None:
        """Overwrites the parameters and buffers of ``module`` on every rank with those of rank ``src``.

        Parameters and buffers that the module excludes from DDP are left alone.
        """
        if not process_group.is_initialized():
            return
        excluded = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        # All are under way before the first is waited for, so many small tensors cost one latency and not one each.
        works = []
        for named_tensors in (module.named_parameters(), module.named_buffers()):
            for name, tensor in named_tensors:
                if name not in excluded:
                    works.append(dist.broadcast(tensor.detach(), src, async_op=True))
        for work in works:
            work.wait()

    def _send_object(self, obj: Any, src: int) -> None:
        failure: Exception | None = None
        try:
            payload = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
            length = len(payload)
        except Exception as error:
            # The others wait for a message: tell them, so that all ranks raise instead of one raising and the rest
            # waiting for the timeout. A negative length marks the payload as an error text.
            failure = error
            payload = f"{type(error).__name__}: {error}".encode(errors="replace")[:_INLINE_BYTES]
            length = -len(payload)
        first = length.to_bytes(_LENGTH_BYTES, "little", signed=True) + payload[:_INLINE_BYTES]
        dist.broadcast(self._to_tensor(bytearray(first.ljust(_FIRST_MESSAGE_BYTES, b"\0"))), src)
        if failure is not None:
            raise RuntimeError(f"Broadcast from rank {src} failed: {type(obj)} cannot be pickled.") from failure
        if len(payload) > _INLINE_BYTES:
            dist.broadcast(self._to_tensor(bytearray(payload[_INLINE_BYTES:])), src)

    def _receive_object(self, src: int) -> Any:
        first = torch.empty(_FIRST_MESSAGE_BYTES, dtype=torch.uint8, device=self._device())
        dist.broadcast(first, src)
        message = _to_bytes(first)
        length = int.from_bytes(message[:_LENGTH_BYTES], "little", signed=True)
        payload = message[_LENGTH_BYTES : _LENGTH_BYTES + min(abs(length), _INLINE_BYTES)]
        if length < 0:
            reason = payload.decode(errors="replace")
            raise RuntimeError(f"Broadcast from rank {src} failed: it could not pickle the object: {reason}")
        if length > _INLINE_BYTES:
            rest = torch.empty(length - _INLINE_BYTES, dtype=torch.uint8, device=self._device())
            dist.broadcast(rest, src)
            payload += _to_bytes(rest)
        try:
            return pickle.loads(payload)
        except Exception as error:
            raise RuntimeError(f"Broadcast from rank {src}: rank {dist.get_rank()} cannot unpickle it.") from error

    def _to_tensor(self, data: bytearray) -> Tensor:
        return torch.frombuffer(data, dtype=torch.uint8).to(self._device())


class _AllGather(torch.autograd.Function):
    """all_gather whose backward sums over ranks; written for gloo too, which lacks a reduce-scatter of its own."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Cloned: autograd may hand the same tensor to other functions, and all_reduce overwrites.
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


def _parse_reduce_op(reduce_op: Any) -> Any:
    if reduce_op is None:
        return ReduceOp.AVG
    if not isinstance(reduce_op, str):
        return reduce_op
    try:
        return REDUCE_OPS[reduce_op.lower()]
    except KeyError:
        raise ValueError(
            f"`reduce_op={reduce_op!r}` is unknown. Use one of {', '.join(REDUCE_OPS)}, or a ReduceOp of torch."
        ) from None


def _all_reduce(tensor: Tensor, op: Any, group: Any) -> None:
    """Reduces in place a contiguous tensor of a dtype that the backend knows."""
    if op == ReduceOp.AVG and dist.get_backend(group) != "nccl":  # only NCCL averages by itself
        dist.all_reduce(tensor, op=ReduceOp.SUM, group=group)
        tensor.div_(dist.get_world_size(group))
    else:
        dist.all_reduce(tensor, op=op, group=group)


def _reduce_copy(tensor: Tensor, op: Any, group: Any) -> Tensor:
    """Reduces a tensor that cannot be reduced where it lies; returns a new one."""
    dtype = tensor.dtype
    if tensor.is_complex():
        return _reduce_complex(tensor, op, group)
    if tensor.is_floating_point():
        wire = tensor.to(dtype if dtype in _NATIVE else torch.float32, copy=True).contiguous()
        _all_reduce(wire, op, group)
        return wire.to(dtype)
    if op == ReduceOp.AVG or (op == ReduceOp.SUM and dtype == torch.bool):
        # Summed as int64, where neither a count nor a mean of small integers overflows.
        total = tensor.to(torch.int64, copy=True).contiguous()
        _all_reduce(total, ReduceOp.SUM, group)
        return total / dist.get_world_size(group) if op == ReduceOp.AVG else total
    wire = tensor.to(_WIDER.get(dtype, dtype), copy=True).contiguous()
    _all_reduce(wire, op, group)
    return wire.to(dtype)


def _reduce_complex(tensor: Tensor, op: Any, group: Any) -> Tensor:
    if op in (ReduceOp.SUM, ReduceOp.AVG):
        total = tensor.clone(memory_format=torch.contiguous_format)
        _all_reduce(torch.view_as_real(total), op, group)
        return total
    if op == ReduceOp.PRODUCT:
        return _gather(tensor, group).prod(dim=0)
    raise ValueError(f"`reduce_op={op}` has no meaning for dtype {tensor.dtype}: complex numbers have no order.")


def _gather(tensor: Tensor, group: Any) -> Tensor:
    world_size = dist.get_world_size(group)
    stacked = torch.empty((world_size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
    if tensor.numel() == 0:
        return stacked
    output, input_ = stacked.view(-1), tensor.contiguous().view(-1)
    if tensor.dtype not in _NATIVE:
        output, input_ = output.view(torch.uint8), input_.view(torch.uint8)
    dist.all_gather_into_tensor(output, input_, group=group)
    return stacked


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
