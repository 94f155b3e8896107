"""Agreement between ranks during ``fit``: what ranks decide alike, and what they compare. See ``docs/agreement.md``."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_strategies_ext._lightning import trainer_decisions
from lightning_strategies_ext.checks import ChecksOptions, argument_on_losses
from lightning_strategies_ext.collective_comparison import compare_collectives
from lightning_strategies_ext.collectives import Collectives
from lightning_strategies_ext.pytorch.epoch_checks import EpochChecks
from lightning_strategies_ext.pytorch.monitored_values import MonitoredValues
from lightning_strategies_ext.pytorch.step_losses import StepLosses
from lightning_strategies_ext.pytorch.stopping import EarlyStop
from lightning_strategies_ext.stage_context import StageContext


def start_agreement(
    trainer: "pl.Trainer",
    context: StageContext,
    collectives: Callable[[], Collectives],
    device: torch.device,
    checks: ChecksOptions,
    has_equal_models: bool,
) -> None:
    """Makes the ranks of a ``fit`` agree until they leave the stage context.

    In other stages, ranks only compare their collectives, if the options request it.

    Args:
        trainer: The Trainer.
        context: Stage context of this rank.
        collectives: Function that returns the collectives of this rank, which are local after a failure.
        device: Device of this rank.
        checks: Options of the checks.
        has_equal_models: Whether the models of the ranks are equal; otherwise, they are not compared after an epoch.
    """
    context.end_agreement()
    stack = context.agreement = ExitStack()
    if context.size > 1 and checks.check_collectives:
        stack.callback(compare_collectives(context, has_batches=True))
    if trainer.state.fn != TrainerFn.FITTING:
        return
    if argument_on_losses(checks) is not None:
        stack.callback(StepLosses(trainer, context, collectives, device, checks).close)
    if context.size == 1:
        return
    for undo in trainer_decisions.share_monitored_values(trainer, MonitoredValues(collectives, device).share):
        stack.callback(undo)
    if has_equal_models:
        epoch_checks = EpochChecks(trainer, collectives, device, checks)

        def compare_after_epoch() -> None:
            inputs = context.uneven_inputs
            if inputs is not None and inputs.ends_epochs_together:
                epoch_checks.compare()

        stack.callback(trainer_decisions.call_after_epoch(trainer, compare_after_epoch))
    early_stop = context.coordinated_stop.early_stop
    if isinstance(early_stop, EarlyStop):
        stack.callback(early_stop.close)
        for undo in trainer_decisions.call_at_points(trainer, early_stop.at_point):
            stack.callback(undo)


def with_reduced_loss(
    closure: Callable[[], Any], collectives: Callable[[], Collectives], reduce_op: str
) -> Callable[[], Any]:
    """Returns a closure whose loss is reduced over ranks, for an optimizer that decides by the loss.

    ``torch.optim.LBFGS`` evaluates the closure until the loss and the gradients satisfy a condition. The gradients are
    equal on all ranks; with losses of their own, ranks would call the closure, and thereby the exchange of gradients,
    different numbers of times. The loss that the closure stores, for ``self.log``, stays this rank's.

    Args:
        closure: Closure that the Trainer or the user passes to ``optimizer.step``.
        collectives: Function that returns the collectives of this rank.
        reduce_op: Reduction of the gradients, "mean" or "sum".
    """

    def reduced() -> Any:
        loss = closure()
        return collectives().reduce(loss.detach().clone(), None, reduce_op) if isinstance(loss, Tensor) else loss

    return reduced
