"""Proxies of torchmetrics metrics in replicas, which update each metric with the arguments of all replicas.

The state and the values of a metric therefore cover the whole batch, for any kind of state. Arguments with a row per
sample are concatenated, and the metric is updated once. Numbers, which each replica computes from its part of the
batch, are merged according to the metric. Sums, maxima, and minima combine parts in the same way as batches, so these
metrics are updated once per part. A mean weights each part by its number of samples, or by the weight that the user
passed. Any other metric is updated once per part, if its state for the batch can be merged from the states for the
parts. :mod:`.number_scopes` decides whether a weight belongs to a part or to the batch.

Limitations: Means and sums of a part cannot be distinguished. A number is interpreted according to the metric, so if
replicas pass means of their parts to a ``SumMetric``, the metric adds them up.
"""

import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, TypeAlias

import torch
import torchmetrics.wrappers
import wrapt
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torchmetrics import MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric, SumMetric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from lightning_strategies_ext._lightning import user_modules
from lightning_strategies_ext.nested import contains, copy_data, is_collection, labels_of, parts_of
from lightning_strategies_ext.replication.context import OnceAction, ReplicaContext, ReplicaStep
from lightning_strategies_ext.replication.denominators import denominator_of
from lightning_strategies_ext.replication.gathering import (
    NUMBERS,
    gather,
    is_equal_object,
    is_inexact,
    value_of_batch,
    weighted_mean,
)
from lightning_strategies_ext.replication.splitting import LIBRARY_ADVICE, is_array

#: Positional and keyword arguments of a call.
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

#: Metrics that combine numbers of parts in the same way as numbers of batches.
_UPDATED_PER_PART = (SumMetric, MaxMetric, MinMetric)
#: Wrappers that forward their arguments. ``Running`` exists since torchmetrics 1.0.
_WRAPPERS = tuple(
    vars(torchmetrics.wrappers)[name]
    for name in ("ClasswiseWrapper", "MinMaxMetric", "Running")
    if name in vars(torchmetrics.wrappers)
)
#: Metrics that may use weights, by themselves or in a metric inside them.
_MAY_USE_WEIGHTS = (MeanMetric, MetricCollection, *_WRAPPERS)
#: Reductions of states that are correct if each part contributes numbers, or rows.
_NUMBER_REDUCTIONS = (dim_zero_sum, dim_zero_max, dim_zero_min)
_ROW_REDUCTIONS = (*_NUMBER_REDUCTIONS, dim_zero_cat)


def is_metric(value: object) -> bool:
    """Returns whether a value is a metric or a collection of metrics."""
    return isinstance(value, (Metric, MetricCollection))


class Identity:
    """Key of a dict that equals only keys of the same object, also after the object's ``id`` is used again.

    Args:
        value: Object, such as a metric, whose own hash depends on its state.
    """

    __slots__ = ("_id", "_reference")

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        self._reference = weakref.ref(value)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        value = self._reference()
        return isinstance(other, Identity) and value is not None and value is other._reference()


