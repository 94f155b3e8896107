"""ParallelStrategy: base class of the Trainer's multi-process strategies.

It implements ranks, collectives, stopping after a SIGTERM, and the handling of a failed rank. Subclasses start the
processes and exchange the gradients. Only the property ``collectives`` depends on the engine, by default
torch.distributed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, Protocol, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy as LightningParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.distributed import Store
from typing_extensions import Self, override

from lightning_strategies_ext._lightning import (
    samplers,
    trainer_data,
    trainer_signals,
    trainer_stages,
    user_modules,
)
from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.arguments import (
    DEFAULT_HANG_TIMEOUT,
    barrier_name,
    check_devices,
    check_hang_timeout,
    check_no_old_names,
    check_plugins,
)
from lightning_strategies_ext.checkpoints import atomic_checkpoint_io
from lightning_strategies_ext.collectives import Collectives
from lightning_strategies_ext.collectives.sampler_order import SharedOrder
from lightning_strategies_ext.failure.exchange_check import check_exchanges
from lightning_strategies_ext.failure.failure_monitor import announce_uncaught
from lightning_strategies_ext.failure.failure_report import is_collective_error, texts_of_exception
from lightning_strategies_ext.failure.process_exit import install_excepthook
from lightning_strategies_ext.failure.rank_status import CollectiveProgress
from lightning_strategies_ext.launch.script_launcher import environment_of_child, get_exit_code, tear_down
from lightning_strategies_ext.monitoring.observer import ExchangeObserver
from lightning_strategies_ext.registry import describe, register_strategies
from lightning_strategies_ext.stage_context import REMOTE_REASON_TIMEOUT_S, StageContext
from lightning_strategies_ext.torch_distributed.collectives import TorchCollectives
from lightning_strategies_ext.uneven.control import UnevenInputs, UnevenInputsController

T = TypeVar("T")


class ParameterTracker(Protocol):
    """Part of a gradient exchange that tracks its parameters."""

    def find_added(self, model: Any) -> Sequence[Tensor]:
        """Returns the parameters of a model that were added to it, or have replaced others."""

    def follow_added(self, model: Any) -> None:
        """Exchanges the gradients of added parameters, too. Collective: all ranks call it."""


#: Exceptions that end the stage on all ranks and are not failures.
_NO_FAILURES = (SIGTERMException, KeyboardInterrupt, trainer_stages.TunerExitException)


class ParallelStrategy(LightningParallelStrategy, ABC):
    """Base class of the Trainer's multi-process strategies.

    Subclasses of Lightning's ``ParallelStrategy`` can derive from this class without changes. They implement the
    abstract ``root_device`` and ``model_to_device``. The collectives use torch.distributed unless a subclass overrides
    them.

    Args:
        accelerator: Accelerator; from ``Trainer(accelerator=...)`` if None.
        parallel_devices: Devices of this host, one per process; from ``Trainer(devices=...)`` if None.
        cluster_environment: Source of ranks and addresses; detected if None.
        checkpoint_io: Plugin that writes and reads checkpoints.
        precision_plugin: Precision plugin; from ``Trainer(precision=...)`` if None.
        hang_timeout: Time that ranks wait in a collective for an inactive rank, in seconds or as a ``timedelta``. All
            ranks then exit with an error that contains their stacks. With None, only the timeout of the backend
            applies.

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

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        hang_timeout: float | timedelta | None = DEFAULT_HANG_TIMEOUT,
    ) -> None:
        self._hang_timeout_s = check_hang_timeout(hang_timeout)
        check_plugins(accelerator, cluster_environment, checkpoint_io)
        if precision_plugin is not None and not isinstance(precision_plugin, Precision):
            raise TypeError(f"`precision_plugin` must be a Precision of lightning.pytorch, got {precision_plugin!r}.")
        check_devices(parallel_devices)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=environment_of_child(cluster_environment),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._stage_context = StageContext(self._engine)
        self._observer: ExchangeObserver | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Creates an object of the class; with ``elastic=True``, of its elastic subclass, if it has one.

        Only this base class has a ``__new__``, because LightningCLI reads the arguments of a class from the class's own
        ``__new__``.
        """
        check_no_old_names(cls, kwargs)
        target = vars(cls).get("elastic_class")
        if target is not None and kwargs.get("elastic") is True:
            module, _, name = target.partition(":")
            cls = getattr(import_module(f"{cls.__module__.rpartition('.')[0]}.{module}"), name)
        return super().__new__(cls)

    checkpoint_io = atomic_checkpoint_io

    register_strategies = register_strategies
    __repr__ = describe

    @property
    @abstractmethod
    @override
    def root_device(self) -> torch.device:
        """Device of this rank."""

    @property
    def collectives(self) -> Collectives:
        """Collectives of this rank, by default over torch.distributed's default group.

        In a process without a group, each returns its input. The collectives of a failed rank are local, see
        :class:`.LocalCollectives`.
        """
        return self._stage_context.collectives

    @property
    @override
    def is_global_zero(self) -> bool:
        """Whether this process has global rank 0."""
        return bool(self.global_rank == 0)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the sampler that shards the dataset; hosts may differ in their numbers of ranks."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """Replaces the order of a user's random sampler with rank 0's order, see :class:`.SharedOrder`."""
        if self.lightning_module is None:
            return dataloader  # no stage is running
        trainer = self.lightning_module.trainer

        def share(sampler: Any) -> SharedOrder:
            order = SharedOrder(sampler, self.broadcast, trainer.current_epoch)
            if trainer.predicting:
                order.reset()  # a rank without samples does not iterate
            return order

        samplers.share_orders(dataloader, share)
        return dataloader

    @property
    def is_shadowing(self) -> bool:
        """Whether this rank has run out of batches and repeats its last batch without effect."""
        inputs = self._stage_context.uneven_inputs
        return inputs is not None and inputs.is_shadowing

    # --- interface of monitors ---

    def prefix_store(self, purpose: str, number: int) -> Store | None:
        """Returns a part of the store that all ranks share, see :meth:`.StageContext.prefix_store`."""
        return self._stage_context.prefix_store(purpose, number)

    @property
    def num_bytes_exchanged(self) -> int | None:
        """Bytes that this rank has passed to exchanges so far; None if exchanges transfer whole gradients."""
        return None

    @property
    def cheaper_compressions(self) -> tuple[str, ...]:
        """Values of the argument ``compression``, if there is one, that would reduce the size of exchanges."""
        return ()

    def observe_exchanges(self, observer: ExchangeObserver | None) -> None:
        """Sets the observer that is notified of exchanges that the strategy itself performs; None for no observer."""
        self._observer = observer

    # --- steps ---

    #: Whether :meth:`_before_forward_of_step` is called.
    _has_work_before_step = False

    def _before_forward_of_step(self) -> None:
        """Runs before each training step if :attr:`_has_work_before_step` is True."""

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one training step."""
        if self._has_work_before_step:
            self._before_forward_of_step()
        inputs = self._stage_context.uneven_inputs
        if inputs is None or not inputs.is_needed:
            return super().training_step(*args, **kwargs)
        with inputs.around_training_step():
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one validation step, or stops before it if the ranks have agreed to stop there."""
        self._before_evaluation_step()
        return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one test step, or stops before it if the ranks have agreed to stop there."""
        self._before_evaluation_step()
        return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one predict step, or stops before it if the ranks have agreed to stop there."""
        self._before_evaluation_step()
        return super().predict_step(*args, **kwargs)

    # --- collectives ---

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over ranks in one round trip, see :meth:`.Collectives.reduce`.

        In a training step, ranks that have run out of batches do not contribute (``uneven_inputs="join"``).

        Args:
            tensor: Tensor of any shape and dtype, which are equal on all ranks. Other objects are returned unchanged.
            group: Group of ranks; all ranks if None.
            reduce_op: "mean" or "avg", "sum", "min", "max", "product", or a ``torch.distributed.ReduceOp``.

        Returns:
            The reduced tensor. The input may have been overwritten with it.

        Raises:
            ValueError: If ``reduce_op`` is unknown.
        """
        inputs = self._stage_context.uneven_inputs
        if (
            inputs is not None
            and self._stage_context.local_collectives is None
            and inputs.handles_reduce(tensor, group)
        ):
            return inputs.reduce(tensor, self.collectives.normalize_op(reduce_op))
        return self._active_collectives.reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gathers one tensor per rank into a tensor of shape ``(world_size, ...)``.

        Args:
            tensor: Tensor of shape ``(...)``, equal on all ranks.
            group: Group of ranks; all ranks if None.
            sync_grads: Whether gradients flow back through the result to every rank's input.
        """
        return self._active_collectives.all_gather(tensor, group, sync_grads)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        """Returns the picklable object of rank ``src`` on every rank; small objects take one round trip.

        Raises:
            ValueError: If there is no rank ``src``.
            RuntimeError: On every rank, if the object cannot be pickled.
        """
        return self._active_collectives.broadcast(obj, src)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits until all ranks have called it.

        Args:
            *args: Name of the barrier, for the error if it fails; further arguments are ignored.
            **kwargs: ``name``, an alternative to the first argument; others are ignored.
        """
        self._active_collectives.barrier(barrier_name(*args, **kwargs))

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns whether the decision is True on all ranks, or with ``all=False`` on any rank.

        It uses ``reduce`` if a subclass overrides that and not ``collectives``, as in Lightning's base class.
        """
        own = type(self)
        overrides_reduce_only = (
            own.reduce is not ParallelStrategy.reduce and own.collectives is ParallelStrategy.collectives
        )
        if overrides_reduce_only and self._stage_context.local_collectives is None:
            return bool(super().reduce_boolean_decision(decision, all))
        return self._active_collectives.reduce_boolean_decision(decision, all)

    # --- checkpoints ---

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the module's state.

        Raises:
            RankFailedError: If ranks are known to have exchanged gradients of different batches.
        """
        self._check_exchanges()
        return super().lightning_module_state_dict()

    # --- exception, teardown ---

    def request_interrupt(self) -> None:
        """Requests that all ranks stop before the same step, as after Ctrl-C; for a worker's signal handler.

        Raises:
            KeyboardInterrupt: If no stage is running.
        """
        self._stage_context.request_interrupt()

    def announce_failure(self, exception: BaseException) -> None:
        """Announces to the other ranks that this rank has failed. Called before any ``on_exception`` hook.

        Until the next stage, the collectives of this rank are local: no other rank takes part, and a callback that
        saves a checkpoint would wait in a barrier indefinitely. An agreed SIGTERM is not a failure, and neither is the
        exception with which the Tuner ends a trial.
        """
        if not isinstance(exception, (SIGTERMException, trainer_stages.TunerExitException)):
            self._fail(exception)

    def explain_exception(self, exception: BaseException) -> BaseException:
        """Returns the exception to show: the given one, or the failure of another rank that made a collective raise."""
        return self._stage_context.explain_exception(exception)

    def reconciliate_processes(self, trace: str) -> None:
        """Terminates the other ranks of this host after this rank has failed, so that no rank waits for it.

        Ranks may exit by themselves within a few seconds; the rest are killed and ``trace`` is shown. Without other
        ranks, it is a no-op.

        Args:
            trace: Traceback of this rank's failure, as returned by ``traceback.format_exc()``.
        """
        if self._stage_context.failure_monitor is not None:
            self._stage_context.failure_monitor.fail_and_kill_local_peers(trace)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Terminates the other ranks if this rank has failed. Ctrl-C and an agreed SIGTERM are not failures."""
        if self._stage_context.failure_monitor is not None and not isinstance(exception, _NO_FAILURES):
            self.reconciliate_processes(texts_of_exception(exception)[1])

    @override
    def teardown(self) -> None:
        """Moves the model to the CPU and frees the resources of the strategy. A second call is a no-op."""
        self._stage_context.leave(is_over=self._ends_with_teardown)
        self._stage_context.release_sigterm()
        if self.cluster_environment is not None:
            tear_down(self.cluster_environment)
        user_modules.move_optimizers(self.optimizers, torch.device("cpu"))
        if self.lightning_module is not None:
            self.lightning_module.cpu()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def end_stage(self) -> None:
        """Ends the stage in a worker, after :meth:`teardown` and the hooks that follow it."""
        if self._stage_context.failure_monitor is not None:
            self._stage_context.failure_monitor.finish_stage()

    @property
    def _parameter_tracker(self) -> ParameterTracker | None:
        """Part that tracks the parameters whose gradients are exchanged; None if nothing is exchanged."""
        return None

    # --- stage context ---

    @property
    def _ends_with_teardown(self) -> bool:
        """Whether the stage of this process ends with the teardown; in a worker it ends with :meth:`end_stage`."""
        return True

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
        self._stage_context.mark_failed(exception, self.global_rank, self.world_size)

    def _enter_world(
        self,
        join: Callable[[], Store | None],
        leave: Callable[[], None] | None,
        abort: Callable[[Sequence[Peer]], None],
        progress: CollectiveProgress,
    ) -> None:
        """Joins the other ranks for a stage. Collective: all ranks call it.

        Args:
            join: Callable that joins the group of all ranks unless this process has joined it, and returns the store of
                the ranks, or None for a single rank.
            leave: Callable that leaves the group of an earlier stage, which may be broken; None without such a group.
            abort: Callable that makes this rank's pending collectives with the given peers raise, if the backend can.
            progress: Progress of this rank's collectives.
        """
        store = join()
        self._stage_context = StageContext(
            self._engine, self.global_rank, self.world_size, store, previous=self._stage_context
        )
        if store is not None:
            self._start_failure_monitor(abort, progress)
        if leave is not None and not self._is_group_intact():
            leave()
            self._enter_world(join, None, abort, progress)

    def _is_group_intact(self) -> bool:
        """Returns whether ranks can use the group of an earlier stage. Collective: all ranks call it, in a stage.

        A failure that ends a stage breaks the group, and the script may catch the exception on all ranks.

        Raises:
            Exception: If the collective fails because another rank has failed in this stage.
        """
        try:
            self.collectives.reduce_boolean_decision(True)
        except Exception as exception:
            monitor = self._stage_context.failure_monitor
            if not is_collective_error(exception) or (
                monitor is not None and monitor.wait_for_failure(REMOTE_REASON_TIMEOUT_S) is not None
            ):
                raise
            return False
        return True

    def _start_failure_monitor(self, abort: Callable[[Sequence[Peer]], None], progress: CollectiveProgress) -> None:
        """Makes all ranks exit when one fails or does not start. Collective: all ranks call it on entering a stage."""
        self._stage_context.start_failure_monitor(abort, progress, self._hang_timeout_s, get_exit_code)
        install_excepthook(announce_uncaught)

    def _start_stop_agreement(self, trainer: "pl.Trainer", *, is_requested: bool) -> None:
        """Makes a SIGTERM on any rank stop all ranks before the same step. Collective: all ranks call it."""
        if self._stage_context.failure_monitor is not None:
            self._stage_context.failure_monitor.set_step_source(
                partial(describe_step, trainer), trainer.default_root_dir
            )
        confirm = trainer_signals.intercept_sigterm(trainer, self._on_sigterm, self._before_train_step)
        requeue = trainer_signals.intercept_requeueing(trainer, lambda: self._stage_context.request_requeue())
        release = partial(trainer_signals.release_sigterm, trainer)
        self._stage_context.start_stop_agreement(confirm, release, requeue, is_requested=is_requested)

    def _evaluate_together(self, trainer: "pl.Trainer") -> None:
        """Makes ranks without batches run the hooks of an evaluation. Collective: all ranks call it."""
        if self._stage_context.size == 1:
            return
        stack = self._stage_context.evaluation = ExitStack()
        stack.callback(trainer_data.evaluate_without_data(trainer, self._decide_any))
        if trainer.state.fn == TrainerFn.PREDICTING:
            stack.callback(trainer_data.predict_with_few_samples(trainer))

    def _start_uneven_inputs(self, trainer: "pl.Trainer", mode: UnevenInputs, device: torch.device) -> None:
        """Starts the handling of uneven inputs in ``fit``. Collective: all ranks call it.

        Args:
            trainer: The Trainer.
            mode: Reaction to uneven inputs.
            device: Device of the small tensors that ranks exchange for it.
        """
        context = self._stage_context
        if context.size > 1:
            ranks = context.rank, context.size
            context.uneven_inputs = UnevenInputsController(
                mode, trainer, context.collectives, context.gradient_exchange, *ranks, device
            )

    def _compare_exchanges(self, trainer: "pl.Trainer", *, in_exchange: bool) -> None:
        """Compares the batches of which ranks exchange gradients, in worlds that do not change. Collective.

        Args:
            trainer: The Trainer.
            in_exchange: Whether the engine compares them in the exchange; otherwise the failure monitors do afterwards.
        """
        context = self._stage_context
        if context.failure_monitor is None or context.evaluation is None:
            return
        context.batch_progress = trainer_stages.batch_progress_of(trainer)
        if not in_exchange:
            context.exchange_log = context.failure_monitor.start_exchange_log()
            context.evaluation.callback(trainer_stages.before_train_end(trainer, self._check_exchanges))

    def _check_exchanges(self) -> None:
        context = self._stage_context
        is_failed = context.local_collectives is not None
        if context.exchange_log is not None and context.failure_monitor is not None and not is_failed:
            check_exchanges(context.exchange_log, context.failure_monitor)

    def _on_sigterm(self) -> None:
        self._stage_context.request_stop()

    def _before_train_step(self) -> None:
        if self._stage_context.has_decision_before_train_step():
            self._stage_context.apply_decision(self._decide_any)
        if self._stage_context.must_requeue:
            assert self.lightning_module is not None
            if not trainer_signals.is_accumulating(self.lightning_module.trainer):
                self._stage_context.requeue()

    def _before_evaluation_step(self) -> None:
        if self._stage_context.has_decision_before_evaluation_step():
            self._stage_context.apply_decision(self._decide_any)
        if self._stage_context.must_requeue:  # the accumulation window may end after SLURM's time limit
            self._stage_context.requeue()

    def _decide_any(self, decision: bool) -> bool:
        return self.reduce_boolean_decision(decision, all=False)

    @override
    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        # The stage context belongs to this process: a worker creates another one.
        state.pop("_stage_context")
        return {**state, "was_asked_to_stop": self._stage_context.was_stop_requested, "_observer": None}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        was_asked_to_stop = state.pop("was_asked_to_stop", False)
        super().__setstate__(state)
        self._stage_context = StageContext(self._engine)
        self._stage_context.was_stop_requested = was_asked_to_stop


def describe_step(trainer: "pl.Trainer") -> str:
    """Returns the stage and step of a Trainer, for messages. Other threads than the training thread may call it."""
    stage = trainer.state.stage
    name = "the setup of the stage" if stage is None else stage.value.replace("_", " ")
    return f"{name}, epoch {trainer.current_epoch}, step {trainer.global_step}"
