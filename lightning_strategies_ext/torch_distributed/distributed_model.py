"""Model in DDP whose gradients and buffers may be exchanged over ``shm`` without DDP's C++ code.

:func:`reason_against` decides whether gradients are exchanged directly (:mod:`.direct_exchange`) or by DDP's reducer.
"""
# Private names of DistributedDataParallel: torch 2.5 to 2.13. Its stubs leave methods without types.
# mypy: disable-error-code="no-untyped-call"

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_strategies_ext.checks import is_compiled
from lightning_strategies_ext.identities import IdentityKind, current
from lightning_strategies_ext.shm.process_group import ShmProcessGroup
from lightning_strategies_ext.shm.tensors import is_plain
from lightning_strategies_ext.torch_distributed.direct_exchange import (
    DirectExchange,
    aligned,
    all_reduce_options,
    trained_parameters,
)
from lightning_strategies_ext.torch_distributed.feature import Feature, FeatureContext

log = logging.getLogger(__name__)

_BUFFERS: Final = int(IdentityKind.BUFFERS)
_DTYPES: Final = (torch.float32, torch.float64)
#: Arguments of DistributedDataParallel with which the user chooses how its reducer exchanges gradients.
_REDUCER_ARGUMENTS: Final = (
    *("process_group", "device_mesh", "bucket_cap_mb", "bucket_cap_mb_list", "mixed_precision"),
    *("delay_all_reduce_named_params", "param_to_hook_all_reduce", "skip_all_reduce_unused_params"),
)


class DistributedModel(DistributedDataParallel):
    """Model in DDP whose gradients may be exchanged without DDP's reducer.

    Attributes:
        direct_exchange: Exchange without the reducer; None if the reducer exchanges the gradients.
    """

    direct_exchange: DirectExchange | None = None
    _buffer_broadcast: "_BufferBroadcast | None" = None

    @property
    def is_exchanged_directly(self) -> bool:
        """Whether gradients are currently exchanged without the reducer.

        False once a communication hook was registered, and in DDP's ``join``.
        """
        return self.direct_exchange is not None and not self._comm_hooks and not self._join_config.enable

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module as DDP's forward does, without the reducer's part if the reducer exchanges nothing."""
        exchange = self.direct_exchange
        if not self._lazy_init_ran:  # may register a communication hook
            self._lazy_init()
        if exchange is None or self._comm_hooks or self._join_config.enable:
            return super().forward(*inputs, **kwargs)
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            exchange.check_last_pass()
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        output = self.module(*inputs, **kwargs)
        self.prepare_for_backward()  # by now, Lightning has set `require_backward_grad_sync` to False in a manual step
        return output

    def prepare_for_backward(self) -> None:
        """Makes the next backward pass exchange gradients directly, unless it runs in ``no_sync``.

        Raises:
            RuntimeError: If the previous backward pass has not computed all gradients.
        """
        assert self.direct_exchange is not None
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self.require_forward_param_sync:
            self.direct_exchange.expect_pass()

    def exchange_directly(self, ddp_kwargs: Mapping[str, Any], *, tries_buckets: bool = False) -> None:
        """Exchanges gradients without the reducer from now on, if possible; otherwise logs the reason as INFO.

        Args:
            ddp_kwargs: Arguments of DistributedDataParallel that the user has set.
            tries_buckets: Whether a search compares bucket sizes.
        """
        reason = reason_against(self, ddp_kwargs, tries_buckets=tries_buckets)
        if reason is None:
            group: Any = self.process_group
            self.direct_exchange = DirectExchange(self, group)
            self._buffer_broadcast = _BufferBroadcast(group)
        else:
            log.info("DDP's reducer exchanges the gradients: %s.", reason)

    def exchange_by_reducer(self) -> None:
        """Makes the reducer exchange the gradients again. A second call is a no-op."""
        if self.direct_exchange is not None:
            self.direct_exchange.close()
            self.direct_exchange = self._buffer_broadcast = None

    def _distributed_broadcast_coalesced(
        self, tensors: list[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        before, current.identity = current.identity, _BUFFERS
        try:
            if self._buffer_broadcast is None or not self._buffer_broadcast.can_broadcast(tensors):
                super()._distributed_broadcast_coalesced(tensors, buffer_size, authoritative_rank)
            else:
                self._buffer_broadcast.broadcast(tensors, authoritative_rank)
        finally:
            current.identity = before

    def _remove_autograd_hooks(self) -> None:
        self.exchange_by_reducer()
        super()._remove_autograd_hooks()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "direct_exchange": None, "_buffer_broadcast": None}


class _BufferBroadcast:
    """Broadcasts the buffers of a model over ``shm`` in one all-reduce, to which all ranks but the root add zeros.

    The bytes are added as integers, so that all ranks have the bits of the root, with any dtype.

    Args:
        group: Process group of the ranks.
    """

    def __init__(self, group: ShmProcessGroup) -> None:
        self._group = group
        self._options = all_reduce_options(dist.ReduceOp.SUM, is_asynchronous=False)
        self._pack = torch.empty(0, dtype=torch.int32)
        self._parts: list[Tensor] = []

    @staticmethod
    def can_broadcast(tensors: Sequence[Tensor]) -> bool:
        """Returns whether all tensors are dense CPU tensors with memory."""
        return all(is_plain(each) and each.is_cpu and each.layout is torch.strided for each in tensors)

    def broadcast(self, tensors: list[Tensor], root: int) -> None:
        """Copies the root's tensors to all ranks. Collective: all ranks call it, with equal shapes and dtypes."""
        parts = self._parts
        if len(parts) != len(tensors) or any(
            part.shape != tensor.shape or part.dtype is not tensor.dtype
            for part, tensor in zip(parts, tensors, strict=True)
        ):
            *begins, end = accumulate((aligned(each.nbytes) for each in tensors), initial=0)
            memory = torch.empty(end, dtype=torch.uint8)
            parts = self._parts = [
                memory[begin : begin + each.nbytes].view(each.dtype).view(each.shape)
                for begin, each in zip(begins, tensors, strict=True)
            ]
            self._pack = memory.view(torch.int32)
        if self._group.rank() == root:
            torch._foreach_copy_(parts, tensors)
        else:
            self._pack.zero_()
        self._group.allreduce([self._pack], self._options).wait()
        # Also writes to the root's tensors: as in DDP, a pass that needs their previous version fails on all ranks.
        torch._foreach_copy_(tensors, parts)


