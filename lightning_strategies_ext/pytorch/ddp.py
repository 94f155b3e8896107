"""DDPStrategy: data parallelism with one process per device, over torch.distributed. Names ``ddp_ext`` and variants.

Unlike Lightning's ``ddp``, it has no blocking collective per training step, no barrier before a reduction, and one copy
of the gradients. Weights are bitwise identical, but three or more ranks over ``shm`` sum in another order than gloo.
"""

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed import Store
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_strategies_ext import arguments
from lightning_strategies_ext._lightning import strategy_parts, user_modules
from lightning_strategies_ext.checks import ChecksOptions
from lightning_strategies_ext.collectives.model_check import check_same_model, share_model
from lightning_strategies_ext.identities import BATCH, GRADIENTS, current
from lightning_strategies_ext.launch.processes.elastic_pool import RestartPolicy
from lightning_strategies_ext.launch.processes.worker_interface import WorkerStarter
from lightning_strategies_ext.launch.processes.worker_process import ProcessStarter
from lightning_strategies_ext.launch.script_launcher import ScriptLauncher
from lightning_strategies_ext.launch.tasks.module_tree import tensors_of
from lightning_strategies_ext.launch.worker_launcher import WorkerLauncher
from lightning_strategies_ext.lightning_names import module_of_package
from lightning_strategies_ext.pytorch.agreement import with_reduced_loss
from lightning_strategies_ext.pytorch.checks import check_batch_norm, check_fit, check_precision, resolve_exchange
from lightning_strategies_ext.pytorch.exchange_comparison import compare_ddp_exchanges, record_ddp_exchange
from lightning_strategies_ext.pytorch.manual_optimization import ManualOptimization
from lightning_strategies_ext.pytorch.parallel import ParallelStrategy
from lightning_strategies_ext.pytorch.rank_assignment import assign_ranks, hide_group_on_one_device, no_device_error
from lightning_strategies_ext.renamed import RenamedAttribute, rejects_old_names
from lightning_strategies_ext.stage_context import EngineGroup
from lightning_strategies_ext.torch_distributed import backend_checks, process_group
from lightning_strategies_ext.torch_distributed.collectives import DefaultGroupProgress
from lightning_strategies_ext.torch_distributed.compression import config as compressions
from lightning_strategies_ext.torch_distributed.ddp_advice import advise_static_graph, explain_unused_parameters
from lightning_strategies_ext.torch_distributed.disconnect import disconnect
from lightning_strategies_ext.torch_distributed.feature import FeatureContext
from lightning_strategies_ext.torch_distributed.gradient_exchange import Contribution, DDPGradientExchange
from lightning_strategies_ext.torch_distributed.unfreezing import Unfreezing
from lightning_strategies_ext.torch_distributed.wrapping import records_graph, wrap_in_ddp
from lightning_strategies_ext.uneven.control import UnevenInputs, check_mode


