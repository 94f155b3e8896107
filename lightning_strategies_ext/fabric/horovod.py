"""HorovodStrategy for Fabric: ``Fabric(strategy="horovod_ext")``."""

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.utilities.seed import reset_seed
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_strategies_ext._lightning import strategy_parts
from lightning_strategies_ext.arguments import (
    DEFAULT_HANG_TIMEOUT,
    check_devices,
    check_not_interactive,
    check_plugins,
)
from lightning_strategies_ext.checks import ChecksOptions, check_flag
from lightning_strategies_ext.collectives.model_check import check_same_model
from lightning_strategies_ext.fabric.parallel import ParallelStrategy
from lightning_strategies_ext.horovod import environment, runtime
from lightning_strategies_ext.horovod.exchange_options import (
    HorovodCompression,
    HorovodExchangeOptions,
    check_exchanges_nothing,
)
from lightning_strategies_ext.horovod.gradient_exchange import HorovodGradientExchange
from lightning_strategies_ext.horovod.launcher import FabricHorovodLauncher
from lightning_strategies_ext.horovod.metrics import MetricSync
from lightning_strategies_ext.horovod.synchronize import HorovodProgress
from lightning_strategies_ext.renamed import rejects_old_names
from lightning_strategies_ext.torch_distributed.wrapping import check_has_trainable_parameters


