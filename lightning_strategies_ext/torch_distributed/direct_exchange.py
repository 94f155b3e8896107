"""Exchange of the gradients of a model in DDP over ``shm``, without DDP's reducer.

DDP's reducer copies each gradient into a bucket, calls the process group from C++, and waits for a Python future. That
takes longer than an all-reduce over ``shm`` itself. :class:`DirectExchange` hooks into the same nodes of autograd as
the reducer and all-reduces the gradients itself: large gradients as soon as they are computed, small gradients
together, as one tensor, at the end of the backward pass. The mean of a large gradient is written to memory that the
ranks share, which becomes the gradient, as the memory of a bucket does with the reducer. The model remains an instance
of DistributedDataParallel, and its reducer remains ready for steps that need it.

A training script observes the same as with the reducer: which passes exchange gradients, when gradients are averaged,
which errors are raised and where, and with two ranks every bit of the result.
"""
# Private names of DistributedDataParallel: torch 2.5 to 2.13. Its stubs leave methods without types.
# mypy: disable-error-code="no-untyped-call"

import logging
import time
from collections.abc import Iterable, Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext.gradients import NUM_HOLDERS_IN_HOOK_OF_NODE, gradient_of, unshare_gradient
from lightning_strategies_ext.identities import BUCKET, GRADIENTS, current
from lightning_strategies_ext.shm.native import SharedCopies
from lightning_strategies_ext.shm.process_group import ShmProcessGroup
from lightning_strategies_ext.shm.tensors import is_plain

log = logging.getLogger(__name__)

#: Bytes from which a gradient is exchanged by itself; smaller gradients are copied into one tensor.
LARGE_NUM_BYTES: Final = 64 * 1024
#: Maximum bytes of that tensor. Further small gradients are exchanged by further all-reduces.
_PACK_NUM_BYTES: Final = 1024 * 1024
#: Alignment of gradients in shared memory, in bytes: a line of a core's cache.
_ALIGNMENT: Final = 64
#: Whether an option makes operations return only after their completion: from torch 2.8 on.
_HAS_ASYNC_OPTION: Final = hasattr(dist.AllreduceOptions(), "asyncOp")


class _Started(NamedTuple):
    """All-reduce of a large gradient that was started.

    Attributes:
        work: Handle of the all-reduce.
        parameter: Parameter of the gradient.
        result: Tensor that has the mean once the work has completed.
        copied_to: Gradient that receives a copy of the mean, if it keeps its memory; None if the result becomes the
            gradient.
    """

    work: Any
    parameter: Tensor
    result: Tensor
    copied_to: Tensor | None = None

    def end(self) -> None:
        """Waits for the mean, and makes it the gradient."""
        self.work.wait()
        if self.copied_to is None:
            self.parameter.grad = self.result
        elif self.copied_to is not self.result:
            self.copied_to.copy_(self.result)


@dataclass
class _Pack:
    """Small gradients that are exchanged as one tensor.

    Attributes:
        parameters: Parameters of the gradients.
        tensor: Tensor for the gradients, which is used in each step; None if each step allocates a tensor.
        gradients: Views of the tensor for the gradients, with the strides of the parameters.
    """

    parameters: list[Tensor]
    tensor: Tensor | None
    gradients: list[Tensor]

    @classmethod
    def create(cls, parameters: list[Tensor], reuses_memory: bool) -> "_Pack":
        tensor, gradients = _new_pack(parameters)
        return cls(parameters, tensor, gradients) if reuses_memory else cls(parameters, None, [])

    def filled(self) -> tuple[Tensor, list[Tensor]]:
        """Returns a tensor with the gradients of this pass, and its view for each gradient."""
        tensor, parts = (self.tensor, self.gradients) if self.tensor is not None else _new_pack(self.parameters)
        gradients: list[Any] = [parameter.grad for parameter in self.parameters]
        try:
            torch._foreach_copy_(parts, gradients)
        except TypeError:  # this rank has not computed the gradient of a parameter
            torch._foreach_copy_(parts, [*map(gradient_of, self.parameters)])
        return tensor, parts


