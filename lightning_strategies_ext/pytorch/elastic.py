"""ElasticStrategy: base class of strategies whose ``fit`` may pass through several worlds.

:mod:`lightning_strategies_ext.elastic` implements elastic training. An elastic strategy derives from this class and, as
its next base class, from the strategy that becomes elastic. It implements ``apply_rank``, ``enter_world``, ``detach``,
and ``membership``.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_strategies_ext._lightning import trainer_data
from lightning_strategies_ext.collectives import LocalCollectives
from lightning_strategies_ext.collectives.model_check import check_same_model
from lightning_strategies_ext.elastic.commit import Commit
from lightning_strategies_ext.elastic.fit import ElasticFit, next_fit_number
from lightning_strategies_ext.elastic.membership import Membership, peers_of
from lightning_strategies_ext.failure.elastic_monitor import elastic_monitor
from lightning_strategies_ext.failure.rank_status import CollectiveProgress
from lightning_strategies_ext.launch.strategy_protocols import StrategyWithWorkers
from lightning_strategies_ext.pytorch.parallel import ParallelStrategy
from lightning_strategies_ext.pytorch.stopping import describe_step
from lightning_strategies_ext.stage_context import StageContext
from lightning_strategies_ext.uneven.exact_evaluation import evaluate_together


class ElasticStrategy(ParallelStrategy, ABC):
    """Base class of the elastic strategies of all engines."""

    _is_elastic = True
    _fit: ElasticFit | None = None
    _commit_every_n_steps: int
    _scale_learning_rate: bool

    @property
    @abstractmethod
    def membership(self) -> Membership:
        """Membership of this rank."""

    @abstractmethod
    def apply_rank(self) -> None:
        """Sets the rank of this process according to its membership."""

    @abstractmethod
    def enter_world(self, trainer: "pl.Trainer") -> None:
        """Starts the agreements and the gradient exchange of a world. Collective: all its ranks call it."""

    def _begin_fit(self, trainer: "pl.Trainer") -> None:
        joins_running_world = not self.membership.has_joined
        commit = Commit(1 if joins_running_world else cast(StrategyWithWorkers, self).num_processes)
        self._make_fit(trainer, next_fit_number(), commit, has_begun=joins_running_world)

    def _make_fit(self, trainer: "pl.Trainer", number: int, commit: Commit, *, has_begun: bool) -> None:
        options = self._commit_every_n_steps, self._scale_learning_rate
        self._fit = ElasticFit(self, trainer, self.membership, *options, number, commit, has_begun)
        if self._stage_context.coordinated_stop.was_requested:
            self._leave_fit()
        self._start_stop_agreement(trainer, is_requested=False)  # without peers, before the training loop

    # --- one world after another ---

    def _enter_context(self, store: dist.Store | None = None, name: str | None = None, *, is_local: bool) -> None:
        """Replaces the stage context, before the first world or for a world.

        Args:
            store: Store of the ranks of a world; None for a rank without peers.
            name: Name of the context of a world, see :class:`.StageContext`.
            is_local: Whether the collectives of this rank are local, because it has not joined the others yet.
        """
        rank, size = self.global_rank, self.world_size
        self._stage_context = StageContext(self._engine, rank, size, store, previous=self._stage_context, name=name)
        if is_local:
            self._stage_context.local_collectives = LocalCollectives(rank, size)

    def activate_collectives(self) -> None:
        """Makes this rank take part in the collectives of its world from now on."""
        self.membership.has_joined = True
        self._stage_context.local_collectives = None

    def _begin_evaluations(self, trainer: "pl.Trainer") -> None:
        """Makes the evaluations of a world count every sample once, with ``exact_evaluation=True``."""
        self._reset_repeating_loaders(trainer)
        if self._exact_evaluation:
            context, settings = self._stage_context, (self._logged_values, self.root_device)
            context.evaluation = evaluate_together(trainer, context, *settings, is_exact=True)

    def _reset_repeating_loaders(self, trainer: "pl.Trainer") -> None:
        # The sanity check, which a rank runs without peers, has created DataLoaders that repeat samples.
        if self._exact_evaluation and self._fit is not None:
            trainer_data.reset_validation_loaders(trainer)

    @contextmanager
    def with_local_collectives(self) -> Generator[None, None, None]:
        """Makes the collectives of this rank local during the block."""
        self._stage_context.local_collectives = LocalCollectives(self.global_rank, self.world_size)
        try:
            yield
        finally:
            self._stage_context.local_collectives = None

    @override
    def on_train_start(self) -> None:
        """Undoes changes of ``on_train_start`` hooks to a restored module, and exchanges gradients of added parameters.

        Raises:
            ModelMismatchError: If the hooks have added different parameters on another rank.
        """
        super().on_train_start()
        if self._fit is None or self._stage_context.local_collectives is not None:
            return
        self._fit.after_train_start()
        self._include_added_parameters()

    def _include_added_parameters(self) -> None:
        assert self.lightning_module is not None
        tracker = self._stage_context.parameter_tracker
        assert tracker is not None
        added = tracker.find_added(self.model)
        if self.reduce_boolean_decision(bool(added), all=False):
            check_same_model(self.collectives, self.lightning_module, self.root_device, is_trained=True)
            self.collectives.broadcast_tensors([parameter.detach() for parameter in added], 0)
            tracker.include_added(self.model)

    def leave_world(self, *, is_coordinated: bool) -> None:
        """Leaves the world.

        Args:
            is_coordinated: Whether all ranks leave before the same step; otherwise some may have exited.
        """
        self._logged_values.reset()
        self._stage_context.leave() if is_coordinated else self._stage_context.abandon()
        self.membership.leave(is_coordinated=is_coordinated)
        elastic_monitor().mark_finished()

    def _detect_hangs(self, trainer: "pl.Trainer", store: dist.Store | None, progress: CollectiveProgress) -> None:
        """Starts the detection of hung ranks, which are killed; stops it without a hang timeout or without peers."""
        if store is None or self._hang_timeout_s is None:
            elastic_monitor().stop_hang_detection()
            return
        where, peers = partial(describe_step, trainer), peers_of(self.membership.members)
        elastic_monitor().start_hang_detection(store, self.global_rank, peers, progress, self._hang_timeout_s, where)

    def detach(self) -> None:
        """Makes the collectives of this rank local, so that it can exit while the other ranks continue."""
        elastic_monitor().stop_hang_detection()
        self._stage_context.local_collectives = LocalCollectives(self.global_rank, self.world_size)

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """Shards the remaining samples of the epoch for a training loader."""
        module = self.lightning_module
        if module is not None and self._fit is not None and module.trainer.training:
            self._fit.shard_loader(dataloader)
        return dataloader

    # --- exception, teardown ---

    @override
    def _fail(self, exception: BaseException) -> None:
        # The other ranks continue without this rank.
        super()._fail(exception)
        if self._fit is not None:
            self.detach()

    @override
    def teardown(self) -> None:
        """Moves the model to the CPU and frees the resources of the strategy. A second call is a no-op."""
        elastic_monitor().stop_hang_detection()
        if self._fit is not None:
            if self._fit.has_pending_sigterm:  # it came after the last step, and applies to the next stage
                self._stage_context.coordinated_stop.request()
            self._fit.close()
        self._fit = None
        super().teardown()

    @override
    def _on_sigterm(self) -> None:
        super()._on_sigterm() if self._fit is None else self._leave_fit()

    def _leave_fit(self) -> None:
        assert self._fit is not None
        self._fit.request_leave()

    @override
    def _before_train_step(self) -> None:
        if self._fit is None:
            super()._before_train_step()
        else:
            self._fit.before_train_step(self._stage_context, self._decide_any)

    @override
    def _before_evaluation_step(self) -> None:
        if self._fit is None:
            super()._before_evaluation_step()
        else:
            self._fit.before_evaluation_step(self._stage_context, self._decide_any)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_fit": None}


def is_fitting(trainer: "pl.Trainer") -> bool:
    """Returns whether the stage is ``fit``, in which ranks may change."""
    return bool(trainer.state.fn == TrainerFn.FITTING)