class DDPStrategy(ParallelStrategy, LightningDDPStrategy):
    """Multi-process data parallelism on one or several hosts.

    Args:
        accelerator: Accelerator; from ``Trainer(accelerator=...)`` if None.
        parallel_devices: Devices of this host, one per process; from ``Trainer(devices=...)`` if None.
        cluster_environment: Source of ranks and addresses; detected if None.
        checkpoint_io: Plugin that writes and reads checkpoints.
        precision_plugin: Precision plugin; from ``Trainer(precision=...)`` if None.
        ddp_comm_state: First argument of ``ddp_comm_hook``. A ``PostLocalSGDState`` enables post-local SGD.
        ddp_comm_hook: Communication hook that replaces DDP's all-reduce of a gradient bucket, on any device.
        ddp_comm_wrapper: Function that wraps the hook, for example torch's ``fp16_compress_wrapper``.
        model_averaging_period: Number of optimizer steps between averagings of the models, with post-local SGD.
        process_group_backend: torch.distributed backend. If None: NCCL on GPUs; on CPUs, shm if a host has several
            ranks, otherwise gloo.
        timeout: Timeout of the rendezvous and of every collective.
        process_group_options: Options of the backend, for example ``ShmOptions(segment_num_bytes=...)``.
        start_method: "popen" runs the script once per device; "fork", "spawn", and "forkserver" start workers.
        hang_timeout: Time that ranks wait in a collective for an inactive rank, in seconds or as a ``timedelta``. All
            ranks then exit with an error that contains their stacks. With None, only ``timeout`` applies.
        uneven_inputs: Reaction to different numbers of training batches. "error" raises on all ranks, "stop" ends the
            epoch with the first rank that runs out, "join" trains on all batches. See :mod:`.uneven.control`.
        compression: Compression of the exchange, for slow networks: a name, or an object with parameters such as
            ``PowerSGD(rank=2)``; see :mod:`.compression.config`.
        checks: Options of the checks that ranks agree during ``fit``, see :class:`.ChecksOptions`; all checks if None.
        exact_evaluation: Whether every sample counts once in evaluations, see :mod:`.uneven.exact_evaluation`.
        **kwargs: Arguments of ``torch.nn.parallel.DistributedDataParallel``. ``gradient_as_bucket_view`` is True by
            default. ``bucket_cap_mb="auto"`` tries sizes in the first steps, see :mod:`.bucket_search`.

    Attributes:
        exchange_state: Final states of the exchange's features after ``fit``, for checkpoints that are saved later.

    Raises:
        TypeError: If an argument is unknown or has the wrong type.
        ValueError: If a value or a combination of values is invalid.
        RuntimeError: If torch was built without the requested backend.

    Example::

        trainer = Trainer(strategy=DDPStrategy(static_graph=True, timeout=timedelta(minutes=5)), devices=2)
    """

    @rejects_old_names
    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = arguments.DEFAULT_TIMEOUT,
        start_method: arguments.StartMethod = "popen",
        process_group_options: Any | None = None,
        hang_timeout: float | timedelta | None = arguments.DEFAULT_HANG_TIMEOUT,
        uneven_inputs: UnevenInputs = "error",
        compression: compressions.CompressionName | compressions.Compression | None = None,
        checks: ChecksOptions | None = None,
        exact_evaluation: bool = False,
        **kwargs: Any,
    ) -> None:
        check_mode(uneven_inputs)
        arguments.check_start_method(start_method)
        backend_checks.check_arguments(process_group_backend, process_group_options, timeout)
        hook = ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper, model_averaging_period
        exchange = kwargs, hook, compression, uneven_inputs, checks
        self._gradient_sync = resolve_exchange(*exchange, is_elastic=self._is_elastic)
        plugins = cluster_environment, checkpoint_io, precision_plugin
        super().__init__(accelerator, parallel_devices, *plugins, hang_timeout, checks, exact_evaluation)
        # ParallelStrategy's constructor calls Lightning's DDPStrategy with defaults; these are the actual values.
        self._ddp_kwargs = kwargs
        self._process_group_backend = process_group_backend
        self._process_group_options = process_group_options
        self._timeout = timeout
        self._start_method = start_method
        self._uneven_inputs = uneven_inputs
        self.exchange_state: dict[str, Any] | None = None
        self.cheaper_compressions = self._gradient_sync.cheaper_compressions(is_elastic=self._is_elastic)
        self._has_equal_models = self._gradient_sync.keeps_models_equal(kwargs)
        self._has_hidden_group = False

    @property
    @override
    def is_distributed(self) -> bool:
        """True. Deprecated in Lightning; this override emits no warning."""
        return True

    @property
    @override
    def root_device(self) -> torch.device:
        """Device of this rank."""
        devices = self.parallel_devices or []
        if self.local_rank >= len(devices):
            raise no_device_error(devices, self.local_rank)
        return devices[self.local_rank]

    # --- environment, launch ---

    @override
    def _configure_launcher(self) -> None:
        # The Trainer calls it after it has set devices, environment, and number of nodes, before processes start.
        is_script = self._start_method == "popen"
        settings = self._process_group_backend, self._process_group_options, self._timeout
        self._process_group_backend = assign_ranks(self, *settings, starts_ranks=not is_script)
        check_precision(self._gradient_sync.compression, self.precision_plugin)
        backend_checks.check_backend_for_devices(self._process_group_backend, self.parallel_devices or [])
        arguments.check_start_method_interactive(self._start_method)
        self._launcher = ScriptLauncher(self) if is_script else WorkerLauncher(self, self._make_starter())

    around_stage = RenamedAttribute("wrap_stage")
    #: Whether workers are reused by the next stage.
    keep_workers = True
    #: Restart policy for workers that exit during ``fit``; None if ``fit`` fails when a worker exits.
    restart_policy: RestartPolicy | None = None

    @property
    def process_group_settings(self) -> tuple[Any, ...]:
        """Settings of the process group; two strategies with equal settings can use the same workers."""
        group = self._process_group_backend, self._timeout, self._process_group_options
        return *group, self.num_nodes, self.parallel_devices

    def post_dispatch(self, trainer: "pl.Trainer") -> None:
        """Runs in the main process once the results of a stage in workers are applied. A no-op; override it."""

    def _make_starter(self) -> WorkerStarter:
        """Creates the object that starts workers, for all start methods except "popen"."""
        assert self._start_method != "popen"
        return ProcessStarter(self._start_method, preloaded=module_of_package(type(self)))

    def check_before_launch(self, trainer: "pl.Trainer | None") -> None:
        """Rejects, before processes start, a ``fit`` that would fail, see :func:`.check_fit`."""
        check_fit(trainer, self.lightning_module, strategy_parts.layer_sync(self), self.root_device)

    def wrap_stage(self, trainer: "pl.Trainer") -> AbstractContextManager[None]:
        """Returns a context manager for the main process, active while workers run the stage; a no-op by default."""
        return nullcontext()

    @override
    def setup_distributed(self) -> None:
        """Joins the process group with the rank that the cluster environment assigns to this process.

        Raises:
            RuntimeError: If this process belongs to a process group of different rank or size.
        """
        if self._worker is None or not self._worker.is_continuation:
            reset_seed()
        self.set_world_ranks()
        self._has_hidden_group = hide_group_on_one_device(self.world_size)
        leave = process_group.stop if process_group.has_others() else None
        self._enter_stage(EngineGroup(self._join_group, leave, disconnect, DefaultGroupProgress()))

    def _join_group(self) -> Store | None:
        settings = self._process_group_backend, self.root_device, self._timeout, self._process_group_options
        assert self.cluster_environment is not None
        self._process_group_backend = process_group.start(self.cluster_environment, *settings, self.num_nodes)
        return process_group.default_store() if self.world_size > 1 else None

    # --- setup ---

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        """Moves the model to the device; for training, also wraps it in DDP and creates the optimizers.

        Raises:
            ModelMismatchError: If another rank has a different model.
            ValueError: If the model cannot be trained, see :func:`.check_fit`, or an optimizer is distributed.
        """
        assert self.accelerator is not None
        assert self.model is not None
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        if is_fitting and (layer_sync := strategy_parts.layer_sync(self)) is not None:
            check_batch_norm(self.model, self.root_device, layer_sync)
            self.model = layer_sync.apply(self.model)
        worker, has_same_model = self._worker, False
        if not is_fitting and worker is not None and self.num_nodes == 1:
            # Without a broadcast, workers keep sharing memory. Workers of other hosts have another main process.
            has_same_model = self.reduce_boolean_decision(worker.are_unchanged(tensors_of(self.model).values()))
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if is_fitting:
            self.configure_ddp()
            self.setup_optimizers(trainer)
        elif not has_same_model:
            share_model(self.collectives, self.model, self.root_device, is_trained=False)
        self.setup_precision_plugin()
        if is_fitting:
            user_modules.move_optimizers(self.optimizers, self.root_device)
            self._features.attach(user_modules.unwrapped_optimizers(self.optimizers))
        self._prepare_logging(trainer, self._process_group_backend)
        self._begin_stage(trainer)

    @override
    def _begin_stage(self, trainer: "pl.Trainer") -> None:
        super()._begin_stage(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            settings = self._logged_values, self.root_device
            self._stage_context.start_uneven_inputs(self._uneven_inputs, trainer, *settings)
            if self._has_equal_models:  # otherwise ranks may run different backward passes
                compare_ddp_exchanges(self._stage_context, trainer, self.model)

    @override
    def _setup_model(self, model: Module) -> DistributedDataParallel:
        if self._ddp_kwargs.get("init_sync", True):
            check_same_model(self.collectives, model, self.root_device, is_trained=True)
        ddp_model = wrap_in_ddp(model, self.root_device, **self._ddp_kwargs)
        contribution = None if self._uneven_inputs == "error" else Contribution()
        parts = self._gradient_sync, {**self._ddp_kwargs}, self.root_device, self.collectives
        context = FeatureContext(
            *parts,
            contribution=contribution,
            timeout=self._timeout,
            num_local_ranks=self.num_processes,
            is_connected=lambda: self._stage_context.local_collectives is None,
            averages_of_model=partial(user_modules.averages_of_model, self.lightning_module),
            on_rebuild=lambda: None if self._observer is None else self._observer.on_exchange_change(),
        )
        self._features.start(context, ddp_model, ManualOptimization.create(self.lightning_module, ddp_model))
        self._stage_context.gradient_exchange = DDPGradientExchange(ddp_model, contribution or Contribution())
        self._stage_context.parameter_tracker = self._features.find(Unfreezing)
        self.exchange_state = None
        return ddp_model

    # --- step ---

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Disables the gradient exchange of backward passes in the block; the first pass after it exchanges the sum.

        With ``static_graph=True``, the first pass of ``fit``, which DDP records, exchanges its gradients in the block.
        """
        model = self.model
        must_exchange = isinstance(model, DistributedDataParallel) and model.static_graph and records_graph(model)
        with nullcontext() if must_exchange else super().block_backward_sync():
            yield

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        """Prepares the exchange of gradients; raises an error if ranks would exchange different gradients."""
        if self._stage_context.uneven_inputs is not None:
            self._stage_context.uneven_inputs.before_backward()
        if (progress := self._stage_context.batch_progress) is not None:
            exchanges = getattr(self.model, "require_backward_grad_sync", False)
            current.identity = GRADIENTS + progress.ready * BATCH if exchanges else 0
            if exchanges and self._stage_context.compare_gradients is not None:
                self._stage_context.compare_gradients()
        for before_backward in self._features.before_backward:
            before_backward(closure_loss)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        """Runs after a backward pass, at whose end DDP has waited for the exchange of gradients."""
        current.identity = 0
        if self._stage_context.exchange_log is not None:
            record_ddp_exchange(self._stage_context, self.model)
        for after_backward in self._features.after_backward:
            after_backward()
        if self._stage_context.uneven_inputs is not None:
            self._stage_context.uneven_inputs.after_backward()

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Steps the optimizer, and returns its result; with local SGD, also averages its parameters once per period."""
        if isinstance(optimizer, LBFGS) and self._has_equal_models:
            closure = with_reduced_loss(closure, lambda: self._active_collectives, "mean")
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        begin_ns = 0 if self._observer is None else time.time_ns()
        for after_optimizer_step in self._features.after_optimizer_step:
            after_optimizer_step(optimizer)
        if self._observer is not None and self._gradient_sync.model_averaging_argument is not None:
            self._observer.on_exchange(begin_ns, begin_ns, time.time_ns(), 0, is_model_exchange=True)
        return output

    # --- evaluation, checkpoints ---

    @override
    def on_validation_start(self) -> None:
        """Makes the models of all ranks equal, so that all ranks validate the same model."""
        super().on_validation_start()
        self._features.synchronize()

    @override
    def on_train_end(self) -> None:
        """Makes the models of all ranks equal, and keeps the state of the exchange for later checkpoints."""
        super().on_train_end()
        self._features.synchronize()
        self.exchange_state = move_data_to_device(self._features.state_dict(), torch.device("cpu")) or None

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the module's state, after making the models of all ranks equal. Collective with local SGD."""
        self._features.synchronize()
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns an optimizer's state. The first optimizer's contains the exchange's. Collective with compression."""
        if optimizer is not self.optimizers[0]:
            return super().optimizer_state(optimizer)
        states = self._features.state_dict() or self.exchange_state or {}  # first: it may change the optimizer's state
        return {**super().optimizer_state(optimizer), **states}  # torch's optimizers ignore further keys

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores the states of the optimizers and of the exchange, the latter once the exchange exists."""
        super().load_optimizer_state_dict(checkpoint)
        self._features.load_state_dict(next(iter(checkpoint["optimizer_states"]), {}))

    # --- exception, teardown ---

    @override
    def explain_exception(self, exception: BaseException) -> BaseException:
        """Returns the exception to show; adds advice to DDP's error about unused parameters."""
        explain_unused_parameters(exception, self, "`training_step`")
        return super().explain_exception(exception)

    @override
    def teardown(self) -> None:
        """Unwraps the model, moves it to the CPU, and frees the strategy's resources. A second call is a no-op.

        The process group remains for the next stage and is destroyed when the interpreter exits.
        """
        if isinstance(self.model, DistributedDataParallel):
            advise_static_graph(self.model, type(self).__name__)
            self.model = self.lightning_module
        strategy_parts.revert_layer_sync(self)
        super().teardown()
        if self._has_hidden_group:
            self._has_hidden_group = False
            process_group.restore_default_group()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "exchange_state": None, "_worker": None}
