"""DDPStrategy: data parallelism with one process per device, over torch.distributed. Names ``ddp_ext`` and variants.

Differences from Lightning's ``ddp``:

- no blocking collective per training step: the agreement on a SIGTERM does not block training;
- no barrier before a reduction, and one round trip for small broadcasts;
- one copy of the gradients in memory;
- communication hooks and post-local SGD on every backend;
- errors are raised before processes start, where possible.

The trained weights are bitwise identical with two CPU ranks, and with more ranks over the same backend. With three or
more ranks over ``shm`` they are equal up to rounding, because ``shm`` sums in a different order than gloo.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed import Store
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from lightning_strategies_ext._lightning import strategy_parts, trainer_logging, user_modules
from lightning_strategies_ext.arguments import (
    DEFAULT_HANG_TIMEOUT,
    DEFAULT_TIMEOUT,
    StartMethod,
    check_start_method,
    check_start_method_interactive,
)
from lightning_strategies_ext.collectives.model_check import check_same_model
from lightning_strategies_ext.failure.exchange_log import ExchangeLog
from lightning_strategies_ext.identities import BATCH, GRADIENTS, current
from lightning_strategies_ext.launch.processes.elastic_pool import RestartPolicy
from lightning_strategies_ext.launch.processes.worker_interface import WorkerStarter
from lightning_strategies_ext.launch.processes.worker_process import ProcessStarter
from lightning_strategies_ext.launch.protocol import WorkerRankInfo
from lightning_strategies_ext.launch.ray import ray_train
from lightning_strategies_ext.launch.ray.ray_train import RayEnvironment
from lightning_strategies_ext.launch.script_launcher import ScriptLauncher, devices_of_ranks
from lightning_strategies_ext.launch.strategy_protocols import WorkerContext
from lightning_strategies_ext.launch.tasks.module_tree import tensors_of
from lightning_strategies_ext.launch.worker_launcher import WorkerLauncher
from lightning_strategies_ext.pytorch.checks import check_batch_norm, check_callbacks, check_precision, may_unfreeze
from lightning_strategies_ext.pytorch.manual_optimization import ManualOptimization, StaticGraph
from lightning_strategies_ext.pytorch.parallel import ParallelStrategy
from lightning_strategies_ext.torch_distributed import process_group
from lightning_strategies_ext.torch_distributed.bucket_search import take_auto
from lightning_strategies_ext.torch_distributed.compression.config import (
    BFloat16,
    Compression,
    CompressionName,
    Float16,
    resolve_compression,
)
from lightning_strategies_ext.torch_distributed.ddp_advice import advise_static_graph, explain_unused_parameters
from lightning_strategies_ext.torch_distributed.direct_exchange import trained_parameters
from lightning_strategies_ext.torch_distributed.disconnect import disconnect
from lightning_strategies_ext.torch_distributed.feature import FeatureContext
from lightning_strategies_ext.torch_distributed.features import Features
from lightning_strategies_ext.torch_distributed.gradient_exchange import Contribution, DDPGradientExchange
from lightning_strategies_ext.torch_distributed.gradient_sync import GradientSyncOptions
from lightning_strategies_ext.torch_distributed.progress import DefaultGroupProgress
from lightning_strategies_ext.torch_distributed.unfreezing import Unfreezing
from lightning_strategies_ext.torch_distributed.wrapping import (
    check_ddp_kwargs,
    check_has_trainable_parameters,
    records_graph,
    wrap_in_ddp,
)
from lightning_strategies_ext.uneven.control import UnevenInputs, check_mode

_OURS = __name__.partition(".")[0]
#: Rank info of a Trainer on one device, in a process that belongs to a group of several ranks.
_SINGLE_RANK_INFO = WorkerRankInfo(0, 1, 0, 1, 0, 1, "127.0.0.1", 0)


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
        uneven_inputs: Reaction to different numbers of training batches: "error" raises on all ranks, "stop" ends the
            epoch with the first rank that runs out, "join" trains on all batches; see :mod:`.uneven.control`.
        compression: Compression of the exchange, for slow networks: a name, or an object with parameters such as
            ``PowerSGD(rank=2)``; see :mod:`.compression.config`.
        **kwargs: Arguments of ``torch.nn.parallel.DistributedDataParallel``. ``gradient_as_bucket_view`` is True by
            default. ``bucket_cap_mb="auto"`` tries sizes in the first steps, see :mod:`.bucket_search`.

    Attributes:
        exchange_state: Final states of the exchange's features after ``fit``, for checkpoints that are saved later.

    Raises:
        TypeError: If an argument is unknown or has the wrong type.
        ValueError: If a value or a combination of values is invalid.
        RuntimeError: If torch was built without the requested backend.

    Example::

        from lightning_strategies_ext import DDPStrategy

        trainer = Trainer(strategy=DDPStrategy(static_graph=True, timeout=timedelta(minutes=5)), devices=2)
    """

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
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: StartMethod = "popen",
        process_group_options: Any | None = None,
        hang_timeout: float | timedelta | None = DEFAULT_HANG_TIMEOUT,
        uneven_inputs: UnevenInputs = "error",
        compression: CompressionName | Compression | None = None,
        **kwargs: Any,
    ) -> None:
        check_mode(uneven_inputs)
        check_start_method(start_method)
        process_group.check_backend(process_group_backend)
        process_group.check_options(process_group_options, process_group_backend)
        process_group.check_timeout(timeout)
        check_ddp_kwargs(kwargs, may_search=True)
        uneven = None if uneven_inputs == "error" else uneven_inputs
        self._tunes_buckets = take_auto(
            kwargs, ddp_comm_hook=ddp_comm_hook, compression=compression, uneven_inputs=uneven
        )
        self._gradient_sync = GradientSyncOptions(
            ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper, model_averaging_period, resolve_compression(compression)
        )
        self._check_exchange(uneven_inputs, kwargs)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            hang_timeout=hang_timeout,
        )
        # ParallelStrategy's constructor calls Lightning's DDPStrategy with defaults; these are the actual values.
        self._ddp_kwargs = kwargs
        self._process_group_backend = process_group_backend
        self._process_group_options = process_group_options
        self._timeout = timeout
        self._start_method = start_method
        self._uneven_inputs = uneven_inputs
        self._features = Features()
        self.exchange_state: dict[str, Any] | None = None
        self._pending_feature_states: Mapping[str, Any] = {}  # states of features, until a model is wrapped
        self._worker: WorkerContext | None = None
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
        if not self.parallel_devices:
            raise RuntimeError("The devices are not known yet. Pass the strategy to a Trainer first.")
        if self.local_rank >= len(self.parallel_devices):
            raise RuntimeError(
                f"This process is local rank {self.local_rank} according to its environment, but `devices` specifies"
                f" {len(self.parallel_devices)} for this host. Pass as many `devices` to the Trainer as processes"
                " were started per host, or start one process per device. If each process is to use its own GPU, make"
                " only that GPU visible to it (`--gpus-per-task=1` under SLURM), with `devices=1`."
            )
        return self.parallel_devices[self.local_rank]

    @property
    @override
    def cheaper_compressions(self) -> tuple[str, ...]:
        """Values of ``compression`` that would reduce the size of exchanges."""
        compression = self._gradient_sync.compression
        if compression is None and self._gradient_sync.comm_hook is None:
            return ("bf16", "powersgd", "localsgd")
        return ("powersgd", "localsgd") if isinstance(compression, (BFloat16, Float16)) else ()

    @property
    @override
    def num_bytes_exchanged(self) -> int | None:
        """Bytes that this rank has passed to a compressed exchange so far; None without compression."""
        return self._features.num_bytes_exchanged

    # --- environment, launch ---

    @override
    def _configure_launcher(self) -> None:
        # The Trainer calls it after it has set devices, environment, and number of nodes, before processes start.
        rank_info = ray_train.current_rank_info()
        if rank_info is not None:
            self._join_ray_train(rank_info)
        else:
            self._assign_one_device_per_rank()
        if rank_info is None and process_group.has_others() and self.num_nodes * self.num_processes == 1:
            assert self.parallel_devices is not None
            self._set_rank_info(_SINGLE_RANK_INFO, self.parallel_devices[0])
            self.set_world_ranks()
        check_precision(self._gradient_sync.compression, self.precision_plugin)
        process_group.check_backend_for_devices(self._process_group_backend, self.parallel_devices or [])
        if self._start_method == "popen":
            check_start_method_interactive(self._start_method)
            self._launcher = ScriptLauncher(self)
        else:
            self._launcher = WorkerLauncher(self, self._make_starter())

    def _assign_one_device_per_rank(self) -> None:
        assert self.cluster_environment is not None
        devices = self.parallel_devices or []
        self.parallel_devices = devices_of_ranks(devices, self.cluster_environment, self.num_nodes)
        if len(self.parallel_devices) != len(devices):
            self.set_world_ranks()

    def _join_ray_train(self, rank_info: WorkerRankInfo) -> None:
        """Uses the rank, the device, and the process group that Ray Train has assigned to this process."""
        ray_train.check_compatible(
            rank_info,
            type(self).__name__,
            starts_ranks=self._start_method != "popen",
            num_devices=len(self.parallel_devices or []),
            process_group_backend=self._process_group_backend,
            process_group_options=self._process_group_options,
            timeout=self._timeout,
        )
        self._process_group_backend = dist.get_backend()
        self._set_rank_info(rank_info, ray_train.current_device())
        self.set_world_ranks()

    def _set_rank_info(self, rank_info: WorkerRankInfo, device: torch.device) -> None:
        """Sets the ranks and the device that Ray has assigned to this process."""
        self.parallel_devices = [device] * rank_info.local_world_size
        self.num_nodes = rank_info.num_nodes
        self.cluster_environment = RayEnvironment(rank_info)

    #: Whether workers are reused by the next stage.
    keep_workers = True
    #: Restart policy for workers that exit during ``fit``; None if ``fit`` fails when a worker exits.
    restart_policy: RestartPolicy | None = None

    @property
    def process_group_settings(self) -> tuple[Any, ...]:
        """Settings of the process group; two strategies with equal settings can use the same workers."""
        settings = self._process_group_backend, self._timeout, self._process_group_options
        return *settings, self.num_nodes, self.parallel_devices

    def post_dispatch(self, trainer: "pl.Trainer") -> None:
        """Runs in the main process once the results of a stage in workers are applied. A no-op; override it."""

    def _make_starter(self) -> WorkerStarter:
        """Creates the object that starts workers, for all start methods except "popen"."""
        assert self._start_method != "popen"
        check_start_method_interactive(self._start_method)
        package = __name__.partition(".")[0]
        module = next(kind.__module__ for kind in type(self).__mro__ if kind.__module__.partition(".")[0] == package)
        return ProcessStarter(self._start_method, preloaded=module)

    def check_before_launch(self, trainer: "pl.Trainer | None") -> None:
        """Rejects, before processes start, a ``fit`` that would fail.

        It checks only properties that no hook can still change; ``setup`` checks the rest.

        Raises:
            MisconfigurationException: If a callback requires a single process.
            ValueError: If no parameter of the module requires a gradient, or if batch normalization would be
                synchronized between CPUs.
        """
        check_callbacks(trainer)
        module = self.lightning_module
        if trainer is None or module is None or trainer.state.fn != TrainerFn.FITTING:
            return
        self._check_batch_norm(module)
        if not may_unfreeze(module, trainer):
            check_has_trainable_parameters(module)

    def _check_exchange(self, uneven_inputs: str, ddp_kwargs: dict[str, Any]) -> None:
        """Rejects, in the constructor, incompatible arguments of the gradient exchange."""
        self._gradient_sync.check_compatible(ddp_kwargs, joins_uneven_inputs=uneven_inputs == "join")

    def _check_batch_norm(self, module: Module) -> None:
        if isinstance(strategy_parts.layer_sync(self), TorchSyncBatchNorm):
            check_batch_norm(module, self.root_device)

    def wrap_stage(self, trainer: "pl.Trainer") -> AbstractContextManager[None]:
        """Returns a context manager for the main process, active while workers run the stage; a no-op by default."""
        return nullcontext()

    def enter_worker(self, context: WorkerContext) -> None:
        """Stores the context of this worker process; called before all other methods."""
        self._worker = context

    @override
    def setup_environment(self) -> None:
        """Prepares the device and joins the process group; returns when all ranks have joined.

        Raises:
            RuntimeError: If this process belongs to a process group of different rank or size.
        """
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self.setup_distributed()

    @override
    def setup_distributed(self) -> None:
        """Joins the process group with the rank that the cluster environment assigns to this process."""
        assert self.cluster_environment is not None
        if self._worker is None or not self._worker.is_continuation:
            reset_seed()
        self.set_world_ranks()
        if self.world_size == 1:
            self._has_hidden_group = process_group.set_aside()
        else:
            strategy_parts.surround_stages_on_one_device(process_group.set_aside, process_group.bring_back)
        leave = process_group.stop if process_group.has_others() else None
        self._enter_world(self._join_group, leave, disconnect, DefaultGroupProgress())

    def _join_group(self) -> Store | None:
        assert self.cluster_environment is not None
        self._process_group_backend = process_group.start(
            self.cluster_environment,
            self._process_group_backend,
            self.root_device,
            self._timeout,
            self._process_group_options,
            self.num_nodes,
        )
        return process_group.default_store() if self.world_size > 1 else None

    # --- setup ---

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        """Moves the model to the device; for training, also wraps it in DDP and creates the optimizers.

        Raises:
            ModelMismatchError: If another rank has a different model.
            ValueError: If training has no parameter that requires a gradient, if batch normalization would be
                synchronized between CPUs, or if post-local SGD is combined with an optimizer that distributes its own
                work.
        """
        assert self.accelerator is not None
        assert self.model is not None
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        layer_sync = strategy_parts.layer_sync(self)
        if is_fitting and layer_sync is not None:
            self._check_batch_norm(self.model)
            self.model = layer_sync.apply(self.model)
        has_same_model = not is_fitting and self._is_module_unchanged_everywhere()
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if is_fitting:
            self.configure_ddp()
            self.setup_optimizers(trainer)
        elif not has_same_model:
            check_same_model(self.collectives, self.model, self.root_device, is_trained=False)
            self.collectives.broadcast_module(self.model)
        self.setup_precision_plugin()
        if is_fitting:
            user_modules.move_optimizers(self.optimizers, self.root_device)
            inner = [opt.optimizer if isinstance(opt, LightningOptimizer) else opt for opt in self.optimizers]
            self._features.attach(inner)
        trainer_logging.skip_needless_moves(trainer)
        self._begin_stage(trainer)

    def _begin_stage(self, trainer: "pl.Trainer") -> None:
        must_stop = self.reduce_boolean_decision(self._stage_context.was_stop_requested, all=False)
        self._start_stop_agreement(trainer, is_requested=must_stop)
        if self._stage_context.failure_monitor is not None:
            self._stage_context.handle_stage_exits(is_job=self._worker is None)
        self._evaluate_together(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._start_uneven_inputs(trainer, self._uneven_inputs, self.root_device)
            self._compare_gradient_exchanges(trainer)

    def _compare_gradient_exchanges(self, trainer: "pl.Trainer") -> None:
        model, kwargs = self.model, self._ddp_kwargs
        # Ranks that average their models, or that exchange in other groups, may run different backward passes.
        may_differ = kwargs.get("process_group") or kwargs.get("device_mesh")
        if may_differ or self._gradient_sync.model_averaging_argument or not isinstance(model, DistributedDataParallel):
            return
        self._compare_exchanges(trainer, in_exchange=process_group.compares_identities())
        context = self._stage_context
        # DDP also exchanges gradients in a pass that reaches no parameter, if it searches for unused ones.
        exchanges_always = model.find_unused_parameters or model.static_graph
        if context.exchange_log is not None and context.evaluation is not None and not exchanges_always:
            context.reached_parameters = deque[Tensor](maxlen=1)
            first = next(iter(trained_parameters(model).values()))
            hook = first.register_post_accumulate_grad_hook(context.reached_parameters.append)
            context.evaluation.callback(hook.remove)

    @override
    def configure_ddp(self) -> None:
        """Wraps the LightningModule in DDP, and starts the features of the gradient exchange."""
        assert isinstance(self.model, pl.LightningModule)
        if self._ddp_kwargs.get("init_sync", True):
            check_same_model(self.collectives, self.model, self.root_device, is_trained=True)
        self.model = self._setup_model(self.model)

    @override
    def _setup_model(self, model: Module) -> DistributedDataParallel:
        ddp_model = wrap_in_ddp(model, self.root_device, **self._ddp_kwargs)
        contribution = None if self._uneven_inputs == "error" else Contribution()
        self._stage_context.gradient_exchange = DDPGradientExchange(ddp_model, contribution or Contribution())
        context = FeatureContext(
            options=self._gradient_sync,
            ddp_kwargs={**self._ddp_kwargs},
            device=self.root_device,
            collectives=self.collectives,
            contribution=contribution,
            timeout=self._timeout,
            num_local_ranks=self.num_processes,
            tunes_buckets=self._tunes_buckets,
            averages_of_model=self._averages_of_model,
            on_rebuild=self._on_rebuild,
        )
        assert self.lightning_module is not None
        manual = (StaticGraph if ddp_model.static_graph else ManualOptimization)(self.lightning_module)
        self._features.close()
        self._features = Features.start(context, ddp_model, manual)
        self._features.load_state_dict(self._pending_feature_states)
        self._pending_feature_states, self.exchange_state = {}, None
        return ddp_model

    def _on_rebuild(self) -> None:
        if self._observer is not None:
            self._observer.on_exchange_change()

    def _averages_of_model(self) -> list[Module]:
        """Returns averages of the model in callbacks such as `EMAWeightAveraging`; each rank updates its own."""
        module = self.lightning_module
        trainer = None if module is None else user_modules.trainer_of(module)
        callbacks: list[Callback] = [] if trainer is None else trainer.callbacks
        held = [value for callback in callbacks for value in vars(callback).values() if isinstance(value, Module)]
        return [
            each
            for each in held
            if each is not module and (isinstance(each, AveragedModel) or type(each) is type(module))
        ]

    @override
    def model_to_device(self) -> None:
        """Moves the model to the device of this rank."""
        assert self.model is not None
        self.model.to(self.root_device)

    def _is_module_unchanged_everywhere(self) -> bool:
        # If so, a broadcast would change nothing, but copy the memory pages that workers share. Workers of other hosts
        # have received their module from another main process.
        if self._worker is None or self.num_nodes > 1:
            return False
        assert self.model is not None
        return self.reduce_boolean_decision(self._worker.are_unchanged(tensors_of(self.model).values()), all=True)

    # --- step ---

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Disables the gradient exchange of backward passes in the block; gradients accumulate locally.

        The first backward pass after the block exchanges the sum. A no-op unless the model is wrapped in DDP. With
        ``static_graph=True``, the first backward pass of ``fit`` exchanges its gradients in the block, too, because DDP
        records the graph in it. The sum is the same: the mean over ranks of a mean is that mean.
        """
        model = self.model
        if isinstance(model, DistributedDataParallel) and model.static_graph and records_graph(model):
            yield
            return
        with super().block_backward_sync():
            yield

    @override
    def _before_train_step(self) -> None:
        super()._before_train_step()
        for before_step in self._features.before_step:
            before_step()

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        """Prepares the exchange of gradients.

        Raises:
            UnevenInputsError: If ranks have different numbers of batches, with ``uneven_inputs="error"``.
            RuntimeError: If a parameter was unfrozen in this step, after DDP's forward.
        """
        if self._stage_context.uneven_inputs is not None:
            self._stage_context.uneven_inputs.before_backward()
        if (progress := self._stage_context.batch_progress) is not None:
            exchanges = getattr(self.model, "require_backward_grad_sync", False)
            current.identity = GRADIENTS + progress.ready * BATCH if exchanges else 0
        for before_backward in self._features.before_backward:
            before_backward(closure_loss)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        """Ends the exchange of gradients, which DDP has already waited for.

        Raises:
            UnevenInputsError: If ranks have different numbers of batches, with ``uneven_inputs="error"``.
        """
        current.identity = 0
        if (log := self._stage_context.exchange_log) is not None:
            self._record_exchange(log)
        for after_backward in self._features.after_backward:
            after_backward()
        if self._stage_context.uneven_inputs is not None:
            self._stage_context.uneven_inputs.after_backward()

    def _record_exchange(self, log: ExchangeLog) -> None:
        reached, progress = self._stage_context.reached_parameters, self._stage_context.batch_progress
        is_exchanged = getattr(self.model, "require_backward_grad_sync", False)
        if is_exchanged and progress is not None and (reached is None or reached):
            log.record(progress.ready)
        if reached is not None:
            reached.clear()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any | None = None,
        **kwargs: Any,
    ) -> Any:
        """Steps the optimizer; with local SGD, also averages its parameters over ranks once per period.

        Returns:
            Result of the optimizer's ``step``.
        """
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        begin_ns = 0 if self._observer is None else time.time_ns()
        for after_optimizer_step in self._features.after_optimizer_step:
            after_optimizer_step(optimizer)
        if self._observer is not None and self._gradient_sync.model_averaging_argument is not None:
            self._observer.on_exchange(begin_ns, begin_ns, time.time_ns(), 0, is_model_exchange=True)
        return output

    @property
    @override
    def _parameter_tracker(self) -> Unfreezing | None:
        return self._features.find(Unfreezing)

    # --- evaluation, checkpoints ---

    def _synchronize(self) -> bool:
        """Makes the models of all ranks equal. Collective; not after a failure of this rank.

        Returns:
            Whether the models are equal.
        """
        if self._stage_context.local_collectives is not None:
            return False
        self._features.synchronize()
        return True

    @override
    def on_validation_start(self) -> None:
        """Makes the models of all ranks equal, so that all ranks validate the same model."""
        super().on_validation_start()
        self._synchronize()

    @override
    def on_train_end(self) -> None:
        """Makes the models of all ranks equal, and keeps the state of the exchange for later checkpoints."""
        super().on_train_end()
        if self._synchronize():
            self.exchange_state = move_data_to_device(self._features.state_dict(), torch.device("cpu")) or None

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the module's state, after making the models of all ranks equal. Collective with local SGD."""
        self._synchronize()
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns an optimizer's state; the first also contains the exchange's. Collective with compression.

        torch's optimizers ignore further keys of a state.
        """
        states: Mapping[str, Any] = {}
        if optimizer is self.optimizers[0]:
            states = self.exchange_state or {}
            if self._stage_context.local_collectives is None:
                states = self._features.state_dict() or states  # before the optimizer's, which it may change
        return {**super().optimizer_state(optimizer), **states}

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores the states of the optimizers and of the exchange; defers the latter until the exchange exists."""
        super().load_optimizer_state_dict(checkpoint)
        first: Mapping[Any, Any] = next(iter(checkpoint["optimizer_states"]), {})
        states = {key: state for key, state in first.items() if str(key).startswith(f"{_OURS}.")}
        if isinstance(self.model, DistributedDataParallel):
            self._features.load_state_dict(states)
        else:
            self._pending_feature_states = states

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
        module = self.lightning_module
        if isinstance(self.model, DistributedDataParallel):
            advise_static_graph(self.model, type(self).__name__)
            self.model = module
        trainer = None if module is None else user_modules.trainer_of(module)
        layer_sync = strategy_parts.layer_sync(self)
        if layer_sync is not None and trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            self.model = layer_sync.revert(self.model)
        self._features.close()
        self._features = Features()
        super().teardown()
        if self._has_hidden_group:
            self._has_hidden_group = False
            process_group.bring_back()

    @property
    @override
    def _ends_with_teardown(self) -> bool:
        return self._worker is None

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_features": Features(),
            "exchange_state": None,
            "_worker": None,
        }
