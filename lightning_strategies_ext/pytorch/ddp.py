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
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import Store
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
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
from lightning_strategies_ext.pytorch.batch_norm import check_can_be_synchronized
from lightning_strategies_ext.pytorch.buckets import BucketsByTrial
from lightning_strategies_ext.pytorch.compressed import Compressed
from lightning_strategies_ext.pytorch.parallel import ParallelStrategy
from lightning_strategies_ext.pytorch.unfreezing import Unfreezing
from lightning_strategies_ext.torch_distributed import process_group
from lightning_strategies_ext.torch_distributed.compression.config import (
    BFloat16,
    Compression,
    CompressionName,
    Float16,
    resolve_compression,
)
from lightning_strategies_ext.torch_distributed.disconnect import disconnect
from lightning_strategies_ext.torch_distributed.distributed_model import DistributedModel
from lightning_strategies_ext.torch_distributed.gradient_exchange import Contribution, DDPGradientExchange
from lightning_strategies_ext.torch_distributed.gradient_sync import (
    GradientSyncOptions,
    ModelAveraging,
    advise_static_graph,
    check_ddp_kwargs,
    explain_unused_parameters,
)
from lightning_strategies_ext.torch_distributed.progress import DefaultGroupProgress
from lightning_strategies_ext.torch_distributed.wrapping import (
    check_has_trainable_parameters,
    records_graph,
    wrap_in_ddp,
)
from lightning_strategies_ext.uneven.control import UnevenInputs, check_mode

_OURS = __name__.partition(".")[0]
#: Rank info of a Trainer on one device, in a process that belongs to a group of several ranks.
_ALONE = WorkerRankInfo(0, 1, 0, 1, 0, 1, "127.0.0.1", 0)


