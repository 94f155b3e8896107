"""Runs a ``fit`` whose ranks may change.

Lightning's training loop runs in one *world* after another, in the same process::

    enter a world -> train -> a rank fails, or hosts join or leave -> leave the world -> enter the next -> ...

Under torchrun there is one world per process. When a rank fails, torchrun terminates and restarts all ranks. When the
ranks agree to leave, ``fit`` raises on all ranks, and torchrun restarts them as well.

- **Commit**: every n optimizer steps, at the start of an accumulation window, each rank copies its state
  (:mod:`.commit`).
- **A rank fails**: the pending collectives of the other ranks fail soon, and all ranks leave the world.
- **Hosts join or leave, or a rank gets a SIGTERM**: all ranks agree on a training step
  (:mod:`...failure.stop_agreement`; no step waits for the agreement), commit before it, and leave the world. No
  optimizer step is repeated.
- **Entering a world**: each process gets its new rank, and the ranks rendezvous (:mod:`.world_transition`). All ranks
  restore the newest commit of any rank; ranks without it, because they are new or lost a peer during their last commit,
  receive it. DataLoaders are created again, and shard the remaining samples of the epoch (:mod:`.sampler`).

A rank that joins runs its script from the beginning. Up to the training loop it runs alone: its collectives return its
own values until it has entered the world. Then it restores the commit. If this fails, because ``on_train_start`` hooks
have added modules or parameter groups on the other ranks, the rank calls its own ``on_train_start`` hooks, also alone,
and restores the commit again. After the restore, Lightning calls these hooks on all ranks. Their changes to the module
and its optimizers are then reverted, because the commit contains them.

A *trial* is a short training by Lightning's ``LearningRateFinder`` or ``BatchSizeFinder``, before the training. The
ranks then enter their first world for the trial. A rank that joins skips trials: the commit contains their result.

Limitations: the job ends if a rank fails before the first training step (torchrun starts it again), or while Horovod
connects the ranks of a new world (about 0.1 s).
"""

import logging
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_strategies_ext._lightning import trainer_signals, trainer_stages
from lightning_strategies_ext.elastic.arguments import check_callbacks
from lightning_strategies_ext.elastic.callback_attributes import plain_attributes_of, set_plain_attributes
from lightning_strategies_ext.elastic.commit import Commit, SharedState, snapshot_model
from lightning_strategies_ext.elastic.membership import Member, Membership
from lightning_strategies_ext.elastic.policy import ScaleLearningRate, WorldSizePolicy, find_policy
from lightning_strategies_ext.elastic.sampler import ShardedLoaders
from lightning_strategies_ext.elastic.strategy_protocol import ElasticStrategyProtocol
from lightning_strategies_ext.elastic.world_transition import LeaveRequest, WorldTransition
from lightning_strategies_ext.exceptions import JoinError
from lightning_strategies_ext.stage_context import StageContext

log = logging.getLogger(__name__)

#: Time for which a rank continues a validation, or an epoch that trains nothing, after a SIGTERM, in seconds: if this
#: ends in time, no step is repeated. Senders of a SIGTERM wait longer before a SIGKILL, torchrun's agents 30 s.
VALIDATION_GRACE_S = 5.0
_fit_numbers: Iterator[int] = count(1)


def next_fit_number() -> int:
    """Returns the number of a new ``fit`` in this process, from 1; equal on all ranks, which run the same script."""
    return next(_fit_numbers)


class _WorldChange(Exception):  # noqa: N818
    """All ranks have committed and leave the world."""


