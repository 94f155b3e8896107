"""Stops of all ranks before the same step, after a SIGTERM or SLURM's signal to requeue the job on any rank.

:mod:`lightning_strategies_ext.stage_context` makes the agreement. This module connects it to the signal handlers and
the training loop of a Trainer.
"""

from collections.abc import Callable
from functools import partial

import lightning.pytorch as pl

from lightning_strategies_ext._lightning import trainer_signals
from lightning_strategies_ext.stage_context import StageContext


def start_stop_agreement(
    context: StageContext,
    trainer: "pl.Trainer",
    on_sigterm: Callable[[], None],
    on_requeue: Callable[[], None],
    before_train_step: Callable[[], None],
    *,
    is_requested: bool,
) -> None:
    """Makes a SIGTERM on any rank stop all ranks before the same step. Collective: all ranks call it.

    Args:
        context: Stage context of this rank.
        trainer: The Trainer.
        on_sigterm: Called in the signal handler.
        on_requeue: Called in the handler of SLURM's signal.
        before_train_step: Called before each training step; raises an exception if the ranks have agreed to stop.
        is_requested: Whether the ranks know already that they have to stop.
    """
    if context.failure_monitor is not None:
        context.failure_monitor.set_step_source(partial(describe_step, trainer), trainer.default_root_dir)
    confirm = trainer_signals.intercept_sigterm(trainer, on_sigterm, before_train_step)
    requeue = trainer_signals.intercept_requeueing(trainer, on_requeue)
    release = partial(trainer_signals.release_sigterm, trainer)
    context.start_stop_agreement(confirm, release, requeue, is_requested=is_requested)


def describe_step(trainer: "pl.Trainer") -> str:
    """Returns the stage and step of a Trainer, for messages. Other threads than the training thread may call it."""
    stage = trainer.state.stage
    name = "the setup of the stage" if stage is None else stage.value.replace("_", " ")
    return f"{name}, epoch {trainer.current_epoch}, step {trainer.global_step}"
