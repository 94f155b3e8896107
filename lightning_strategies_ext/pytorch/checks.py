"""Checks of a stage before its processes start, and of the module before training."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BatchSizeFinder, Callback
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_strategies_ext import arguments
from lightning_strategies_ext.checks import ChecksOptions, check_can_skip, check_checks
from lightning_strategies_ext.elastic.arguments import check_elastic_compatible
from lightning_strategies_ext.torch_distributed.bucket_search import pop_auto
from lightning_strategies_ext.torch_distributed.compression.config import (
    Compression,
    CompressionName,
    is_stateless,
    resolve_compression,
)
from lightning_strategies_ext.torch_distributed.gradient_sync import GradientSyncOptions
from lightning_strategies_ext.torch_distributed.wrapping import check_ddp_kwargs, check_has_trainable_parameters
from lightning_strategies_ext.uneven.control import UnevenInputs

_PACKAGE = __name__.partition(".")[0]
_HOOKS_THAT_MAY_UNFREEZE = ("configure_model", "setup", "configure_callbacks")


def check_arguments(
    accelerator: Any, parallel_devices: Any, cluster_environment: Any, checkpoint_io: Any, precision_plugin: Any
) -> None:
    """Rejects invalid arguments that all strategies for several processes have.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``parallel_devices`` mixes device types, repeats a GPU, or contains an unavailable GPU.
    """
    arguments.check_plugins(accelerator, cluster_environment, checkpoint_io)
    if precision_plugin is not None and not isinstance(precision_plugin, Precision):
        raise TypeError(f"`precision_plugin` must be a Precision of lightning.pytorch, got {precision_plugin!r}.")
    arguments.check_devices(parallel_devices)


def resolve_exchange(
    ddp_kwargs: dict[str, Any],
    hook: tuple[Any, Any, Any, Any],
    compression: CompressionName | Compression | None,
    uneven_inputs: UnevenInputs,
    checks: ChecksOptions | None,
    *,
    is_elastic: bool,
) -> GradientSyncOptions:
    """Checks the arguments of the gradient exchange in DDP.

    Args:
        ddp_kwargs: Arguments of DistributedDataParallel, from which ``bucket_cap_mb="auto"`` is removed.
        hook: The arguments ``ddp_comm_state``, ``ddp_comm_hook``, ``ddp_comm_wrapper``, and ``model_averaging_period``.
        compression: Compression of the exchange.
        uneven_inputs: Reaction to different numbers of training batches.
        checks: Options of the checks during ``fit``.
        is_elastic: Whether ranks may change during ``fit``.

    Returns:
        Configuration of the exchange.

    Raises:
        TypeError: If an argument is unknown or has the wrong type.
        ValueError: If a value or a combination of values is invalid.
    """
    check_ddp_kwargs(ddp_kwargs, may_search=True)
    others = {"ddp_comm_hook": hook[1], "compression": compression, "uneven_inputs": uneven_inputs}
    tunes_buckets = pop_auto(ddp_kwargs, **others)
    options = GradientSyncOptions(*hook, resolve_compression(compression), tunes_buckets)
    if is_elastic:  # first, because the next checks would recommend or name a mode that elastic training sets
        check_elastic_compatible(uneven_inputs, options.model_averaging_argument)
        check_checks(checks, is_elastic=True)
    options.check_compatible(ddp_kwargs, joins_uneven_inputs=uneven_inputs == "join")
    given = {name: ddp_kwargs.get(name) for name in ("static_graph", "process_group", "device_mesh")}
    given |= {"ddp_comm_hook": options.comm_hook, "uneven_inputs": uneven_inputs if uneven_inputs == "join" else None}
    conflicts = (f"{name}={value!r}" for name, value in given.items() if value)
    check_can_skip(checks, options.model_averaging_argument, *conflicts)
    return options


def check_callbacks(trainer: "pl.Trainer | None") -> None:
    """Rejects, before processes start, a callback that Lightning rejects later, in each process.

    Raises:
        MisconfigurationException: If a callback requires a single process.
    """
    if any(isinstance(callback, BatchSizeFinder) for callback in _callbacks_of(trainer)):
        raise MisconfigurationException(  # as in Lightning
            "`BatchSizeFinder` (`Tuner.scale_batch_size`) tries batch sizes in one process, but this strategy has"
            " several. Find the size with `Trainer(strategy='auto', devices=1)`, or for all devices with"
            " `strategy='dp_ext'`, and train with that size and without the callback."
        )


def check_fit(
    trainer: "pl.Trainer | None", module: "pl.LightningModule | None", layer_sync: Any, device: torch.device
) -> None:
    """Rejects, before processes start, a ``fit`` that would fail in each process.

    It checks only properties that no hook can still change.

    Args:
        trainer: The Trainer; None without a stage.
        module: Module of the stage.
        layer_sync: LayerSync plugin of the strategy, or None.
        device: Device of a rank.

    Raises:
        MisconfigurationException: If a callback requires a single process.
        ValueError: If no parameter of the module requires a gradient, or if batch normalization would be synchronized
            between CPUs.
    """
    check_callbacks(trainer)
    if trainer is None or module is None or trainer.state.fn != TrainerFn.FITTING:
        return
    check_batch_norm(module, device, layer_sync)
    if not may_unfreeze(module, trainer):
        check_has_trainable_parameters(module)


def check_batch_norm(module: Module, device: torch.device, layer_sync: Any) -> None:
    """Rejects synchronized batch normalization on CPUs: the layers of torch and Horovod support GPUs only.

    Args:
        module: Module to train; a module without batch normalization is accepted.
        device: Device of this rank.
        layer_sync: LayerSync plugin of the strategy; only torch's is checked.

    Raises:
        ValueError: If the module has batch normalization and the device is a CPU.
    """
    if not isinstance(layer_sync, TorchSyncBatchNorm):
        return
    if device.type == "cpu" and any(isinstance(layer, _BatchNorm) for layer in module.modules()):
        raise ValueError(
            "`sync_batchnorm=True` requires GPUs: neither torch's SyncBatchNorm nor Horovod's supports CPUs, but"
            f" {type(module).__name__} has batch normalization. Omit the argument, or use `accelerator='gpu'`."
        )


def check_layer_sync(layer_sync: Any, behavior: str, condition: str) -> None:
    """Rejects a plugin that synchronizes layers otherwise than the strategy supports.

    Args:
        layer_sync: LayerSync plugin of the strategy, or None.
        behavior: How the plugin synchronizes layers, and why that fails.
        condition: Where ``Trainer(sync_batchnorm=True)`` works, for the message.

    Raises:
        ValueError: If the plugin is not torch's.
    """
    if layer_sync is not None and not isinstance(layer_sync, TorchSyncBatchNorm):
        raise ValueError(
            f"`plugins=[{type(layer_sync).__name__}(...)]` synchronizes layers {behavior}. For batch normalization, use"
            f" `Trainer(sync_batchnorm=True)`{condition}."
        )


def check_precision(compression: Compression | None, precision: Precision) -> None:
    """Rejects stateful compressions if gradients are scaled: residuals of different scales do not add up.

    Raises:
        ValueError: If the compression is stateful and the precision plugin scales gradients.
    """
    if is_stateless(compression) or not isinstance(precision, MixedPrecision) or precision.scaler is None:
        return
    raise ValueError(
        f"`compression={compression!r}` cannot be combined with `precision={precision.precision!r}`, which scales"
        " gradients by a factor that each rank may change. Use `precision='bf16-mixed'`, or the compression 'bf16' or"
        " 'fp16'."
    )


def may_unfreeze(module: "pl.LightningModule", trainer: "pl.Trainer") -> bool:
    """Returns whether a hook may unfreeze parameters before training. Lightning's and our callbacks do not."""
    if any(is_overridden(hook, module) for hook in _HOOKS_THAT_MAY_UNFREEZE):
        return True
    return any(
        is_overridden("setup", callback, Callback)
        for callback in _callbacks_of(trainer)
        if type(callback).__module__.partition(".")[0] not in (pl.__name__.partition(".")[0], _PACKAGE)
    )


def _callbacks_of(trainer: "pl.Trainer | None") -> list[Callback]:
    return getattr(trainer, "callbacks", [])