class ReplicaMetric(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """Proxy of a metric in a replica. Updates are deferred; methods that return a value wait for all replicas.

    Attributes and methods of the proxy itself begin with ``_self_``, as ``wrapt`` requires.

    Args:
        metric: Metric of the module.
        context: Context of the replica.
    """

    def __init__(self, metric: Any, context: ReplicaContext) -> None:
        super().__init__(metric)
        self._self_context = context

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Updates the metric with the arguments of all replicas at the same call. Deferred."""
        key = (Identity(self.__wrapped__), "update")
        # The step may write to the arguments in place before the action runs, except with one replica: it runs now.
        arguments = (args, kwargs) if self._self_context.is_alone else copy_data((args, kwargs))
        self._self_context.defer(key, self._self_create_update("update"), arguments)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Updates the metric with the arguments of all replicas, and returns its value for the whole batch."""
        return self._self_run_once("forward", self._self_create_update("__call__"), (args, kwargs))

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
        return ((name, self._self_wrap(part)) for name, part in self.__wrapped__.items(*args, **kwargs))

    def values(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Returns the metrics of a collection."""
        return (self._self_wrap(part) for part in self.__wrapped__.values(*args, **kwargs))

    def __getitem__(self, key: Any) -> Any:
        """Returns a metric of a collection."""
        return self._self_wrap(self.__wrapped__[key])

    def __getattr__(self, name: str) -> Any:
        return self._self_wrap(getattr(self.__wrapped__, name))

    def _self_wrap(self, value: Any) -> Any:
        return ReplicaMetric(value, self._self_context) if is_metric(value) else value

    def _self_run_once(self, method: str, action: OnceAction, payload: Any = None) -> Any:
        name = f"{type(self.__wrapped__).__name__}.{method}"
        key = Identity(self.__wrapped__)
        return self._self_context.run_once(name, action, payload, changes_parameters=False, key=key)

    def _self_create_update(self, method: str) -> OnceAction:
        metric, step = self.__wrapped__, self._self_context.step
        call_index = self._self_context.metric_calls[id(metric)]
        self._self_context.metric_calls[id(metric)] += 1

        def action(payloads: list[Any], sizes: list[int]) -> Any:
            return update_for_batch(metric, method, payloads, sizes, step, call_index)

        return action


def update_for_batch(
    metric: Any,
    method: str,
    payloads: Sequence[Arguments],
    sizes: Sequence[int],
    step: ReplicaStep,
    call_index: int = 0,
) -> Any:
    """Calls a metric's ``update`` or ``__call__`` for the whole batch.

    Args:
        metric: Metric or collection.
        method: Name of the method.
        payloads: Arguments of each replica.
        sizes: Number of samples of each replica.
        step: Current step. The metric is on its root device.
        call_index: Number of previous calls of this metric in the step.

    Returns:
        Result of the method.

    Raises:
        ValueError: If the arguments cannot be merged for this kind of metric.
    """
    device = step.root_device
    arguments = _values_by_argument(payloads)
    lengths = _lengths_of(payloads, step)
    has_number = any(_has_number(values, lengths or sizes) for values in arguments.values())
    if len(payloads) == 1 and not (has_number and isinstance(metric, _MAY_USE_WEIGHTS)):
        args, kwargs = move_data_to_device(payloads[0], device)
        return getattr(metric, method)(*args, **kwargs)
    if not has_number:
        args, kwargs = _join(payloads, sizes, device, metric, lengths)
        return getattr(metric, method)(*args, **kwargs)
    # A metric's `forward` calls its `update`, as do wrappers and collections. There, each inner metric is updated with
    # the arguments of all replicas.
    with ExitStack() as stack:
        for base_metric in _base_metrics(metric):
            stack.enter_context(_updating_for_all(base_metric, payloads, sizes, step, call_index))
        args, kwargs = move_data_to_device(payloads[0], device)
        return getattr(metric, method)(*args, **kwargs)


@contextmanager
def _updating_for_all(
    metric: Metric, payloads: Sequence[Arguments], sizes: Sequence[int], step: ReplicaStep, call_index: int
) -> Generator[None, None, None]:
    """Replaces ``update`` of the metric inside the context, by updates with the arguments of all replicas."""
    update = metric.update

    def update_for_all(*args: Any, **kwargs: Any) -> None:
        # A collection passes on only the keyword arguments that the metric accepts.
        accepted = [(args, {name: named[name] for name in kwargs}) for args, named in payloads]
        for args, kwargs in _update_arguments(metric, accepted, sizes, step, call_index):
            update(*args, **kwargs)

    metric.update = update_for_all  # type: ignore[method-assign]
    try:
        yield
    finally:
        metric.update = update  # type: ignore[method-assign]


def _update_arguments(
    metric: Metric, payloads: Sequence[Arguments], sizes: Sequence[int], step: ReplicaStep, call_index: int
) -> Sequence[Arguments]:
    """Returns the arguments for the metric, one entry per update."""
    if isinstance(metric, MeanMetric):
        return _mean_arguments(metric, payloads, sizes, step, call_index)
    device, num_replicas = step.root_device, step.number_scopes.num_replicas
    arguments, lengths = _values_by_argument(payloads), _lengths_of(payloads, step)
    numbers = {key: values for key, values in arguments.items() if _has_number(values, lengths or sizes)}
    has_rows = any(contains(values, is_array) for key, values in arguments.items() if key not in numbers)
    if has_rows and all(_is_setting(values) for values in numbers.values()):
        return [_join(payloads, sizes, device, metric, lengths)]
    per_part = [move_data_to_device(payload, device) for payload in payloads]
    if len(payloads) == 1:
        return per_part
    if isinstance(metric, SumMetric):
        values = arguments[0 if 0 in arguments else "value"]
        step.warn_if_added_repeatedly((Identity(metric), call_index), type(metric).__name__, values, sizes)
    if isinstance(metric, _UPDATED_PER_PART):
        return per_part
    if metric.full_state_update or not _is_reduced_by(metric, _ROW_REDUCTIONS if has_rows else _NUMBER_REDUCTIONS):
        raise _number_error(metric, "its state for the batch cannot be computed from its states for the parts")
    if len(set(sizes)) > 1 or len(sizes) < num_replicas:
        rank_zero_warn(
            f"{type(metric).__name__} is given numbers by replicas whose parts of the batch differ in size"
            f" ({', '.join(map(str, sizes))} samples, for {num_replicas} replicas), and is updated once for each"
            " part. That is correct for sums and counts. If they are means, give it a tensor with a row per sample."
        )
    return per_part


def _mean_arguments(
    metric: Metric, payloads: Sequence[Arguments], sizes: Sequence[int], step: ReplicaStep, call_index: int
) -> Sequence[Arguments]:
    """Returns the arguments for a :class:`MeanMetric`, one entry per update."""
    arguments, device, lengths = _values_by_argument(payloads), step.root_device, _lengths_of(payloads, step)
    values = arguments[0 if 0 in arguments else "value"]
    weights = arguments.get(1, arguments.get("weight"))
    has_rows = not all(map(_is_number, values))
    counts = [float(weight) for weight in weights] if weights and all(map(_is_number, weights)) else []
    # A constant fraction is a weight of each row; an integer may be the number of samples.
    if has_rows and (not counts or (len(set(counts)) == 1 and not counts[0].is_integer())):
        return [_join(payloads, sizes, device, metric, lengths)]
    per_part = [move_data_to_device(payload, device) for payload in payloads]
    if not counts:
        if weights or len(per_part) == 1:
            return per_part
        if not all(map(is_inexact, values)):
            raise _number_error(metric, "an integer is not a mean over the part's samples")
        return [((value_of_batch(values, list(map(denominator_of, values)), sizes, device),), {})]
    if step.are_batch_weights((Identity(metric), call_index), type(metric).__name__, counts, sizes):
        weight = counts[0] * step.number_scopes.num_replicas  # as the sum of the weights of the parts
    elif has_rows:
        weight = sum(counts)  # each row gets the total weight of all parts
    else:
        return per_part
    mean_or_rows = (
        gather(values, sizes, device, "values", lengths) if has_rows else weighted_mean(values, sizes, device)
    )
    return [((mean_or_rows, weight), {})]


def _base_metrics(metric: Any) -> Iterator[Metric]:
    """Yields the base metrics of a collection or wrapper, or the metric itself.

    Raises:
        ValueError: If a metric of another kind contains metrics.
    """
    if isinstance(metric, MetricCollection):
        for part in metric.values(copy_state=False):
            yield from _base_metrics(part)
    elif isinstance(metric, _WRAPPERS):
        for base_metric in metric.children():
            yield from _base_metrics(base_metric)
    elif any(isinstance(part, (Metric, MetricCollection)) for part in metric.modules() if part is not metric):
        raise _number_error(metric, "the values that it passes to the metrics inside it are not known")
    else:
        yield metric


def _lengths_of(payloads: Sequence[Arguments], step: ReplicaStep) -> Sequence[int] | None:
    """Returns the numbers of entries of lists with one entry per sample; None if they are unknown."""
    return step.lengths if len(payloads) == len(step.sizes) else None


def _values_by_argument(payloads: Sequence[Arguments]) -> dict[int | str, list[Any]]:
    """Returns the values of the replicas, by position or name of the argument."""
    args, kwargs = payloads[0]
    if any(len(others) != len(args) or named.keys() != kwargs.keys() for others, named in payloads):
        raise ValueError(
            "Replicas have updated a metric with different arguments. Pass the same arguments for all samples."
            f" {LIBRARY_ADVICE}"
        )
    by_position: dict[int | str, list[Any]] = {i: [args[i] for args, _ in payloads] for i in range(len(args))}
    return {**by_position, **{name: [named[name] for _, named in payloads] for name in kwargs}}


def _has_number(values: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Returns whether the values of an argument contain numbers that each stand for a whole part."""
    first = values[0]
    if all(map(_is_number, values)):
        return True
    if not is_collection(first) or any(type(value) is not type(first) for value in values):
        return False
    if isinstance(first, list) and (list(map(len, values)) == list(sizes) or not contains(first, is_array)):
        return False  # an entry per sample
    if any(labels_of(value) != labels_of(first) for value in values):
        return False
    return any(_has_number(column, sizes) for column in zip(*map(parts_of, values), strict=True))


def _is_number(value: Any) -> bool:
    return isinstance(value, NUMBERS) or (is_array(value) and value.ndim == 0)


def _is_setting(values: Sequence[Any]) -> bool:
    """Returns whether an argument is equal in all replicas, and therefore a setting, not computed from the parts.

    Equal integers are not settings, because they may be counts of the parts.
    """
    if not all(is_equal_object(value, values[0]) or _is_same_tensor(value, values[0]) for value in values):
        return False
    return isinstance(values[0], bool) or is_inexact(values[0])


def _is_same_tensor(one: Any, other: Any) -> bool:
    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one.cpu(), other.cpu())


def _join(
    payloads: Sequence[Arguments],
    sizes: Sequence[int],
    device: torch.device,
    metric: Any,
    lengths: Sequence[int] | None = None,
) -> Arguments:
    """Returns the arguments for the whole batch: rows and entries are joined, and a number is a setting."""
    name = f"{type(metric).__name__}.update(...)"

    def join(values: list[Any]) -> Any:
        if all(map(_is_number, values)):
            return values[0]
        if all(isinstance(value, list) for value in values) and not contains(values, is_array):
            return list(chain.from_iterable(values))
        return gather(values, sizes, device, name, lengths)

    args, kwargs = payloads[0]
    joined = {key: join(values) for key, values in _values_by_argument(payloads).items()}
    return tuple(joined[i] for i in range(len(args))), {key: joined[key] for key in kwargs}


def _is_reduced_by(metric: Metric, functions: Sequence[Callable[..., Any]]) -> bool:
    """Returns whether the reduction of each state of the metric over processes is one of these functions."""
    return all(function in functions for function in user_modules.metric_reductions(metric).values())


def _number_error(metric: Any, reason: str) -> ValueError:
    return ValueError(
        f"{type(metric).__name__} is given a number by each replica, for its part of the batch, and {reason}: its value"
        " would differ from that of one device. Give it a tensor with a row per sample, or return the number from the"
        " step and update the metric in `on_train_batch_end` or a similar hook, which receives the whole batch."
        f" {LIBRARY_ADVICE}"
    )
