"""State that a step changes besides weights and gradients: metrics, logged values, buffers, attributes."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy
from torchmetrics import Metric

from lightning_strategies_ext._lightning import logging_state


class StepStateSnapshot:
    """Copy of the metrics, the values logged per epoch, and the buffers of a training step, as of its creation.

    Args:
        trainer: The Trainer, in ``fit``.
    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        self._trainer = trainer
        # Keys are ids, because the hash of a metric depends on its state.
        self._metrics = {id(metric): (metric, _copied(metric.metric_state)) for metric in self._metrics_now()}
        self._position = logging_state.logging_position(trainer)
        self._buffers = [(buffer, buffer.clone()) for buffer in trainer.lightning_module.buffers()]

    def restore(self) -> None:
        """Restores the saved metrics, logged values, and buffers. Metrics created since are reset."""
        for metric in self._metrics_now():
            if id(metric) not in self._metrics:
                metric.reset()
                logging_state.retain_key(metric)
        for metric, states in self._metrics.values():
            for name, state in _copied(states).items():
                setattr(metric, name, state)
        logging_state.set_logging_position(self._trainer, self._position)
        for buffer, value in self._buffers:
            # `data` bypasses autograd, which may need the overwritten values for the gradients of a shadowed step.
            buffer.data.copy_(value)

    def _metrics_now(self) -> Iterator[Metric]:
        yield from logging_state.logged_per_epoch(self._trainer)
        for module in self._trainer.lightning_module.modules():
            if isinstance(module, Metric):
                yield module


class EvaluationStateSnapshot:
    """Copy of the state that an evaluation step and its hooks change, as of its creation.

    It contains the attributes of the LightningModule, its submodules, and the callbacks, see
    :class:`ContentsSnapshot`, and logged values.

    Args:
        trainer: The Trainer, in an evaluation.
    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        self._trainer = trainer
        # The callbacks of this package observe the steps that run, also without effect.
        package = __name__.partition(".")[0]
        callbacks = [each for each in trainer.callbacks if not type(each).__module__.startswith(package)]  # type: ignore[attr-defined]
        logged = logging_state.current_results(trainer)
        self._with_values = {id(metric) for metric in logged if not metric.has_reset}
        owners = [*trainer.lightning_module.modules(), *callbacks, *logged, logging_state.logger_connector(trainer)]
        self._contents = ContentsSnapshot(owners)
        self._results = MetricResults(trainer)

    def restore(self) -> None:
        """Restores this state. Keys of ``self.log`` that are new in this evaluation have no value of this rank."""
        logged = [metric for metric in logging_state.current_results(self._trainer) if not metric.has_reset]
        changed = self._results.changed()
        self._contents.restore()
        for metric in changed:
            metric._computed = None
        for metric in logged:
            if id(metric) not in self._with_values:
                logging_state.drop_values(metric)


class MetricResults:
    """Results that the metrics of the LightningModule have computed, as of its creation.

    A metric keeps its result until its next update, and then computes it without a collective. A result of a shadowed
    step includes the repeated batch, and an older result lacks the updates of other ranks. All ranks therefore drop the
    results of the metrics that have been updated or computed in such a step.

    Args:
        trainer: The Trainer, in an evaluation.
    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        modules = trainer.lightning_module.modules()
        self._results = [(module, module._computed) for module in modules if isinstance(module, Metric)]

    def changed(self) -> list[Metric]:
        """Returns the metrics that have a different result now, or none."""
        return [metric for metric, result in self._results if metric._computed is not result]

    def drop_changed(self) -> None:
        """Makes the metrics that have a different result now compute it again."""
        for metric in self.changed():
            metric._computed = None


#: Number of items of a container up to which the contents of its items are copied, too.
MAX_ITEMS_WITH_CONTENTS = 1000


class ContentsSnapshot:
    """Copy of the attributes of objects, as of its creation.

    It also contains the items of the lists, dicts, sets, and deques among the attributes, of those within them, and
    the values of the tensors and arrays that are attributes or values of dicts, except parameters. It has no copy of
    the contents of other objects, of the values of the tensors in a list, or of what is within a container of more
    than :data:`MAX_ITEMS_WITH_CONTENTS` items, which may be as large as a dataset.

    Args:
        owners: The objects.
    """

    def __init__(self, owners: Iterable[Any]) -> None:
        self._saved: list[tuple[Any, Any]] = []
        known: set[int] = set()
        waiting: list[Any] = [vars(owner) for owner in owners]
        while waiting:
            value = waiting.pop()
            if id(value) in known or not isinstance(value, _COPIED):
                continue
            known.add(id(value))
            if isinstance(value, dict):
                self._saved.append((value, list(value.items())))
                if len(value) <= MAX_ITEMS_WITH_CONTENTS:
                    waiting += value.values()
            elif isinstance(value, Tensor):
                if not isinstance(value, Parameter) and value.layout is torch.strided and not is_lazy(value):
                    self._saved.append((value, value.detach().clone()))
            elif isinstance(value, np.ndarray):
                self._saved.append((value, value.copy()))
            else:
                items = list(value)
                if not isinstance(value, tuple):
                    self._saved.append((value, items))
                if len(items) <= MAX_ITEMS_WITH_CONTENTS:
                    waiting += [item for item in items if isinstance(item, _CONTAINERS)]

    def restore(self) -> None:
        """Restores the attributes. Objects that have not changed are not written to."""
        for value, saved in self._saved:
            if isinstance(value, Tensor):
                if not torch.equal(value, saved):
                    value.data.copy_(saved)  # `data` bypasses autograd
            elif isinstance(value, np.ndarray):
                if value.flags.writeable:
                    value[...] = saved
            elif isinstance(value, dict):
                if not _are_same(value.items(), saved):
                    value.clear()
                    for key, item in saved:  # not `update`, with which a Counter adds
                        value[key] = item
            elif not _are_same([(None, item) for item in value], [(None, item) for item in saved]):
                value.clear()
                value.update(saved) if isinstance(value, set) else value.extend(saved)


_CONTAINERS = (dict, list, set, deque, tuple)
_COPIED = (*_CONTAINERS, Tensor, np.ndarray)


def _are_same(items: Iterable[tuple[Any, Any]], saved: list[tuple[Any, Any]]) -> bool:
    found = list(items)
    return len(found) == len(saved) and all(
        new is old and key is old_key for (key, new), (old_key, old) in zip(found, saved, strict=True)
    )


def _copied(states: dict[str, list[Tensor] | Tensor]) -> dict[str, Any]:
    return {name: list(state) if isinstance(state, list) else state.clone() for name, state in states.items()}