def reason_against(model: DistributedDataParallel, ddp_kwargs: Mapping[str, Any], *, tries_buckets: bool) -> str | None:
    """Returns the reason why the reducer must exchange the gradients of a model; None if there is none."""
    group = model.process_group
    if not isinstance(group, ShmProcessGroup):
        return "the process group is not `shm`"
    if group.size() == 1:
        return "there is one rank"
    if not group.is_compiled:
        return "the ranks are on several hosts, or there is no compiled library"
    for name in _REDUCER_ARGUMENTS:
        if ddp_kwargs.get(name):
            return f"`{name}={ddp_kwargs[name]!r}`"
    if tries_buckets:
        return "bucket sizes are compared"
    if model.static_graph or model.find_unused_parameters:
        return "`find_unused_parameters` or `static_graph` is set"
    if model._comm_hooks:
        return "there is a communication hook"
    if model._use_python_reducer or any(map(is_compiled, model.module.modules())):
        return "a module is compiled"
    parameters = trained_parameters(model).values()
    if any(parameter.dtype not in _DTYPES for parameter in parameters):
        return "a parameter is neither float32 nor float64"
    if any(getattr(module, "sparse", False) for module in model.module.modules()):
        return "gradients may be sparse"
    return None


class DirectExchangeFeature(Feature):
    """Exchanges the gradients of a model without DDP's reducer, where possible.

    Args:
        context: The parts of the strategy that the feature uses.
    """

    def __init__(self, context: FeatureContext) -> None:
        self._context = context
        self._model: DistributedModel | None = None

    @override
    def wrap(self, model: DistributedDataParallel) -> None:
        if isinstance(model, DistributedModel):
            self._model, context = model, self._context
            model.exchange_directly(context.ddp_kwargs, tries_buckets=context.options.tunes_buckets)

    @override
    def after_rebuild(self, model: DistributedDataParallel) -> None:
        self.wrap(model)

    @override
    def close(self) -> None:
        if self._model is not None:
            self._model.exchange_by_reducer()
        self._model = None
