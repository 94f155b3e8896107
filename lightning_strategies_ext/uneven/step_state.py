"""What a training step changes besides weights and gradients: metrics, what is logged per epoch, buffers."""

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torchmetrics import Metric

from lightning_strategies_ext._lightning import trainer_logging


class StepState:
    """A copy of it, as it is now.

    Args:
        trainer: The Trainer, in ``fit``.
    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        self._trainer = trainer
        # By identity: the hash of a metric is that of its state.
        self._metrics = {id(metric): (metric, _copied(metric.metric_state)) for metric in self._metrics_now()}
        self._position = trainer_logging.position_of_logging(trainer)
        self._buffers = [(buffer, buffer.clone()) for buffer in trainer.lightning_module.buffers()]

    def restore(self) -> None:
        """Makes it so again. Metrics that are new since are reset."""
        for metric in self._metrics_now():
            if id(metric) not in self._metrics:
                metric.reset()
        for metric, states in self._metrics.values():
            for name, state in _copied(states).items():
                setattr(metric, name, state)
        trainer_logging.set_position_of_logging(self._trainer, self._position)
        for buffer, value in self._buffers:
            # Past autograd, which may need what is overwritten: for the gradients of a step that counts for nothing.
            buffer.data.copy_(value)

    def _metrics_now(self) -> Iterator[Metric]:
        yield from trainer_logging.logged_per_epoch(self._trainer)
        for module in self._trainer.lightning_module.modules():
            if isinstance(module, Metric):
                yield module


def _copied(states: dict[str, list[Tensor] | Tensor]) -> dict[str, Any]:
    return {name: list(state) if isinstance(state, list) else state.clone() for name, state in states.items()}
