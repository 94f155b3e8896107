"""Private names for objects of users: modules, optimizers, metrics, random number generators."""

from collections.abc import Iterable
from inspect import getclosurevars
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.fabric.utilities.optimizer import _optimizers_to_device

# States of all random number generators, of torch, NumPy and Python (2.5 to 2.6).
from lightning.fabric.utilities.seed import _collect_rng_states as random_states
from lightning.fabric.utilities.seed import _set_rng_states as set_random_states
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim.swa_utils import AveragedModel
from torchmetrics import Metric

__all__ = [
    "averages_of_model",
    "metric_reductions",
    "move_optimizers",
    "random_states",
    "set_device",
    "set_random_states",
    "pop_forward_redirection",
    "synchronizes_itself",
    "trainer_of",
    "unwrapped_optimizers",
]


def set_device(module: torch.nn.Module, device: torch.device) -> None:
    """Sets the value of the property ``device`` of a LightningModule or similar class.

    The property has no setter, and ``module.to(device)`` would also move the parameters (2.5 to 2.6).
    """
    if isinstance(module, _DeviceDtypeModuleMixin):
        module._device = device


def pop_forward_redirection(module: torch.nn.Module) -> str | None:
    """Restores ``forward``, and returns the name of the method that Fabric has redirected it to; None if it has not.

    For ``fabric_module.training_step(...)`` and methods passed to ``mark_forward_method``, Fabric replaces ``forward``
    of the user's module. The replacement calls the method of that module, from its closure (2.5 to 2.6:
    ``_FabricModule._redirection_through_forward``). A replica must call its own method, so it needs the name.
    """
    forward = vars(module).get("forward")
    if getattr(forward, "__qualname__", "") != "_FabricModule._redirection_through_forward.<locals>.wrapped_forward":
        return None
    found = getclosurevars(forward).nonlocals  # type: ignore[arg-type]
    module.forward = found["original_forward"]
    return str(found["method_name"])


def trainer_of(module: Any) -> Any:
    """Returns the Trainer to which a LightningModule is attached; None for none, or without a module.

    The public property ``LightningModule.trainer`` raises without a Trainer, for example in the teardown after an early
    exception (2.5 to 2.6).
    """
    return None if module is None else module._trainer


def averages_of_model(module: Any) -> list[torch.nn.Module]:
    """Returns averages of a LightningModule in callbacks such as `EMAWeightAveraging`; each rank updates its own."""
    trainer = trainer_of(module)
    callbacks = [] if trainer is None else trainer.callbacks
    callback_values = [value for callback in callbacks for value in vars(callback).values() if value is not module]
    return [value for value in callback_values if isinstance(value, AveragedModel) or type(value) is type(module)]


def move_optimizers(optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> None:
    """Moves the state of optimizers to ``device``.

    Lightning has no public function for this; ``state_dict`` and ``load_state_dict`` would copy more (2.5 to 2.6).
    """
    _optimizers_to_device(list(optimizers), device)


def unwrapped_optimizers(optimizers: Iterable[Any]) -> list[torch.optim.Optimizer]:
    """Returns torch's optimizers, also those that Lightning has wrapped in ``LightningOptimizer``."""
    return [each.optimizer if isinstance(each, LightningOptimizer) else each for each in optimizers]


def metric_reductions(metric: Metric) -> dict[str, Any]:
    """Returns the reduction of each state of a metric over processes, ``_reductions`` (torchmetrics 1.0 to 1.9)."""
    return dict(metric._reductions)


def synchronizes_itself(metric: Metric) -> bool:
    """Whether a metric overrides how its states are synchronized, as ``MeanAveragePrecision`` does.

    ``Metric.sync`` calls ``_sync_dist``, and no public method that a subclass overrides (torchmetrics 1.0 to 1.9).
    """
    return type(metric)._sync_dist is not Metric._sync_dist
