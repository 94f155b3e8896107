"""The exchange of gradients over Horovod, while the backward pass still runs.

A gradient is on its way as soon as autograd has added it up, small ones with the others of their group. Autograd calls
the exchange at the end of each backward pass, which waits for the gradients that are left: when ``loss.backward()``
returns, hooks, clipping and the optimizer see the gradients of all ranks. While the exchange is held back, gradients
add up locally, and the next backward pass that is not held back exchanges their sum: once per window of accumulation.

Adasum combines not gradients but what each rank's optimizer has made of its own (as Horovod's ``DistributedOptimizer``
does): see :class:`DeltaExchange`.

What it does not promise: that ranks may leave out different parameters for free. A parameter without a gradient on one
rank is exchanged as zeros after the backward pass, by all ranks.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_strategies_ext.checks import check_flag, check_whole_number
from lightning_strategies_ext.collectives.base import names_excluded_from_ddp
from lightning_strategies_ext.gradients import NUM_HOLDERS, unshare_gradient
from lightning_strategies_ext.horovod.waiting import wait_for
from lightning_strategies_ext.monitoring.observer import ExchangeObserver

Compression = Literal["none", "fp16"]
Op = Literal["average", "sum", "adasum"]
#: A group of gradients is full with so many bytes. Each call costs Horovod's threads of all ranks a word with each
#: other (with gloo on one host, a step with six small gradients took 15 % less as one group). And the gradients of the
#: last layers should be on their way while those of the first are computed.
GROUP_NUM_BYTES = 2**20


@dataclass(frozen=True)
class ExchangeOptions:
    """How gradients are exchanged. It names no class of Horovod's, so that it can be checked without Horovod.

    Attributes:
        compression: "none", or "fp16" to halve the bytes.
        op: "average", "sum" or "adasum".
        num_groups: Into how many groups parameters are put, each exchanged as a whole; 0 exchanges each by itself;
            None puts small neighbours together, up to 1 MiB.
        sparse_as_dense: Whether sparse gradients are made dense first.
        gradient_predivide_factor: Gradients are divided by it before they are summed, and by what is left of the
            number of ranks after.
        process_set: The ranks that exchange gradients; None for all.

    Raises:
        TypeError: If a value is of the wrong kind.
        ValueError: If a value or a combination cannot work.
    """

    compression: Compression = "none"
    op: Op = "average"
    num_groups: int | None = None
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    process_set: Any = None

    def __post_init__(self) -> None:
        if str(self.compression) == "bf16":
            raise ValueError(
                "`compression='bf16'`: Horovod 0.28 cannot sum bfloat16. Use 'fp16' (with a gradient scaler, since its"
                " range is small), or 'none'."
            )
        for name, known in (("compression", ("none", "fp16")), ("op", ("average", "sum", "adasum"))):
            if getattr(self, name) not in known:
                raise ValueError(f"`{name}={getattr(self, name)!r}` is unknown. Use one of {', '.join(known)}.")
        if self.num_groups is not None:
            check_whole_number("num_groups", self.num_groups, 0)
        check_flag("sparse_as_dense", self.sparse_as_dense)
        if not isinstance(self.gradient_predivide_factor, (int, float)) or self.gradient_predivide_factor <= 0:
            raise ValueError(f"`gradient_predivide_factor={self.gradient_predivide_factor!r}` must be above 0.")
        if self.gradient_predivide_factor != 1.0 and self.op != "average":
            raise ValueError(
                f"`gradient_predivide_factor={self.gradient_predivide_factor!r}` splits the division of an average, and"
                f" `op={self.op!r}` is none. Leave one of them out."
            )


def check_exchanges_nothing(optimizer: Optimizer, strategy: str) -> None:
    """Rejects an optimizer that exchanges gradients itself.

    Args:
        optimizer: The optimizer.
        strategy: Name of the strategy in the message.

    Raises:
        TypeError: If ``horovod.torch.DistributedOptimizer`` has wrapped the optimizer.
    """
    # The wrapper is a subclass of the optimizer's own class, made for the call, with the same name.
    if getattr(getattr(optimizer, "zero_grad", None), "__module__", "") == "horovod.torch.optimizer":
        raise TypeError(
            f"`horovod.torch.DistributedOptimizer` has wrapped the optimizer {type(optimizer).__name__}, and"
            f" {strategy} exchanges gradients as well: both would reduce the same gradients. Use the optimizer without"
            " the wrapper, and pass `op`, `compression` and `process_set` to the strategy."
        )


@dataclass
class Pending:
    """A gradient that is on its way.

    Attributes:
        gradient: Where the result goes.
        wire: What travels: the gradient itself, or a copy in another dtype or layout.
        handle: Horovod's.
    """

    gradient: Tensor
    wire: Tensor
    handle: Any


class GradientExchange:
    """Exchanges the gradients of a module's parameters.

    Args:
        module: The module, on its device, with the same weights on all ranks.
        options: How.
        prefix: Distinguishes the names of its operations, the same on all ranks, from those of other exchanges.
        together: All exchanges that take part in the same backward passes, in the same order on all ranks; the caller
            adds this one. None for this one only.
    """

    def __init__(
        self,
        module: Module,
        options: ExchangeOptions,
        prefix: str = "gradient",
        together: "list[GradientExchange] | None" = None,
    ) -> None:
        import horovod.torch as hvd

        self._hvd = hvd
        self._options = options
        self._process_set = hvd.global_process_set if options.process_set is None else options.process_set
        self._prefix = prefix
        self._shared_with = together
        # Under manual optimization, a backward pass that is not the strategy's is an error of the user.
        self._is_automatic: bool = getattr(module, "automatic_optimization", True)
        self._take_parameters(module)
        #: The ranks that have computed gradients that count; None for all.
        self.contributors: Sequence[int] | None = None
        self.is_held_back = False
        #: Gives all ranks the buffers of one; None unless each step gives them those of rank 0.
        self.broadcast_buffers: Callable[[int | None], None] | None = None
        #: Whether a backward pass of the strategy runs. The gradients of others stay local, as under DDP.
        self.is_in_backward = False
        self._hook_of_loss: RemovableHandle | None = None
        self._is_queued = False  # whether autograd calls `_end_pass` when the pass ends
        self._num_finished = 0  # passes that have exchanged, within one backward pass of the strategy
        #: Hears of each exchange.
        self.observer: ExchangeObserver | None = None
        self._begun_at_ns = self._num_bytes = 0
        self._kept: dict[Parameter, Tensor | None] | None = None
        self._has_own = False  # gradients that have not been exchanged, from before this backward pass
        self._ready: set[Parameter] = set()
        self._pending: dict[Parameter, Pending] = {}
        self._pending_sparse: dict[Parameter, Callable[[], Tensor]] = {}
        self._hooks: dict[Parameter, Any] = {}
        self._hook_in()

    def _take_parameters(self, module: Module) -> None:
        self._names = {parameter: f"{self._prefix}.{name}" for name, parameter in _exchanged_parameters(module)}
        self._groups = _groups(list(self._names), self._options.num_groups)

    def find_added(self, module: Module) -> list[Tensor]:
        """Returns the parameters that were added to the module or replaced others, and are not exchanged."""
        return [parameter for _, parameter in _exchanged_parameters(module) if parameter not in self._names]

    def follow_added(self, module: Module) -> None:
        """Exchanges the gradients of added parameters, too. Collective: all ranks call it."""
        self._take_parameters(module)
        self._hook_in()

    @contextmanager
    def held_back(self) -> Generator[None, None, None]:
        """Keeps the backward passes inside it from exchanging gradients; they add up locally instead."""
        before, self.is_held_back = self.is_held_back, True
        try:
            yield
        finally:
            self.is_held_back = before

    def keep_gradients(self) -> None:
        """Lets the next backward pass, up to :meth:`finish`, add nothing to what this rank contributes."""
        self._kept = {}
        # What has been exchanged is on the contributors too, and theirs is enough.
        if self.is_held_back or self._has_own:
            self._kept = {
                parameter: None if parameter.grad is None else parameter.grad.clone() for parameter in self._names
            }

    def begin(self, loss: Tensor) -> None:
        """Lets the backward pass that is to come exchange gradients, with all exchanges of ``together``.

        Args:
            loss: The tensor of which the strategy computes the gradients.

        Raises:
            RuntimeError: If the backward pass before it has failed midway.
        """
        does_exchange = False
        for exchange in self._together:
            if exchange._ready:
                raise RuntimeError(
                    "The backward pass before this one ended with an exception, after this rank had begun to exchange"
                    " gradients. The ranks would mix those of both passes. Do not continue after an exception in a"
                    " backward pass."
                )
            exchange.is_in_backward, exchange._num_finished, exchange._is_queued = True, 0, False
            does_exchange = does_exchange or not exchange.is_held_back
        if does_exchange and loss.requires_grad:
            # In the pass of the loss itself, and not in one that a reentrant checkpoint starts within it.
            self._hook_of_loss = loss.register_hook(self._queue)

    def finish(self) -> None:
        """Ends what :meth:`begin` began: now at the latest, the gradients are those of all ranks.

        Raises:
            RuntimeError: If another rank has failed or shut Horovod down.
        """
        if self._hook_of_loss is not None:
            self._hook_of_loss.remove()
            self._hook_of_loss = None
        self.is_in_backward = False
        if self.is_held_back or not self._process_set.included():
            self._has_own = self._has_own or self._kept is None
        elif not self._num_finished:
            self._exchange_rest()  # the pass has not come to a parameter of this rank
        self._kept = None

    @property
    def _together(self) -> "Sequence[GradientExchange]":
        return (self,) if self._shared_with is None else self._shared_with

    def _queue(self, _: Tensor | None = None) -> None:
        """Lets autograd call :meth:`_end_pass` before the backward pass returns; called within the pass."""
        if not self._is_queued:
            for exchange in self._together:
                exchange._is_queued = True
            Variable._execution_engine.queue_callback(self._end_pass)

    def _end_pass(self) -> None:
        exchanges = self._together
        has_gradients = False  # a pass of `torch.autograd.grad` has none
        for exchange in exchanges:
            exchange._is_queued = False
            has_gradients = has_gradients or bool(exchange._ready)
        if has_gradients:
            for exchange in exchanges:  # in one order: the ranks wait for each other in each
                exchange._exchange_rest()

    def _exchange_rest(self) -> None:
        """Exchanges the gradients that are left, and waits for all."""
        if self.is_held_back or not self._process_set.included():
            return
        self._num_finished += 1
        self._has_own = False
        ready_at_ns = 0 if self.observer is None else time.time_ns()
        zeros: dict[Parameter, Tensor] = {}
        for parameter in self._names:
            if parameter.requires_grad and parameter not in self._ready:
                if parameter.grad is None:
                    zeros[parameter] = parameter.grad = torch.zeros_like(parameter)
                elif self._kept is not None:
                    self._restore(parameter, self._kept.get(parameter))
                self._start(parameter)
        usage = None if self.contributors is None else self._usage(zeros)
        for handle in {id(pending.handle): pending.handle for pending in self._pending.values()}.values():
            wait_for(handle)
        for parameter, pending in self._pending.items():
            if pending.wire is not pending.gradient:
                pending.gradient.copy_(pending.wire)
            is_unused = parameter in zeros and not pending.gradient.any() if usage is None else not usage[parameter]
            if is_unused:
                parameter.grad = None  # the optimizer must not see a gradient of zeros
        for parameter, result in self._pending_sparse.items():
            parameter.grad = result()
        self._pending.clear()
        self._pending_sparse.clear()
        self._ready.clear()
        if self.observer is not None:
            begun_at_ns = min(self._begun_at_ns or ready_at_ns, ready_at_ns)
            self.observer.exchanged(begun_at_ns, ready_at_ns, time.time_ns(), self._num_bytes)
            self._begun_at_ns = self._num_bytes = 0
        self._hook_in()  # parameters that were frozen before

    def _usage(self, zeros: dict[Parameter, Tensor]) -> dict[Parameter, bool] | None:
        """Finds for each parameter whether a rank that contributes has a gradient of it; None if all contribute.

        A rank without data computes gradients that do not count, and cannot know from their mean alone whether the
        others have used a parameter.
        """
        assert self.contributors is not None
        if len(self.contributors) == self._process_set.size():
            return None
        has_gradient = [
            parameter not in zeros and (self._kept is None or self._kept.get(parameter) is not None)
            for parameter in self._names
        ]
        counts = torch.tensor(has_gradient, dtype=torch.int32)
        name = f"{self._prefix}.usage"
        wait_for(self._hvd.allreduce_async_(counts, name=name, op=self._hvd.Sum, process_set=self._process_set))
        return {parameter: count > 0 for parameter, count in zip(self._names, counts.tolist(), strict=True)}

    def share_buffers(self) -> None:
        """Gives all ranks the buffers of the first that contributes, where each step gives them those of rank 0."""
        if self.broadcast_buffers is not None and self.contributors and self.contributors[0]:
            self.broadcast_buffers(self.contributors[0])

    def close(self) -> None:
        """Lets go of the parameters."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _hook_in(self) -> None:
        for parameter in self._names:
            if parameter.requires_grad and parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _on_gradient(self, parameter: Tensor) -> None:
        # Autograd calls this hook also where it has added up nothing: for a parameter that was frozen after the forward
        # pass (`toggle_optimizer`), or whose gradient a function returns as None.
        if parameter.grad is None or not parameter.requires_grad:
            return
        parameter = cast(Parameter, parameter)
        if not self.is_in_backward:
            self._keep_local(parameter)
            return
        if self._kept is not None:
            self._restore(parameter, self._kept.get(parameter))
        if not self.is_held_back and self._process_set.included():
            if self._num_finished and self._options.op == "sum":
                raise RuntimeError(
                    f"`op='sum'`: a second backward pass in `backward` or `on_after_backward` computed"
                    f" {self._names[parameter]}, whose gradient is a sum over ranks already and would be summed again."
                    " Add up the losses for one backward pass, or use `op='average'`."
                )
            if not self._is_queued:  # the user's `backward` has another loss
                self._together[0]._queue()
            self._start(parameter)

    def _keep_local(self, parameter: Parameter) -> None:
        if not self._is_automatic and not self.is_held_back:
            raise RuntimeError(
                f"A backward pass outside of `self.manual_backward` computed {self._names[parameter]}, which the ranks"
                " would not exchange. Call `self.manual_backward(loss)` in place of `loss.backward()`. For gradients"
                " of one rank, use `torch.autograd.grad`, or `with self.trainer.strategy.block_backward_sync():`."
            )
        self._has_own = True

    @staticmethod
    def _restore(parameter: Parameter, kept: Tensor | None) -> None:
        if parameter.grad is None:
            return
        if kept is None:
            parameter.grad.zero_()
        elif kept.layout == parameter.grad.layout == torch.strided:
            parameter.grad.copy_(kept)
        else:
            parameter.grad = kept

    def _start(self, parameter: Parameter) -> None:
        if parameter in self._ready:
            raise RuntimeError(
                f"One backward pass computed {self._names[parameter]} twice, and the ranks exchange it once. Use"
                " `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, and start no backward pass in a hook"
                " of another one."
            )
        self._ready.add(parameter)
        gradient = cast(Tensor, parameter.grad)
        if gradient.is_sparse and not self._options.sparse_as_dense:
            op, divisor = self._op
            dtype, rows = gradient.dtype, gradient.coalesce()
            if dtype == torch.bfloat16:  # Horovod cannot sum it
                rows = rows.to(torch.float32)
            summed = self._hvd.sparse_allreduce_async(rows, self._names[parameter], op, self._process_set)
            self._pending_sparse[parameter] = lambda: (summed() if divisor == 1 else summed() / divisor).to(dtype)
        elif gradient.is_sparse:
            parameter.grad = gradient.to_dense()
        elif gradient.is_conj():  # which has no real view
            parameter.grad = gradient.resolve_conj()
        group = self._groups[parameter]
        if all(member in self._ready or not member.requires_grad for member in group):
            dense = [member for member in group if member in self._ready and member not in self._pending_sparse]
            self._send(dense)

    def _send(self, parameters: Sequence[Parameter]) -> None:
        if not parameters:
            return
        gradients = [unshare_gradient(parameter, NUM_HOLDERS) for parameter in parameters]
        if gradients[0].is_complex():  # a group has one dtype, and Horovod reduces no complex numbers
            gradients = [torch.view_as_real(gradient) for gradient in gradients]
        wires = [self._on_the_wire(gradient) for gradient in gradients]
        if self.observer is not None:
            self._begun_at_ns = self._begun_at_ns or time.time_ns()
            self._num_bytes += sum(wire.nbytes for wire in wires)
        factor = self._options.gradient_predivide_factor
        op, divisor = self._op
        scales = {"prescale_factor": 1.0 / factor, "postscale_factor": factor / divisor}
        common = {"op": op, "process_set": self._process_set, **scales}
        name = self._names[parameters[0]]
        if len(wires) == 1:
            handle = self._hvd.allreduce_async_(wires[0], name=name, **common)
        else:
            handle = self._hvd.grouped_allreduce_async_(wires, name=f"group.{name}", **common)
        for parameter, gradient, wire in zip(parameters, gradients, wires, strict=True):
            self._pending[parameter] = Pending(gradient, wire, handle)

    def _on_the_wire(self, gradient: Tensor) -> Tensor:
        if self._options.compression == "fp16" and gradient.is_floating_point():
            return gradient.to(torch.float16).contiguous()
        if gradient.dtype == torch.bfloat16:  # Horovod cannot sum it
            return gradient.to(torch.float32).contiguous()
        return gradient.contiguous()

    @property
    def _op(self) -> tuple[Any, int]:
        """Horovod's reduction, and what is to be divided by besides."""
        if self._options.op == "sum":
            return self._hvd.Sum, 1
        if self.contributors is None or len(self.contributors) == self._process_set.size():
            return self._hvd.Average, 1
        return self._hvd.Sum, len(self.contributors)


