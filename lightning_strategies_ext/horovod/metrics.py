"""Metrics of torchmetrics under Horovod.

By default a metric asks torch.distributed whether there are other ranks, and under Horovod the answer is wrong. For the
time of a stage the metrics of a module ask Horovod instead; those that were given functions of their own keep them.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available

from lightning_strategies_ext.collectives import Collectives


class MetricSync:
    """Lets the metrics in a module synchronise through our collectives, until :meth:`close`.

    Args:
        module: The module.
        collectives: Says what carries their states, which changes when this rank fails or enters a world.
    """

    def __init__(self, module: Module, collectives: Callable[[], Collectives]) -> None:
        self._metrics: list[tuple[Metric, Any, Any]] = []
        gather = _gather_with(collectives)
        for metric in module.modules():
            if isinstance(metric, Metric) and metric.distributed_available_fn is jit_distributed_available:
                self._metrics.append((metric, metric.distributed_available_fn, metric.dist_sync_fn))
                metric.distributed_available_fn = _are_several_with(collectives)
                if metric.dist_sync_fn is None:
                    metric.dist_sync_fn = gather

    def close(self) -> None:
        """Gives the metrics back what they had."""
        for metric, is_available, sync in self._metrics:
            metric.distributed_available_fn, metric.dist_sync_fn = is_available, sync
        self._metrics.clear()


def _are_several_with(collectives: Callable[[], Collectives]) -> Callable[[], bool]:
    def are_several() -> bool:
        return collectives().rank() is not None and collectives().world_size() > 1

    return are_several


def _gather_with(collectives: Callable[[], Collectives]) -> Callable[..., list[Tensor]]:
    def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
        return collectives().gather_list(tensor, group)

    return gather
