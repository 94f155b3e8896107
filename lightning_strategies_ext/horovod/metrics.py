"""Synchronization of torchmetrics metrics under Horovod.

By default, a metric finds other ranks through torch.distributed, which finds none under Horovod. During a stage, all
metrics of the process use Horovod instead: in modules, containers, and callbacks, and also metrics that are created
later. Metrics with custom functions for synchronization keep them.
"""

from collections.abc import Callable
from typing import Any

from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available

from lightning_strategies_ext.collectives import Collectives

_ORIGINAL_SYNC = Metric.sync


class MetricSync:
    """Synchronizes all metrics of the process over the ranks of Horovod, until :meth:`close`.

    Args:
        collectives: Returns the current collectives, which change when this rank fails or joins a world.
    """

    def __init__(self, collectives: Callable[[], Collectives]) -> None:
        self.collectives = collectives
        _open.append(self)
        Metric.sync = _sync  # type: ignore[assignment, method-assign]

    def close(self) -> None:
        """Restores the default synchronization. A second call is a no-op."""
        if self in _open:
            _open.remove(self)
        if not _open:
            Metric.sync = _ORIGINAL_SYNC  # type: ignore[method-assign]


#: Open objects; metrics use the last one.
_open: list[MetricSync] = []


def _sync(
    metric: Metric,
    dist_sync_fn: Callable[..., Any] | None = None,
    process_group: Any = None,
    should_sync: bool = True,
    distributed_available: Callable[..., Any] | None = None,
) -> None:
    """Replaces ``Metric.sync``."""
    is_default_check = distributed_available in (None, jit_distributed_available)
    if should_sync and is_default_check and metric.distributed_available_fn is jit_distributed_available:
        collectives = _open[-1].collectives()
        distributed_available = lambda: collectives.rank() is not None and collectives.world_size() > 1  # noqa: E731
        dist_sync_fn = dist_sync_fn or collectives.gather_list
    _ORIGINAL_SYNC(metric, dist_sync_fn, process_group, should_sync, distributed_available)
