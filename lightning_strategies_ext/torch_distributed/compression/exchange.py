"""What a strategy asks of a compression while it trains, and which one that is."""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_strategies_ext.torch_distributed.compression.gradients import CompressedGradients
from lightning_strategies_ext.torch_distributed.compression.models import LocalModels
from lightning_strategies_ext.torch_distributed.compression.options import Compression, LocalSGD


class CompressedExchange(Protocol):
    """The exchange of one model in DDP.

    Attributes:
        num_bytes: What this rank has handed over so far: of several ranks per host, what goes between hosts.
    """

    num_bytes: int

    def attach(self, optimizers: Iterable[Optimizer]) -> None:
        """Begins to look after the optimizers of the model."""

    def hook(self, state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        """Averages a bucket of gradients; for ``register_comm_hook``."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after each step of an optimizer."""

    def follow(self) -> None:
        """Goes on when other parameters need gradients, and DDP was made anew; models do not differ then."""

    def bring_models_together(self, averages: Iterable[Module]) -> None:
        """Gives all ranks the same model, if theirs differ, and the same averages of it; called by all together."""

    def state_dict(self) -> dict[str, Any]:
        """What stays from step to step, as a whole, with which all ranks go on; called by all together."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave, on this number of ranks or another."""

    def close(self) -> None:
        """Leaves the groups of the exchange. A second call does no harm."""


def begin(
    compression: Compression, model: DistributedDataParallel, timeout: timedelta | None = None
) -> CompressedExchange | None:
    """Makes the exchange of a model; called by all ranks of the default group together.

    Args:
        compression: What is exchanged.
        model: In DDP.
        timeout: Of the collectives; torch's default if None.

    Returns:
        None for a rank that has nobody to exchange gradients with.
    """
    if isinstance(compression, LocalSGD):
        return LocalModels(model, compression, timeout)
    return CompressedGradients(model, compression, timeout) if dist.get_world_size() > 1 else None
