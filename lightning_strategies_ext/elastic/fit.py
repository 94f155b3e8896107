"""A ``fit`` whose ranks may change.

Lightning's training loop runs in one *world* after another, in the same process::

    enter a world -> train -> a rank fails, or hosts join or leave -> leave the world -> enter the next -> ...

- **Commit**: every n optimizer steps, at the start of an accumulation window, each rank copies its state
  (:mod:`.commit`).
- **A rank fails**: the pending collectives of the other ranks fail within milliseconds, and all ranks leave the world.
- **Hosts join or leave, or a rank gets a SIGTERM**: all ranks agree on a step, as for any SIGTERM
  (:mod:`...failure.stop_agreement`; no step waits for the agreement), commit before that step, and leave the world. No
  step is repeated.
- **Entering a world**: each rank gets its number, and the ranks rendezvous (:mod:`.membership`). All ranks restore the
  newest commit of any rank; ranks without it, because they are new or were a step behind, receive it. DataLoaders are
  created again, and shard the remaining samples of the epoch (:mod:`.sampler`).

A rank that joins runs its script from the beginning. Up to the training loop it runs alone: its collectives return its
own values until it has entered the world. If it cannot restore the commit, because the ``on_train_start`` hooks of the
other ranks have added modules or parameter groups, it first calls its own hooks, also alone, and restores again. On all
ranks, Lightning then calls the hooks in the new world; their changes to the module and its optimizers are reverted.

Limitations: the job ends if a rank fails before the first training step, or while Horovod connects the ranks of a new
world (about 0.1 s).
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_strategies_ext._lightning import trainer_data, trainer_signals, trainer_stages
from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.collectives import Collectives
from lightning_strategies_ext.elastic.arguments import check_callbacks
from lightning_strategies_ext.elastic.commit import Commit, copy_model
from lightning_strategies_ext.elastic.membership import Member, Membership, MembershipServiceError
from lightning_strategies_ext.elastic.policy import ScaleLearningRate, WorldSizePolicy, find_policy
from lightning_strategies_ext.elastic.sampler import shard_loader
from lightning_strategies_ext.exceptions import JoinError, TooFewRanksError
from lightning_strategies_ext.stage_context import StageContext

log = logging.getLogger(__name__)

#: Time for which surviving ranks wait for their rank in the next world before they save a checkpoint, in seconds. The
#: driver assigns ranks immediately if there are enough slots.
SAVE_AFTER_S = 5.0
#: Timeout for the driver's reply to a process that got a SIGTERM while it waited for its rank in the next world, in
#: seconds. The driver replies immediately that no rank is left for it, unless the driver has ended the job.
SIGTERM_ANSWER_TIMEOUT_S = 0.5
#: Time for which a rank continues a validation after a SIGTERM, in seconds: if the validation ends in time, no step is
#: repeated. Senders of a SIGTERM wait longer before a SIGKILL, torchrun's agents 30 s.
VALIDATION_GRACE_S = 5.0
#: Exit code of a rank that leaves after a SIGTERM. The driver interprets 0 as the end of the whole job.
_SIGTERM_EXIT_CODE = 128 + 15
_fit_numbers: Iterator[int] = count(1)


def next_fit_number() -> int:
    """Returns the number of a ``fit`` in this process, from 1. Processes that run one script number its calls alike."""
    return next(_fit_numbers)


class _WorldChange(Exception):  # noqa: N818
    """All ranks have committed and leave the world."""


class ElasticStrategyProtocol(Protocol):
    """Interface of a strategy that an elastic ``fit`` uses."""

    @property
    def global_rank(self) -> int:
        """Rank of this process in this world."""

    @property
    def world_size(self) -> int:
        """Number of ranks of this world."""

    @property
    def collectives(self) -> Collectives:
        """Collectives of the ranks of this world."""

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Plugin that writes checkpoints."""

    def barrier(self, name: str) -> None:
        """Returns when every rank has called it."""

    def apply_rank(self) -> None:
        """Applies the rank that the membership has assigned to this process."""

    def activate_collectives(self) -> None:
        """Connects this rank's collectives to those of the other ranks."""

    def with_local_collectives(self) -> AbstractContextManager[None]:
        """Returns a context manager in which this rank's collectives return its own values."""

    def enter_world(self, trainer: "pl.Trainer") -> None:
        """Starts the failure monitor, the stop agreement, and the gradient exchange of this world."""

    def leave_world(self, *, is_coordinated: bool) -> None:
        """Stops them; ``agreed`` states whether all ranks leave before the same step."""

    def detach(self) -> None:
        """Prepares the exit of this rank alone: the other ranks continue."""


