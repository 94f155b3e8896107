"""ParallelStrategy: what every multi-process strategy of the Trainer does the same way.

It promises ranks, collectives, the handling of a SIGTERM and of a failing rank. How processes start and how gradients
are exchanged is left to the strategies; what carries the collectives is an engine (``collectives``), by default
torch.distributed, and nothing else here knows which.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import BatchSizeFinder
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
    check_devices,
    check_hang_timeout,
    check_no_old_names,
    check_plugins,
    name_of_barrier,
)
from lightning_strategies_ext.checkpoints import SavesWholeCheckpoints
from lightning_strategies_ext.collectives import Collectives
from lightning_strategies_ext.collectives.sampler_order import SharedOrder
from lightning_strategies_ext.failure.failure_monitor import announce_uncaught
from lightning_strategies_ext.failure.failure_report import is_collective_error, texts_of_exception
from lightning_strategies_ext.failure.process_exit import install_excepthook
from lightning_strategies_ext.failure.rank_status import CollectiveProgress
from lightning_strategies_ext.launch.script_launcher import environment_of_child, get_exit_code, tear_down
from lightning_strategies_ext.monitoring.observer import ExchangeObserver
from lightning_strategies_ext.registry import Registered
from lightning_strategies_ext.stage_context import REMOTE_REASON_TIMEOUT_S, StageContext
from lightning_strategies_ext.torch_distributed.collectives import TorchCollectives
from lightning_strategies_ext.uneven.control import UnevenInputs, UnevenInputsControl

T = TypeVar("T")

#: By these, all ranks end, and none of them has failed.
_NO_FAILURES = (SIGTERMException, KeyboardInterrupt, trainer_stages.TunerExitException)


class ParallelStrategy(Registered, SavesWholeCheckpoints, LightningParallelStrategy, ABC):
    """Base of the Trainer's strategies with several processes.

    A class that works on Lightning's ``ParallelStrategy`` works on this one. Of what is abstract there, ``root_device``
    and ``model_to_device`` are left to it; the collectives it may leave to torch.distributed or bring itself.

    Args:
        accelerator: As chosen by ``Trainer(accelerator=...)`` if None.
        parallel_devices: Devices of this host, one per process. As chosen by ``Trainer(devices=...)`` if None.
        cluster_environment: Where ranks and addresses come from; detected if None.
        checkpoint_io: How checkpoints are written.
        precision_plugin: As chosen by ``Trainer(precision=...)`` if None.
        hang_timeout: How long ranks wait in a collective for an inactive rank, in seconds or a ``timedelta``. Then all
            ranks exit with an error that has the stacks of all. None leaves it to the timeout of the backend.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If ``parallel_devices`` mixes device types, repeats a GPU or names one that is not there.

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
        self._world = StageContext(self._engine)
        self._observer: ExchangeObserver | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """With ``elastic=True``, an object of the subclass that is elastic, if a class has one.

        It stands here since LightningCLI takes a class's own ``__new__`` for what says its arguments.
        """
        check_no_old_names(cls, kwargs)
        target = vars(cls).get("elastic_class")
        if target is not None and kwargs.get("elastic") is True:
            module, _, name = target.partition(":")
            cls = getattr(import_module(f"{cls.__module__.rpartition('.')[0]}.{module}"), name)  # beside it
        return super().__new__(cls)

    @property
    @abstractmethod
    @override
    def root_device(self) -> torch.device:
        """The device of this rank."""

    @property
    def collectives(self) -> Collectives:
        """What carries this strategy's collectives: torch.distributed's default group, once this process is in one.

        In a process that is in none, each returns its input. A rank that has failed answers alone, see
        :class:`.LocalCollectives`.
        """
        return self._world.collectives

    @property
    @override
    def is_global_zero(self) -> bool:
        """Whether this is the process with rank zero among all hosts."""
        return bool(self.global_rank == 0)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which samples are this rank's; hosts may have different numbers of ranks, and ranks may change."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """Replaces the order of a user's random sampler by that of rank 0, see :class:`.SharedOrder`."""
        if self.lightning_module is None:
            return dataloader  # no stage runs
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
        """Whether this rank has run out of batches and goes through the last one again, which counts for nothing."""
        inputs = self._world.uneven_inputs
        return inputs is not None and inputs.is_shadowing

    # --- what a monitor asks ---

    def part_of_store(self, purpose: str, number: int) -> Store | None:
        """A part of the key-value store that all ranks share, see :meth:`.StageContext.prefix_store`."""
        return self._world.prefix_store(purpose, number)

    @property
    def num_bytes_exchanged(self) -> int | None:
        """What this rank has handed to exchanges so far, in bytes, where what is exchanged is not the gradients."""
        return None

    @property
    def cheaper_compressions(self) -> tuple[str, ...]:
        """Values of the argument ``compression``, if there is one, with which less would be exchanged."""
        return ()

    def observe_exchanges(self, observer: ExchangeObserver | None) -> None:
        """Lets an observer hear of exchanges that the strategy itself carries out; None ends it."""
        self._observer = observer

    # --- steps ---

    #: Whether :meth:`_before_training_step` is called.
    _has_work_before_step = False

    def _before_training_step(self) -> None:
        """Called before each training step, where an engine has work there."""

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one training step."""
        if self._has_work_before_step:
            self._before_training_step()
        inputs = self._world.uneven_inputs
        if inputs is None or not inputs.is_needed:
            return super().training_step(*args, **kwargs)
        with inputs.around_training_step():
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one validation step; before it all ranks stop if they agreed to."""
        self._before_evaluation_step()
        return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one test step; before it all ranks stop if they agreed to."""
        self._before_evaluation_step()
        return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one predict step; before it all ranks stop if they agreed to."""
        self._before_evaluation_step()
        return super().predict_step(*args, **kwargs)

    # --- collectives ---

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over ranks in one round trip, see :meth:`.Collectives.reduce`.

        In a training step, ranks that have run out of batches count for nothing (``uneven_inputs="join"``).

        Args:
            tensor: Any shape and dtype, the same on all ranks; what is not a tensor is returned unchanged.
            group: Ranks that take part, default all.
            reduce_op: "mean" or "avg", "sum", "min", "max", "product", or a ``torch.distributed.ReduceOp``.

        Returns:
            The reduced value. The input may have been overwritten with it.

        Raises:
            ValueError: If ``reduce_op`` is unknown.
        """
        inputs = self._world.uneven_inputs
        if inputs is not None and self._world.local_collectives is None and inputs.does_reduce(tensor, group):
            return inputs.reduce(tensor, self.collectives.op_named(reduce_op))
        return self._answering.reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gathers one tensor per rank into a tensor of shape ``(world_size, ...)``.

        Args:
            tensor: Shape ``(...)``, the same on all ranks.
            group: Ranks that take part, default all.
            sync_grads: Whether gradients flow back through the result, to every rank's input.
        """
        return self._answering.all_gather(tensor, group, sync_grads)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        """Gives every rank the object of rank ``src``, any picklable one; small ones in one round trip.

        Raises:
            ValueError: If there is no such rank.
            RuntimeError: On every rank, if the object cannot be pickled.
        """
        return self._answering.broadcast(obj, src)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Returns when every rank has called it.

        Args:
            *args: The first is a name, shown in the error if it fails. There is no use for others.
            **kwargs: ``name`` is the same.
        """
        self._answering.barrier(name_of_barrier(*args, **kwargs))

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agrees on a decision: whether all ranks say yes, or with ``all=False`` whether any does.

        A subclass that brings ``reduce``, and no ``collectives``, decides by that, as on Lightning's base.
        """
        own = type(self)
        brings_reduce = own.reduce is not ParallelStrategy.reduce and own.collectives is ParallelStrategy.collectives
        if brings_reduce and self._world.local_collectives is None:
            return bool(super().reduce_boolean_decision(decision, all))
        return self._answering.reduce_boolean_decision(decision, all)

    # --- exception, teardown ---

    @staticmethod
    def _check_callbacks(trainer: "pl.Trainer | None") -> None:
        """Refuses, before processes start, a callback that Lightning refuses in each of several processes."""
        callbacks = getattr(trainer, "callbacks", [])
        if any(isinstance(callback, BatchSizeFinder) for callback in callbacks):
            raise MisconfigurationException(  # as Lightning raises
                "`BatchSizeFinder` (`Tuner.scale_batch_size`) tries batch sizes in one process, and this strategy has"
                " several. Find the size with `Trainer(strategy='auto', devices=1)`, or for all devices with"
                " `strategy='dp_ext'`, and train with the size that was found and without the callback."
            )

    def request_interrupt(self) -> None:
        """Lets all ranks stop before the same step, as after Ctrl-C; for the signal handler of a worker process.

        Raises:
            KeyboardInterrupt: If no stage runs that could agree on a step.
        """
        self._world.request_interrupt()

    def announce_failure(self, exception: BaseException) -> None:
        """Says to the other ranks that this one has failed; called before any ``on_exception`` hook.

        From here to the next stage the collectives of this rank return its own values: no other rank takes part, and a
        callback that saves a checkpoint would wait in a barrier for ever. An agreed SIGTERM is no failure, and the
        Tuner's way out of a trial is none either.
        """
        if not isinstance(exception, (SIGTERMException, trainer_stages.TunerExitException)):
            self._fail(exception)

    def explain_exception(self, exception: BaseException) -> BaseException:
        """The exception that the user should see: the given one, or one that it came from by way of a collective."""
        return self._world.explain_exception(exception)

    def reconciliate_processes(self, trace: str) -> None:
        """Ends the other ranks of this host after this one failed, so that none waits for it.

        Ranks that end by themselves within a few seconds are left to; the others are killed and ``trace`` is shown.
        Does nothing where there are no other ranks.

        Args:
            trace: The failure of this rank, as ``traceback.format_exc()`` gives it.
        """
        if self._world.failure_monitor is not None:
            self._world.failure_monitor.fail_and_kill_local_peers(trace)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Ends the other ranks if this one failed. Ctrl-C and an agreed SIGTERM end all ranks and are no failures."""
        if self._world.failure_monitor is not None and not isinstance(exception, _NO_FAILURES):
            self.reconciliate_processes(texts_of_exception(exception)[1])

    @override
    def teardown(self) -> None:
        """Moves the model off the device and frees what the strategy holds. A second call does no harm."""
        self._world.leave(is_over=self._ends_with_teardown)
        self._world.release_sigterm()
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
        """Called in a worker when all of a stage is over: hooks that come after :meth:`teardown`, too."""
        if self._world.failure_monitor is not None:
            self._world.failure_monitor.finish_stage()

    # --- the world ---

    @property
    def _ends_with_teardown(self) -> bool:
        """Whether nobody waits for what this process does after a stage's teardown, as the main process of a worker."""
        return True

    @property
    def has_joined(self) -> bool:
        """Whether this process has met the other ranks, as far as there are any."""
        return self._world.failure_monitor is not None

    def _engine(self) -> Collectives:
        """The engine's collectives; engines other than torch.distributed override it."""
        return TorchCollectives(lambda: self.root_device)

    @property
    def _answering(self) -> Collectives:
        # A subclass may bring `collectives` of its own, which say nothing of a rank that has failed.
        return self._world.local_collectives or self.collectives

    def _fail(self, exception: BaseException) -> None:
        self._world.mark_failed(exception, self.global_rank, self.world_size)

    def _enter_world(
        self,
        join: Callable[[], Store | None],
        leave: Callable[[], None] | None,
        wake: Callable[[Sequence[Peer]], None],
        progress: CollectiveProgress,
    ) -> None:
        """Joins the other ranks for a stage. Collective: all ranks call it.

        Args:
            join: Joins the group of all ranks unless the process has; returns their store, or None for a single rank.
            leave: Leaves the group of an earlier stage, which may be broken; None if there is none.
            wake: See :class:`.FailureMonitor`.
            progress: Progress of this rank.
        """
        store = join()
        self._world = StageContext(self._engine, self.global_rank, self.world_size, store, previous=self._world)
        if store is not None:
            self._end_together(wake, progress)
        if leave is not None and not self._is_group_intact():
            leave()
            self._enter_world(join, None, wake, progress)

    def _is_group_intact(self) -> bool:
        """Whether ranks can use the group of an earlier stage; called by all ranks together, in a stage.

        A failure that ends a stage breaks the group, and the script may catch the exception on all ranks.

        Raises:
            Exception: That of the collective which fails because another rank has failed in this stage.
        """
        try:
            self.collectives.reduce_boolean_decision(True)
        except Exception as exception:
            watch = self._world.failure_monitor
            if not is_collective_error(exception) or (
                watch is not None and watch.wait_for_failure(REMOTE_REASON_TIMEOUT_S) is not None
            ):
                raise
            return False
        return True

    def _end_together(self, wake: Callable[[Sequence[Peer]], None], progress: CollectiveProgress) -> None:
        """Lets all ranks end when one fails or does not come; called by all ranks together, on entering a stage."""
        self._world.start_failure_monitor(wake, progress, self._hang_timeout_s, get_exit_code)
        install_excepthook(announce_uncaught)

    def _agree_on_sigterm(self, trainer: "pl.Trainer", *, is_requested: bool) -> None:
        """Lets a SIGTERM on any rank stop all before the same step; called by all ranks together."""
        if self._world.failure_monitor is not None:
            self._world.failure_monitor.set_step_source(partial(where_in, trainer), trainer.default_root_dir)
        confirm = trainer_signals.intercept_sigterm(trainer, self._on_sigterm, self._before_train_step)
        requeue = trainer_signals.intercept_requeueing(trainer, lambda: self._world.request_requeue())
        release = partial(trainer_signals.release_sigterm, trainer)
        self._world.start_stop_agreement(confirm, release, requeue, is_requested=is_requested)

    def _evaluate_together(self, trainer: "pl.Trainer") -> None:
        """Lets ranks without batches run the hooks of an evaluation; called by all ranks together."""
        if self._world.size == 1:
            return
        stack = self._world.evaluation = ExitStack()
        stack.callback(trainer_data.evaluate_without_data(trainer, self._decide_any))
        if trainer.state.fn == TrainerFn.PREDICTING:
            stack.callback(trainer_data.predict_with_few_samples(trainer))

    def _keep_in_step(self, trainer: "pl.Trainer", way: UnevenInputs, device: torch.device) -> None:
        """Begins to look after ranks that run out of batches; called by all ranks together, in ``fit``.

        Args:
            trainer: The Trainer.
            way: What happens to them.
            device: Of the few numbers that ranks tell each other.
        """
        world = self._world
        if world.size > 1:
            ranks = world.rank, world.size
            world.uneven_inputs = UnevenInputsControl(
                way, trainer, world.collectives, world.gradient_exchange, *ranks, device
            )

    def _on_sigterm(self) -> None:
        self._world.request_stop()

    def _before_train_step(self) -> None:
        if self._world.has_decision_before_train_step():
            self._world.apply_decision(self._decide_any)
        if self._world.must_requeue:
            assert self.lightning_module is not None
            if not trainer_signals.is_accumulating(self.lightning_module.trainer):
                self._world.requeue()

    def _before_evaluation_step(self) -> None:
        if self._world.has_decision_before_evaluation_step():
            self._world.apply_decision(self._decide_any)
        if self._world.must_requeue:  # a window of accumulation may end after the time that is left
            self._world.requeue()

    def _decide_any(self, decision: bool) -> bool:
        return self.reduce_boolean_decision(decision, all=False)

    @override
    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        # What belongs to this process stays here: a worker has a world of its own.
        state.pop("_world")
        return {**state, "was_asked_to_stop": self._world.was_stop_requested, "_observer": None}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        was_asked_to_stop = state.pop("was_asked_to_stop", False)
        super().__setstate__(state)
        self._world = StageContext(self._engine)
        self._world.was_stop_requested = was_asked_to_stop


def where_in(trainer: "pl.Trainer") -> str:
    """What a Trainer is at, for people; asked beside the thread that trains, which it costs nothing."""
    stage = trainer.state.stage
    name = "the stage's setup" if stage is None else stage.value.replace("_", " ")
    return f"{name}, epoch {trainer.current_epoch}, step {trainer.global_step}"
