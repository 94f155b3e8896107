"""State that a training step changes besides weights and gradients: metrics, values logged per epoch, buffers."""

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torchmetrics import Metric

from lightning_strategies_ext._lightning import trainer_logging


class StepStateSnapshot:
    """Copy of this state, as of its creation.

    Args:
        trainer: The Trainer, in ``fit``.
    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        self._trainer = trainer
        # Keys are ids, because the hash of a metric depends on its state.
        self._metrics = {id(metric): (metric, _copied(metric.metric_state)) for metric in self._metrics_now()}
        self._position = trainer_logging.logging_position(trainer)
        self._buffers = [(buffer, buffer.clone()) for buffer in trainer.lightning_module.buffers()]

    def restore(self) -> None:
        """Restores the saved metrics, logged values, and buffers. Metrics created since are reset."""
        for metric in self._metrics_now():
            if id(metric) not in self._metrics:
                metric.reset()
                trainer_logging.keep_key(metric)
        for metric, states in self._metrics.values():
            for name, state in _copied(states).items():
                setattr(metric, name, state)
        trainer_logging.set_logging_position(self._trainer, self._position)
        for buffer, value in self._buffers:
            # `data` bypasses autograd, which may need the overwritten values for the gradients of a shadowed step.
            buffer.data.copy_(value)

    def _metrics_now(self) -> Iterator[Metric]:
        yield from trainer_logging.logged_per_epoch(self._trainer)
        for module in self._trainer.lightning_module.modules():
            if isinstance(module, Metric):
                yield module


def _copied(states: dict[str, list[Tensor] | Tensor]) -> dict[str, Any]:
    return {name: list(state) if isinstance(state, list) else state.clone() for name, state in states.items()}
