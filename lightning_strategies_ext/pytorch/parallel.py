"""ParallelStrategy: base class of the Trainer's multi-process strategies.

It implements collectives, the stop after a SIGTERM, and the reaction to a failed rank. Subclasses start processes and
exchange the gradients. Only the property ``collectives`` depends on the engine, by default torch.distributed.
"""

from abc import ABC
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy as LightningParallelStrategy
from torch import Tensor
from torch.distributed import Store
from typing_extensions import Self, override

from lightning_strategies_ext import arguments
from lightning_strategies_ext._lightning import samplers, strategy_parts, trainer_logging, trainer_stages
from lightning_strategies_ext.checkpoints import atomic_checkpoint_io
from lightning_strategies_ext.checks import ChecksOptions, check_checks, check_flag
from lightning_strategies_ext.collectives import Collectives
from lightning_strategies_ext.elastic.arguments import elastic_class_of
from lightning_strategies_ext.failure.failure_monitor import announce_uncaught
from lightning_strategies_ext.failure.failure_report import texts_of_exception
from lightning_strategies_ext.launch.script_launcher import environment_of_child, get_exit_code, tear_down
from lightning_strategies_ext.launch.strategy_protocols import WorkerContext
from lightning_strategies_ext.monitoring.observer import ExchangeObserver
from lightning_strategies_ext.pytorch.agreement import start_agreement
from lightning_strategies_ext.pytorch.checks import check_arguments
from lightning_strategies_ext.pytorch.exchange_comparison import check_recorded_exchanges
from lightning_strategies_ext.pytorch.logged_values import NO_LOGGED_VALUES, LoggedValues, can_exchange
from lightning_strategies_ext.pytorch.step_losses import check_has_loss
from lightning_strategies_ext.pytorch.stopping import start_stop_agreement
from lightning_strategies_ext.registry import describe, register_strategies
from lightning_strategies_ext.renamed import RenamedAttribute, rejects_old_names
from lightning_strategies_ext.stage_context import EngineGroup, StageContext
from lightning_strategies_ext.torch_distributed.collectives import TorchCollectives
from lightning_strategies_ext.torch_distributed.features import Features
from lightning_strategies_ext.uneven.exact_evaluation import ExactEvaluation, evaluate_together

T = TypeVar("T")