class HorovodStrategy(ParallelStrategy):
    """Multi-process data parallelism over Horovod, under Fabric.

    Args:
        accelerator: Accelerator; from ``Fabric(accelerator=...)`` if None.
        parallel_devices: Devices of this host, one per process; from ``Fabric(devices=...)`` if None.
        checkpoint_io: Plugin that writes and reads checkpoints.
        precision: Precision plugin; from ``Fabric(precision=...)`` if None.
        compression: "none", or "fp16" to exchange gradients in float16.
        op: Reduction of the gradients: "average" or "sum". Only the Trainer supports "adasum".
        num_groups: Number of groups of parameters; the gradients of a group are exchanged together. 0 exchanges each
            gradient separately; None groups small gradients of adjacent parameters, up to 1 MiB.
        sparse_as_dense: Whether sparse gradients are converted to dense ones before the exchange.
        gradient_predivide_factor: Divisor f of the gradients before they are summed over n ranks; the sum is divided by
            n / f.
        process_set: Ranks that exchange gradients; all ranks if None.
        hang_timeout: Time that ranks wait in a collective for an inactive rank, in seconds or as a ``timedelta``. All
            ranks then exit with an error that contains their stacks. With None, ranks wait indefinitely.
        broadcast_buffers: Whether rank 0 broadcasts its buffers in every training step, as in DDP by default. Otherwise
            each rank trains with its own buffers, and receives rank 0's at the first call of a module after
            ``module.eval()``, and before a checkpoint. All ranks must make this call.
        checks: With ``ChecksOptions(check_collectives=True)``, ranks compare each collective of the strategy before it
            starts, for debugging. Fabric supports no other field.

    Raises:
        RuntimeError: If Horovod is not installed, or not built for this torch; the message contains the command to run.
        TypeError: If an argument has the wrong type.
        ValueError: If a value or a combination of values is invalid.

    Example::

        fabric = Fabric(strategy="horovod_ext", devices=2)
    """

    @rejects_old_names
    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        compression: HorovodCompression = "none",
        op: str = "average",
        num_groups: int | None = None,
        sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0,
        process_set: Any = None,
        hang_timeout: float | timedelta | None = DEFAULT_HANG_TIMEOUT,
        broadcast_buffers: bool = False,
        checks: ChecksOptions | None = None,
    ) -> None:
        if op == "adasum":
            raise ValueError(
                "`op='adasum'` combines the steps of optimizers, which the user's loop calls under Fabric."
                " Use the Trainer, or another `op`."
            )
        self._options = HorovodExchangeOptions(
            compression,
            op,  # type: ignore[arg-type]
            num_groups,
            sparse_as_dense,
            gradient_predivide_factor,
            process_set,
        )
        check_flag("broadcast_buffers", broadcast_buffers)
        check_plugins(accelerator, None, checkpoint_io)
        check_devices(parallel_devices)
        if precision is not None and not isinstance(precision, Precision):
            raise TypeError(f"`precision` must be a Precision of lightning.fabric, got {precision!r}.")
        runtime.check_installed()
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=environment.environment_of_launcher(),
            checkpoint_io=checkpoint_io,
            precision=precision,
            hang_timeout=hang_timeout,
            checks=checks,
        )
        self._num_nodes = 1
        self._broadcast_buffers = broadcast_buffers
        self._exchanges: list[HorovodGradientExchange] = []
        self._buffers: list[_Buffers] = []
        self._backward_sync = _HorovodBackwardSync()
        self._backward_sync_control = self._backward_sync

        from lightning_strategies_ext.horovod.collectives import HorovodCollectives  # needs Horovod

        self.collectives = HorovodCollectives(lambda: self.root_device)

    @property
    def num_processes(self) -> int:
        """Number of ranks on this host."""
        return environment.num_processes(self.parallel_devices or [], self.cluster_environment)

    @property
    def num_nodes(self) -> int:
        """Number of hosts, from ``Fabric(num_nodes=...)``."""
        return self._num_nodes

    @property
    @override
    def root_device(self) -> torch.device:
        """Device of this rank."""
        if not self.parallel_devices:
            raise RuntimeError("The devices are not known yet. Pass the strategy to Fabric first.")
        return environment.device_of_rank(self.parallel_devices, self.local_rank)

    @override
    def _configure_launcher(self) -> None:
        # Fabric's constructor calls it last: all settings are known, and nothing has started.
        assert self.cluster_environment is not None
        check_not_interactive("`strategy='horovod_ext'`")
        environment.check_num_nodes(self._num_nodes, self.cluster_environment)
        environment.set_launch_size(self.parallel_devices or [], self.cluster_environment)
        self._launcher = FabricHorovodLauncher(self)

    @override
    def setup_environment(self) -> None:
        """Prepares the device and joins the other ranks; returns when all ranks have joined.

        Raises:
            RuntimeError: If this process has joined other ranks before, or Horovod does not support the device.
        """
        assert self.cluster_environment is not None
        super().setup_environment()
        reset_seed()
        launch = environment.launch_info_from(self.cluster_environment, self.num_processes)
        runtime.start(launch, self.root_device, self._options.process_set)
        from lightning_strategies_ext.horovod.collectives import HorovodCollectives  # needs Horovod

        device = self.root_device
        collectives = HorovodCollectives(lambda: device)  # without a reference to the strategy
        MetricSync(lambda: collectives)  # until the process exits, as with a process group
        store = runtime.store() if self.world_size > 1 else None
        self._start_failure_monitor(
            self.global_rank, self.world_size, store, runtime.abort_collectives, HorovodProgress()
        )

    @override
    def setup_module(self, module: Module) -> Module:
        """Broadcasts rank 0's weights of a module, and starts the exchange of its gradients.

        Raises:
            ModelMismatchError: If another rank has a different module.
            ValueError: If no parameter of the module requires a gradient.
        """
        check_has_trainable_parameters(module)
        check_same_model(self.collectives, module, self.root_device, is_trained=True)
        self.collectives.broadcast_module(module)
        exchange = HorovodGradientExchange(module, self._options, f"gradient.{len(self._exchanges)}", self._exchanges)
        self._exchanges.append(exchange)
        wrapped = _Wrapped(module)
        self._backward_sync.exchanges[id(wrapped)] = exchange
        if any(True for _ in module.buffers()):
            buffers = _Buffers(module, exchange, self.collectives, self._options.process_set, self._broadcast_buffers)
            self._buffers.append(buffers)
            wrapped.register_forward_pre_hook(buffers)
        return wrapped

    @override
    def _sync_buffers_of_evaluation(self) -> None:
        for buffers in self._buffers:
            buffers.broadcast()

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Returns the optimizer.

        Raises:
            TypeError: If ``horovod.torch.DistributedOptimizer`` has wrapped the optimizer.
        """
        check_exchanges_nothing(optimizer, type(self).__name__)
        return super().setup_optimizer(optimizer)

    @override
    def save_checkpoint(self, path: Any, state: Any, storage_options: Any | None = None, filter: Any = None) -> None:
        """Writes a checkpoint on rank 0, and broadcasts the buffers of rank 0.

        Args:
            path: Path of the file.
            state: Objects to save.
            storage_options: Options of the checkpoint plugin.
            filter: Filter of :meth:`lightning.fabric.Fabric.save`.
        """
        super().save_checkpoint(path, state, storage_options, filter)
        for buffers in self._buffers:
            buffers.broadcast()

    @override
    def module_to_device(self, module: Module) -> None:
        """Moves a module to the device of this rank."""
        module.to(self.root_device)

    @override
    def backward(self, tensor: Tensor, module: Module | None = None, *args: Any, **kwargs: Any) -> None:
        """Runs the backward pass and waits for the exchange of its gradients."""
        if self._exchanges:
            self._exchanges[0].begin(tensor)
        super().backward(tensor, module, *args, **kwargs)
        for exchange in self._exchanges:
            exchange.finish()


class _Wrapped(Module):
    """Wrapper of the user's module, like DDP.

    Fabric runs methods such as ``training_step`` through the call of the wrapper, and only if there is a wrapper.
    """

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    @override
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)


class _Buffers:
    """Broadcasts the buffers of rank 0, as a hook that runs before a module's forward pass.

    Args:
        module: The module.
        exchange: Exchange of the module's gradients.
        collectives: Collectives of all ranks.
        process_set: Ranks that exchange gradients; all ranks if None.
        broadcasts_in_steps: Whether to broadcast before training steps, too, and not only before evaluations.
    """

    def __init__(
        self,
        module: Module,
        exchange: HorovodGradientExchange,
        collectives: Any,
        process_set: Any,
        broadcasts_in_steps: bool,
    ) -> None:
        self._module = module
        self._exchange = exchange
        self._collectives = collectives
        self._process_set = process_set
        self._broadcasts_in_steps = broadcasts_in_steps
        self._are_stale = True  # whether the buffers may differ between ranks
        self._was_in_no_sync = False

    def __call__(self, wrapped: Module, args: Any) -> None:
        if not self._module.training:
            self.broadcast()
            return
        if self._broadcasts_in_steps and not self._was_in_no_sync:  # as in DDP
            self._collectives.broadcast_buffers(self._module, self._process_set, is_known_to_match=True)
        self._are_stale, self._was_in_no_sync = True, self._exchange.is_in_no_sync

    def broadcast(self) -> None:
        """Broadcasts the buffers unless they are equal since the last broadcast. Collective: all ranks call it."""
        if self._are_stale:
            self._collectives.broadcast_buffers(self._module, self._process_set)
        self._are_stale = False

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return _hook_of_copies, ()  # copies of the module, such as averages, belong to one rank


def _hook_of_copies() -> Any:
    return _no_op


def _no_op(module: Module, args: Any) -> None:
    """A no-op."""


class _HorovodBackwardSync(strategy_parts.BackwardSyncControl):
    """Disables the gradient exchange of one module."""

    def __init__(self) -> None:
        self.exchanges: dict[int, HorovodGradientExchange] = {}

    @override
    def no_backward_sync(self, module: Module, enabled: bool = True) -> AbstractContextManager[Any]:
        exchange = self.exchanges.get(id(module)) if enabled else None
        return nullcontext() if exchange is None else exchange.no_sync()
