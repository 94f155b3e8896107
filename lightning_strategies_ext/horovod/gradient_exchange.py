"""Gradient exchange over Horovod, overlapped with the backward pass.

The all-reduce of a gradient starts as soon as autograd has accumulated it; small gradients are reduced in groups. At
the end of each backward pass, autograd calls back, and the exchange waits for the remaining gradients: when
``loss.backward()`` returns, hooks, clipping, and the optimizer use the gradients of all ranks. In ``no_sync``,
gradients accumulate locally. The next backward pass outside of ``no_sync`` exchanges their sum, so each accumulation
window has one exchange.

Adasum combines parameter updates of the ranks' optimizers instead of gradients (as Horovod's ``DistributedOptimizer``
does), see :mod:`.adasum`.

Limitations: If a parameter has no gradient on one rank, its exchange starts on this rank only after the backward pass,
with a gradient of zeros, and the other ranks wait for it.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

from lightning_strategies_ext.collectives.base import names_excluded_from_ddp
from lightning_strategies_ext.gradients import NUM_HOLDERS, unshare_gradient
from lightning_strategies_ext.horovod.exchange_options import HorovodExchangeOptions
from lightning_strategies_ext.horovod.synchronize import synchronize
from lightning_strategies_ext.monitoring.observer import ExchangeObserver

#: Size at which a group of gradients is full, in bytes. Each operation costs a negotiation between Horovod's threads of
#: all ranks (with gloo on one host, a step with six small gradients took 15 % less time with one group). The limit lets
#: the gradients of the last layers be exchanged while those of the first layers are computed.
GROUP_NUM_BYTES = 2**20


@dataclass
class PendingGradient:
    """A gradient whose all-reduce is pending.

    Attributes:
        gradient: Tensor that receives the result.
        wire: Tensor that is reduced: the gradient itself, or a copy with another dtype or layout.
        handle: Horovod's handle of the operation.
    """

    gradient: Tensor
    wire: Tensor
    handle: Any


class HorovodGradientExchange:
    """Exchanges the gradients of a module's parameters.

    Args:
        module: Module on its device, with equal weights on all ranks.
        options: Options of the exchange.
        prefix: Prefix of the names of operations; equal on all ranks, and different for each exchange.
        shared_exchanges: All exchanges of the same backward passes, in the same order on all ranks; the caller appends
            this exchange. None if there is no other.
    """

    def __init__(
        self,
        module: Module,
        options: HorovodExchangeOptions,
        prefix: str = "gradient",
        shared_exchanges: "list[HorovodGradientExchange] | None" = None,
    ) -> None:
        import horovod.torch as hvd

        self._hvd = hvd
        self._options = options
        self._process_set = hvd.global_process_set if options.process_set is None else options.process_set
        self._prefix = prefix
        self._shared_exchanges = shared_exchanges
        # Under manual optimization, a backward pass that bypasses the strategy is a user error.
        self._is_automatic: bool = getattr(module, "automatic_optimization", True)
        self._register_parameters(module)
        #: Contributing ranks, the others are shadowing; None if all ranks contribute.
        self.contributors: Sequence[int] | None = None
        self.is_in_no_sync = False
        #: Broadcasts the buffers of a rank; None unless each step broadcasts the buffers of rank 0.
        self.broadcast_buffers: Callable[[int | None], None] | None = None
        #: Whether a backward pass of the strategy runs. Gradients of other passes stay local, as under DDP.
        self.is_in_backward = False
        #: Whether the backward pass has exchanged gradients, or this rank is known to contribute none. Otherwise
        #: :meth:`finish` exchanges zeros, so that no rank waits for this rank.
        self.has_contributed = False
        self._loss_hook: RemovableHandle | None = None
        self._is_queued = False  # whether autograd will call `_end_pass` at the end of the pass
        self._num_finished = 0  # passes with an exchange, within one backward pass of the strategy
        self.observer: ExchangeObserver | None = None  # records each exchange
        self._begun_at_ns = self._num_bytes = 0
        self._saved_gradients: dict[Parameter, Tensor | None] | None = None
        self._has_own = False  # whether earlier backward passes have left local gradients
        self._ready: set[Parameter] = set()
        self._pending: dict[Parameter, PendingGradient] = {}
        self._pending_sparse: dict[Parameter, Callable[[], Tensor]] = {}
        self._hooks: dict[Parameter, Any] = {}
        self._hook_in()

    def _register_parameters(self, module: Module) -> None:
        self._names = {parameter: f"{self._prefix}.{name}" for name, parameter in exchanged_parameters(module)}
        self._groups = _groups(list(self._names), self._options.num_groups)

    def find_added(self, module: Module) -> list[Tensor]:
        """Returns the parameters that were added to the module or replaced others, and are not exchanged yet."""
        return [parameter for _, parameter in exchanged_parameters(module) if parameter not in self._names]

    def include_added(self, module: Module) -> None:
        """Includes added parameters in the exchange. Collective: all ranks call it."""
        self._register_parameters(module)
        self._hook_in()

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Disables the exchange inside the context; gradients accumulate locally."""
        before, self.is_in_no_sync = self.is_in_no_sync, True
        try:
            yield
        finally:
            self.is_in_no_sync = before

    def exclude_next_backward(self) -> None:
        """Makes the next backward pass, up to :meth:`finish`, leave the contribution of this rank unchanged."""
        self._saved_gradients = {}
        self.has_contributed = True
        # The contributing ranks also have exchanged gradients, so this rank need not contribute them.
        if self.is_in_no_sync or self._has_own:
            self._saved_gradients = {
                parameter: None if parameter.grad is None else parameter.grad.clone() for parameter in self._names
            }

    def begin(self, loss: Tensor) -> None:
        """Enables the exchange in the next backward pass, for all exchanges of ``shared_exchanges``.

        Args:
            loss: Tensor on which the strategy calls ``backward``.

        Raises:
            RuntimeError: If the previous backward pass has failed after it had started to exchange gradients.
        """
        does_exchange = False
        for exchange in self._pass_exchanges:
            if exchange._ready:
                raise RuntimeError(
                    "The previous backward pass raised an exception after this rank had begun to exchange gradients,"
                    " so the ranks would mix gradients of two passes. Do not continue after an exception in a"
                    " backward pass."
                )
            exchange.is_in_backward, exchange._num_finished, exchange._is_queued = True, 0, False
            exchange.has_contributed = exchange._saved_gradients is not None
            does_exchange = does_exchange or not exchange.is_in_no_sync
        if does_exchange and loss.requires_grad:
            # Queue in the pass of the loss itself, not in a nested pass of a reentrant checkpoint.
            self._loss_hook = loss.register_hook(self._queue)

    def finish(self) -> None:
        """Ends the backward pass after :meth:`begin`, and exchanges the gradients if the pass has not done so.

        Raises:
            RuntimeError: If another rank has failed or shut Horovod down.
        """
        if self._loss_hook is not None:
            self._loss_hook.remove()
            self._loss_hook = None
        self.is_in_backward = False
        if self.is_in_no_sync or not self._process_set.included():
            self._has_own = self._has_own or self._saved_gradients is None
        elif not self._num_finished:
            self._exchange_rest()  # the pass has reached no parameter on this rank
        self._saved_gradients = None

    @property
    def _pass_exchanges(self) -> "Sequence[HorovodGradientExchange]":
        return (self,) if self._shared_exchanges is None else self._shared_exchanges

    def _queue(self, _: Tensor | None = None) -> None:
        """Makes autograd call :meth:`_end_pass` at the end of the current backward pass."""
        if not self._is_queued:
            for exchange in self._pass_exchanges:
                exchange._is_queued = True
            Variable._execution_engine.queue_callback(self._end_pass)

    def _end_pass(self) -> None:
        exchanges = self._pass_exchanges
        has_gradients = False  # stays False in a pass of `torch.autograd.grad`
        for exchange in exchanges:
            exchange._is_queued = False
            has_gradients = has_gradients or bool(exchange._ready)
        if has_gradients:
            for exchange in exchanges:  # in the same order on all ranks, which wait for each other
                exchange._exchange_rest()

    def _exchange_rest(self) -> None:
        """Exchanges the remaining gradients, and waits for all gradients."""
        if self.is_in_no_sync or not self._process_set.included():
            return
        self._num_finished += 1
        self.has_contributed, self._has_own = True, False
        ready_at_ns = 0 if self.observer is None else time.time_ns()
        zeros: dict[Parameter, Tensor] = {}
        for parameter in self._names:
            if parameter.requires_grad and parameter not in self._ready:
                if parameter.grad is None:
                    zeros[parameter] = parameter.grad = torch.zeros_like(parameter)
                elif self._saved_gradients is not None:
                    self._restore(parameter, self._saved_gradients.get(parameter))
                self._start(parameter)
        usage = None if self.contributors is None else self._usage(zeros)
        for handle in {id(pending.handle): pending.handle for pending in self._pending.values()}.values():
            synchronize(handle, self._process_set)
        for parameter, pending in self._pending.items():
            if pending.wire is not pending.gradient:
                pending.gradient.copy_(pending.wire)
            is_unused = parameter in zeros and not pending.gradient.any() if usage is None else not usage[parameter]
            if is_unused:
                parameter.grad = None  # not zeros: the optimizer must skip the parameter
        for parameter, result in self._pending_sparse.items():
            parameter.grad = result()
        self._pending.clear()
        self._pending_sparse.clear()
        self._ready.clear()
        if self.observer is not None:
            begun_at_ns = min(self._begun_at_ns or ready_at_ns, ready_at_ns)
            self.observer.on_exchange(begun_at_ns, ready_at_ns, time.time_ns(), self._num_bytes)
            self._begun_at_ns = self._num_bytes = 0
        self._hook_in()  # for parameters that were frozen before

    def _usage(self, zeros: dict[Parameter, Tensor]) -> dict[Parameter, bool] | None:
        """Returns, for each parameter, whether a contributing rank has a gradient; None if all ranks contribute.

        A shadowing rank has local gradients without effect. It cannot infer from the mean whether other ranks have used
        a parameter.
        """
        assert self.contributors is not None
        if len(self.contributors) == self._process_set.size():
            return None
        has_gradient = [
            parameter not in zeros
            and (self._saved_gradients is None or self._saved_gradients.get(parameter) is not None)
            for parameter in self._names
        ]
        counts = torch.tensor(has_gradient, dtype=torch.int32)
        name = f"{self._prefix}.usage"
        handle = self._hvd.allreduce_async_(counts, name=name, op=self._hvd.Sum, process_set=self._process_set)
        synchronize(handle, self._process_set)
        return {parameter: count > 0 for parameter, count in zip(self._names, counts.tolist(), strict=True)}

    def sync_buffers(self) -> None:
        """Broadcasts the first contributing rank's buffers, if each step broadcasts buffers and it is not rank 0."""
        if self.broadcast_buffers is not None and self.contributors and self.contributors[0]:
            self.broadcast_buffers(self.contributors[0])

    def sync_buffers_of_forward(self) -> None:
        """A no-op: a forward pass exchanges nothing."""

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _hook_in(self) -> None:
        for parameter in self._names:
            if parameter.requires_grad and parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _on_gradient(self, parameter: Tensor) -> None:
        # Autograd also calls this hook without a new gradient: for a parameter that was frozen after the forward pass
        # (`toggle_optimizer`), or if a function returns None as its gradient.
        if parameter.grad is None or not parameter.requires_grad:
            return
        parameter = cast(Parameter, parameter)
        if not self.is_in_backward:
            self._mark_local(parameter)
            return
        if self._saved_gradients is not None:
            self._restore(parameter, self._saved_gradients.get(parameter))
        if not self.is_in_no_sync and self._process_set.included():
            if self._num_finished and self._options.op == "sum":
                raise RuntimeError(
                    "`op='sum'`: a second backward pass in `backward` or `on_after_backward` computed"
                    f" {self._names[parameter]}, whose gradient is already summed over the ranks and would be summed"
                    " again. Add the losses and run one backward pass, or use `op='average'`."
                )
            if not self._is_queued:  # the user's `backward` uses a different loss
                self._pass_exchanges[0]._queue()
            self._start(parameter)

    def _mark_local(self, parameter: Parameter) -> None:
        if not self._is_automatic and not self.is_in_no_sync:
            raise RuntimeError(
                f"A backward pass outside of `self.manual_backward` computed {self._names[parameter]}, which the"
                " ranks would not exchange. Call `self.manual_backward(loss)` instead of `loss.backward()`. For"
                " gradients of one rank, use `torch.autograd.grad`, or `with"
                " self.trainer.strategy.block_backward_sync():`."
            )
        self._has_own = True

    @staticmethod
    def _restore(parameter: Parameter, saved: Tensor | None) -> None:
        if parameter.grad is None:
            return
        if saved is None:
            parameter.grad.zero_()
        elif saved.layout == parameter.grad.layout == torch.strided:
            parameter.grad.copy_(saved)
        else:
            parameter.grad = saved

    def _start(self, parameter: Parameter) -> None:
        if parameter in self._ready:
            raise RuntimeError(
                f"One backward pass computed {self._names[parameter]} twice, but the ranks exchange it once. Use"
                " `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, and do not start a backward pass in"
                " a hook of another one."
            )
        self._ready.add(parameter)
        gradient = cast(Tensor, parameter.grad)
        if gradient.is_sparse and not self._options.sparse_as_dense:
            op, divisor = self._op
            dtype, rows = gradient.dtype, gradient.coalesce()
            if dtype == torch.bfloat16:  # Horovod cannot sum bfloat16
                rows = rows.to(torch.float32)
            summed = self._hvd.sparse_allreduce_async(rows, self._names[parameter], op, self._process_set)
            self._pending_sparse[parameter] = lambda: (summed() if divisor == 1 else summed() / divisor).to(dtype)
        elif gradient.is_sparse:
            parameter.grad = gradient.to_dense()
        elif gradient.is_conj():  # a conjugated tensor has no real view
            parameter.grad = gradient.resolve_conj()
        group = self._groups[parameter]
        if all(member in self._ready or not member.requires_grad for member in group):
            dense = [member for member in group if member in self._ready and member not in self._pending_sparse]
            self._send(dense)

    def _send(self, parameters: Sequence[Parameter]) -> None:
        if not parameters:
            return
        gradients = [unshare_gradient(parameter, NUM_HOLDERS) for parameter in parameters]
        if gradients[0].is_complex():  # a group has one dtype; Horovod cannot reduce complex numbers
            gradients = [torch.view_as_real(gradient) for gradient in gradients]
        wire_tensors = [self._to_wire_dtype(gradient) for gradient in gradients]
        if self.observer is not None:
            self._begun_at_ns = self._begun_at_ns or time.time_ns()
            self._num_bytes += sum(wire.nbytes for wire in wire_tensors)
        factor = self._options.gradient_predivide_factor
        op, divisor = self._op
        scales = {"prescale_factor": 1.0 / factor, "postscale_factor": factor / divisor}
        common = {"op": op, "process_set": self._process_set, **scales}
        name = self._names[parameters[0]]
        if len(wire_tensors) == 1:
            handle = self._hvd.allreduce_async_(wire_tensors[0], name=name, **common)
        else:
            handle = self._hvd.grouped_allreduce_async_(wire_tensors, name=f"group.{name}", **common)
        for parameter, gradient, wire in zip(parameters, gradients, wire_tensors, strict=True):
            self._pending[parameter] = PendingGradient(gradient, wire, handle)

    def _to_wire_dtype(self, gradient: Tensor) -> Tensor:
        if self._options.compression == "fp16" and gradient.is_floating_point():
            return gradient.to(torch.float16).contiguous()
        if gradient.dtype == torch.bfloat16:  # Horovod cannot sum bfloat16
            return gradient.to(torch.float32).contiguous()
        return gradient.contiguous()

    @property
    def _op(self) -> tuple[Any, int]:
        """Horovod's reduction, and the divisor of its result."""
        if self._options.op == "sum":
            return self._hvd.Sum, 1
        if self.contributors is None or len(self.contributors) == self._process_set.size():
            return self._hvd.Average, 1
        return self._hvd.Sum, len(self.contributors)


def exchanged_parameters(module: Module) -> Iterator[tuple[str, Parameter]]:
    """Yields the names and parameters of a module whose gradients are exchanged."""
    excluded = names_excluded_from_ddp(module)
    return ((name, parameter) for name, parameter in module.named_parameters() if name not in excluded)


def _groups(parameters: list[Parameter], num_groups: int | None) -> dict[Parameter, list[Parameter]]:
    parameters = parameters[::-1]  # a backward pass computes gradients from the last layer to the first
    max_group_size = len(parameters) if num_groups is None else -(-len(parameters) // num_groups) if num_groups else 1
    groups: list[list[Parameter]] = []
    for parameter in parameters:
        last = groups[-1] if groups else []
        num_bytes = sum(member.nbytes for member in last)
        # A single large gradient is reduced in place, whereas Horovod copies a group to a buffer and back.
        is_large = num_groups is None and max(num_bytes, parameter.nbytes) >= GROUP_NUM_BYTES
        # Horovod reduces the tensors of a group as one buffer, with one dtype.
        if not last or len(last) >= max_group_size or is_large or last[0].dtype != parameter.dtype:
            groups.append([parameter])
        else:
            last.append(parameter)
    return {parameter: group for group in groups for parameter in group}
