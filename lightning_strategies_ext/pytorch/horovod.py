"""HorovodStrategy: data parallelism over Horovod, under ``horovodrun``, ``mpirun``, or started by ``fit`` itself.

Names ``horovod_ext``, and ``horovod``, which Lightning 2 dropped. Horovod is another engine than torch.distributed: the
Trainer's collectives, the sampler's ranks, the agreement on a SIGTERM, the end of failing ranks and the synchronisation
of metrics all go through it. No collective waits for a ``join``: all ranks take part in all of them.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.distributed import Store
from torch.optim import Optimizer
from typing_extensions import override

from lightning_strategies_ext._lightning import launching, strategy_parts, trainer_logging, user_modules
from lightning_strategies_ext.arguments import DEFAULT_HANG_TIMEOUT, check_not_interactive, name_of_barrier
from lightning_strategies_ext.checks import check_flag
from lightning_strategies_ext.collectives import Collectives
from lightning_strategies_ext.collectives.same_model import check_is_same
from lightning_strategies_ext.elastic.options import check_is_not_elastic
from lightning_strategies_ext.elastic.policy import scale_learning_rates
from lightning_strategies_ext.failure.rank_status import CollectiveProgress
from lightning_strategies_ext.horovod import environment, runtime
from lightning_strategies_ext.horovod.batch_norm import SynchronizedBatchNorm
from lightning_strategies_ext.horovod.exchange import (
    Compression,
    DeltaExchange,
    ExchangeOptions,
    GradientExchange,
    Op,
    check_exchanges_nothing,
)
from lightning_strategies_ext.horovod.launch import Launch
from lightning_strategies_ext.horovod.launcher import HorovodLauncher
from lightning_strategies_ext.horovod.metrics import MetricSync
from lightning_strategies_ext.launch.script_launcher import environment_of_child
from lightning_strategies_ext.monitoring.observer import ExchangeObserver
from lightning_strategies_ext.pytorch.batch_norm import check_can_be_synchronized
from lightning_strategies_ext.pytorch.parallel import ParallelStrategy
from lightning_strategies_ext.torch_distributed.wrapping import check_has_trainable_parameters
from lightning_strategies_ext.uneven.control import UnevenInputs, check_way


@strategy_parts.refuse_compiled_module(
    "Compile its submodules in `configure_model`, or use `strategy='ddp_ext'`, which trains compiled modules."
)
class HorovodStrategy(ParallelStrategy):
    """Multi-process data parallelism over Horovod.

    Args:
        accelerator: As chosen by ``Trainer(accelerator=...)`` if None.
        parallel_devices: Devices of this host, one per process. As chosen by ``Trainer(devices=...)`` if None.
        checkpoint_io: How checkpoints are written.
        precision_plugin: As chosen by ``Trainer(precision=...)`` if None.
        compression: "none", or "fp16": gradients travel in half the bytes.
        op: "average" or "sum" of the gradients, or "adasum" of what each rank's optimizer made of its own.
        num_groups: Into how many groups parameters are put, each exchanged as a whole; 0 exchanges each by itself;
            None puts small neighbours together, up to 1 MiB.
        sparse_as_dense: Whether sparse gradients are made dense before they are exchanged.
        gradient_predivide_factor: Gradients are divided by it before they are summed, and by what is left of the
            number of ranks after.
        scale_learning_rate: Whether learning rates are multiplied by the number of ranks, as Lightning 1 did.
        process_set: The ranks that exchange gradients; None for all.
        uneven_inputs: What happens when ranks have different numbers of training batches: "error" on all ranks, "stop"
            with the first that runs out, or "join": the others train to their end, see :mod:`.uneven.control`.
        elastic: Whether ranks may die, leave and join during ``fit``: True makes a :class:`.HorovodElasticStrategy`.
        commit_every_n_steps: See there.
        hang_timeout: How long ranks wait in a collective for an inactive rank, in seconds or a ``timedelta``. Then all
            ranks exit with an error that has the stacks of all. None lets ranks wait indefinitely. Elastic ranks
            kill the inactive rank instead.
        broadcast_buffers: Whether buffers are those of rank 0 in every training step, as DDP makes them by default.
            Otherwise each rank trains with its own, and gets those of rank 0 before each evaluation and checkpoint.

    Raises:
        RuntimeError: If Horovod is not installed, or not for this torch; the message names the command.
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value or a combination cannot work.

    Example::

        # horovodrun -np 2 python train.py, or mpirun -np 2 python train.py, or with devices=2: python train.py
        trainer = Trainer(strategy="horovod_ext")
    """

    strategy_name = "horovod_ext"
    elastic_class = "horovod_elastic:HorovodElasticStrategy"

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        compression: Compression = "none",
        op: Op = "average",
        num_groups: int | None = None,
        sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0,
        scale_learning_rate: bool = False,
        process_set: Any = None,
        uneven_inputs: UnevenInputs = "error",
        elastic: bool = False,
        commit_every_n_steps: int | None = None,
        hang_timeout: float | timedelta | None = DEFAULT_HANG_TIMEOUT,
        broadcast_buffers: bool = False,
    ) -> None:
        self._options = ExchangeOptions(
            compression, op, num_groups, sparse_as_dense, gradient_predivide_factor, process_set
        )
        self._check_elastic(elastic, commit_every_n_steps)
        check_flag("scale_learning_rate", scale_learning_rate)
        check_flag("broadcast_buffers", broadcast_buffers)
        check_way(uneven_inputs)
        if uneven_inputs == "join" and (op == "adasum" or process_set is not None):
            reason = "`op='adasum'`" if op == "adasum" else "a `process_set`"
            raise ValueError(
                f"`uneven_inputs='join'` averages gradients over the ranks that have data, which {reason} does not."
                " Leave one of them out, or use `uneven_inputs='stop'`."
            )
        runtime.check_installed()
        cluster_environment = environment_of_child(None)
        launch = Launch.find()
        if launch is not None:
            cluster_environment = environment.HorovodEnvironment(launch)
            launching.say_rank(launch.rank)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            hang_timeout=hang_timeout,
        )
        self._scale_learning_rate = scale_learning_rate
        self._uneven_inputs = uneven_inputs
        self._has_work_before_step = broadcast_buffers
        self._are_buffers_stale = True
        self._deltas: DeltaExchange | None = None
        self._metrics: MetricSync | None = None
        self._batch_norm: SynchronizedBatchNorm | None = None

    def _check_elastic(self, elastic: Any, commit_every_n_steps: Any) -> None:
        check_is_not_elastic(type(self), elastic, "HorovodStrategy", commit_every_n_steps=commit_every_n_steps)

    @property
    def is_distributed(self) -> bool:
        """True: each rank has a part of the data."""
        return True

    @property
    def rank(self) -> int:
        """Global rank, as Horovod calls it."""
        return self.global_rank

    @property
    def num_processes(self) -> int:
        """Ranks on this host."""
        return environment.num_processes(self.parallel_devices or [], self.cluster_environment)

    @property
    def num_nodes(self) -> int:
        """Hosts."""
        if isinstance(self.cluster_environment, environment.HorovodEnvironment):
            launch = self.cluster_environment.launch
            return max(1, launch.size // launch.local_size)
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        environment.check_num_nodes(num_nodes, self.cluster_environment)

    @property
    @override
    def root_device(self) -> torch.device:
        """The device of this rank."""
        if not self.parallel_devices:
            raise RuntimeError("The devices are not known yet: pass the strategy to a Trainer first.")
        return environment.device_of_rank(self.parallel_devices, self.local_rank)

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        """False: the Trainer counts, and gradients add up locally until it says so."""
        return False

    @property
    @override
    def cheaper_compressions(self) -> tuple[str, ...]:
        """Values of ``compression`` with which less would be exchanged."""
        return ("fp16",) if self._options.compression == "none" else ()

    @override
    def observe_exchanges(self, observer: ExchangeObserver | None) -> None:
        """Lets an observer hear of each exchange; None ends it."""
        super().observe_exchanges(observer)
        for exchange in (self._world.gradient_exchange, self._deltas):
            if isinstance(exchange, (GradientExchange, DeltaExchange)):
                exchange.observer = observer

    # --- environment, launch ---

    @override
    def _configure_launcher(self) -> None:
        # Called by the Trainer when devices and environment are known, in one process still.
        assert self.cluster_environment is not None
        check_not_interactive(f"`strategy={self.strategy_name!r}`")
        environment.configure(self.parallel_devices or [], self.cluster_environment)
        self._launcher = HorovodLauncher(self)

    def check_before_launch(self, trainer: "pl.Trainer | None") -> None:
        """Refuses, before processes start, a ``fit`` that cannot work.

        Raises:
            ValueError: If layers are to be synchronised other than batch normalisation, or this between CPUs, or if
                there is a callback that needs one process.
        """
        self._check_callbacks(trainer)
        layer_sync = strategy_parts.layer_sync(self)
        if layer_sync is not None and not isinstance(layer_sync, TorchSyncBatchNorm):
            raise ValueError(
                f"`plugins=[{type(layer_sync).__name__}(...)]` syncs layers over torch.distributed, which is not there"
                " under Horovod. For batch normalisation, `Trainer(sync_batchnorm=True)` does it on GPUs."
            )
        module = self.lightning_module
        if (
            layer_sync is not None
            and module is not None
            and trainer is not None
            and trainer.state.fn == TrainerFn.FITTING
        ):
            check_can_be_synchronized(module, self.root_device)

    @override
    def setup_environment(self) -> None:
        """Prepares the device and joins the other ranks; returns when all have.

        Raises:
            RuntimeError: If this process has joined other ranks before.
        """
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        reset_seed()
        self._join()

    def _join(self) -> None:
        leave = runtime.shut_down if runtime.has_others() else None
        self._enter_world(self._join_group, leave, runtime.let_go, CollectiveProgress())

    def _join_group(self) -> Store | None:
        assert self.cluster_environment is not None
        launch = environment.launch_of(self.cluster_environment, self.num_processes)
        runtime.start(launch, self.root_device, self._options.process_set)
        launching.say_rank(self.global_rank)
        return runtime.store() if self.world_size > 1 else None

    # --- setup ---

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        """Places the model on the device with rank 0's weights, and creates the optimizers.

        Raises:
            DifferentModelsError: If another rank has another model.
            RuntimeError: If ``op="adasum"`` cannot be had from this Horovod.
            TypeError: If ``horovod.torch.DistributedOptimizer`` has wrapped an optimizer.
            ValueError: If a model to be trained has no parameter that needs a gradient.
        """
        assert self.accelerator is not None
        assert self.lightning_module is not None
        module = self.lightning_module
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        if is_fitting and strategy_parts.layer_sync(self) is not None:
            check_can_be_synchronized(module, self.root_device)
            self._batch_norm = SynchronizedBatchNorm(module)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        check_is_same(self.collectives, module, self.root_device, is_trained=is_fitting)
        self.collectives.broadcast_module(module)
        if is_fitting:
            check_has_trainable_parameters(module)
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                check_exchanges_nothing(optimizer, type(self).__name__)
            if self._scale_learning_rate:
                scale_learning_rates(trainer, self.world_size)
        self.setup_precision_plugin()
        if is_fitting:
            user_modules.move_optimizers(self.optimizers, self.root_device)
        self._metrics = MetricSync(lambda: self.collectives)
        trainer_logging.skip_needless_moves(trainer)
        self._begin_stage(trainer)

    def _begin_stage(self, trainer: "pl.Trainer") -> None:
        self._begin_exchange(trainer)
        must_stop = self.reduce_boolean_decision(self._world.was_stop_requested, all=False)
        self._agree_on_sigterm(trainer, is_requested=must_stop)
        if self._world.failure_monitor is not None:
            self._world.handle_stage_exits(is_job=True)
        self._evaluate_together(trainer)

    @override
    def model_to_device(self) -> None:
        """Moves the model to the device of this rank."""
        assert self.model is not None
        self.model.to(self.root_device)

    # --- step ---

    @override
    def _before_training_step(self) -> None:
        exchange = self._world.gradient_exchange
        # As DDP, which skips it within a window of accumulation.
        if self._are_buffers_stale:
            self._share_buffers()
        self._are_buffers_stale = exchange is None or not exchange.is_held_back

    def _share_buffers(self, src: int | None = None, *, is_known_to_match: bool = True) -> None:
        """Gives all ranks the buffers of one, default rank 0. Collective."""
        collectives = self.collectives
        if self._world.local_collectives is None and self.lightning_module is not None:
            collectives.broadcast_buffers(  # type: ignore[attr-defined]
                self.lightning_module, self._options.process_set, src, is_known_to_match=is_known_to_match
            )

    @override
    def on_validation_start(self) -> None:
        """Gives all ranks the buffers of rank 0, so that they evaluate one model."""
        super().on_validation_start()
        self._share_buffers(is_known_to_match=False)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Keeps the backward passes inside it from exchanging gradients; they add up locally instead."""
        exchange = self._world.gradient_exchange
        assert exchange is None or isinstance(exchange, GradientExchange)
        with nullcontext() if exchange is None else exchange.held_back():
            yield

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        """Prepares the exchange of gradients."""
        exchange = self._world.gradient_exchange
        if exchange is not None:
            assert isinstance(exchange, GradientExchange)
            exchange.begin(closure_loss)
        if self._world.uneven_inputs is not None:
            self._world.uneven_inputs.before_backward()

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        """Waits until the gradients are those of all ranks, where the backward pass itself has not done so.

        Raises:
            UnevenInputsError: If ranks turn out to have different numbers of batches, with ``uneven_inputs="error"``.
        """
        if self._world.uneven_inputs is not None:
            self._world.uneven_inputs.after_backward()
        elif self._world.gradient_exchange is not None:
            self._world.gradient_exchange.finish()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any | None = None,
        **kwargs: Any,
    ) -> Any:
        """Steps the optimizer; with Adasum, combines the steps of all ranks.

        Returns:
            What the optimizer's ``step`` returned.
        """
        if self._deltas is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        with self._deltas.around_step(parameters):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    # --- collectives ---

    @override
    def all_gather(self, result: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gathers one tensor per rank, whose first dimensions may differ; see :meth:`.HorovodCollectives.all_gather`.

        Args:
            result: The tensor; named as in Lightning 1, and why this method is here.
            group: Process set, default all ranks.
            sync_grads: Whether gradients flow back through the result, to every rank's input.
        """
        return super().all_gather(result, group, sync_grads)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Returns when every rank has called it; in ``Trainer.save_checkpoint``, gives all ranks the buffers of rank 0.

        Args:
            *args: As those of :meth:`.ParallelStrategy.barrier`.
            **kwargs: The same.
        """
        super().barrier(*args, **kwargs)
        # Here, and not in `save_checkpoint`, which one rank may call alone.
        if name_of_barrier(*args, **kwargs) == "Trainer.save_checkpoint":
            self._share_buffers(is_known_to_match=False)

    # --- teardown ---

    @override
    def teardown(self) -> None:
        """Moves the model off the device and frees what the strategy holds. A second call does no harm.

        Horovod stays initialised for the next stage, and is shut down when the interpreter ends.
        """
        self._world.leave()
        if self._metrics is not None:
            self._metrics.close()
        if self._batch_norm is not None:
            self._batch_norm.revert()
        self._deltas = self._metrics = self._batch_norm = None
        super().teardown()

    @override
    def _engine(self) -> Collectives:
        from lightning_strategies_ext.horovod.collectives import HorovodCollectives

        return HorovodCollectives(lambda: self.root_device)

    def _begin_exchange(self, trainer: "pl.Trainer") -> None:
        assert self.lightning_module is not None
        world = self._world
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._are_buffers_stale = True
        if self._options.op == "adasum":
            self._deltas = DeltaExchange(self.lightning_module, self._options)
        else:
            exchange = GradientExchange(self.lightning_module, self._options)
            exchange.broadcast_buffers = self._share_buffers if self._has_work_before_step else None
            world.gradient_exchange = exchange
        self._keep_in_step(trainer, self._uneven_inputs, torch.device("cpu"))

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_deltas": None, "_metrics": None, "_batch_norm": None}


def legacy_horovod(**kwargs: Any) -> HorovodStrategy:
    """What ``Trainer(strategy="horovod")`` gives where Lightning has no such name."""
    strategy = HorovodStrategy(**kwargs)  # which knows the rank
    rank_zero_info(
        "`strategy='horovod'` is served by lightning-strategies-ext; it is the same as `strategy='horovod_ext'`."
    )
    return strategy
