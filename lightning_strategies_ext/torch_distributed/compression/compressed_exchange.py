"""Interface of a compressed exchange, and the feature that manages the exchange of a model in DDP."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Self, override

from lightning_strategies_ext.torch_distributed.compression.compressed_gradients import CompressedGradients
from lightning_strategies_ext.torch_distributed.compression.config import Compression, LocalSGD
from lightning_strategies_ext.torch_distributed.compression.local_sgd import LocalSGDExchange
from lightning_strategies_ext.torch_distributed.feature import Feature, FeatureContext
from lightning_strategies_ext.torch_distributed.gradient_exchange import register_hook


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
        """Continues with other trainable parameters, after DDP was rebuilt; the models are equal then."""

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


class CompressionFeature(Feature):
    """Compressed exchange of a model, from the creation of DDP to the end of training.

    The exchange is another object, without a reference to the strategy: DDP holds the hook in C++ objects, which would
    keep the strategy and its model alive.

    Args:
        compression: Compression of the exchange.
        context: The parts of the strategy that the feature uses.
    """

    state_key = "lightning_strategies_ext.compression"

    def __init__(self, compression: Compression, context: FeatureContext) -> None:
        self._compression = compression
        self._context = context
        self._exchange: CompressedExchange | None = None

    @classmethod
    def create(cls, context: FeatureContext) -> Self | None:
        """Returns the feature, or None if it is not in use."""
        return None if context.options.compression is None else cls(context.options.compression, context)

    @property
    @override
    def num_bytes_exchanged(self) -> int | None:
        return None if self._exchange is None else self._exchange.num_bytes

    @override
    def wrap(self, model: DistributedDataParallel) -> None:
        self._exchange = create_exchange(self._compression, model, self._context.timeout)
        self._register_hook(model)

    @override
    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        if self._exchange is not None:
            self._exchange.attach(optimizers)

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._exchange is not None:
            self._exchange.load_state_dict(state)

    @override
    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        if self._exchange is not None:
            self._exchange.after_step(optimizer)

    @override
    def after_rebuild(self, model: DistributedDataParallel) -> None:
        self._register_hook(model)
        if self._exchange is not None:
            self._exchange.on_ddp_rebuilt()

    @override
    def synchronize(self) -> None:
        """Averages the models of the ranks, and their averages in callbacks, if they differ."""
        if self._exchange is not None:
            self._exchange.average_models(self._context.averages_of_model())

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._exchange is None else self._exchange.state_dict()

    @override
    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = None

    def _register_hook(self, model: DistributedDataParallel) -> None:
        hook = None if self._exchange is None else self._exchange.hook
        register_hook(model, hook, None, self._context.contribution)
