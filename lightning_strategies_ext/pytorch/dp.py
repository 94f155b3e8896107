"""DataParallelStrategy: one process, a replica of the module on each device, a part of each batch for each replica.

Name ``dp_ext`` (and ``dp``, which Lightning 2 has dropped). The Trainer runs a single process: loops, callbacks,
optimizers, and checkpoints work as on a single device. Only the four steps run on replicas (:mod:`.replication`); their
results, logged values, and updated metrics cover the whole batch.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy as LightningParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from lightning_strategies_ext._lightning import strategy_parts, trainer_logging, user_modules
from lightning_strategies_ext.arguments import check_plugins
from lightning_strategies_ext.checkpoints import atomic_checkpoint_io
from lightning_strategies_ext.pytorch.checks import check_layer_sync
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
from lightning_strategies_ext.torch_distributed import process_group

T = TypeVar("T")


@strategy_parts.refuse_compiled_module(
    "Pass the module without `torch.compile`, or use `strategy='ddp_ext'`, which trains compiled modules."
)
class DataParallelStrategy(LightningParallelStrategy):
    """Single-process data parallelism.

    Args:
        accelerator: Accelerator; from ``Trainer(accelerator=...)`` if None.
        parallel_devices: One device per replica, the CPU any number of times; from ``Trainer(devices=...)`` if None.
        checkpoint_io: Plugin that writes and reads checkpoints.
        precision_plugin: Precision plugin; from ``Trainer(precision=...)`` if None.
        scatter: Function that splits batches without a first dimension to split. ``scatter(batch, num_replicas)``
            returns at most ``num_replicas`` pairs of a part and its number of samples.
        sequential: Whether replicas run one after the other. By default, they do on the CPU only: all threads share
            torch's CPU random generator, so that dropout in concurrent replicas would not be reproducible.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``parallel_devices`` does not support replicas.

    Example::

        trainer = Trainer(strategy="dp_ext", accelerator="gpu", devices=4)
        trainer.fit(model)
    """

    strategy_name = "dp_ext"

    @rejects_old_names
    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        scatter: Scatter | None = None,
        sequential: bool | None = None,
    ) -> None:
        check_plugins(accelerator, None, checkpoint_io)
        if precision_plugin is not None and not isinstance(precision_plugin, Precision):
            raise TypeError(f"`precision_plugin` must be a Precision of lightning.pytorch, got {precision_plugin!r}.")
        check_replica_devices(parallel_devices)
        check_scatter(scatter, sequential)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=None,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._scatter = scatter
        self._sequential = sequential
        self._num_nodes = 1
        self._has_hidden_group = False

    checkpoint_io = atomic_checkpoint_io

    register_strategies = register_strategies
    __repr__ = describe

    @property
    @override
    def root_device(self) -> torch.device:
        """Device of the module itself, of which the replicas are copies."""
        if not self.parallel_devices:
            raise RuntimeError("The devices are not known yet. Pass the strategy to a Trainer first.")
        return self.parallel_devices[0]

    @property
    def is_distributed(self) -> bool:
        """False: for the Trainer there is one process, with whole batches."""
        return False

    @property
    @override
    def distributed_sampler_kwargs(self) -> None:  # type: ignore[override]
        """None: batches are split, not the dataset."""
        return

    @property
    @override
    def world_size(self) -> int:
        """1: there is one process."""
        return 1

    @property
    def num_nodes(self) -> int:
        """1: there is one host."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        check_single_process(num_nodes, None)
        self._num_nodes = num_nodes

    @override
    def _configure_launcher(self) -> None:
        # The Trainer's constructor calls it last: all settings are known, and nothing has started.
        check_single_process(self._num_nodes, self.cluster_environment)
        check_replica_devices(self.parallel_devices)

    # --- setup ---

    @override
    def setup_environment(self) -> None:
        """Prepares the root device, and hides an existing default process group during the stage."""
        self._has_hidden_group = process_group.hide_default_group()
        super().setup_environment()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Prepares the module for the stage.

        Raises:
            ValueError: If the module cannot be replicated, or a plugin requires several processes.
        """
        assert self.lightning_module is not None
        layer_sync = strategy_parts.layer_sync(self)
        check_layer_sync(layer_sync, "between processes, but `strategy='dp_ext'` is one process", "")
        for name in ("training_step", "validation_step", "test_step", "predict_step"):
            step = getattr(self.lightning_module, name)
            if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
                raise ValueError(
                    f"`{name}(self, dataloader_iter)` fetches its batches itself, but `strategy='dp_ext'` splits"
                    f" batches that the Trainer fetches. Use `{name}(self, batch, batch_idx)`, or"
                    " `strategy='ddp_ext'`."
                )
        trainer_logging.prepare_logging(trainer, None)
        super().setup(trainer)

    @override
    def model_to_device(self) -> None:
        """Moves the module to the root device."""
        assert self.model is not None
        self.model.to(self.root_device)

    @override
    def _setup_model(self, model: Module) -> ReplicatedModule:
        assert self.parallel_devices
        return ReplicatedModule(
            model,
            self.parallel_devices,
            self._scatter,
            self._sequential,
            sync_batchnorm=strategy_parts.layer_sync(self) is not None,
        )

    # --- steps ---

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Returns the batch unchanged; each replica moves its part to its device.

        If the module or data module overrides transfer hooks, they run once, with the whole batch and the root device.
        """
        module = self.lightning_module
        assert module is not None
        hooks = ("transfer_batch_to_device", "on_after_batch_transfer")
        sources = [module, *filter(None, [getattr(user_modules.trainer_of(module), "datamodule", None)])]
        is_whole = self.root_device.type == "cpu" or len(self.parallel_devices or ()) == 1
        if is_whole or any(_overrides(source, hook) for source in sources for hook in hooks):
            return super().batch_to_device(batch, device, dataloader_idx)
        return batch

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a training step on replicas; the loss covers the whole batch."""
        with self.precision_plugin.train_step_context():
            return self._run("training_step", args, kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a validation step on replicas."""
        with self.precision_plugin.val_step_context():
            return self._run("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a test step on replicas."""
        with self.precision_plugin.test_step_context():
            return self._run("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a predict step on replicas; predictions are in the order of the samples."""
        with self.precision_plugin.predict_step_context():
            return self._run("predict_step", args, kwargs)

    def _run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(self.model, ReplicatedModule):
            raise RuntimeError(
                f"`{method}` of the strategy runs on replicas, which exist only during a stage. Call it within a stage."
            )
        return self.model.run(method, *args, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """A no-op: each backward pass adds the gradients of replicas to those on the root device."""
        yield

    # --- collectives ---

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduces each tensor of a collection over its entries, one per replica; scalars stay unchanged.

        Raises:
            ValueError: If ``reduce_op`` is unknown.
        """
        return reduce_replicas(tensor, reduce_op)

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

    # --- teardown ---

    @override
    def teardown(self) -> None:
        """Ends the replicas' threads, unwraps the model, and moves it to the CPU. A second call is a no-op."""
        if isinstance(self.model, ReplicatedModule):
            self.model.close()
            self.model = self.lightning_module
        super().teardown()
        if self._has_hidden_group:
            self._has_hidden_group = False
            process_group.restore_default_group()


def legacy_dp(**kwargs: Any) -> DataParallelStrategy:
    """Creates the strategy for ``Trainer(strategy="dp")``, a name that Lightning 2 does not have."""
    rank_zero_info("`strategy='dp'` is provided by lightning-strategies-ext, and is the same as `strategy='dp_ext'`.")
    return DataParallelStrategy(**kwargs)


def _overrides(source: Any, hook: str) -> bool:
    parent = pl.LightningModule if isinstance(source, pl.LightningModule) else pl.LightningDataModule
    return is_overridden(hook, source, parent=parent)
