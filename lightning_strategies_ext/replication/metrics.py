"""Proxies of torchmetrics metrics in replicas, which update each metric with the arguments of all replicas.

The state and the values of a metric therefore cover the whole batch, for any kind of state.
"""

from collections.abc import Iterator
from typing import Any

import wrapt
from torchmetrics import Metric, MetricCollection

from lightning_strategies_ext.replication.context import OnceAction, ReplicaContext
from lightning_strategies_ext.replication.metric_updates import update_for_batch


def is_metric(value: object) -> bool:
    """Returns whether a value is a metric or a collection of metrics."""
    return isinstance(value, (Metric, MetricCollection))


class ReplicaMetric(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """Proxy of a metric in a replica. Updates are deferred; methods that return a value wait for all replicas.

    Args:
        metric: Metric of the module.
        context: Context of the replica.
    """

    def __init__(self, metric: Any, context: ReplicaContext) -> None:
        super().__init__(metric)
        self._self_context = context

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Updates the metric with the arguments of all replicas at the same call. Deferred."""
        self._self_context.defer((id(self.__wrapped__), "update"), self._self_call("update"), (args, kwargs))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Updates the metric with the arguments of all replicas, and returns its value for the whole batch."""
        return self._self_run_once("forward", self._self_call("__call__"), (args, kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls :meth:`forward`."""
        return self.forward(*args, **kwargs)

    def compute(self) -> Any:
        """Returns the value over all updates."""
        metric = self.__wrapped__
        return self._self_run_once("compute", lambda payloads, sizes: metric.compute())

    def reset(self) -> None:
        """Resets the metric, once for all replicas."""
        metric = self.__wrapped__
        self._self_run_once("reset", lambda payloads, sizes: metric.reset())

    def items(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Returns the metrics of a collection with their names."""
        return ((name, self._self_part(part)) for name, part in self.__wrapped__.items(*args, **kwargs))

    def values(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Returns the metrics of a collection."""
        return (self._self_part(part) for part in self.__wrapped__.values(*args, **kwargs))

    def __getitem__(self, key: Any) -> Any:
        """Returns a metric of a collection."""
        return self._self_part(self.__wrapped__[key])

    def __getattr__(self, name: str) -> Any:
        return self._self_part(getattr(self.__wrapped__, name))

    def _self_part(self, value: Any) -> Any:
        return ReplicaMetric(value, self._self_context) if is_metric(value) else value

    def _self_run_once(self, method: str, act: OnceAction, payload: Any = None) -> Any:
        name = f"{type(self.__wrapped__).__name__}.{method}"
        return self._self_context.run_once(name, act, payload, touches_weights=False)

    def _self_call(self, method: str) -> OnceAction:
        metric, step = self.__wrapped__, self._self_context.step
        number = self._self_context.calls[id(metric)]
        self._self_context.calls[id(metric)] += 1

        def act(payloads: list[Any], sizes: list[int]) -> Any:
            return update_for_batch(metric, method, payloads, sizes, step, number)

        return act