class DDPStrategy(Unfreezing, BucketsByTrial, Compressed, ParallelStrategy, LightningDDPStrategy):
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
        self._take_bucket_size(kwargs, ddp_comm_hook=ddp_comm_hook, compression=compression, uneven_inputs=uneven)
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
        self._averaging: ModelAveraging | None = None
        self._worker: WorkerContext | None = None
        self._has_set_aside = False

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
            raise RuntimeError("The devices are not known yet: pass the strategy to a Trainer first.")
        if self.local_rank >= len(self.parallel_devices):
            raise RuntimeError(
                f"This process is local rank {self.local_rank}, as its environment says, and `devices` gives this host"
                f" {len(self.parallel_devices)}. Give the Trainer as many `devices` as processes were started per host,"
                " or start as many processes as there are devices. If each process is to have its own GPU, let it see"
                " no other (`--gpus-per-task=1` under SLURM), with `devices=1`."
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

    # --- environment, launch ---

    @override
    def _configure_launcher(self) -> None:
        # The Trainer calls it after it has set devices, environment, and number of nodes, before processes start.
        rank_info = ray_train.current_rank_info()
        if rank_info is not None:
            self._join_ray_train(rank_info)
        else:
            self._have_one_device_each()
        if rank_info is None and process_group.has_others() and self.num_nodes * self.num_processes == 1:
            assert self.parallel_devices is not None
            self._set_rank_info(_ALONE, self.parallel_devices[0])
            self.set_world_ranks()
        self._check_precision(self._gradient_sync.compression)
        process_group.check_backend_for_devices(self._process_group_backend, self.parallel_devices or [])
        if self._start_method == "popen":
            check_start_method_interactive(self._start_method)
            self._launcher = ScriptLauncher(self)
        else:
            self._launcher = WorkerLauncher(self, self._make_starter())

    def _have_one_device_each(self) -> None:
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
        self._check_callbacks(trainer)
        module = self.lightning_module
        if trainer is None or module is None or trainer.state.fn != TrainerFn.FITTING:
            return
        self._check_batch_norm(module)
        module_hooks = ("configure_model", "setup", "configure_callbacks")
        if not any(is_overridden(hook, module) for hook in module_hooks) and not _has_callback_with_setup(trainer):
            check_has_trainable_parameters(module)

    def _check_exchange(self, uneven_inputs: str, ddp_kwargs: dict[str, Any]) -> None:
        """Rejects, in the constructor, incompatible arguments of the gradient exchange."""
        self._gradient_sync.check_compatible(ddp_kwargs, joins_uneven_inputs=uneven_inputs == "join")

    def _check_batch_norm(self, module: Module) -> None:
        if isinstance(strategy_parts.layer_sync(self), TorchSyncBatchNorm):
            check_can_be_synchronized(module, self.root_device)

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
            self._has_set_aside = process_group.set_aside()
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
        has_same_model = not is_fitting and self._all_have_module_as_sent()
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
            self._averaging = self._gradient_sync.create_averaging(inner, self.num_processes)
            if self._compressed is not None:
                self._compressed.attach(inner)
        trainer_logging.skip_needless_moves(trainer)
        self._begin_stage(trainer)

    def _begin_stage(self, trainer: "pl.Trainer") -> None:
        must_stop = self.reduce_boolean_decision(self._world.was_stop_requested, all=False)
        self._agree_on_sigterm(trainer, is_requested=must_stop)
        if self._world.failure_monitor is not None:
            self._world.handle_stage_exits(is_job=self._worker is None)
        self._evaluate_together(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._keep_in_step(trainer, self._uneven_inputs, self.root_device)

    @override
    def configure_ddp(self) -> None:
        """Wraps the LightningModule in DDP, with the communication hook."""
        assert isinstance(self.model, pl.LightningModule)
        if self._ddp_kwargs.get("init_sync", True):
            check_same_model(self.collectives, self.model, self.root_device, is_trained=True)
        self.model = self._setup_model(self.model)

    @override
    def _setup_model(self, model: Module) -> DistributedDataParallel:
        ddp_model = wrap_in_ddp(model, self.root_device, **self._ddp_kwargs)
        share = None if self._uneven_inputs == "error" else Contribution()
        self._begin_compression(self._gradient_sync.begin_compression(ddp_model, self._timeout))
        self._gradient_sync.register_hook(ddp_model, self._compressed, share)
        self._world.gradient_exchange = DDPGradientExchange(ddp_model, share or Contribution())
        self._begin_to_try_buckets(ddp_model)
        ddp_model.exchange_directly(self._ddp_kwargs, tries_buckets=self._tries_buckets)
        self._look_after_unfreezing(ddp_model, share)
        return ddp_model

    @override
    def model_to_device(self) -> None:
        """Moves the model to the device of this rank."""
        assert self.model is not None
        self.model.to(self.root_device)

    def _all_have_module_as_sent(self) -> bool:
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
    def pre_backward(self, closure_loss: Tensor) -> None:
        """Prepares DDP for a backward pass, under manual optimization; automatic optimization does not need it.

        Raises:
            UnevenInputsError: If ranks have different numbers of batches, with ``uneven_inputs="error"``.
            RuntimeError: If a parameter was unfrozen in this step, after DDP's forward.
        """
        self._check_unfreezing()
        if self._world.uneven_inputs is not None:
            self._world.uneven_inputs.before_backward()
        if isinstance(self.model, DistributedDataParallel) and not self._is_automatic_optimization:
            if isinstance(self.model, DistributedModel) and self.model.is_exchanged_directly:
                self.model.prepare_for_backward()
            else:
                prepare_for_backward(self.model, closure_loss)
                self._queue_exchange_of_first_pass(self.model, closure_loss)
        if self._bucket_search is not None:
            self._bucket_search.begin_pass()

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        """Exchanges the gradients of the first backward pass of a static graph, under manual optimization.

        Raises:
            UnevenInputsError: If ranks have different numbers of batches, with ``uneven_inputs="error"``.
        """
        if isinstance(self.model, DistributedDataParallel) and self.model.static_graph:
            self._exchange_first_pass(self.model)
        if self._bucket_search is not None:
            assert isinstance(self.model, DistributedDataParallel)
            self._bucket_search.end_pass(self.model.require_backward_grad_sync)
        if self._world.uneven_inputs is not None:
            self._world.uneven_inputs.after_backward()

    @staticmethod
    def _queue_exchange_of_first_pass(model: DistributedDataParallel, loss: Tensor) -> None:
        # At the end of the backward pass, so that `on_after_backward` receives averaged gradients.
        def queue(_: Tensor) -> None:
            if records_graph(model):
                Variable._execution_engine.queue_callback(model.reducer._delay_all_reduce)  # type: ignore[attr-defined]
                model._static_graph_delay_allreduce_enqueued = True

        if records_graph(model) and loss.requires_grad:
            loss.register_hook(queue)

    def _exchange_first_pass(self, model: DistributedDataParallel) -> None:
        # Needed if the user's `backward` has computed the gradients of another loss. In the first pass, DDP records the
        # graph and exchanges all gradients at the end. The output of DDP's forward triggers that exchange, but a manual
        # backward pass starts within forward.
        if self._is_automatic_optimization or not records_graph(model):
            return
        model.reducer._delay_all_reduce()  # type: ignore[attr-defined]
        model._static_graph_delay_allreduce_enqueued = True

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
        for exchange in (self._averaging, self._compressed):
            if exchange is not None:
                exchange.after_step(optimizer)
        if self._observer is not None and self._gradient_sync.model_averaging_argument is not None:
            self._observer.on_exchange(begin_ns, begin_ns, time.time_ns(), 0, is_model_exchange=True)
        return output

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
            if isinstance(self.model, DistributedModel):
                self.model.exchange_by_reducer()
            self.model = module
        trainer = None if module is None else user_modules.trainer_of(module)
        layer_sync = strategy_parts.layer_sync(self)
        if layer_sync is not None and trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            self.model = layer_sync.revert(self.model)
        self._averaging = None
        self._end_trying_buckets()
        self._end_compression()
        super().teardown()
        if self._has_set_aside:
            self._has_set_aside = False
            process_group.bring_back()

    @property
    @override
    def _ends_with_teardown(self) -> bool:
        return self._worker is None

    @property
    def _is_automatic_optimization(self) -> bool:
        return self.lightning_module is not None and self.lightning_module.automatic_optimization

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_averaging": None,
            "_compressed": None,
            "exchange_state": None,
            "_worker": None,
        }


def _has_callback_with_setup(trainer: "pl.Trainer") -> bool:
    """Returns whether a callback may unfreeze parameters; Lightning's and this package's callbacks do not."""
    callbacks: list[Callback] = getattr(trainer, "callbacks", [])
    return any(
        is_overridden("setup", callback, Callback)
        for callback in callbacks
        if type(callback).__module__.partition(".")[0] not in (pl.__name__.partition(".")[0], _OURS)
    )
