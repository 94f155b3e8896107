"""Compressed exchanges under the Trainer: when models are averaged, and the exchange's state in checkpoints."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from lightning_strategies_ext._lightning import user_modules
from lightning_strategies_ext.torch_distributed.compression.compressed_exchange import CompressedExchange
from lightning_strategies_ext.torch_distributed.compression.config import BFloat16, Compression, Float16

if TYPE_CHECKING:
    from lightning_strategies_ext.pytorch.parallel import ParallelStrategy as _Base
else:
    _Base = object

#: Key of the exchange's state in the first optimizer's state; torch's optimizers ignore further keys.
_KEY = "lightning_strategies_ext.compression"


class Compressed(_Base):
    """Mixin that manages a compressed exchange, if there is one; precedes the strategy among the base classes.

    Attributes:
        exchange_state: Final state of the exchange of the last ``fit``, for checkpoints that are saved after it.
    """

    _compressed: CompressedExchange | None = None
    exchange_state: dict[str, Any] | None = None
    _restored: Mapping[str, Any] | None = None

    @property
    @override
    def num_bytes_exchanged(self) -> int | None:
        """Bytes that this rank has passed to a compressed exchange so far; None without compression."""
        return None if self._compressed is None else self._compressed.num_bytes

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the module's state, after averaging the ranks' models if they differ. Collective."""
        self._bring_models_together()
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns an optimizer's state; the first also contains the exchange's. Collective with compression."""
        state = None
        if optimizer is self.optimizers[0]:
            state = self.exchange_state
            if self._compressed is not None and self._world.local_collectives is None:
                state = self._compressed.state_dict()  # before the optimizer's, which it may change
        return {**super().optimizer_state(optimizer), **({_KEY: state} if state else {})}

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores the states of the optimizers and of the exchange; defers the latter until the exchange exists."""
        super().load_optimizer_state_dict(checkpoint)
        states = checkpoint["optimizer_states"]
        restored = states[0].get(_KEY) if states else None
        if self._compressed is None:
            self._restored = restored
        elif restored:
            self._compressed.load_state_dict(restored)

    @override
    def on_validation_start(self) -> None:
        """Averages the ranks' models, so that all ranks validate the same model."""
        super().on_validation_start()
        self._bring_models_together()

    @override
    def on_train_end(self) -> None:
        """Averages the ranks' models, so that all ranks end with the same model, and keeps the exchange's state."""
        super().on_train_end()
        self._bring_models_together()
        if self._compressed is not None and self._world.local_collectives is None:
            self.exchange_state = move_data_to_device(self._compressed.state_dict(), torch.device("cpu"))

    def _bring_models_together(self) -> None:
        if self._compressed is not None and self._world.local_collectives is None:
            assert self.lightning_module is not None
            self._compressed.average_models(_averages_of(self.lightning_module))

    def _begin_compression(self, exchange: CompressedExchange | None) -> None:
        self._end_compression()
        self._compressed, self.exchange_state = exchange, None
        if exchange is not None and self._restored:
            exchange.load_state_dict(self._restored)
        self._restored = None

    def _end_compression(self) -> None:
        if self._compressed is not None:
            self._compressed.close()
        self._compressed = None

    def _check_precision(self, compression: Compression | None) -> None:
        """Rejects stateful compressions if gradients are scaled: residuals of different scales do not add up.

        Raises:
            ValueError: If the compression is stateful and the precision plugin scales gradients.
        """
        precision = self.precision_plugin
        if compression is None or isinstance(compression, (BFloat16, Float16)):
            return
        if isinstance(precision, MixedPrecision) and precision.scaler is not None:
            raise ValueError(
                f"`compression={compression!r}` does not go with `precision={precision.precision!r}`, which scales"
                " gradients by a factor that each rank may change. Use `precision='bf16-mixed'`, or the compression"
                " 'bf16' or 'fp16'."
            )


def _averages_of(module: "pl.LightningModule") -> list[nn.Module]:
    """Returns averages of the model in callbacks such as `EMAWeightAveraging`; each rank updates its own."""
    trainer = user_modules.trainer_of(module)
    callbacks: list[pl.Callback] = [] if trainer is None else trainer.callbacks
    held = [value for callback in callbacks for value in vars(callback).values() if isinstance(value, nn.Module)]
    return [
        each for each in held if each is not module and (isinstance(each, AveragedModel) or type(each) is type(module))
    ]
