"""Coordinated stop of a Trainer's stage: after a SIGTERM, SLURM's signal to requeue the job, or an early stop.

:mod:`lightning_strategies_ext.coordinated_stop` makes all ranks stop before the same step. This module connects it to
the signal handlers and the training loop of a Trainer.
"""

from collections.abc import Callable
from functools import partial

import lightning.pytorch as pl

from lightning_strategies_ext._lightning import trainer_signals
from lightning_strategies_ext.pytorch.early_stop import EarlyStop
from lightning_strategies_ext.stage_context import StageContext


def start_stop_agreement(
    context: StageContext,
    trainer: "pl.Trainer",
    on_sigterm: Callable[[], None],
    before_train_step: Callable[[], None],
    any_rank: Callable[[bool], bool],
    *,
    is_requested: bool | None,
) -> None:
    """Makes a SIGTERM on any rank stop all ranks before the same step. Collective: all ranks call it.

    Args:
        context: Stage context of this rank.
        trainer: The Trainer.
        on_sigterm: Callable that the signal handler calls.
        before_train_step: Callable for the start of each training step, which raises an exception if the ranks have
            agreed to stop.
        any_rank: Collective that returns whether its argument is True on any rank.
        is_requested: Whether the ranks know already that they have to stop. If None, the ranks find out whether any
            rank has received a SIGTERM after the last step of the previous stage.
    """
    stop = context.coordinated_stop
    if is_requested is None:
        is_requested = any_rank(stop.was_requested)
    if context.failure_monitor is not None:
        context.failure_monitor.set_step_source(partial(describe_step, trainer), trainer.default_root_dir)
    stop.early_stop = EarlyStop.create(trainer, context, any_rank)
    confirm = trainer_signals.intercept_sigterm(trainer, on_sigterm, before_train_step, stop.early_stop)
    requeue = trainer_signals.intercept_requeueing(trainer, stop.request_requeue)
    release = partial(trainer_signals.release_sigterm, trainer)
    is_accumulating = partial(trainer_signals.is_accumulating, trainer)
    factory = context.stop_agreement_factory()
    stop.start(factory, confirm, release, requeue, is_accumulating, is_requested=is_requested)


def describe_step(trainer: "pl.Trainer") -> str:
    """Returns the stage and step of a Trainer, for messages. Other threads than the training thread may call it."""
    stage = trainer.state.stage
    name = "the setup of the stage" if stage is None else stage.value.replace("_", " ")
    return f"{name}, epoch {trainer.current_epoch}, step {trainer.global_step}"