class ElasticFit:
    """Runs one rank's ``fit`` in a world whose ranks may change.

    Args:
        strategy: The strategy.
        trainer: The Trainer, in ``fit``.
        membership: Membership of this process.
        commit_every_n_steps: Number of optimizer steps between commits.
        scales_learning_rate: Whether learning rates scale with the number of ranks if no callback defines a policy.
        fit_number: Number of this ``fit``, from :func:`next_fit_number`.
        commit: Commit of this rank, possibly from an earlier process.
        has_begun: Whether the ``fit`` has begun on other ranks or in earlier processes.
    """

    def __init__(
        self,
        strategy: ElasticStrategyProtocol,
        trainer: "pl.Trainer",
        membership: Membership,
        commit_every_n_steps: int,
        scales_learning_rate: bool,
        fit_number: int,
        commit: Commit,
        has_begun: bool,
    ) -> None:
        self._strategy = strategy
        self._trainer = trainer
        self._callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        check_callbacks(self._callbacks)
        self._membership = membership
        self._commit_every_n_steps = commit_every_n_steps
        self._policy = find_policy(self._callbacks, ScaleLearningRate() if scales_learning_rate else WorldSizePolicy())
        self._fit_number = fit_number
        self._first_world_size = len(membership.members)  # when `fit` began; after a restore, that of the commit
        self._commit = commit
        self._loaders = ShardedLoaders(trainer)
        self._listener = membership.listen()
        self._leave_request = LeaveRequest()
        self._transition = WorldTransition(
            strategy, trainer, membership, self._listener, commit, self._leave_request, fit_number
        )
        self._has_begun = has_begun  # on any rank, or in an earlier process
        self._may_differ = has_begun  # whether the module may differ from the commit, which this rank has not restored
        self._is_first_step_after_restore = False
        self._must_check_size = False  # from the first commit, which may lack states of optimizers, to the next step
        self._is_in_trial = False
        self._has_entered_for_trial = False
        self._settings_before_training: dict[str, Any] | None = None
        self._settings_after_restore: dict[str, Any] = {}  # those of the commit, with the changes of the policy
        self._schedulers_before_training: list[Any] = []
        self._revert_hooks: Callable[[], None] | None = None  # from a restore until the `on_train_start` hooks have run
        self._unwrap_fit_loop = trainer_stages.wrap_fit_loop(
            trainer, self._run, self._run_trial, self._loaders.before_epoch
        )
        self._stop_skipping_trials = trainer_stages.skip_trials(self._callbacks) if has_begun else None

    def close(self) -> None:
        """Restores the Trainer's original methods and stops the listener."""
        self._unwrap_fit_loop()
        if self._stop_skipping_trials is not None:
            self._stop_skipping_trials()
        self._listener.close()

    def request_leave(self, with_error: BaseException | None = None) -> None:
        """Requests that this rank leaves while the other ranks continue; for a signal handler.

        Args:
            with_error: Exception that ``fit`` raises when the rank leaves; by default a SIGTERMException.
        """
        self._leave_request.set(with_error)

    @property
    def has_pending_sigterm(self) -> bool:
        """Whether this rank has received a SIGTERM too late to leave before a step of this ``fit``."""
        return self._leave_request.is_of_sigterm

    # --- one world after another ---

    def _run(self, train: Callable[[], None]) -> None:
        if not self._membership.members:  # a new rank, which has been in no world
            self._transition.join_next_world()
        while True:
            try:
                self._enter()
                train()
                # Another rank may fail before all ranks arrive here, and the next world then needs this rank.
                self._strategy.barrier("end of elastic training")
                self._commit.capture_final(self._trainer, self._first_world_size, self._strategy.collectives)
            except _WorldChange:
                self._strategy.leave_world(is_coordinated=True)
            except Exception as error:
                if not self._membership.is_peer_loss(error):
                    raise
                log.info("Rank %d of %d: %s", self._strategy.global_rank, len(self._membership.members), error)
                self._strategy.leave_world(is_coordinated=False)
            else:
                return
            if self._leave_request.is_set:
                self._transition.leave_job()
            self._transition.join_next_world()

    def _run_trial(self, train: Callable[[], None]) -> None:
        """Trains for a callback that searches for a learning rate or a batch size, without commits."""
        if not self._has_begun and not self._has_entered_for_trial:
            self._strategy.activate_collectives()
            self._strategy.enter_world(self._trainer)
            self._has_entered_for_trial = True
        was_in_trial, self._is_in_trial = self._is_in_trial, True
        try:
            train()
        finally:
            self._is_in_trial = was_in_trial

    def _enter(self) -> None:
        """Enters the world; if training has begun, first restores the newest commit of its ranks."""
        if self._stop_skipping_trials is not None:
            self._stop_skipping_trials()
        if self._settings_before_training is None:  # only now, because `on_fit_start` hooks may change them
            self._settings_before_training = trainer_stages.settings_of(self._trainer)
            self._schedulers_before_training = [*self._trainer.lr_scheduler_configs]
        if not self._has_begun and self._has_entered_for_trial:  # the training begins in the world of the trial
            self._has_begun = True
            return
        if self._has_begun:
            self._check_is_same_fit()
        self._strategy.activate_collectives()
        if self._has_begun:
            self._restore_newest_commit()
        self._strategy.enter_world(self._trainer)
        if self._has_begun:
            self._revert_hooks = snapshot_model(self._trainer)
        self._has_begun = True

    def _check_is_same_fit(self) -> None:
        number = max(member.fit_number for member in self._membership.members)
        if number not in (0, self._fit_number):  # 0 if all ranks are new, so that there is no commit
            raise RuntimeError(
                f"This rank is in call {self._fit_number} of `fit`, the other ranks are in call {number}: a rank that"
                " joins runs the script from its beginning. Call `fit` only once in a script whose number of ranks"
                " may grow."
            )

    # --- restoring a commit ---

    def _restore_newest_commit(self) -> None:
        members = self._membership.members
        newest = max(members, key=lambda member: member.committed_batches)  # the lowest rank, if several ranks have it
        if newest.committed_batches < 0:
            raise RuntimeError(
                "There is no commit to restore: a rank was lost before the first training step, or all ranks with a"
                " commit were lost. Restart the job."
            )
        self._share_commit(newest)
        self._restore()
        shared = self._commit.shared
        assert shared is not None
        self._first_world_size = shared.first_world_size
        self._settings_after_restore = shared.settings
        repeated = max(member.steps_done for member in members) - newest.committed_step
        num_new = sum(member.is_new for member in members)
        rank_zero_info(
            f"Elastic training continues with {len(members)} ranks ({num_new} new) from the commit at step"
            f" {newest.committed_step}; {repeated} steps are repeated."
        )
        if shared.world_size != len(members):
            self._apply_policy(shared, len(members))

    def _apply_policy(self, shared: SharedState, world_size: int) -> None:
        """Calls the policy with the settings of the commit, and keeps its changes for :meth:`after_train_start`."""
        trainer = self._trainer
        before = trainer_stages.settings_of(trainer)
        trainer_stages.apply_settings(trainer, shared.settings)
        self._policy.on_world_size_change(trainer, trainer.lightning_module, shared.world_size, world_size)
        self._settings_after_restore = trainer_stages.settings_of(trainer)
        trainer_stages.apply_settings(trainer, before)

    def _share_commit(self, newest: Member) -> None:
        """Sends the newest commit to the ranks that lack it."""
        are_behind = [member.committed_batches != newest.committed_batches for member in self._membership.members]
        if not any(are_behind):
            return
        src, collectives = self._membership.members.index(newest), self._strategy.collectives
        shared, attributes = collectives.broadcast((self._commit.shared, plain_attributes_of(self._callbacks)), src)
        rank = self._strategy.global_rank
        if self._membership.members[rank].is_new:
            set_plain_attributes(self._callbacks, attributes)
        self._commit.receive(collectives, src, shared, are_behind[rank])

    def _restore(self) -> None:
        has_local_state = self._commit.has_local_state_for(len(self._membership.members))
        all_ranks_have_local_state = self._strategy.collectives.reduce_boolean_decision(has_local_state, all=True)
        if self._revert_hooks is not None:  # a rank was lost while the `on_train_start` hooks ran
            self._revert_hooks()
        problem = self._try_to_restore(all_ranks_have_local_state)
        if problem is not None:  # the `on_train_start` hooks may add the modules and parameter groups of the commit
            with self._strategy.with_local_collectives():
                trainer_stages.start_training(self._trainer)
            problem = self._try_to_restore(all_ranks_have_local_state)
        if problem is not None:
            raise JoinError(
                f"Rank {self._strategy.global_rank} cannot join the other ranks, because it differs from their commit:"
                f" {problem}. Create the same modules and parameter groups on every rank, in `__init__`,"
                " `configure_model`, `setup` or `on_train_start`."
            ) from problem
        self._may_differ = False
        self._is_first_step_after_restore = True

    def _try_to_restore(self, all_ranks_have_local_state: bool) -> Exception | None:
        """Restores the commit. Returns the difference if this rank has never restored one and differs; else None."""
        self._loaders.reset()
        # Lightning calls `on_train_start` hooks again; they must find the attributes from the beginning of `fit`.
        assert self._settings_before_training is not None
        trainer_stages.apply_settings(self._trainer, self._settings_before_training)
        self._trainer.lr_scheduler_configs[:] = self._schedulers_before_training
        problem: Exception | None = None
        try:
            self._commit.restore(
                self._trainer, self._strategy.global_rank, all_ranks_have_local_state=all_ranks_have_local_state
            )
        except Exception as error:
            if not self._may_differ or self._membership.is_peer_loss(error):
                raise
            problem = error
        difference = self._commit.find_difference(self._trainer) if self._may_differ else None
        return problem if difference is None else ValueError(difference)

    def after_train_start(self) -> None:
        """Reverts changes of ``on_train_start`` hooks to the restored module, optimizers, and settings."""
        if self._revert_hooks is not None:
            self._revert_hooks()
            self._revert_hooks = None
            trainer_stages.apply_settings(self._trainer, self._settings_after_restore)

    # --- loaders ---

    def shard_loader(self, loader: Any) -> None:
        """Shards the remaining samples of the epoch for a training DataLoader of this rank."""
        world_size = self._strategy.world_size
        self._loaders.shard(
            loader,
            self._strategy.global_rank,
            world_size,
            lambda given: self._policy.per_rank_batch_size(given, self._first_world_size, world_size),
        )

    # --- between two steps ---

    def before_train_step(self, context: StageContext, any_rank: Callable[[bool], bool]) -> None:
        """Commits if a commit is due, and leaves the world if the ranks have agreed to leave it.

        Args:
            context: Stage context of the current world.
            any_rank: Collective that returns whether the argument is True on any rank.
        """
        trainer = self._trainer
        if self._is_in_trial:
            return
        if self._is_first_step_after_restore:
            trainer_stages.finish_restart(trainer)
            self._commit.restore_random()
            self._is_first_step_after_restore = False
        self._commit.record_step(trainer.global_step)
        if trainer_signals.is_accumulating(trainer):  # commits contain no partly accumulated gradients
            is_one_window = trainer.accumulate_grad_batches >= trainer.num_training_batches  # the whole epoch
            if is_one_window and trainer_signals.is_without_training(trainer):
                self._leave_without_commit(context, context.coordinated_stop.has_decision_before_train_step, any_rank)
            return
        if self._must_check_size and trainer.global_step > self._commit.step:
            self._must_check_size = False
            self._commit.check_later_size(trainer)
        if self._leave_request.is_set or self._listener.has_changed:
            context.coordinated_stop.request()
        stop = context.coordinated_stop
        must_leave = stop.has_decision_before_train_step() and stop.must_end(any_rank)
        if must_leave or self._is_commit_due():
            self._must_check_size |= self._commit.shared is None
            self._commit.capture(trainer, self._first_world_size, self._strategy.collectives)
        if must_leave:
            raise _WorldChange

    def _is_commit_due(self) -> bool:
        return (
            self._commit.shared is None or self._trainer.global_step - self._commit.step >= self._commit_every_n_steps
        )

    def before_evaluation_step(self, context: StageContext, any_rank: Callable[[bool], bool]) -> None:
        """Leaves the job during a long validation, if this rank has to.

        The ranks agree on the step before which this rank leaves. The other ranks then continue, detect the loss of
        this rank, and restore a commit.

        Args:
            context: Stage context of the current world.
            any_rank: Collective that returns whether the argument is True on any rank.
        """
        self._leave_without_commit(context, context.coordinated_stop.has_decision_before_evaluation_step, any_rank)

    def _leave_without_commit(
        self, context: StageContext, has_decision: Callable[[], bool], any_rank: Callable[[bool], bool]
    ) -> None:
        must_leave, stop = self._leave_request.is_older_than(VALIDATION_GRACE_S), context.coordinated_stop
        if must_leave:
            stop.request()
        if has_decision() and stop.must_end(any_rank) and must_leave:
            self._strategy.leave_world(is_coordinated=False)
            self._transition.leave_job()