class DeltaExchange:
    """Combines, by Adasum, how far each rank's optimizer has moved the parameters (Maleki et al., 2020).

    Args:
        module: The module.
        options: How.

    Raises:
        RuntimeError: If this Horovod has no Adasum, or not for so many ranks.
    """

    def __init__(self, module: Module, options: ExchangeOptions) -> None:
        import horovod.torch as hvd

        self._hvd = hvd
        self._exchanged = {parameter for _, parameter in _exchanged_parameters(module)}
        self._process_set = hvd.global_process_set if options.process_set is None else options.process_set
        self._is_compressed = options.compression == "fp16"
        #: Hears of each exchange.
        self.observer: ExchangeObserver | None = None
        size = self._process_set.size()
        if not hvd.mpi_enabled() and not hvd.nccl_built():
            raise RuntimeError(
                "`op='adasum'` needs Horovod over MPI: start the ranks with `mpirun` (or `horovodrun --mpi`), with a"
                " Horovod that was built by `python -m lightning_strategies_ext install-horovod --mpi`."
            )
        if size & (size - 1):
            raise RuntimeError(f"`op='adasum'` needs 1, 2, 4, 8, ... ranks; there are {size}.")

    @contextmanager
    def around_step(self, parameters: Iterable[Tensor]) -> Generator[None, None, None]:
        """Lets an optimizer's step inside it be the combination of all ranks' steps."""
        moved = [
            torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
            for parameter in parameters
            if parameter.requires_grad and parameter in self._exchanged
        ]
        starts = [values.clone() for values in moved]
        yield
        if not self._process_set.included():
            return
        deltas = [values - start for values, start in zip(moved, starts, strict=True)]
        wires = [delta.to(torch.float16) if self._is_compressed else _summable(delta) for delta in deltas]
        begun_at_ns = 0 if self.observer is None else time.time_ns()
        handles = [
            self._hvd.allreduce_async_(wire, name=f"delta.{index}", op=self._hvd.Adasum, process_set=self._process_set)
            for index, wire in enumerate(wires)
        ]
        for values, start, wire, handle in zip(moved, starts, wires, handles, strict=True):
            wait_for(handle)
            values.copy_(start + wire.to(start.dtype))
        if self.observer is not None:
            num_bytes = sum(wire.nbytes for wire in wires)
            self.observer.exchanged(begun_at_ns, begun_at_ns, time.time_ns(), num_bytes)


def _exchanged_parameters(module: Module) -> Iterator[tuple[str, Parameter]]:
    excluded = names_excluded_from_ddp(module)
    return ((name, parameter) for name, parameter in module.named_parameters() if name not in excluded)


def _summable(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.dtype == torch.bfloat16 else tensor


def _groups(parameters: list[Parameter], num_groups: int | None) -> dict[Parameter, list[Parameter]]:
    # Gradients come in the order from the last layer to the first.
    parameters = parameters[::-1]
    most = len(parameters) if num_groups is None else -(-len(parameters) // num_groups) if num_groups else 1
    groups: list[list[Parameter]] = []
    for parameter in parameters:
        last = groups[-1] if groups else []
        num_bytes = sum(member.nbytes for member in last)
        # A large gradient by itself is summed where it is; Horovod would copy a group into a buffer and back.
        is_large = num_groups is None and max(num_bytes, parameter.nbytes) >= GROUP_NUM_BYTES
        # Horovod sums the tensors of a group as one, of one dtype.
        if not last or len(last) >= most or is_large or last[0].dtype != parameter.dtype:
            groups.append([parameter])
        else:
            last.append(parameter)
    return {parameter: group for group in groups for parameter in group}
