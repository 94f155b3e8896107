"""Interface of features: optional parts of the gradient exchange of a model in DDP.

Each feature is a class in a file of its own, and a line of the table in :mod:`.features`, which creates the features
of a model and calls them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_strategies_ext.collectives import Collectives
from lightning_strategies_ext.torch_distributed.gradient_exchange import Contribution
from lightning_strategies_ext.torch_distributed.gradient_sync import GradientSyncOptions


@dataclass
class FeatureContext:
    """The parts of a strategy that the features of one model use.

    Attributes:
        options: Communication hook, compression, averaging of models, and search for the bucket size.
        ddp_kwargs: Arguments with which DDP is rebuilt.
        device: Device of this rank.
        collectives: Collectives of all ranks.
        contribution: Contribution of this rank to an exchange; None if all ranks always contribute.
        timeout: Timeout of collectives; torch's default if None.
        num_local_ranks: Number of ranks on this host.
        is_connected: Returns whether this rank takes part in collectives; it does not after a failure.
        averages_of_model: Returns the modules that hold averages of the model, such as those of callbacks.
        on_rebuild: Called after DDP was rebuilt.
        rebuild: The method :meth:`.Features.rebuild`, which creates DDP again for a model.
    """

    options: GradientSyncOptions
    ddp_kwargs: dict[str, Any]
    device: torch.device
    collectives: Collectives
    contribution: Contribution | None = None
    timeout: timedelta | None = None
    num_local_ranks: int = 1
    is_connected: Callable[[], bool] = lambda: True
    averages_of_model: Callable[[], Iterable[Module]] = tuple
    on_rebuild: Callable[[], None] = lambda: None
    rebuild: Callable[[DistributedDataParallel], None] = field(init=False)


class Feature:
    """Optional part of the gradient exchange of a model in DDP; a no-op except for the methods that it overrides.

    The methods are in the order in which a strategy of the Trainer calls them. Fabric calls only :meth:`wrap` and
    :meth:`after_rebuild`, because it has no hooks for the others.

    Attributes:
        state_key: Key of the feature's state in checkpoints; None without a state.
    """

    state_key: str | None = None

    @property
    def num_bytes_exchanged(self) -> int | None:
        """Bytes that this rank has passed to exchanges so far; None if they are not counted."""
        return None

    def wrap(self, model: DistributedDataParallel) -> None:
        """Starts the feature, after DDP was created. Collective: all ranks call it."""

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Receives the optimizers of the model, once they exist; in elastic training, features get none."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state that :meth:`state_dict` has returned, on any number of ranks."""

    def before_step(self) -> None:
        """Runs before each training step."""

    def before_backward(self, loss: Tensor) -> None:
        """Runs before each backward pass, also before passes that exchange nothing."""

    def after_backward(self) -> None:
        """Runs after each backward pass, also after passes that exchange nothing.

        A pass exchanges gradients if the model's ``require_backward_grad_sync`` is True. The user's
        ``on_after_backward`` has run before.
        """

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Runs after each step of an optimizer."""

    def after_rebuild(self, model: DistributedDataParallel) -> None:
        """Continues after DDP was rebuilt. Collective: all ranks call it."""

    def synchronize(self, averages: Iterable[Module]) -> None:
        """Makes the models of all ranks equal, before evaluations, checkpoints, and the end. Collective.

        Args:
            averages: Modules that hold averages of the model.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all ranks, with which all ranks continue. Collective: all ranks call it."""
        return {}

    def close(self) -> None:
        """Ends the feature. A second call is a no-op."""