class DirectExchange:
    """Exchanges the gradients of a model in DDP in place of its reducer.

    Args:
        model: Model in DDP.
        group: Process group of the ranks.

    Attributes:
        records_times: Whether the times of exchanges are recorded.
        times: Times at which the last recorded exchange began, at which only the exchange remained, and at which it
            ended, as ``time.time_ns()`` counts; None if none was recorded.
    """

    def __init__(self, model: DistributedDataParallel, group: ShmProcessGroup) -> None:
        self.records_times = False
        self.times: tuple[int, int, int] | None = None
        self._group = group
        named = trained_parameters(model)
        self._names, self._parameters = [*named], [*named.values()]
        self._options = all_reduce_options(dist.ReduceOp.AVG, is_asynchronous=False)
        self._large_options = all_reduce_options(dist.ReduceOp.AVG, is_asynchronous=True)
        reuses_memory = bool(model.gradient_as_bucket_view)
        self._is_large = [parameter.nbytes >= LARGE_NUM_BYTES for parameter in self._parameters]
        # The order until rank 0's order is known: autograd mostly computes the gradients of the last layers first.
        self._large = [index for index in reversed(range(len(self._parameters))) if self._is_large[index]]
        self._is_order_known = len(self._large) < 2
        self._copies = self._share_copies() if self._large and reuses_memory else {}
        self._order: list[int] = []
        self._begin_ns = self._ready_ns = self._blocked_ns = 0
        small = [each for each in self._parameters if each.nbytes < LARGE_NUM_BYTES]
        self._packs = [_Pack.create(parameters, reuses_memory) for parameters in _packed(small)]
        self._reset()
        # The reducer owns these nodes, so the hooks exist as long as the reducer.
        self._handles = [
            get_gradient_edge(parameter).node.register_hook(partial(self._gradient_is_ready, index))
            for index, parameter in enumerate(self._parameters)
        ]

    def check_last_pass(self) -> None:
        """Checks that the last backward pass has computed all gradients.

        Raises:
            RuntimeError: If a gradient is missing; then the computed gradients are not averaged.
        """
        if not 0 < self._num_remaining < len(self._parameters):
            return
        missing = [name for name, is_ready in zip(self._names, self._are_ready, strict=True) if not is_ready]
        raise RuntimeError(
            "Expected to have finished reduction in the prior iteration before starting a new one: the last backward"
            f" pass computed no gradient of {_listed(missing)}. Parameters of the module that take no part in the loss"
            " need `find_unused_parameters=True`."
        )

    def expect_pass(self) -> None:
        """Makes the next backward pass exchange gradients, or the current pass if it has just begun.

        Raises:
            RuntimeError: If the last backward pass has not computed all gradients.
        """
        self.check_last_pass()
        self._is_expecting = True

    def close(self) -> None:
        """Ends the exchange, even if an autograd graph outlives the model. A second call is a no-op."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # --- backward pass ---

    def _gradient_is_ready(self, index: int, *_: Any) -> None:
        """Starts the exchange of a parameter's gradient, if possible. Called by autograd after it was accumulated."""
        if not self._is_expecting:
            return
        if self._are_ready[index]:
            raise RuntimeError(
                f"Expected to mark a variable ready only once: the gradient of {self._names[index]!r} was accumulated"
                " twice in one backward pass. This happens if several reentrant activation checkpoints use one"
                " parameter (use `use_reentrant=False`), or if the module's forward was called again within the pass."
            )
        self._are_ready[index] = True
        self._num_remaining -= 1
        if self._is_large[index]:
            if not self._is_order_known:
                self._order.append(index)
            self._exchange_large()
        if self._num_remaining == 0:
            if self.records_times:
                self._ready_ns = time.time_ns()
            # At the end of the pass, as in the reducer: a gradient may still be accumulated a second time.
            Variable._execution_engine.queue_callback(self._finish)

    def _exchange_large(self) -> None:
        """Starts all-reduces in rank 0's order, up to the first gradient that is not computed yet."""
        large, are_ready = self._large, self._are_ready
        before = current.identity
        try:
            while self._num_started < len(large) and are_ready[large[self._num_started]]:
                begin_ns = time.time_ns() if self.records_times else 0
                current.identity = (before or GRADIENTS) + (self._num_started + 1) * BUCKET
                self._start(large[self._num_started])
                self._num_started += 1
                if self.records_times:
                    self._begin_ns = self._begin_ns or begin_ns
                    self._blocked_ns += time.time_ns() - begin_ns
        finally:
            current.identity = before

    def _start(self, index: int) -> None:
        """Starts the all-reduce of a large gradient."""
        parameter = self._parameters[index]
        copies = self._copies.get(index)
        gradient = gradient_of(parameter)
        # With `create_graph`, the gradient is part of a graph.
        if copies is not None and is_plain(gradient) and gradient.is_contiguous() and not gradient.requires_grad:
            work = self._group.all_reduce_into(copies, gradient, self._large_options)
            started = _Started(work, parameter, copies.own.detach())
            if work.is_completed():
                started.end()  # frees the memory in which the next gradient is computed
                return
        else:
            gradient = unshare_gradient(parameter, NUM_HOLDERS_IN_HOOK_OF_NODE)
            result = gradient if gradient.is_contiguous() else gradient.contiguous()
            work = self._group.allreduce([result], self._large_options)
            started = _Started(work, parameter, result, copied_to=gradient)
        self._started.append(started)

    def _finish(self) -> None:
        if torch.is_grad_enabled():  # `backward(create_graph=True)`
            with torch.no_grad():
                self._exchange_rest()
        else:
            self._exchange_rest()
        if self.records_times:
            ready = self._ready_ns - self._blocked_ns
            self.times = self._begin_ns or ready, ready, time.time_ns()
        if not self._is_order_known:
            self._adopt_order_of_rank_zero()
        self._reset()

    def _exchange_rest(self) -> None:
        before = current.identity
        identity = (before or GRADIENTS) + len(self._large) * BUCKET
        for pack in self._packs:
            tensor, means = pack.filled()
            current.identity = identity = identity + BUCKET
            try:
                work = self._group.allreduce([tensor], self._options)
            finally:
                current.identity = before
            if not _HAS_ASYNC_OPTION:
                work.wait()
            # As with the reducer's buckets, other tensors that share a gradient's memory do not receive the average.
            for parameter, mean in zip(pack.parameters, means, strict=True):
                parameter.grad = mean
        for started in self._started:
            started.end()

    def _reset(self) -> None:
        self._is_expecting = False
        self._are_ready = [False] * len(self._parameters)
        self._num_remaining = len(self._parameters)
        self._num_started = 0
        self._started: list[_Started] = []
        self._begin_ns = self._ready_ns = self._blocked_ns = 0

    def _share_copies(self) -> dict[int, SharedCopies]:
        """Returns shared memory for the means of large gradients; empty if a rank's ``/dev/shm`` has no space."""
        parameters = {index: self._parameters[index] for index in sorted(self._large)}
        *begins, end = accumulate((aligned(each.nbytes) for each in parameters.values()), initial=0)
        try:
            memory = self._group.share_memory(end)
        except MemoryError as error:
            log.info("Means of large gradients are copied from shared memory: %s.", error)
            return {}
        copies = {}
        for begin, (index, parameter) in zip(begins, parameters.items(), strict=True):
            own = memory[self._group.rank()][begin : begin + parameter.nbytes].view(parameter.dtype)
            pointers = (c_void_p * len(memory))(*(each.data_ptr() + begin for each in memory))
            copies[index] = SharedCopies(own.view(parameter.shape), pointers, memory)
        return copies

    def _adopt_order_of_rank_zero(self) -> None:
        """Adopts the order in which rank 0 has computed the large gradients. Collective: all ranks call it."""
        order = torch.tensor(self._order)
        self._group.broadcast([order], dist.BroadcastOptions()).wait()
        self._large = order.tolist()
        self._is_order_known = True
        self._order = []


