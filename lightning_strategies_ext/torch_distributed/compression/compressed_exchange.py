"""Interface of a compressed exchange for strategies, and the choice of its implementation."""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_strategies_ext.torch_distributed.compression.compressed_gradients import CompressedGradients
from lightning_strategies_ext.torch_distributed.compression.config import Compression, LocalSGD
from lightning_strategies_ext.torch_distributed.compression.local_sgd import LocalSGDExchange


class CompressedExchange(Protocol):
    """Compressed exchange of one model in DDP.

    Attributes:
        num_bytes: Bytes that this rank has passed to collectives so far; with several ranks per host, only bytes
            between hosts.
    """

    num_bytes: int

    def attach(self, optimizers: Iterable[Optimizer]) -> None:
        """Registers the optimizers of the model."""

    def hook(self, state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        """Averages a bucket of gradients; for ``register_comm_hook``."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Updates the exchange after a step of an optimizer."""

    def on_ddp_rebuilt(self) -> None:
        """Continues with other trainable parameters, after DDP was initialized again; the models are equal then."""

    def average_models(self, averages: Iterable[Module]) -> None:
        """Averages the models of all ranks, and their averages, if they differ. Collective: all ranks call it.

        Args:
            averages: Modules that hold averages of the model.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all ranks, with which all ranks continue. Collective: all ranks call it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state that :meth:`state_dict` has returned, on any number of ranks."""

    def close(self) -> None:
        """Leaves the process groups of the exchange. A second call is a no-op."""


def create_exchange(
    compression: Compression, model: DistributedDataParallel, timeout: timedelta | None = None
) -> CompressedExchange | None:
    """Creates the exchange of a model. Collective: all ranks of the default group call it.

    Args:
        compression: Compression of the exchange.
        model: Model in DDP.
        timeout: Timeout of the collectives; torch's default if None.

    Returns:
        The exchange; None for gradients of a single rank.
    """
    if isinstance(compression, LocalSGD):
        return LocalSGDExchange(model, compression, timeout)
    return CompressedGradients(model, compression, timeout) if dist.get_world_size() > 1 else None
