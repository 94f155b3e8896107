"""What is private in what users give to Lightning: modules, optimizers, metrics, generators of random numbers."""

from collections.abc import Iterable
from inspect import getclosurevars
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.fabric.utilities.optimizer import _optimizers_to_device

# The states of all generators of random numbers, which torch, numpy and Python have no common name for (2.5 to 2.6).
from lightning.fabric.utilities.seed import _collect_rng_states as random_states
from lightning.fabric.utilities.seed import _set_rng_states as set_random_states
from torchmetrics import Metric

__all__ = [
    "merging_of_metric",
    "move_optimizers",
    "random_states",
    "set_device",
    "set_random_states",
    "take_redirection",
    "trainer_of",
]


def set_device(module: torch.nn.Module, device: torch.device) -> None:
    """Sets what the property ``device`` of LightningModules and the like returns.

    The property has no setter, and ``module.to(device)`` would move the parameters too (2.5 to 2.6).
    """
    if isinstance(module, _DeviceDtypeModuleMixin):
        module._device = device


def take_redirection(module: torch.nn.Module) -> str | None:
    """The method that Fabric wants called in place of ``forward``, or None; ``forward`` is itself again then.

    For ``fabric_module.training_step(...)`` and methods given to ``mark_forward_method``, Fabric sets ``forward`` of
    the user's module to a function that calls the method of that module (2.5 to 2.6: ``_FabricModule.
    _redirection_through_forward``). A replica must call its own, so the name is read from the function's closure.
    """
    forward = vars(module).get("forward")
    if getattr(forward, "__qualname__", "") != "_FabricModule._redirection_through_forward.<locals>.wrapped_forward":
        return None
    found = getclosurevars(forward).nonlocals  # type: ignore[arg-type]
    module.forward = found["original_forward"]
    return str(found["method_name"])


def trainer_of(module: Any) -> Any:
    """The Trainer that a LightningModule is attached to, or None.

    The public property ``LightningModule.trainer`` raises when there is none, which is what a teardown after an early
    exception meets (2.5 to 2.6).
    """
    return module._trainer


def move_optimizers(optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> None:
    """Moves the state of optimizers to ``device``.

    Lightning has no public function for it; a state dict round trip would copy more (2.5 to 2.6).
    """
    _optimizers_to_device(list(optimizers), device)


def merging_of_metric(metric: Metric) -> dict[str, Any]:
    """How a metric makes one of what processes have, by state; ``_reductions`` tells it (torchmetrics 1.0 to 1.9)."""
    return dict(metric._reductions)