class ParallelStrategy(LightningParallelStrategy, ABC):
    """Base class of the Trainer's multi-process strategies.

    Subclasses of Lightning's ``ParallelStrategy`` can derive from this class without changes. They implement
    ``root_device`` and ``model_to_device``. The collectives use torch.distributed unless a subclass overrides them.

    Args:
        accelerator: Accelerator; from ``Trainer(accelerator=...)`` if None.
        parallel_devices: Devices of this host, one per process; from ``Trainer(devices=...)`` if None.
        cluster_environment: Source of ranks and addresses; detected if None.
        checkpoint_io: Plugin that writes and reads checkpoints.
        precision_plugin: Precision plugin; from ``Trainer(precision=...)`` if None.
        hang_timeout: Time that ranks wait in a collective for an inactive rank, in seconds or as a ``timedelta``. All
            ranks then exit with an error that contains their stacks. With None, only the timeout of the backend
            applies.
        checks: Options of the checks that ranks agree during ``fit``, see :class:`.ChecksOptions`; all checks if None.
        exact_evaluation: Whether every sample counts once in evaluations, see :mod:`.uneven.exact_evaluation`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``parallel_devices`` mixes device types, repeats a GPU, or contains an unavailable GPU.

    Example::

        class MyStrategy(lightning_strategies_ext.ParallelStrategy):
            @property
            def root_device(self):
                return self.parallel_devices[self.local_rank]

            def model_to_device(self):
                self.model.to(self.root_device)
    """

    @rejects_old_names
    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        hang_timeout: float | timedelta | None = arguments.DEFAULT_HANG_TIMEOUT,
        checks: ChecksOptions | None = None,
        exact_evaluation: bool = False,
    ) -> None:
        self._exact_evaluation = check_flag("exact_evaluation", exact_evaluation)
        self._hang_timeout_s = arguments.check_hang_timeout(hang_timeout)
        self._checks = check_checks(checks, is_elastic=self._is_elastic)
        check_arguments(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=environment_of_child(cluster_environment),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._stage_context = StageContext(self._engine)
        self._features = Features()  # of the gradient exchange
        self._observer: ExchangeObserver | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Creates an object of the class; with ``elastic=True``, of its elastic class, if it has one.

        Only this base class has a ``__new__``: LightningCLI reads a class's arguments from its own ``__new__``.
        """
        return super().__new__(elastic_class_of(cls) if kwargs.get("elastic") is True else cls)

    #: Context of this process if the strategy has started it as a worker; its stage ends with :meth:`end_stage`.
    _worker: WorkerContext | None = None
    #: Whether ranks may change during ``fit``.
    _is_elastic = False
    #: Whether all ranks have the same model after each training step.
    _has_equal_models = True
    _logged_values = NO_LOGGED_VALUES
    #: Values of the argument ``compression``, if there is one, that would reduce the size of exchanges.
    cheaper_compressions: tuple[str, ...] = ()
    checkpoint_io = atomic_checkpoint_io
    register_strategies = register_strategies
    __repr__ = describe
    part_of_store = RenamedAttribute("prefix_store")
    has_met = RenamedAttribute("has_joined")
    note_failure = RenamedAttribute("announce_failure")
    explained = RenamedAttribute("explain_exception")

    @property
    def collectives(self) -> Collectives:
        """Collectives of this rank, by default over torch.distributed's default group.

        In a process without a group, each returns its input. A failed rank has :class:`.LocalCollectives`.
        """
        return self._stage_context.collectives

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the sampler that shards the dataset; hosts may differ in their numbers of ranks."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """Replaces the order of a user's random sampler with rank 0's order, see :class:`.SharedOrder`."""
        if self.lightning_module is not None:  # a stage is running
            samplers.share_orders_of_stage(dataloader, self.lightning_module.trainer, self.broadcast)
        return dataloader

    @property
    def is_shadowing(self) -> bool:
        """Whether this rank has run out of batches and repeats its last batch without effect."""
        steps = self._stage_context.shadowed_steps
        return steps is not None and steps.is_shadowing

    # --- interface of monitors ---

    def prefix_store(self, purpose: str, number: int) -> Store | None:
        """Returns a part of the store that all ranks share, see :meth:`.StageContext.prefix_store`."""
        return self._stage_context.prefix_store(purpose, number)

    @property
    def num_bytes_exchanged(self) -> int | None:
        """Bytes that this rank has passed to exchanges so far; None if exchanges transfer whole gradients."""
        return self._features.num_bytes_exchanged

    def observe_exchanges(self, observer: ExchangeObserver | None) -> None:
        """Sets the observer that is notified of exchanges that the strategy itself performs; None for no observer."""
        self._observer = observer

    # --- steps ---

    #: Function that runs before each training step; None for no function.
    _before_forward_of_step: Callable[[], None] | None = None

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one training step."""
        if self._before_forward_of_step is not None:
            self._before_forward_of_step()
        inputs = self._stage_context.uneven_inputs
        if inputs is None or not inputs.is_needed:
            output = super().training_step(*args, **kwargs)
        else:
            with inputs.wrap_training_step():
                output = super().training_step(*args, **kwargs)
        if self._logged_values.pending:
            self._logged_values.start()
        if output is None and getattr(self.lightning_module, "automatic_optimization", False):
            check_has_loss(self.lightning_module, self._stage_context, self._checks)
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one validation step, or stops before it if the ranks have agreed to stop there."""
        self._before_evaluation_step()
        output = super().validation_step(*args, **kwargs)
        if self._logged_values.pending:
            self._logged_values.start()
        return output

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one test step, or stops before it if the ranks have agreed to stop there."""
        self._before_evaluation_step()
        output = super().test_step(*args, **kwargs)
        if self._logged_values.pending:
            self._logged_values.start()
        return output

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one predict step, or stops before it if the ranks have agreed to stop there."""
        self._before_evaluation_step()
        return super().predict_step(*args, **kwargs)

    # --- collectives ---

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over the ranks that do not shadow the current step, see :meth:`.Collectives.reduce`."""
        context, steps = self._stage_context, self._stage_context.shadowed_steps
        if steps is not None and context.local_collectives is None and steps.handles_reduce(tensor, group):
            return steps.reduce(tensor, self.collectives.normalize_op(reduce_op))
        return self._active_collectives.reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gathers one tensor per rank, see :meth:`.Collectives.all_gather` and :meth:`.ExactEvaluation.all_gather`."""
        context, steps = self._stage_context, self._stage_context.shadowed_steps
        if isinstance(steps, ExactEvaluation) and context.local_collectives is None:
            return steps.all_gather(tensor, group, sync_grads)
        return self._active_collectives.all_gather(tensor, group, sync_grads)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        """Returns the object of rank ``src`` on every rank, see :meth:`.Collectives.broadcast`."""
        return self._active_collectives.broadcast(obj, src)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits until all ranks have called it. An optional name is shown in the error if it fails."""
        self._active_collectives.barrier(arguments.barrier_name(*args, **kwargs))

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns whether the decision is True on all ranks, or with ``all=False`` on any rank.

        If a subclass overrides ``reduce`` but not ``collectives``, it uses ``reduce``, as Lightning's base class does.
        """
        own = type(self)
        has_own_reduce = own.reduce is not ParallelStrategy.reduce and own.collectives is ParallelStrategy.collectives
        if has_own_reduce and self._stage_context.local_collectives is None:
            return bool(super().reduce_boolean_decision(decision, all))
        return self._active_collectives.reduce_boolean_decision(decision, all)

    # --- checkpoints ---

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the module's state.

        Raises:
            RankFailedError: If ranks are known to have exchanged gradients of different batches.
        """
        check_recorded_exchanges(self._stage_context)
        return super().lightning_module_state_dict()

    # --- exception, teardown ---

    def request_interrupt(self) -> None:
        """Requests that all ranks stop before the same step, as after Ctrl-C; for a worker's signal handler."""
        self._stage_context.coordinated_stop.request_interrupt()

    def announce_failure(self, exception: BaseException) -> None:
        """Announces to the other ranks that this rank has failed, unless all ranks stop. Called before any callback.

        Until the next stage, the collectives of this rank are local. Otherwise a callback that saves a checkpoint would
        wait in a barrier indefinitely, because no other rank takes part.
        """
        if not isinstance(exception, trainer_stages.STOPS):
            self._fail(exception)

    def explain_exception(self, exception: BaseException) -> BaseException:
        """Returns the exception to show: the given one, or the failure of another rank that made a collective raise."""
        return self._stage_context.explain_exception(exception)

    def reconciliate_processes(self, trace: str) -> None:
        """Terminates the other ranks of this host, if there are any, after this rank has failed; shows ``trace``.

        Ranks may exit by themselves within a few seconds; the rest are killed.
        """
        if self._stage_context.failure_monitor is not None:
            self._stage_context.failure_monitor.fail_and_kill_local_peers(trace)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Terminates the other ranks if this rank has failed. Ctrl-C and an agreed SIGTERM are not failures."""
        if self.has_joined and not isinstance(exception, (*trainer_stages.STOPS, KeyboardInterrupt)):
            self.reconciliate_processes(texts_of_exception(exception)[1])

    @override
    def teardown(self) -> None:
        """Moves the model to the CPU and frees the resources of the strategy. A second call is a no-op."""
        self._features.close()
        self._stage_context.leave(is_over=self._worker is None)
        self._stage_context.coordinated_stop.release_sigterm()
        if self.cluster_environment is not None:
            tear_down(self.cluster_environment)
        strategy_parts.tear_down(self)

    def enter_worker(self, context: WorkerContext) -> None:
        """Stores the context of this worker process; called before all other methods."""
        self._worker = context

    def end_stage(self) -> None:
        """Ends the stage in a worker, after :meth:`teardown` and the hooks that follow it."""
        if self._stage_context.failure_monitor is not None:
            self._stage_context.failure_monitor.finish_stage()

    # --- stage context ---

    @property
    def has_joined(self) -> bool:
        """Whether this process has joined other ranks; False for a rank without peers."""
        return self._stage_context.failure_monitor is not None

    def _engine(self) -> Collectives:
        """Creates the engine's collectives; strategies of other engines than torch.distributed override it."""
        return TorchCollectives(lambda: self.root_device)

    @property
    def _active_collectives(self) -> Collectives:
        # A subclass may override `collectives`, without local collectives for a failed rank.
        return self._stage_context.local_collectives or self.collectives

    def _fail(self, exception: BaseException) -> None:
        self._logged_values.reset()
        self._stage_context.mark_failed(exception, self.global_rank, self.world_size)

    def _enter_stage(self, group: EngineGroup) -> None:
        """Joins the other ranks, and makes all ranks exit when one fails or does not start. Collective."""
        store, ranks = group.join(), (self.global_rank, self.world_size)
        context = self._stage_context = StageContext(self._engine, *ranks, store, previous=self._stage_context)
        if store is not None:
            functions = get_exit_code, announce_uncaught
            context.start_failure_monitor(group.abort, group.progress, self._hang_timeout_s, *functions)
        if group.leave is not None and not context.is_group_intact():
            group.leave()
            self._enter_stage(replace(group, leave=None))

    def _prepare_logging(self, trainer: "pl.Trainer", backend: str | None = "") -> None:
        """Makes ``self.log`` exchange the values of a step together, with this class's ``reduce``."""
        settings = self.reduce, self.root_device, lambda: self.prefix_store("logged_values", 0)
        self._logged_values = LoggedValues(lambda: self._active_collectives, *settings)
        is_packed = type(self).reduce is ParallelStrategy.reduce and can_exchange(self.root_device, backend)
        trainer_logging.prepare_logging(trainer, self._logged_values if is_packed else None)

    def _begin_stage(self, trainer: "pl.Trainer") -> None:
        """Starts the agreements of a stage. Collective: all ranks call it."""
        context = self._stage_context
        self._start_stop_agreement(trainer)
        context.handle_stage_exits(is_job=self._worker is None)
        settings = self._logged_values, self.root_device
        context.evaluation = evaluate_together(trainer, context, *settings, is_exact=self._exact_evaluation)

    def _start_stop_agreement(self, trainer: "pl.Trainer", *, is_requested: bool | None = None) -> None:
        """Makes a SIGTERM on any rank stop all ranks before the same step. Collective: all ranks call it.

        By default, the stop is requested if any rank has received a SIGTERM after the last step of the previous stage.
        """
        context, hooks = self._stage_context, (self._on_sigterm, self._before_train_step)
        start_stop_agreement(context, trainer, *hooks, self._decide_any, is_requested=is_requested)
        options = self._checks, self._has_equal_models
        start_agreement(trainer, context, lambda: self._active_collectives, self.root_device, *options)

    def _on_sigterm(self) -> None:
        self._stage_context.coordinated_stop.request()

    def _before_train_step(self) -> None:
        self._stage_context.coordinated_stop.before_train_step(self._decide_any)
        for before_step in self._features.before_step:
            before_step()

    def _before_evaluation_step(self) -> None:
        self._stage_context.coordinated_stop.before_evaluation_step(self._decide_any)

    def _decide_any(self, decision: bool) -> bool:
        return self.reduce_boolean_decision(decision, all=False)

    @override
    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_observer": None}
        state.pop("_logged_values", None)
        return state
