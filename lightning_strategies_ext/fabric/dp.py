"""DataParallelStrategy for Fabric: ``Fabric(strategy="dp_ext")``."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies import DataParallelStrategy as FabricDataParallelStrategy
from torch import Tensor
from torch.nn import DataParallel, Module
from typing_extensions import override

from lightning_strategies_ext._lightning import strategy_parts
from lightning_strategies_ext.arguments import check_plugins
from lightning_strategies_ext.checkpoints import atomic_checkpoint_io
from lightning_strategies_ext.registry import describe, register_strategies
from lightning_strategies_ext.renamed import rejects_old_names
from lightning_strategies_ext.replication.gathering import reduce_replicas
from lightning_strategies_ext.replication.module import (
    ReplicatedModule,
    Scatter,
    check_replica_devices,
    check_scatter,
    check_single_process,
)

T = TypeVar("T")


class DataParallelStrategy(FabricDataParallelStrategy):
    """Single-process data parallelism under Fabric.

    Args:
        accelerator: Accelerator; from ``Fabric(accelerator=...)`` if None.
        parallel_devices: One device per replica, the CPU any number of times; from ``Fabric(devices=...)`` if None.
        checkpoint_io: Plugin that writes and reads checkpoints.
        precision: Precision plugin; from ``Fabric(precision=...)`` if None.
        scatter: Function that splits the first input of the module if it has no first dimension to split.
            ``scatter(batch, num_replicas)`` returns at most ``num_replicas`` pairs of a part and its number of samples.
        sequential: Whether replicas run one after the other; by default, only on the CPU.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``parallel_devices`` does not support replicas.

    Example::

        fabric = Fabric(strategy="dp_ext", accelerator="gpu", devices=4)
        model, optimizer = fabric.setup(model, optimizer)
    """

    @rejects_old_names
    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        scatter: Scatter | None = None,
        sequential: bool | None = None,
    ) -> None:
        check_plugins(accelerator, None, checkpoint_io)
        if precision is not None and not isinstance(precision, Precision):
            raise TypeError(f"`precision` must be a Precision of lightning.fabric, got {precision!r}.")
        check_replica_devices(parallel_devices)
        check_scatter(scatter, sequential)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            checkpoint_io=checkpoint_io,
            precision=precision,
        )
        self._scatter = scatter
        self._sequential = sequential
        self._num_nodes = 1
        self._backward_sync_control = _NoBackwardSync()

    checkpoint_io = atomic_checkpoint_io

    register_strategies = register_strategies
    __repr__ = describe

    @property
    @override
    def root_device(self) -> torch.device:
        """Device of the modules themselves, of which the replicas are copies."""
        if not self.parallel_devices:
            raise RuntimeError("The devices are not known yet. Pass the strategy to Fabric first.")
        return self.parallel_devices[0]

    @property
    @override
    def distributed_sampler_kwargs(self) -> None:
        """None: batches are split, not the dataset."""
        return

    @property
    @override
    def world_size(self) -> int:
        """1: there is one process."""
        return 1

    @property
    def num_nodes(self) -> int:
        """Number of hosts; only 1 is supported."""
        return self._num_nodes

    @override
    def _configure_launcher(self) -> None:
        # Fabric's constructor calls it last: all settings are known, and nothing has started.
        check_single_process(self._num_nodes, self.cluster_environment)
        check_replica_devices(self.parallel_devices)

    @override
    def setup_module(self, module: Module) -> ReplicatedModule:
        """Wraps a module so that its calls run on replicas.

        Raises:
            ValueError: If the module cannot be replicated.
        """
        assert self.parallel_devices
        return ReplicatedModule(module, self.parallel_devices, self._scatter, self._sequential)

    @override
    def module_to_device(self, module: Module) -> None:
        """Moves a module to the root device."""
        module.to(self.root_device)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None) -> Any:
        """Returns the batch unchanged; each replica moves its part to its device."""
        return batch

    @override
    def all_reduce(self, collection: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduces each tensor of a collection over its entries, one per replica; see :func:`.reduce_replicas`.

        Raises:
            ValueError: If ``reduce_op`` is unknown.
        """
        return reduce_replicas(collection, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Returns the tensor: there is one process."""
        return tensor

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        """Returns the object: there is one process."""
        return obj

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """A no-op: there is one process."""

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns the decision: there is one process."""
        return decision

    @override
    def get_module_state_dict(self, module: Module) -> dict[str, Any | Tensor]:
        """Returns the state of the module itself, without a wrapper's prefix."""
        return _unwrapped(module).state_dict()

    @override
    def load_module_state_dict(self, module: Module, state_dict: dict[str, Any | Tensor], strict: bool = True) -> None:
        """Loads a state without a wrapper's prefix into the module itself.

        Raises:
            RuntimeError: If shapes differ or, with ``strict``, if names differ.
        """
        _unwrapped(module).load_state_dict(state_dict, strict=strict)


class _NoBackwardSync(strategy_parts.BackwardSyncControl):
    """A no-op: each backward pass adds the gradients of replicas on the root device, without an exchange."""

    @override
    def no_backward_sync(self, module: Module, enabled: bool = True) -> AbstractContextManager[None]:
        return nullcontext()


def _unwrapped(module: Module) -> Module:
    return module.module if isinstance(module, DataParallel) else module
