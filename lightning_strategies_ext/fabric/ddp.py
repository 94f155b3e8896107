"""DDPStrategy for Fabric: ``Fabric(strategy="ddp_ext")`` and variants."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_strategies_ext._lightning import strategy_parts
from lightning_strategies_ext.arguments import (
    DEFAULT_HANG_TIMEOUT,
    DEFAULT_TIMEOUT,
    StartMethod,
    check_devices,
    check_plugins,
    check_start_method,
    check_start_method_interactive,
)
from lightning_strategies_ext.checks import ChecksOptions
from lightning_strategies_ext.collectives.model_check import check_same_model
from lightning_strategies_ext.fabric.parallel import ParallelStrategy
from lightning_strategies_ext.launch.script_launcher import FabricScriptLauncher, devices_of_ranks
from lightning_strategies_ext.launch.worker_launcher import FabricWorkerLauncher
from lightning_strategies_ext.renamed import rejects_old_names
from lightning_strategies_ext.torch_distributed import backend_checks, process_group
from lightning_strategies_ext.torch_distributed.collectives import DefaultGroupProgress, TorchCollectives
from lightning_strategies_ext.torch_distributed.compression.config import (
    BFloat16,
    Float16,
    is_stateless,
    resolve_compression,
)
from lightning_strategies_ext.torch_distributed.ddp_advice import explain_unused_parameters
from lightning_strategies_ext.torch_distributed.disconnect import disconnect
from lightning_strategies_ext.torch_distributed.feature import FeatureContext
from lightning_strategies_ext.torch_distributed.features import Features
from lightning_strategies_ext.torch_distributed.gradient_sync import GradientSyncOptions
from lightning_strategies_ext.torch_distributed.wrapping import (
    BackwardPasses,
    check_ddp_kwargs,
    records_graph,
    wrap_in_ddp,
)


class DDPStrategy(ParallelStrategy, FabricDDPStrategy):
    """Multi-process data parallelism under Fabric.

    Args:
        accelerator: Accelerator; from ``Fabric(accelerator=...)`` if None.
        parallel_devices: Devices of this host, one per process; from ``Fabric(devices=...)`` if None.
        cluster_environment: Source of ranks and addresses; detected if None.
        checkpoint_io: Plugin that writes and reads checkpoints.
        precision: Precision plugin; from ``Fabric(precision=...)`` if None.
        process_group_backend: torch.distributed backend; chosen by device if None.
        timeout: Timeout of the rendezvous and of every collective.
        process_group_options: Options of the backend, for example ``ShmOptions(segment_num_bytes=...)``.
        start_method: "popen" runs the script once per device; "fork", "spawn", and "forkserver" start workers.
        ddp_comm_state: First argument of ``ddp_comm_hook``.
        ddp_comm_hook: Communication hook that replaces DDP's all-reduce of a gradient bucket, on any device.
        ddp_comm_wrapper: Function that wraps the hook.
        hang_timeout: Time that ranks wait in a collective for an inactive rank, in seconds or as a ``timedelta``. All
            ranks then exit with an error that contains their stacks. With None, only ``timeout`` applies.
        compression: Compression of gradients: "bf16" or "fp16". Other compressions have a state, which only the Trainer
            manages.
        checks: With ``ChecksOptions(check_collectives=True)``, ranks compare each collective before it starts, and each
            ``torch.distributed`` call of your own, for debugging. Fabric supports no other field.
        **kwargs: Arguments of ``torch.nn.parallel.DistributedDataParallel``.

    Raises:
        TypeError: If an argument is unknown or has the wrong type.
        ValueError: If a value or a combination of values is invalid.

    Example::

        fabric = Fabric(strategy="ddp_ext", devices=2)
    """

    @rejects_old_names
    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: StartMethod = "popen",
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        process_group_options: Any | None = None,
        hang_timeout: float | timedelta | None = DEFAULT_HANG_TIMEOUT,
        compression: Literal["bf16", "fp16"] | BFloat16 | Float16 | None = None,
        checks: ChecksOptions | None = None,
        **kwargs: Any,
    ) -> None:
        check_start_method(start_method)
        check_plugins(accelerator, cluster_environment, checkpoint_io)
        check_devices(parallel_devices)
        backend_checks.check_arguments(process_group_backend, process_group_options, timeout)
        if precision is not None and not isinstance(precision, Precision):
            raise TypeError(f"`precision` must be a Precision of lightning.fabric, got {precision!r}.")
        if isinstance(ddp_comm_state, PostLocalSGDState):
            raise ValueError(
                f"`ddp_comm_state={ddp_comm_state!r}` lets the models of the ranks differ, and under Fabric the"
                " strategy does not average them. Omit it and average the models in your loop with torch's"
                " PeriodicModelAverager, or use the Trainer."
            )
        check_ddp_kwargs(kwargs)
        resolved = resolve_compression(compression)
        if not is_stateless(resolved):
            raise ValueError(
                f"`compression={compression!r}` has state that belongs in checkpoints, and needs the optimizers. Use"
                " 'bf16' or 'fp16' under Fabric, or the Trainer, whose strategy supports all compressions."
            )
        self._gradient_sync = GradientSyncOptions(ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper, compression=resolved)
        self._gradient_sync.check_compatible(kwargs)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            hang_timeout=hang_timeout,
            checks=checks,
        )
        self._ddp_kwargs = kwargs
        self._process_group_options = process_group_options
        if kwargs.get("static_graph"):
            self._backward_sync_control = _BackwardSyncControl()
        self.collectives = TorchCollectives(self._get_root_device)
        self._models_with_buffers: list[DistributedDataParallel] = []

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        devices = self.parallel_devices or []
        self.parallel_devices = devices_of_ranks(devices, self.cluster_environment, self.num_nodes)
        if len(self.parallel_devices) != len(devices):
            self._set_world_ranks()
        backend_checks.check_backend_for_devices(self._process_group_backend, self.parallel_devices or [])
        check_start_method_interactive(self._start_method)
        if self._start_method == "popen":
            self._launcher = FabricScriptLauncher(self)
        else:
            self._launcher = FabricWorkerLauncher(self, self._start_method, preloaded=__name__)

    #: Whether workers are reused by the next ``launch``.
    keep_workers = True

    @property
    def process_group_settings(self) -> tuple[Any, ...]:
        """Settings of the process group; two strategies with equal settings can use the same workers."""
        settings = self._process_group_backend, self._timeout, self._process_group_options
        return *settings, self.num_nodes, self.parallel_devices

    @override
    def _setup_distributed(self) -> None:
        # `setup_environment` calls it in each process.
        assert self.cluster_environment is not None
        self._set_world_ranks()
        self._process_group_backend = process_group.start(
            self.cluster_environment,
            self._process_group_backend,
            self.root_device,
            self._timeout,
            self._process_group_options,
            self.num_nodes,
        )
        store = process_group.default_store() if self.world_size > 1 else None
        self._start_failure_monitor(self.global_rank, self.world_size, store, disconnect, DefaultGroupProgress())

    @override
    def setup_module(self, module: Module) -> DistributedDataParallel:
        """Wraps a module in DDP.

        Raises:
            ModelMismatchError: If another rank has a different module.
            ValueError: If no parameter of the module requires a gradient.
        """
        if self._ddp_kwargs.get("init_sync", True):
            check_same_model(self.collectives, module, self.root_device, is_trained=True)
        model = wrap_in_ddp(module, self.root_device, **self._ddp_kwargs)
        context = FeatureContext(
            options=self._gradient_sync,
            ddp_kwargs=self._ddp_kwargs,
            device=self.root_device,
            collectives=self.collectives,
            timeout=self._timeout,
        )
        Features().start(context, model)
        BackwardPasses(model)
        if any(True for _ in model.buffers()):
            self._models_with_buffers.append(model)
        return model

    @override
    def _sync_buffers_of_evaluation(self) -> None:
        for model in self._models_with_buffers:
            if model.will_sync_module_buffers():
                model._sync_buffers()
                model.require_forward_param_sync = False  # as after the first forward pass without gradients

    @override
    def explain_exception(self, exception: BaseException) -> BaseException:
        """Returns the exception to show; adds advice to DDP's error about unused parameters."""
        explain_unused_parameters(exception, self, "a step")
        return super().explain_exception(exception)

    def _get_root_device(self) -> torch.device:
        return self.root_device


class _BackwardSyncControl(strategy_parts.DDPBackwardSyncControl):
    """Disables the gradient exchange of backward passes, except the pass in which DDP records a static graph.

    The sum of gradients is the same: the mean over ranks of a mean is that mean.
    """

    @override
    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        must_exchange = isinstance(module, DistributedDataParallel) and records_graph(module)
        return super().no_backward_sync(module, enabled and not must_exchange)