def _packed(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Divides parameters with small gradients into groups that are exchanged together."""
    groups: list[list[Tensor]] = []
    num_bytes = 0
    for parameter in sorted(parameters, key=lambda each: str(each.dtype)):
        num_bytes += parameter.nbytes
        if not groups or num_bytes > _PACK_NUM_BYTES or groups[-1][0].dtype != parameter.dtype:
            groups.append([])
            num_bytes = parameter.nbytes
        groups[-1].append(parameter)
    return groups


def _new_pack(parameters: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Returns memory for the gradients of parameters, and its view for each gradient."""
    *begins, end = accumulate((each.numel() for each in parameters), initial=0)
    tensor = parameters[0].new_empty(end)
    # `empty_like` has the strides of a parameter if its elements fill its memory, else the default strides.
    strides = [torch.empty_like(each).stride() for each in parameters]
    with torch.no_grad():
        pairs = zip(parameters, strides, begins, strict=True)
        return tensor, [tensor.as_strided(each.shape, stride, begin) for each, stride, begin in pairs]


def aligned(num_bytes: int) -> int:
    """Returns a number of bytes, rounded up to a multiple of a line of a core's cache."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def all_reduce_options(op: Any, *, is_asynchronous: bool) -> dist.AllreduceOptions:
    """Returns the options of an all-reduce. Before torch 2.8, the caller always waits."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(op)
    if _HAS_ASYNC_OPTION:
        options.asyncOp = is_asynchronous
    return options


def exchanged_parameters(model: DistributedDataParallel) -> dict[str, Tensor]:
    """Returns the parameters that DDP does not ignore, by name, including frozen parameters."""
    ignored = model.parameters_to_ignore
    return {name: each for name, each in model.module.named_parameters() if name not in ignored}


def trained_parameters(model: DistributedDataParallel) -> dict[str, Tensor]:
    """Returns the parameters whose gradients DDP exchanges, by name."""
    return {name: each for name, each in exchanged_parameters(model).items() if each.requires_grad}


def gradient_bytes(model: DistributedDataParallel) -> int:
    """Returns the bytes of all gradients that a model in DDP exchanges in a step."""
    return sum(parameter.nbytes for parameter in trained_parameters(model).values())


def _listed(names: Sequence[str], max_listed: int = 8) -> str:
    suffix = f" and {len(names) - max_listed} more" if len(names) > max_listed else ""
    return ", ".join(map(repr, names[:max_listed])) + suffix