class ElasticFit:
    """Runs one rank's ``fit`` in a world whose ranks may change.

    Args:
        strategy: The strategy.
        trainer: The Trainer, in ``fit``.
        membership: Membership of this process.
        commit_every_n_steps: Number of optimizer steps between commits.
        scales_learning_rate: Whether learning rates scale with the number of ranks if no callback defines a policy.
        number: Number of this ``fit``, from :func:`next_fit_number`.
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
        number: int,
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
        self._number = number
        self._first_world_size = len(membership.members)
        self._commit = commit
        self._listener = membership.listen()
        self._asked_to_leave_at: float | None = None
        self._leaves_with: BaseException = SIGTERMException(_SIGTERM_EXIT_CODE)
        self._is_first_step = False
        self._num_sharded = 0
        self._epoch_of_loaders: int | None = None  # epoch in which the DataLoaders began, if not at its start
        self._saved: Path | None = None
        self._has_begun = has_begun
        self._is_fresh = has_begun  # whether this process has neither begun the `fit` nor restored a commit
        self._undo_hooks: Callable[[], None] | None = None  # until `on_train_start` hooks have run after a restore
        self._undo = trainer_stages.wrap_fit_loop(trainer, self._run, self._run_trial, self._before_epoch)
        self._allow_trials = trainer_stages.skip_trials(self._callbacks) if has_begun else None
        self._settings = trainer_stages.settings_of(trainer)
        self._schedulers: list[Any] = []
        self._is_running = False
        self._is_in_trial = False
        self._has_entered = False  # whether a trial has entered a world before the first commit

    def close(self) -> None:
        """Restores the Trainer's original methods and stops the listener."""
        self._undo()
        if self._allow_trials is not None:
            self._allow_trials()
        self._listener.close()

    def leave(self, with_error: BaseException | None = None) -> None:
        """Requests that this rank leaves while the other ranks continue; for a signal handler.

        Args:
            with_error: Exception that ``fit`` raises when the rank leaves; by default a SIGTERMException.
        """
        if with_error is not None:
            self._leaves_with = with_error
        self._asked_to_leave_at = time.monotonic()

    @property
    def _is_leaving(self) -> bool:
        return self._asked_to_leave_at is not None

    # --- one world after another ---

    def _run(self, train: Callable[[], None]) -> None:
        if not self._membership.members:
            self._find_next_world()
        while True:
            try:
                self._enter()
                train()
                # Without it, a rank could exit that the other ranks need in a next world.
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
            if self._is_leaving:
                self._end()
            self._find_next_world()

    def _run_trial(self, train: Callable[[], None]) -> None:
        """Trains for a callback that searches a learning rate or batch size; no commit contains the result."""
        if not self._has_begun and not self._has_entered:
            self._strategy.activate_collectives()
            self._strategy.enter_world(self._trainer)
            self._has_entered = True
        before, self._is_in_trial = self._is_in_trial, True
        try:
            train()
        finally:
            self._is_in_trial = before

    def _enter(self) -> None:
        """Enters the world; if training has begun, first restores the newest commit of its ranks."""
        if self._allow_trials is not None:
            self._allow_trials()
        if not self._is_running:  # keeps changes that `on_fit_start` hooks have made
            self._settings = trainer_stages.settings_of(self._trainer)
            self._schedulers = [*self._trainer.lr_scheduler_configs]
            self._is_running = True
        if not self._has_begun and self._has_entered:
            self._has_begun = True
            return
        if self._has_begun:
            self._check_is_same_fit()
        self._strategy.activate_collectives()
        if self._has_begun:
            newest = max(
                self._membership.members, key=lambda member: member.committed_batches
            )  # the lowest rank of several
            if newest.committed_batches < 0:
                raise RuntimeError(
                    "A rank was lost before the first training step, so there is no commit to restore. Restart the job."
                )
            self._share_commit(newest)
            self._restore(newest)
        self._strategy.enter_world(self._trainer)
        if self._has_begun:
            self._undo_hooks = copy_model(self._trainer)
        self._has_begun = True

    def _check_is_same_fit(self) -> None:
        number = max(member.fit_number for member in self._membership.members)
        if number != self._number:
            raise RuntimeError(
                f"This rank is in call {self._number} of `fit`, the other ranks are in call {number}: a rank that"
                " joins runs the script from its beginning. Call `fit` only once in a script whose number of ranks"
                " may grow."
            )

    def _share_commit(self, newest: Member) -> None:
        are_behind = [member.committed_batches != newest.committed_batches for member in self._membership.members]
        if not any(are_behind):
            return
        src, collectives = self._membership.members.index(newest), self._strategy.collectives
        shared, settings = collectives.broadcast((self._commit.shared, _settings_of(self._callbacks)), src)
        rank = self._strategy.global_rank
        if self._membership.members[rank].is_new:
            _apply_settings(self._callbacks, settings)
        self._commit.receive(collectives, src, shared, are_behind[rank])

    def _restore(self, newest: Member) -> None:
        trainer, shared = self._trainer, self._commit.shared
        assert shared is not None
        has_local_state = self._commit.has_local_state_for(len(self._membership.members))
        is_complete = self._strategy.collectives.reduce_boolean_decision(has_local_state, all=True)
        self._restore_commit(is_complete)
        self._first_world_size = shared.first_world_size
        self._is_first_step = True
        repeated = max(member.steps_done for member in self._membership.members) - newest.committed_step
        num_new = sum(member.is_new for member in self._membership.members)
        rank_zero_info(
            f"Elastic training continues with {len(self._membership.members)} ranks ({num_new} new) from the commit"
            f" at step {newest.committed_step}; {repeated} steps are repeated."
        )
        if shared.world_size != len(self._membership.members):
            module = trainer.lightning_module
            self._policy.on_world_size_change(trainer, module, shared.world_size, len(self._membership.members))

    def _restore_commit(self, is_complete: bool) -> None:
        if self._undo_hooks is not None:  # another rank was lost while the hooks ran
            self._undo_hooks()
        problem = self._try_to_restore(is_complete)
        if problem is not None:
            with self._strategy.with_local_collectives():
                trainer_stages.start_training(self._trainer)
            problem = self._try_to_restore(is_complete)
        if problem is not None:
            raise JoinError(
                f"Rank {self._strategy.global_rank} cannot join the other ranks, because it differs from their commit:"
                f" {problem}. Create the same modules and parameter groups on every rank, in `__init__`,"
                " `configure_model`, `setup` or `on_train_start`."
            ) from problem
        self._is_fresh = False

    def _try_to_restore(self, is_complete: bool) -> Exception | None:
        """Restores the commit; returns the error if a process that has not restored a commit before fails to."""
        trainer = self._trainer
        trainer_data.reset_loaders(trainer)
        # The next hooks, `on_train_start` included, must find the settings from before the training.
        trainer_stages.apply_settings(trainer, self._settings)
        trainer.lr_scheduler_configs[:] = self._schedulers
        self._num_sharded, self._epoch_of_loaders = 0, None
        problem: Exception | None = None
        try:
            self._commit.restore(trainer, self._strategy.global_rank, is_complete=is_complete)
        except Exception as error:
            if not self._is_fresh or self._membership.is_peer_loss(error):
                raise
            problem = error
        difference = self._commit.find_difference(trainer) if self._is_fresh else None
        return problem if difference is None else ValueError(difference)

    def after_train_start(self) -> None:
        """Reverts changes of ``on_train_start`` hooks to the restored module, optimizers, and settings."""
        if self._undo_hooks is not None:
            self._undo_hooks()
            self._undo_hooks = None
            assert self._commit.shared is not None
            trainer_stages.apply_settings(self._trainer, self._commit.shared.settings)

    def _before_epoch(self) -> None:
        # DataLoaders that began within an epoch have the length of its remainder.
        epoch = self._trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
        if self._epoch_of_loaders not in (None, epoch):
            trainer_data.reset_training_loaders(self._trainer)
            self._epoch_of_loaders = None
            with isolate_rng():  # ranks without an interruption draw no random numbers here
                self._trainer.fit_loop.setup_data()

    # --- between two training steps ---

    def before_train_step(self, world: StageContext) -> None:
        """Commits if a commit is due, and leaves the world if the ranks have agreed to.

        Args:
            world: Stage context of the current world.
        """
        trainer = self._trainer
        if self._is_in_trial:
            return
        if self._is_first_step:
            trainer_stages.finish_restart(trainer)
            self._commit.restore_random()
            self._is_first_step = False
        self._commit.record_step(trainer.global_step)
        if trainer_signals.is_accumulating(trainer):
            return  # commits contain no partly accumulated gradients
        must_change = self._is_leaving or self._listener.has_changed
        if must_change:
            world.request_stop()
        must_change = world.has_decision_before_train_step()
        if must_change or self._is_due():
            self._commit.capture(trainer, self._first_world_size, self._strategy.collectives)
        if must_change:
            raise _WorldChange

    def _is_due(self) -> bool:
        return (
            self._commit.shared is None or self._trainer.global_step - self._commit.step >= self._commit_every_n_steps
        )

    def before_evaluation_step(self, world: StageContext) -> None:
        """Lets this rank leave during a long validation; the other ranks then detect its loss and restore a commit."""
        asked_at = self._asked_to_leave_at
        is_leaving = asked_at is not None and time.monotonic() - asked_at > VALIDATION_GRACE_S
        if is_leaving:
            world.request_stop()
        if world.has_decision_before_evaluation_step() and is_leaving:
            self._strategy.leave_world(is_coordinated=False)
            self._end()

    # --- loaders ---

    def shard_loader(self, loader: Any) -> None:
        """Shards the remaining samples of the epoch for a training DataLoader of this rank."""
        world_size = self._strategy.world_size
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        sampler = shard_loader(
            loader,
            self._strategy.global_rank,
            world_size,
            lambda given: self._policy.per_rank_batch_size(given, self._first_world_size, world_size),
            lambda: progress.current.ready,
        )
        states = trainer_data.pending_loader_states(self._trainer)
        if self._num_sharded < len(states):  # now, because the Trainer reads the length next
            sampler.load_state_dict(states[self._num_sharded])
            self._epoch_of_loaders = states[self._num_sharded]["epoch"]
        self._num_sharded += 1

    # --- from one world to the next ---

    def _find_next_world(self) -> None:
        done = self._trainer.global_step
        while True:
            # A change from here on may not be part of the next world.
            self._listener.has_changed = False
            try:
                rank = self._membership.next_rank(self._on_wait_for_rank)
                if rank is None:
                    self._strategy.detach()
                    log.warning("This rank exits: %s.", self._membership.no_rank_reason)
                    raise SystemExit(0)
                committed = self._commit.batches, self._commit.step
                number = self._number if self._membership.has_joined else 0
                member = Member(Peer.this_process(rank), number, *committed, done)
                is_complete = self._membership.rendezvous(member, self._on_wait_for_others)
            except MembershipServiceError as error:
                raise TooFewRanksError(f"{error}. {self._where_saved()}") from error
            if is_complete:
                break
            log.warning("Rank %d: a new rank did not join. Requesting another world.", rank)
        self._strategy.apply_rank()
        self._saved = None

    def _on_wait_for_rank(self, waited_s: float) -> None:
        if waited_s > SAVE_AFTER_S and self._saved is None and self._commit.shared is not None:
            self._saved = self._save()
            log.warning(
                "This rank is not part of the next world: %s %s",
                self._membership.waiting_reason,
                self._where_saved(),
            )
        if self._asked_to_leave_at is None or time.monotonic() - self._asked_to_leave_at < SIGTERM_ANSWER_TIMEOUT_S:
            return
        self._on_wait_for_others(waited_s)

    def _on_wait_for_others(self, waited_s: float) -> None:
        if not self._is_leaving:
            return
        if self._membership.sigterm_consequence is None:
            self._end()
        raise TooFewRanksError(
            f"This rank received a SIGTERM before it joined a new world: {self._membership.sigterm_consequence}."
            f" {self._where_saved()}"
        )

    def _where_saved(self) -> str:
        if self._commit.shared is None:
            return "It had no state to save yet."
        self._saved = self._saved or self._save()
        return (
            f"The state at step {self._commit.step} is saved in {self._saved}. Continue with `trainer.fit(...,"
            f" ckpt_path='{self._saved}')`."
        )

    def _save(self) -> Path:
        """Returns the path of the commit as a Lightning checkpoint; one rank of each host writes the file."""
        path = Path(self._trainer.default_root_dir, f"elastic-step={self._commit.step}.ckpt").absolute()
        peers, here = [member.peer for member in self._membership.members], Peer.this_process(0).host
        if next(peer.pid for peer in peers if peer.host == here and peer.is_running()) == os.getpid():
            self._strategy.checkpoint_io.save_checkpoint(self._commit.checkpoint(), path)
        return path

    def _end(self) -> None:
        self._strategy.detach()
        if isinstance(self._leaves_with, SIGTERMException):
            log.warning("This rank leaves the world after a SIGTERM.")
        raise self._leaves_with


def _settings_of(callbacks: list[pl.Callback]) -> list[dict[str, Any]]:
    """Returns plain attributes of callbacks, which ``setup`` may have set, such as the directory of checkpoints."""
    return [
        {name: value for name, value in vars(callback).items() if isinstance(value, (str, int, float, type(None)))}
        for callback in callbacks
    ]


def _apply_settings(callbacks: list[pl.Callback], settings: list[dict[str, Any]]) -> None:
    for callback, found in zip(callbacks, settings, strict=True):
        if not isinstance(callback, ProgressBar):
            vars(callback).update(found)
