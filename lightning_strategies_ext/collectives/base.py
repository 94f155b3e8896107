"""Semantics of collectives for all engines: dtypes, means of integers, objects, decisions.

An engine transfers tensors of a few dtypes. This module builds all other operations on them, each with only the round
trips that it needs: no barrier before a reduction (Lightning's own has one), one broadcast for a small object
(torch's ``broadcast_object_list`` takes two and an exchange of sizes), one gather directly into the stacked result. In
a process that belongs to no group, each operation returns its input.

Limitations: Tensors of different shapes on different ranks work only if the engine supports them. An ``all_gather`` of
tensors of different sizes raises over ``shm`` and gloo; over NCCL, its detection would synchronize the GPU at every
call.
"""

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

#: Values of `reduce_op` as strings, in any case → name in this package.
REDUCE_OPS = {
    "mean": "mean",
    "avg": "mean",
    "sum": "sum",
    "min": "min",
    "max": "max",
    "product": "product",
    "prod": "product",
}

#: Dtypes that engines reduce. Other dtypes are reduced as a wider dtype that holds each of their values, and gathered
#: as bytes.
NATIVE = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64}
)
_WIDER = {
    torch.bool: torch.uint8,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}

#: Size of the first message of an object broadcast, in bytes: a length, then as much of the pickle as fits. Loopback
#: and Ethernet take as long for 1 KiB as for one byte, and Lightning's booleans, paths, and step counts fit.
_FIRST_MESSAGE_BYTES = 1024
_LENGTH_BYTES = 8
_INLINE_BYTES = _FIRST_MESSAGE_BYTES - _LENGTH_BYTES


