"""Coordinated stop of a Trainer's stage: after a SIGTERM, SLURM's signal to requeue the job, or an early stop.

:mod:`lightning_strategies_ext.coordinated_stop` makes all ranks stop before the same step. This module connects it to
the signal handlers and the training loop of a Trainer.

An early stop is needed where user code sets ``trainer.should_stop`` on one rank. With Lightning's ``ddp``, the loops of
that rank end, and the other ranks wait for it. Here the rank requests a stop agreement
(:mod:`...failure.stop_agreement`) at the next *point* at which the loops read ``trainer.should_stop``. Points are the
ends of training steps, validations, and epochs, and the end of the hooks before the first step.

- If no rank has passed the point yet, all ranks stop there. This is the case if all ranks set the attribute in the same
  step, as ``EarlyStopping`` and ``Timer`` do. Training then ends exactly where it ends with Lightning's ``ddp``.
- Otherwise ranks continue to the first point or step that no rank has passed, and the attribute is False until then.

At that point the attribute becomes True on all ranks, and Lightning's loops stop as usual: they complete ``min_epochs``
and ``min_steps``, and a validation that is due. A step without a request costs no function call and no message.
"""

from collections.abc import Callable
from functools import partial

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import Self

from lightning_strategies_ext._lightning import trainer_signals
from lightning_strategies_ext.failure.stop_agreement import StopAgreement
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


class EarlyStop:
    """Makes the ranks of a ``fit`` agree on ``trainer.should_stop``.

    Args:
        trainer: The Trainer.
        context: Stage context of this rank.
        any_rank: Collective that returns whether its argument is True on any rank.

    Attributes:
        step_record: The current stop agreement, in which the training loop records the ends of steps.
    """

    def __init__(self, trainer: "pl.Trainer", context: StageContext, any_rank: Callable[[bool], bool]) -> None:
        self._trainer = trainer
        self._context = context
        self._any_rank = any_rank
        self._is_requested = self._is_agreed = False
        self.step_record: StopAgreement | None = None

    @classmethod
    def create(cls, trainer: "pl.Trainer", context: StageContext, any_rank: Callable[[bool], bool]) -> Self | None:
        """Returns the object; None outside of ``fit``, and for a rank without peers."""
        is_used = trainer.state.fn == TrainerFn.FITTING and context.size > 1 and context.store is not None
        return cls(trainer, context, any_rank) if is_used else None

    def at_point(self) -> None:
        """Passes a point, except the end of a training step: the loops call it there."""
        self._pass(is_recorded=False)

    def after_train_step(self) -> None:
        """Passes the end of a training step; called only if the attribute is set, or this rank has voted."""
        self._pass(is_recorded=not self._trainer.should_stop)

    def resolve(self) -> None:
        """Sets the attribute on all ranks if a rank has requested it. Collective: all ranks call it at one point."""
        if self._any_rank(self._is_requested and not self._is_agreed):
            self._trainer.should_stop = self._is_requested = self._is_agreed = True

    def close(self) -> None:
        """Sets the attribute again if the stage has ended before all ranks have stopped."""
        if self._is_requested:
            self._trainer.should_stop = True

    def _pass(self, *, is_recorded: bool) -> None:
        trainer, agreement = self._trainer, self.step_record
        if agreement is None:
            return
        if self._is_agreed and not trainer.should_stop:  # the user, or the learning rate finder, has reset it
            self._is_requested = self._is_agreed = False
        if trainer.should_stop and not self._is_requested:
            self._is_requested = True
            agreement.request_here()
        if agreement.must_stop_at_point(is_recorded=is_recorded):
            self._context.coordinated_stop.resolve(self._any_rank)
        if self._is_requested:
            trainer.should_stop = self._is_agreed
