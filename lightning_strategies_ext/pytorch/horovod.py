"""HorovodStrategy: data parallelism over Horovod, under ``horovodrun``, ``mpirun``, or started by ``fit`` itself.

Names ``horovod_ext`` and ``horovod``, which Lightning 2 dropped. Horovod replaces torch.distributed.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed import Store
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_strategies_ext import arguments
from lightning_strategies_ext._lightning import launching, strategy_parts, user_modules
from lightning_strategies_ext.checks import ChecksOptions, check_can_skip, check_checks, check_flag
from lightning_strategies_ext.collectives import Collectives
from lightning_strategies_ext.collectives.model_check import share_model
from lightning_strategies_ext.elastic.arguments import check_is_not_elastic
from lightning_strategies_ext.elastic.policy import scale_learning_rates
from lightning_strategies_ext.horovod import environment, runtime
from lightning_strategies_ext.horovod.adasum import AdasumExchange
from lightning_strategies_ext.horovod.batch_norm import SynchronizedBatchNorm
from lightning_strategies_ext.horovod.exchange_options import (
    GradientOp,
    HorovodCompression,
    HorovodExchangeOptions,
    check_exchanges_nothing,
)
from lightning_strategies_ext.horovod.gradient_exchange import HorovodGradientExchange
from lightning_strategies_ext.horovod.launcher import HorovodLauncher
from lightning_strategies_ext.horovod.metrics import MetricSync
from lightning_strategies_ext.horovod.synchronize import HorovodProgress
from lightning_strategies_ext.monitoring.observer import ExchangeObserver
from lightning_strategies_ext.pytorch.agreement import with_reduced_loss
from lightning_strategies_ext.pytorch.checks import check_batch_norm, check_callbacks, check_layer_sync
from lightning_strategies_ext.pytorch.exchange_comparison import compare_exchanges
from lightning_strategies_ext.pytorch.parallel import ParallelStrategy
from lightning_strategies_ext.renamed import rejects_old_names
from lightning_strategies_ext.stage_context import EngineGroup
from lightning_strategies_ext.torch_distributed.wrapping import check_has_trainable_parameters
from lightning_strategies_ext.uneven.control import UnevenInputs, check_mode


@strategy_parts.refuse_compiled_module(
    "Compile its submodules in `configure_model`, or use `strategy='ddp_ext'`, which trains compiled modules."
)
class HorovodStrategy(ParallelStrategy):
    """Multi-process data parallelism over Horovod.

    Args:
        accelerator: Accelerator; from ``Trainer(accelerator=...)`` if None.
        parallel_devices: Devices of this host, one per process; from ``Trainer(devices=...)`` if None.
        checkpoint_io: Plugin that writes and reads checkpoints.
        precision_plugin: Precision plugin; from ``Trainer(precision=...)`` if None.
        compression: "none", or "fp16" to exchange gradients in float16.
        op: Reduction: "average" or "sum" of the gradients, or "adasum" of the ranks' optimizer steps.
        num_groups: Number of groups of parameters; the gradients of a group are exchanged together. 0 exchanges each
            gradient separately. None groups small gradients of adjacent parameters, up to 1 MiB.
        sparse_as_dense: Whether sparse gradients are converted to dense ones before the exchange.
        gradient_predivide_factor: Divisor f of the gradients before they are summed over n ranks; the sum is divided by
            n / f.
        scale_learning_rate: Whether learning rates are multiplied by the number of ranks, as in Lightning 1.
        process_set: Ranks that exchange gradients; all ranks if None.
        uneven_inputs: Reaction to different numbers of training batches. "error" raises on all ranks, "stop" ends the
            epoch with the first rank that runs out, "join" trains on all batches. See :mod:`.uneven.control`.
        elastic: Whether ranks may change during ``fit``: True creates a :class:`.HorovodElasticStrategy`.
        commit_every_n_steps: Argument of :class:`.HorovodElasticStrategy`.
        hang_timeout: Time that ranks wait in a collective for an inactive rank, in seconds or as a ``timedelta``. All
            ranks then exit with an error that contains their stacks; in elastic training, the inactive rank is killed.
            With None, ranks wait indefinitely.
        broadcast_buffers: Whether rank 0 broadcasts its buffers in every training step, as in DDP by default. Otherwise
            each rank trains with its own buffers, and receives rank 0's before each evaluation and checkpoint.
        checks: Options of the checks that ranks agree during ``fit``, see :class:`.ChecksOptions`; all checks if None.
        exact_evaluation: Whether every sample counts once in evaluations, see :mod:`.uneven.exact_evaluation`.

    Raises:
        RuntimeError: If Horovod is not installed, or not built for this torch; the message contains the command to run.
        TypeError: If an argument has the wrong type.
        ValueError: If a value or a combination of values is invalid.

    Example::

        # horovodrun -np 2 python train.py, or mpirun -np 2 python train.py, or with devices=2: python train.py
        trainer = Trainer(strategy="horovod_ext")
    """

    strategy_name = "horovod_ext"
    elastic_class = "horovod_elastic:HorovodElasticStrategy"

    @rejects_old_names
    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        compression: HorovodCompression = "none",
        op: GradientOp = "average",
        num_groups: int | None = None,
        sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0,
        scale_learning_rate: bool = False,
        process_set: Any = None,
        uneven_inputs: UnevenInputs = "error",
        elastic: bool = False,
        commit_every_n_steps: int | None = None,
        hang_timeout: float | timedelta | None = arguments.DEFAULT_HANG_TIMEOUT,
        broadcast_buffers: bool = False,
        checks: ChecksOptions | None = None,
        exact_evaluation: bool = False,
    ) -> None:
        self._options = HorovodExchangeOptions(
            compression, op, num_groups, sparse_as_dense, gradient_predivide_factor, process_set
        )
        self._check_elastic(elastic, commit_every_n_steps)
        check_flag("scale_learning_rate", scale_learning_rate)
        check_flag("broadcast_buffers", broadcast_buffers)
        check_mode(uneven_inputs)
        if joins := uneven_inputs == "join":
            self._options.check_can_join()
        check_checks(checks, is_elastic=self._is_elastic)  # first, because elastic training sets `uneven_inputs`
        check_can_skip(checks, self._options.unequal_argument, "uneven_inputs='join'" if joins else None)
        runtime.check_installed()
        plugins = environment.environment_of_launcher(), checkpoint_io, precision_plugin
        super().__init__(accelerator, parallel_devices, *plugins, hang_timeout, checks, exact_evaluation)
        self.cheaper_compressions = ("fp16",) if compression == "none" else ()
        self._scale_learning_rate, self._uneven_inputs = scale_learning_rate, uneven_inputs
        self._has_equal_models = process_set is None
        self._before_forward_of_step = self._share_buffers_of_step if broadcast_buffers else None
        self._are_buffers_stale = True
        self._deltas: AdasumExchange | None = None
        self._undo = ExitStack()  # what the stage has replaced: metrics and batch normalization

    def _check_elastic(self, elastic: Any, commit_every_n_steps: Any) -> None:
        check_is_not_elastic(type(self), elastic, self.elastic_class, commit_every_n_steps=commit_every_n_steps)

    @property
    def is_distributed(self) -> bool:
        """True: each rank has a shard of the data."""
        return True

    @property
    def rank(self) -> int:
        """Global rank of this process, under Horovod's name."""
        return self.global_rank

    @property
    def num_processes(self) -> int:
        """Number of ranks on this host."""
        return environment.num_processes(self.parallel_devices or [], self.cluster_environment)

    @property
    def num_nodes(self) -> int:
        """Number of hosts."""
        return environment.num_nodes(self.cluster_environment)

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        environment.check_num_nodes(num_nodes, self.cluster_environment)

    @property
    @override
    def root_device(self) -> torch.device:
        """Device of this rank."""
        if not self.parallel_devices:
            raise RuntimeError("The devices are not known yet. Pass the strategy to a Trainer first.")
        return environment.device_of_rank(self.parallel_devices, self.local_rank)

    @override
    def observe_exchanges(self, observer: ExchangeObserver | None) -> None:
        """Sets the observer that is notified of each exchange; None for no observer."""
        super().observe_exchanges(observer)
        for exchange in (self._stage_context.gradient_exchange, self._deltas):
            if isinstance(exchange, (HorovodGradientExchange, AdasumExchange)):
                exchange.observer = observer

    # --- environment, launch ---

    @override
    def _configure_launcher(self) -> None:
        # The Trainer calls it after it has set devices and environment, before processes start.
        assert self.cluster_environment is not None
        arguments.check_not_interactive(f"`strategy={self.strategy_name!r}`")
        environment.set_launch_size(self.parallel_devices or [], self.cluster_environment)
        self._launcher = HorovodLauncher(self)

    def check_before_launch(self, trainer: "pl.Trainer | None") -> None:
        """Rejects, before processes start, a ``fit`` that would fail, see :func:`.check_fit`.

        Raises:
            ValueError: If a plugin synchronizes other layers than batch normalization.
        """
        check_callbacks(trainer)
        layer_sync = strategy_parts.layer_sync(self)
        check_layer_sync(layer_sync, "over torch.distributed, which is not initialized under Horovod", " on GPUs")
        module = self.lightning_module
        if module is not None and trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            check_batch_norm(module, self.root_device, layer_sync)

    @override
    def setup_environment(self) -> None:
        """Prepares the device and joins the other ranks; returns when all ranks have joined.

        Raises:
            RuntimeError: If this process has joined other ranks before, or Horovod does not support the device.
        """
        super().setup_environment()
        reset_seed()
        self._join()

    def _join(self) -> None:
        leave = runtime.shut_down if runtime.has_others() else None
        self._enter_stage(EngineGroup(self._join_group, leave, runtime.abort_collectives, HorovodProgress()))

    def _join_group(self) -> Store | None:
        assert self.cluster_environment is not None
        launch = environment.launch_info_from(self.cluster_environment, self.num_processes)
        runtime.start(launch, self.root_device, self._options.process_set)
        launching.set_rank_zero_only_rank(self.global_rank)
        return runtime.store() if self.world_size > 1 else None

    @override
    def _engine(self) -> Collectives:
        from lightning_strategies_ext.horovod.collectives import HorovodCollectives

        return HorovodCollectives(lambda: self.root_device)

    # --- setup ---

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        """Moves the model to the device, with rank 0's weights; for training, also creates the optimizers.

        Raises:
            ModelMismatchError: If another rank has a different model.
            RuntimeError: If this Horovod or this number of ranks does not support ``op="adasum"``.
            TypeError: If ``horovod.torch.DistributedOptimizer`` has wrapped an optimizer.
            ValueError: If training has no parameter that requires a gradient.
        """
        module = self.lightning_module
        assert self.accelerator is not None
        assert module is not None
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        if is_fitting and (layer_sync := strategy_parts.layer_sync(self)) is not None:
            check_batch_norm(module, self.root_device, layer_sync)
            self._undo.callback(SynchronizedBatchNorm(module).restore)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        share_model(self.collectives, module, self.root_device, is_trained=is_fitting)
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
        self._undo.callback(MetricSync(lambda: self.collectives).close)
        self._prepare_logging(trainer)
        self._begin_stage(trainer)

    @override
    def _begin_stage(self, trainer: "pl.Trainer") -> None:
        self._begin_exchange(trainer)
        super()._begin_stage(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self._deltas is None and self._has_equal_models:
            compare_exchanges(self._stage_context, trainer, in_exchange=False)

    def _begin_exchange(self, trainer: "pl.Trainer") -> None:
        assert self.lightning_module is not None
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._are_buffers_stale = True
        if self._options.op == "adasum":
            self._deltas = AdasumExchange(self.lightning_module, self._options)
        else:
            exchange = HorovodGradientExchange(self.lightning_module, self._options)
            exchange.broadcast_buffers = self._broadcast_buffers if self._before_forward_of_step is not None else None
            self._stage_context.gradient_exchange = self._stage_context.parameter_tracker = exchange
        settings = self._logged_values, torch.device("cpu")
        self._stage_context.start_uneven_inputs(self._uneven_inputs, trainer, *settings)

    @override
    def model_to_device(self) -> None:
        """Moves the model to the device of this rank."""
        assert self.model is not None
        self.model.to(self.root_device)

    # --- step ---

    def _share_buffers_of_step(self) -> None:
        exchange = self._stage_context.gradient_exchange
        if self._are_buffers_stale:  # as in DDP, not within an accumulation window
            self._broadcast_buffers()
        self._are_buffers_stale = exchange is None or not exchange.is_in_no_sync

    def _broadcast_buffers(self, src: int | None = None, *, is_known_to_match: bool = True) -> None:
        """Broadcasts the buffers of one rank, by default rank 0. Collective: all ranks call it."""
        if self._stage_context.local_collectives is None and self.lightning_module is not None:
            self.collectives.broadcast_buffers(  # type: ignore[attr-defined]
                self.lightning_module, self._options.process_set, src, is_known_to_match=is_known_to_match
            )

    @override
    def on_validation_start(self) -> None:
        """Broadcasts the buffers of rank 0, so that all ranks evaluate the same model."""
        super().on_validation_start()
        self._broadcast_buffers(is_known_to_match=False)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Disables the gradient exchange of backward passes in the block; gradients accumulate locally."""
        exchange = self._stage_context.gradient_exchange
        assert exchange is None or isinstance(exchange, HorovodGradientExchange)
        with nullcontext() if exchange is None else exchange.no_sync():
            yield

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        """Prepares the exchange of gradients."""
        exchange = self._stage_context.gradient_exchange
        if exchange is not None:
            assert isinstance(exchange, HorovodGradientExchange)
            if self._stage_context.compare_gradients is not None and not exchange.is_in_no_sync:
                self._stage_context.compare_gradients()
            exchange.begin(closure_loss)
        if self._stage_context.uneven_inputs is not None:
            self._stage_context.uneven_inputs.before_backward()

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        """Waits for the exchange of gradients, unless the backward pass itself has waited."""
        context, exchange = self._stage_context, self._stage_context.gradient_exchange
        log, progress = context.exchange_log, context.batch_progress
        if log is not None and progress is not None and exchange is not None and not exchange.is_in_no_sync:
            assert isinstance(exchange, HorovodGradientExchange)
            log.record(progress.ready if exchange.has_contributed else -progress.ready)
        if context.uneven_inputs is not None:
            context.uneven_inputs.after_backward()
        elif exchange is not None:
            exchange.finish()

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Steps the optimizer, and returns its result; with Adasum, combines the steps of all ranks."""
        if self._deltas is None:
            if isinstance(optimizer, LBFGS) and self._has_equal_models:
                reduce_op = "sum" if self._options.op == "sum" else "mean"
                closure = with_reduced_loss(closure, lambda: self._active_collectives, reduce_op)
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        with self._deltas.wrap_step(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    # --- collectives ---

    @override
    def all_gather(self, result: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gathers one tensor per rank, whose first dimensions may differ; see :meth:`.HorovodCollectives.all_gather`.

        The first argument has the name that it had in Lightning 1.
        """
        return super().all_gather(result, group, sync_grads)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits until all ranks have called it; in ``Trainer.save_checkpoint``, broadcasts the buffers of rank 0."""
        super().barrier(*args, **kwargs)
        if arguments.barrier_name(*args, **kwargs) == "Trainer.save_checkpoint":  # one rank may call the method alone
            self._broadcast_buffers(is_known_to_match=False)

    # --- teardown ---

    @override
    def teardown(self) -> None:
        """Moves the model to the CPU and frees the resources of the strategy. A second call is a no-op.

        Horovod remains initialized for the next stage and is shut down when the interpreter exits.
        """
        self._stage_context.leave()
        self._undo.close()
        self._deltas = None
        super().teardown()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_deltas": None, "_undo": ExitStack()}
