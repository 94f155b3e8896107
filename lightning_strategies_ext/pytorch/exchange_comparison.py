"""Comparison of gradient exchanges: ranks that exchange gradients of different batches get an error.

Over ``shm`` the batch is part of the operation's identity (:mod:`lightning_strategies_ext.identities`). With other
engines, each rank records the batches of its exchanges, and the failure monitors compare the records.
"""

from collections import deque

import lightning.pytorch as pl
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext._lightning import trainer_stages
from lightning_strategies_ext.failure.exchange_check import check_exchanges
from lightning_strategies_ext.stage_context import StageContext
from lightning_strategies_ext.torch_distributed import process_group
from lightning_strategies_ext.torch_distributed.direct_exchange import trained_parameters


def compare_exchanges(context: StageContext, trainer: "pl.Trainer", *, in_exchange: bool) -> None:
    """Makes ranks compare the batches whose gradients they exchange, unless the world may change. Collective.

    Args:
        context: Stage context of this rank.
        trainer: The Trainer.
        in_exchange: Whether the engine compares the batches in the exchange. If not, the failure monitors compare them
            afterwards.
    """
    if context.failure_monitor is None or context.evaluation is None:
        return
    context.batch_progress = trainer_stages.batch_progress_of(trainer)
    if not in_exchange:
        context.exchange_log = context.failure_monitor.start_exchange_log()
        context.evaluation.callback(trainer_stages.before_train_end(trainer, lambda: check_recorded_exchanges(context)))


def check_recorded_exchanges(context: StageContext) -> None:
    """Compares the exchanges that ranks have recorded; a no-op if they record none, or after a failure of this rank.

    Raises:
        RankFailedError: If ranks are known to have exchanged gradients of different batches.
    """
    is_failed = context.local_collectives is not None
    if context.exchange_log is not None and context.failure_monitor is not None and not is_failed:
        check_exchanges(context.exchange_log, context.failure_monitor)


def compare_ddp_exchanges(context: StageContext, trainer: "pl.Trainer", model: Module | None) -> None:
    """Like :func:`compare_exchanges`, for a model in DDP; :func:`record_ddp_exchange` records the exchanges."""
    if not isinstance(model, DistributedDataParallel):
        return
    compare_exchanges(context, trainer, in_exchange=process_group.compares_identities())
    # DDP also exchanges gradients in a pass that reaches no parameter, if it searches for unused ones.
    exchanges_always = model.find_unused_parameters or model.static_graph
    if context.exchange_log is not None and context.evaluation is not None and not exchanges_always:
        context.reached_parameters = deque[Tensor](maxlen=1)
        first = next(iter(trained_parameters(model).values()))
        hook = first.register_post_accumulate_grad_hook(context.reached_parameters.append)
        context.evaluation.callback(hook.remove)


def record_ddp_exchange(context: StageContext, model: Module | None) -> None:
    """Records the exchange of a backward pass, if its gradients were exchanged and it has reached a parameter."""
    is_exchanged = getattr(model, "require_backward_grad_sync", False)
    reached, progress, log = context.reached_parameters, context.batch_progress, context.exchange_log
    if is_exchanged and log is not None and progress is not None and (reached is None or reached):
        log.record(progress.ready)
    if reached is not None:
        reached.clear()
