"""Training steps in which a rank has no loss, or a loss that is NaN or infinite, see :class:`.ChecksOptions`.

A rank has no loss in a batch if ``training_step`` returns None, or a loss that depends on no parameter. With "skip",
each rank sends one number before a backward pass that exchanges gradients. From these numbers, all ranks know which of
them contribute: those with a loss in this batch or in an earlier batch of the accumulation window.

- If all ranks have a loss in this batch, the backward pass is the usual one.
- Otherwise, gradients are averaged over the ranks that contribute, and the others join with zeros. Under DDP, the pass
  exchanges nothing, and the ranks then average their local gradients. Horovod's exchange can leave ranks out itself.
- If no rank contributes, nothing is exchanged, and the optimizer finds no gradients.

DDP's forward would prepare the exchange before the ranks have these numbers. With "skip", the preparation is deferred
to the backward pass, as with manual optimization. With the default options, a step calls nothing of this module.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Module, Parameter
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_leaves

from lightning_strategies_ext._lightning import strategy_parts, user_modules
from lightning_strategies_ext._lightning._patching import replace_method
from lightning_strategies_ext.checks import ChecksOptions, argument_on_losses, argument_that_skips
from lightning_strategies_ext.collectives import Collectives, LocalCollectives
from lightning_strategies_ext.exceptions import NonfiniteLossError
from lightning_strategies_ext.failure.rank_status import format_ranks
from lightning_strategies_ext.horovod.gradient_exchange import HorovodGradientExchange
from lightning_strategies_ext.pytorch.manual_optimization import prepare_pass
from lightning_strategies_ext.stage_context import StageContext
from lightning_strategies_ext.torch_distributed import process_group
from lightning_strategies_ext.torch_distributed.gradient_exchange import DDPGradientExchange
from lightning_strategies_ext.uneven.step_state import StepStateSnapshot

#: Bits of the number that a rank sends: it has a loss in this batch, it contributes gradients, it has an error.
_HAS_LOSS, _CONTRIBUTES, _HAS_ERROR = 1, 2, 4


class StepLosses:
    """Checks the losses of this rank during one ``fit``, and leaves out the batches without one.

    From its creation to :meth:`close`, it surrounds methods of the strategy: Lightning has no hook that can leave out a
    backward pass, or run between the pass and ``on_after_backward``.

    Args:
        trainer: The Trainer.
        context: Stage context of this rank.
        collectives: Function that returns the collectives of this rank, which are local after a failure.
        device: Device of this rank.
        options: Options, of which at least one on losses is not the default.

    Raises:
        ValueError: If the module or an optimizer does not support the options.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        context: StageContext,
        collectives: Callable[[], Collectives],
        device: torch.device,
        options: ChecksOptions,
    ) -> None:
        self._trainer, self._context, self._collectives, self._device = trainer, context, collectives, device
        self._strategy: Any = trainer.strategy
        self._module = trainer.lightning_module
        self._skips_missing, self._nonfinite = options.missing_loss == "skip", options.nonfinite_loss
        self._skips = argument_that_skips(options) is not None
        self._has_loss = True  # in the current batch
        self._has_accumulated = False  # whether an earlier batch of the accumulation window had a loss
        self._has_no_contributor = False  # whether no rank contributes to the current optimizer step
        self._error = ""  # about a loss of this rank, until the next exchange
        self._pending_average: Callable[[], None] | None = None  # of local gradients, in the current backward pass
        _check_supported(options, trainer, context, is_synchronized=self._has_synchronized_layers())
        strategy, precision = self._strategy, self._strategy.precision_plugin
        # The methods before their replacement.
        self._training_step, self._backward = strategy.training_step, strategy.backward
        self._optimizer_step, self._post_backward = strategy.optimizer_step, precision.post_backward
        self._undo = ExitStack()
        for owner, replaced, method in (
            (strategy, Strategy.training_step, self.training_step),
            (strategy, Strategy.backward, self.backward),
            (strategy, Strategy.optimizer_step, self.optimizer_step),
            (precision, Precision.post_backward, self.post_backward),
        ):
            self._undo.callback(replace_method(owner, replaced.__name__, method))

    def close(self) -> None:
        """Restores the methods of the strategy and of its precision plugin. A second call is a no-op."""
        self._undo.close()

    # --- methods of the strategy and of its precision plugin ---

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the training step of the strategy; returns a loss of NaN in place of None."""
        random_states = user_modules.random_states() if self._nonfinite == "error" else {}
        buffers = [(each, each.clone()) for each in self._module.buffers()] if self._nonfinite == "skip" else []
        with self._deferred_preparation():
            output = self._training_step(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        self._has_loss = loss is not None
        if output is None:  # with one rank, Lightning accepts it
            return torch.full((), torch.nan, device=self._device) if self._skips_missing else None
        if self._nonfinite == "ignore" or not isinstance(loss, Tensor) or _is_finite(loss):
            return output
        if self._nonfinite == "skip":
            self._has_loss = False
            for buffer, value in buffers:  # such as running statistics, which would stay NaN
                buffer.data.copy_(value)
        elif not self._error:
            self._error = self._describe(loss, args, self._find_module(random_states, args, kwargs))
        return output

    def backward(self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the backward pass of the strategy, or what is left of it without a loss.

        Raises:
            NonfiniteLossError: On all ranks, if a rank has had a loss that is not finite.
        """
        exchange = self._context.gradient_exchange
        has_loss = self._has_loss and not (self._skips_missing and not _reaches_parameter(loss))
        run: Callable[[], Tensor] = partial(self._run_without_loss, loss)
        if has_loss:
            run = partial(self._backward, loss, optimizer, *args, **kwargs)
        if exchange is not None and exchange.is_in_no_sync:
            self._has_accumulated = self._has_accumulated or has_loss
            return run()
        contributes, self._has_accumulated = has_loss or self._has_accumulated, False
        numbers = self._gather(has_loss * _HAS_LOSS | contributes * _CONTRIBUTES | bool(self._error) * _HAS_ERROR)
        self._raise_errors(numbers)
        if not self._skips:
            return run()
        num_contributors = sum(bool(number & _CONTRIBUTES) for number in numbers)
        self._has_no_contributor = num_contributors == 0
        do_all_have_loss = all(number & _HAS_LOSS for number in numbers)
        if isinstance(exchange, HorovodGradientExchange):
            return run() if do_all_have_loss else self._run_in_horovod(exchange, num_contributors, run)
        if do_all_have_loss and self._model is not None:
            prepare_pass(self._model, loss)
            return run()
        return self._run_in_ddp(contributes, num_contributors, run)

    def post_backward(self, tensor: Tensor, module: "pl.LightningModule") -> Tensor:
        """Averages local gradients before ``on_after_backward`` if DDP has not exchanged them."""
        if self._pending_average is not None:
            self._pending_average()
        return self._post_backward(tensor, module)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Steps the optimizer; without gradients, and so without an effect, if no rank has contributed any."""
        saved: list[tuple[Tensor, Tensor | None]] = []
        self._has_no_contributor = False

        def run_closure() -> Any:
            loss = closure()
            if not self._has_no_contributor:
                return loss
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                saved.append((parameter, parameter.grad))
                parameter.grad = None
            return None  # Lightning's fp16 precision then leaves out the scaler

        output = self._optimizer_step(optimizer, run_closure, model, **kwargs)
        for parameter, gradient in saved:
            parameter.grad = gradient
        return output

    # --- one backward pass ---

    @property
    def _model(self) -> DistributedDataParallel | None:
        model = self._strategy.model
        return model if isinstance(model, DistributedDataParallel) else None

    @contextmanager
    def _deferred_preparation(self) -> Generator[None, None, None]:
        """Keeps DDP's forward from preparing the exchange, for :func:`.prepare_pass`."""
        model = self._model if self._skips else None
        if model is None or not model.require_backward_grad_sync:
            yield
            return
        model.require_backward_grad_sync = False
        try:
            yield
        finally:
            model.require_backward_grad_sync = True

    def _run_without_loss(self, loss: Tensor) -> Tensor:
        """Runs what a backward pass does besides computing gradients; the gradients of this rank stay unchanged."""
        loss, context = loss.detach(), self._context
        if isinstance(context.gradient_exchange, HorovodGradientExchange):
            context.gradient_exchange.exclude_next_backward()
        precision = self._strategy.precision_plugin
        if isinstance(precision, MixedPrecision) and precision.scaler is not None:
            precision.scaler.scale(loss)  # otherwise the scaler would not exist in the first step
        self._strategy.pre_backward(loss)
        if self._pending_average is not None:
            self._pending_average()
        if context.reached_parameters is not None and context.gradient_exchange is not None:
            context.reached_parameters.append(loss)  # this rank takes part in the exchange, which is recorded
        self._strategy.post_backward(loss)
        return loss

    def _run_in_ddp(self, contributes: bool, num_contributors: int, run: Callable[[], Tensor]) -> Tensor:
        exchange, model = self._context.gradient_exchange, self._model
        assert isinstance(exchange, DDPGradientExchange)
        assert model is not None
        model.require_forward_param_sync = True  # the next forward broadcasts buffers, as after any exchange
        if num_contributors:
            self._pending_average = partial(exchange.exchange_local_gradients, contributes, num_contributors)
        try:
            loss = run()
        finally:
            self._pending_average = None
        if model.find_unused_parameters and num_contributors:
            # The reducer would count the parameters that this pass has used as used in the next pass.
            self._strategy._features.rebuild(model)
        return loss

    def _run_in_horovod(
        self, exchange: HorovodGradientExchange, num_contributors: int, run: Callable[[], Tensor]
    ) -> Tensor:
        before = exchange.contributors
        if not num_contributors:
            with exchange.no_sync():
                return run()
        exchange.contributors = range(num_contributors)  # only their number matters here
        try:
            return run()
        finally:
            exchange.contributors = before

    def _gather(self, number: int) -> list[int]:
        """Returns the numbers of all ranks. Collective: all ranks call it."""
        numbers: list[int] = (
            self._collectives().all_gather(torch.tensor([number], device=self._device)).view(-1).tolist()
        )
        return numbers

    # --- losses that are not finite ---

    def _raise_errors(self, numbers: list[int]) -> None:
        ranks = [rank for rank, number in enumerate(numbers) if number & _HAS_ERROR]
        if not ranks:
            return
        collectives = self._collectives()
        text = collectives.broadcast(self._error, ranks[0])
        collectives.barrier()  # a rank that raises leaves the collectives, so all must have the text
        also = f" Losses of {format_ranks(ranks[1:])} are not finite, either." if len(ranks) > 1 else ""
        raise NonfiniteLossError(
            f"{text}{also} Check the data, lower the learning rate, or clip gradients. With"
            " `checks=ChecksOptions(nonfinite_loss='skip')`, the strategy leaves such losses out."
        )

    def _describe(self, loss: Tensor, args: tuple[Any, ...], source: str) -> str:
        where = f"batch {self._trainer.fit_loop.batch_idx} of epoch {self._trainer.current_epoch}"
        value = str(loss.item()) if loss.numel() == 1 else "not finite"
        is_of_batch = (
            " The batch contains values that are not finite." if not all(map(_is_finite, _floats(args))) else ""
        )
        return f"The loss of rank {self._context.rank} in {where} is {value}.{is_of_batch} {source}"

    def _find_module(self, random_states: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Returns a sentence about the first module with an output that is not finite.

        Runs the batch again on the module itself, with the random numbers of the first run. The collectives of this
        rank are local meanwhile. Restores random states, buffers, metrics, and logged values.
        """
        if self._has_synchronized_layers():
            return "The module that has computed it is not searched, because of `sync_batchnorm=True`."
        if args and isinstance(args[0], Iterator):
            return "The module that has computed it is unknown, because `training_step` fetches its batches itself."
        found: list[str] = []

        def check(name: str, module: Module, _: Any, output: Any) -> None:
            if not found and not all(map(_is_finite, _floats(output))):
                found.append(f"`{name}` ({type(module).__name__})" if name else f"`{type(module).__name__}.forward`")

        snapshot, context = StepStateSnapshot(self._trainer), self._context
        before, context.local_collectives = context.local_collectives, LocalCollectives(context.rank, context.size)
        with ExitStack() as stack:
            stack.callback(setattr, context, "local_collectives", before)
            stack.callback(self._strategy._logged_values.pending.clear)
            stack.callback(snapshot.restore)
            stack.enter_context(isolate_rng())
            stack.enter_context(process_group.replaced_by_local_group())
            for name, module in self._module.named_modules():
                stack.callback(module.register_forward_hook(partial(check, name)).remove)
            user_modules.set_random_states(random_states)
            try:
                with self._strategy.precision_plugin.train_step_context():
                    self._module.training_step(*args, **kwargs)
            except Exception as error:
                if not found:
                    problem = f"{type(error).__name__}: {error}"
                    return (
                        f"The module that has computed it is unknown, because running the batch again raised {problem}."
                    )
        if found:
            return f"The first module with an output that is not finite is {found[0]}."
        return (
            "The outputs of all modules are finite when the batch is run again, so `training_step` itself computes it."
        )

    def _has_synchronized_layers(self) -> bool:
        kind = SyncBatchNorm if strategy_parts.layer_sync(self._strategy) is None else _BatchNorm
        return any(isinstance(module, kind) for module in self._module.modules())


def check_has_loss(module: Any, context: StageContext, checks: ChecksOptions) -> None:
    """Rejects None as the result of ``training_step`` with several ranks, unless missing losses are skipped.

    Lightning rejects it as well, and its error names neither the rank nor the batch.

    Raises:
        RuntimeError: If missing losses are an error.
    """
    if context.size > 1 and checks.missing_loss == "error":
        trainer = module.trainer
        raise RuntimeError(
            f"`training_step` returned None on rank {context.rank} in batch {trainer.fit_loop.batch_idx} of epoch"
            f" {trainer.current_epoch}, so this rank has no loss, and no gradients to exchange. Return a loss on all"
            " ranks, for example `0 * output.sum()`. With `checks=ChecksOptions(missing_loss='skip')`, which elastic"
            " training does not support, gradients are averaged over the ranks that have a loss."
        )


def _check_supported(
    options: ChecksOptions, trainer: "pl.Trainer", context: StageContext, *, is_synchronized: bool
) -> None:
    module, skip = trainer.lightning_module, argument_that_skips(options)
    if not module.automatic_optimization:
        raise ValueError(
            f"{argument_on_losses(options)} requires automatic optimization, but {type(module).__name__} has"
            " `automatic_optimization=False`, so that the strategy does not receive its losses. Omit the argument, and"
            " check the losses before `manual_backward`, which all ranks must call equally often."
        )
    if skip is None:
        return
    what = None
    if not isinstance(context.gradient_exchange, (DDPGradientExchange, HorovodGradientExchange)):
        what = f"{type(trainer.strategy).__name__}, which exchanges gradients in its own way"
    elif is_synchronized:
        what = "synchronized batch normalization, whose backward pass waits for all ranks"
    elif any(isinstance(optimizer, LBFGS) for optimizer in trainer.strategy.optimizers):
        what = "`torch.optim.LBFGS`, which compares losses of several passes"
    elif any(getattr(each, "sparse", False) for each in module.modules()):
        what = "sparse gradients (`sparse=True` of a layer), because a rank without a loss joins with dense zeros"
    if what is not None:
        raise ValueError(f"{skip} cannot be combined with {what}. Omit one of the two.")


def _reaches_parameter(loss: Tensor) -> bool:
    """Returns whether a backward pass reaches a parameter; True if a custom function hides that.

    Mostly, the search ends after a few nodes: a parameter of the last layer is near to the loss.
    """
    nodes: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = {*nodes}
    for node in nodes:  # breadth first: the loop appends to the list
        is_custom = isinstance(node, BackwardCFunction) and type(node).__name__ != "_DDPSinkBackward"
        if is_custom or isinstance(getattr(node, "variable", None), Parameter):
            return True
        new = [following for following, _ in node.next_functions if following is not None and following not in seen]
        seen.update(new)
        nodes += new
    return False


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def _floats(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor) and each.is_floating_point()]
