"""Comparison of gradient exchanges: ranks that exchange gradients of different batches get an error.

Over ``shm`` the batch is part of the operation's identity (:mod:`lightning_strategies_ext.identities`). With other
engines, each rank records the batches of its exchanges, and the failure monitors compare the records.
"""

import time
from collections import deque
from typing import Final

import lightning.pytorch as pl
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext._lightning import trainer_stages
from lightning_strategies_ext.exceptions import RankFailedError
from lightning_strategies_ext.failure.failure_detector import diagnose_mismatch
from lightning_strategies_ext.stage_context import StageContext
from lightning_strategies_ext.torch_distributed import process_group
from lightning_strategies_ext.torch_distributed.direct_exchange import trained_parameters

#: Seconds that a rank waits for equal statuses of the ranks of its host: two status intervals.
_STATUS_TIMEOUT_S: Final = 0.5
_POLL_S: Final = 0.002


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

    Called where wrong weights would be stored or returned. All ranks call it at the same point, and then it takes
    milliseconds. It is no collective: a rank that calls it alone waits for half a second.

    Raises:
        RankFailedError: If this rank and another have exchanged gradients of different batches, as far as is known.
    """
    log, monitor = context.exchange_log, context.failure_monitor
    if log is None or monitor is None or context.local_collectives is not None:
        return
    monitor.publish()
    deadline = time.monotonic() + _STATUS_TIMEOUT_S
    while True:
        observed = monitor.observe()
        failure = diagnose_mismatch(observed, log) or monitor.failure
        if failure is not None and failure.kind == "mismatch":
            raise RankFailedError(f"The ranks have exchanged gradients of different batches: {failure.headline}.")
        local = [status.exchanges for rank, status in observed.statuses.items() if observed.is_local(rank)]
        totals = {None if each is None else (each.stage, each.count, each.digest) for each in local}
        if len(totals) == 1 or time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)


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