class Collectives(ABC):
    """Collectives of one rank.

    Args:
        device: Function that returns the device of this rank; called when an operation creates a tensor.
    """

    #: Further values of ``reduce_op`` that the engine supports.
    extra_reduce_ops: dict[str, str] = {}  # noqa: RUF012
    #: Whether only this rank takes part, so that a reduction returns its input.
    is_local = False
    #: Whether :meth:`all_gather` concatenates tensors whose first dimensions differ.
    gathers_different_lengths = False
    #: Dtypes of tensors that the engine reduces in place.
    native_dtypes: frozenset[torch.dtype] = NATIVE

    #: Function that compares an operation, and optionally its tensor, with those of the other ranks before it starts;
    #: None if ranks do not compare them.
    compare: "Callable[..., None] | None" = None

    def __init__(self, device: Callable[[], torch.device]) -> None:
        self._device = device

    # --- operations of an engine ---

    @abstractmethod
    def rank(self, group: Any = None) -> int | None:
        """Returns the rank in a group, by default all ranks; None if it is not in the group, or there is no group."""

    @abstractmethod
    def world_size(self, group: Any = None) -> int:
        """Returns the number of ranks in a group of this rank, by default all ranks."""

    def has_all_ranks(self, group: Any) -> bool:
        """Returns whether a group, of which this rank is a member, has all ranks."""
        return group is None or self.world_size(group) == self.world_size()

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: str, group: Any) -> None:
        """Reduces a contiguous tensor of a dtype in :attr:`native_dtypes` in place; ``"mean"`` of floats only."""

    @abstractmethod
    def _all_gather(self, output: Tensor, tensor: Tensor, group: Any) -> None:
        """Gathers flat tensors of a dtype in :attr:`native_dtypes` into one flat tensor, in rank order."""

    @abstractmethod
    def _broadcast(self, tensors: Iterable[Tensor], src: int) -> None:
        """Overwrites tensors with those of rank ``src``; starts all broadcasts before it waits for the first."""

    @abstractmethod
    def start_all_reduce(self, tensor: Tensor, op: str, name: str) -> Callable[[], None]:
        """Starts to reduce a tensor over all ranks, in place, concurrently with other operations.

        Args:
            tensor: Contiguous tensor of a dtype in :attr:`native_dtypes`, of the same shape on all ranks.
            op: "sum", "min", or "max".
            name: Name of the operation, equal on all ranks, that distinguishes it from concurrent operations.

        Returns:
            Function that waits until the operation has ended.
        """

    @abstractmethod
    def start_all_gather(self, output: Tensor, tensor: Tensor, name: str) -> Callable[[], None]:
        """Starts to gather the bytes of one tensor from each rank, concurrently with other operations.

        Args:
            output: Flat tensor that receives the tensors of all ranks, in rank order.
            tensor: Flat tensor, of the same size and dtype on all ranks. It is not modified until the operation ends.
                It may be this rank's part of ``output``, if the other parts are zero.
            name: Name of the operation, equal on all ranks, that distinguishes it from concurrent operations.

        Returns:
            Function that waits until the operation has ended.
        """

    @abstractmethod
    def barrier(self, name: str | None = None) -> None:
        """Waits until all ranks have called it.

        Args:
            name: Name of the barrier, for the error if it fails.
        """

    # --- operations built on them ---

    def start_sum(self, tensor: Tensor, name: str) -> Callable[[], None]:
        """Starts to sum a tensor over all ranks, in place; see :meth:`start_all_reduce`."""
        return self.start_all_reduce(tensor, "sum", name)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over ranks; every rank receives the result.

        As in Lightning, a contiguous tensor of a dtype that the engine reduces is overwritten with the result. In all
        other cases the result is a new tensor, so use the returned tensor.

        Args:
            tensor: Tensor of any shape, layout, and dtype, which are equal on all ranks. Other objects are returned
                unchanged.
            group: Group of the engine; all ranks by default. A rank outside the group receives its input.
            reduce_op: Key of :data:`REDUCE_OPS` in any case, a ``torch.distributed.ReduceOp``, or None for the mean.

        Returns:
            The reduced tensor, of the dtype of the input, except: the mean of integers or booleans has the default
            float dtype, and the sum of booleans is an int64 count, as with ``torch.mean`` and ``torch.sum``.

        Raises:
            ValueError: If ``reduce_op`` is unknown, or not defined for the dtype.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        op = self.normalize_op(reduce_op)
        if self.rank(group) is None:
            return tensor
        if self.compare is not None and self.has_all_ranks(group):
            self.compare(f"reduce ({op})", tensor)
        if (
            tensor.dtype in self.native_dtypes
            and tensor.is_contiguous()
            and (tensor.is_floating_point() or op != "mean")
        ):
            self._all_reduce(tensor.detach(), op, group)
            return tensor
        return self._reduce_copy(tensor.detach(), op, group)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers one tensor from each rank.

        Args:
            tensor: Tensor of shape ``(...)`` and any dtype, which are equal on all ranks.
            group: Group of the engine; all ranks by default.
            sync_grads: Whether the result carries gradients: each rank's input then receives the sum, over all ranks,
                of the gradients with respect to its slice.

        Returns:
            Tensor of shape ``(world_size, ...)``, in rank order. Without a group: the input.
        """
        if self.rank(group) is None:
            return tensor
        if sync_grads:
            gathered: Tensor = _AllGather.apply(tensor, self, group)  # type: ignore[no-untyped-call]
            return gathered
        return self._gather(tensor.detach(), group)

    def gather_list(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """Gathers one tensor from each rank into a list, as torchmetrics requires."""
        return list(self._gather(tensor.detach(), group))

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Returns the object of rank ``src`` on every rank.

        Objects whose pickle is smaller than 1 KiB take one round trip, larger objects two.

        Args:
            obj: Any picklable object on rank ``src``; ignored on other ranks.
            src: Global rank of the source.

        Raises:
            ValueError: If there is no rank ``src``.
            RuntimeError: On every rank, if the object cannot be pickled; on a rank that cannot unpickle it.
        """
        rank = self.rank()
        if rank is None:
            return obj
        world_size = self.world_size()
        if not 0 <= src < world_size:
            raise ValueError(f"`src={src}`: there are {world_size} ranks. Use a rank from 0 to {world_size - 1}.")
        if self.compare is not None:
            self.compare(f"broadcast of an object of rank {src}")
        if rank == src:
            self._send_object(obj, src)
            return obj
        received: T = self._receive_object(src)
        return received

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Combines the decisions of all ranks in one round trip.

        Args:
            decision: Decision of this rank.
            all: Whether the result is True only if it is True on all ranks; otherwise one rank suffices.
        """
        if self.rank() is None:
            return bool(decision)
        if self.compare is not None:
            self.compare("reduction of a decision")
        vote = torch.tensor(int(decision), dtype=torch.int32, device=self._device())
        self._all_reduce(vote, "min" if all else "max", None)
        return bool(vote.item())

    def broadcast_module(self, module: torch.nn.Module, src: int = 0) -> None:
        """Overwrites the parameters and buffers of ``module`` on every rank with those of rank ``src``.

        Parameters and buffers that the module excludes from DDP stay unchanged.
        """
        if self.rank() is None:
            return
        if self.compare is not None:
            self.compare(f"broadcast of the module of rank {src}")
        excluded = names_excluded_from_ddp(module)
        named_tensors = [*module.named_parameters(), *module.named_buffers()]
        self._broadcast([tensor.detach() for name, tensor in named_tensors if name not in excluded], src)

    def broadcast_tensors(self, tensors: Iterable[Tensor], src: int) -> None:
        """Overwrites tensors, of equal shapes and dtypes on all ranks, with those of rank ``src``."""
        if self.rank() is None:
            return
        if self.compare is not None:
            self.compare(f"broadcast of tensors of rank {src}")
        self._broadcast(tensors, src)

    def normalize_op(self, reduce_op: Any) -> str:
        """Returns the engine's name of a reduction; :meth:`reduce` describes the argument."""
        if reduce_op is None:
            return "mean"
        name = str(getattr(reduce_op, "name", reduce_op)).lower()
        names = {**REDUCE_OPS, **self.extra_reduce_ops}
        if name not in names:
            raise ValueError(
                f"`reduce_op={reduce_op!r}` is unknown. Use one of {', '.join(names)}, or a ReduceOp of torch."
            )
        return names[name]

    def _reduce_copy(self, tensor: Tensor, op: str, group: Any) -> Tensor:
        """Reduces a tensor that cannot be reduced in place; returns a new tensor."""
        dtype = tensor.dtype
        if tensor.is_complex():
            return self._reduce_complex(tensor, op, group)
        if tensor.is_floating_point():
            wire = tensor.to(dtype if dtype in self.native_dtypes else torch.float32, copy=True).contiguous()
            self._all_reduce(wire, op, group)
            return wire.to(dtype)
        if op == "mean" or (op == "sum" and dtype == torch.bool):
            # Summed as int64, so that neither a count nor a mean of small integers overflows.
            total = tensor.to(torch.int64, copy=True).contiguous()
            self._all_reduce(total, "sum", group)
            return total / self.world_size(group) if op == "mean" else total
        wider = dtype
        while wider not in self.native_dtypes and wider in _WIDER:
            wider = _WIDER[wider]
        wire = tensor.to(wider, copy=True).contiguous()
        self._all_reduce(wire, op, group)
        return wire.to(dtype)

    def _reduce_complex(self, tensor: Tensor, op: str, group: Any) -> Tensor:
        if op in ("sum", "mean"):
            total = tensor.clone(memory_format=torch.contiguous_format)
            self._all_reduce(torch.view_as_real(total), op, group)
            return total
        if op == "product":
            return self._gather(tensor, group).prod(dim=0)
        raise ValueError(
            f"`reduce_op={op}` is not defined for dtype {tensor.dtype}, because complex numbers have no order."
            " Use 'sum', 'mean' or 'product'."
        )

    def _gather(self, tensor: Tensor, group: Any) -> Tensor:
        if self.compare is not None and self.has_all_ranks(group):
            self.compare("all_gather", tensor)
        # An empty tensor is gathered, too: other ranks may have elements, and the operation needs all ranks.
        stacked = torch.empty((self.world_size(group), *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        output, input_ = stacked.view(-1), tensor.contiguous().view(-1)
        if tensor.dtype not in self.native_dtypes:
            output, input_ = output.view(torch.uint8), input_.view(torch.uint8)
        self._all_gather(output, input_, group)
        return stacked

    def _send_object(self, obj: Any, src: int) -> None:
        failure: Exception | None = None
        try:
            payload = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
            length = len(payload)
        except Exception as error:
            # The other ranks wait for a message. Without one, they would wait for the timeout; with the error text, all
            # ranks raise. A negative length marks the payload as an error text.
            failure = error
            payload = f"{type(error).__name__}: {error}".encode(errors="replace")[:_INLINE_BYTES]
            length = -len(payload)
        first = length.to_bytes(_LENGTH_BYTES, "little", signed=True) + payload[:_INLINE_BYTES]
        self._broadcast([self._to_tensor(bytearray(first.ljust(_FIRST_MESSAGE_BYTES, b"\0")))], src)
        if failure is not None:
            raise RuntimeError(f"Broadcast from rank {src} failed: {type(obj)} cannot be pickled.") from failure
        if len(payload) > _INLINE_BYTES:
            self._broadcast([self._to_tensor(bytearray(payload[_INLINE_BYTES:]))], src)

    def _receive_object(self, src: int) -> Any:
        first = torch.empty(_FIRST_MESSAGE_BYTES, dtype=torch.uint8, device=self._device())
        self._broadcast([first], src)
        message = _to_bytes(first)
        length = int.from_bytes(message[:_LENGTH_BYTES], "little", signed=True)
        payload = message[_LENGTH_BYTES : _LENGTH_BYTES + min(abs(length), _INLINE_BYTES)]
        if length < 0:
            reason = payload.decode(errors="replace")
            raise RuntimeError(f"Broadcast from rank {src} failed: rank {src} cannot pickle the object: {reason}")
        if length > _INLINE_BYTES:
            rest = torch.empty(length - _INLINE_BYTES, dtype=torch.uint8, device=self._device())
            self._broadcast([rest], src)
            payload += _to_bytes(rest)
        try:
            return pickle.loads(payload)
        except Exception as error:
            raise RuntimeError(
                f"Broadcast from rank {src} failed: rank {self.rank()} cannot unpickle the object."
            ) from error

    def _to_tensor(self, data: bytearray) -> Tensor:
        return torch.frombuffer(data, dtype=torch.uint8).to(self._device())


def names_excluded_from_ddp(module: torch.nn.Module) -> set[str]:
    """Returns the names in ``_ddp_params_and_buffers_to_ignore``: parameters and buffers that ranks do not exchange."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def describe_tensor(tensor: Tensor) -> str:
    """Returns the shape and the dtype of a tensor, for messages."""
    return f"a tensor of shape {list(tensor.shape)} and dtype {str(tensor.dtype).removeprefix('torch.')}"


class _AllGather(torch.autograd.Function):
    """All-gather whose backward all-reduces, because gloo has no reduce-scatter of its own."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, collectives: Collectives, group: Any) -> Tensor:
        ctx.collectives, ctx.group = collectives, group
        return collectives._gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # Cloned, because autograd may pass the same tensor to other functions, and the reduction overwrites it.
        total = grads[0].clone(memory_format=torch.contiguous_format)
        total = ctx.collectives.reduce(total, ctx.group, "sum")
        return total[ctx.collectives.rank(ctx.group)], None, None


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
