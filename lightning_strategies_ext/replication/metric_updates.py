"""Updates of torchmetrics metrics with the arguments of all replicas, each for its part of the batch.

Arguments with rows are concatenated, and the metric is updated once. How numbers are merged depends on the metric.
Sums, maxima, and minima combine parts in the same way as batches, so these metrics are updated once per part. A mean
weights each part by its number of samples, or by the weight that the user passed. Any other metric is updated once per
part, if its state for the batch can be merged from the states for the parts. :mod:`.number_scopes` decides whether a
weight belongs to a part or to the batch.

Limitations: Means and sums of a part cannot be distinguished. A number is interpreted according to the metric, so if
replicas pass means of their parts to a ``SumMetric``, the metric adds them up.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, TypeAlias

import torch
import torchmetrics.wrappers
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torchmetrics import MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric, SumMetric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from lightning_strategies_ext._lightning import user_modules
from lightning_strategies_ext.nested import contains, is_collection, labels_of, parts_of
from lightning_strategies_ext.replication.context import ReplicaStep
from lightning_strategies_ext.replication.gathering import (
    NUMBERS,
    denominator_of,
    gather,
    is_fraction,
    is_same,
    value_of_batch,
    weighted_mean,
)
from lightning_strategies_ext.replication.single_process import IF_OF_A_LIBRARY
from lightning_strategies_ext.replication.splitting import is_array

#: Positional and keyword arguments of a call.
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

_ADDING_UP = (SumMetric, MaxMetric, MinMetric)
#: Wrappers that forward their arguments. ``Running`` exists since torchmetrics 1.0.
_WRAPPERS = tuple(
    vars(torchmetrics.wrappers)[name]
    for name in ("ClasswiseWrapper", "MinMaxMetric", "Running")
    if name in vars(torchmetrics.wrappers)
)
#: Metrics that may use weights.
_WEIGHING = (MeanMetric, MetricCollection, *_WRAPPERS)
_NUMBERS_MERGED_BY = (dim_zero_sum, dim_zero_max, dim_zero_min)
_ROWS_MERGED_BY = (*_NUMBERS_MERGED_BY, dim_zero_cat)


def update_for_batch(
    metric: Any,
    method: str,
    payloads: Sequence[Arguments],
    sizes: Sequence[int],
    step: ReplicaStep,
    number: int = 0,
) -> Any:
    """Calls a metric's ``update`` or ``__call__`` for the whole batch.

    Args:
        metric: Metric or collection.
        method: Name of the method.
        payloads: Arguments of each replica.
        sizes: Number of samples of each replica.
        step: Current step. The metric is on its root device.
        number: Number of previous calls of this metric in the step.

    Returns:
        Result of the method.

    Raises:
        ValueError: If the arguments cannot be merged for this kind of metric.
    """
    device = step.root_device
    columns = _columns(payloads)
    has_number = any(_has_number(column, sizes) for column in columns.values())
    if len(payloads) == 1 and not (has_number and isinstance(metric, _WEIGHING)):
        args, kwargs = move_data_to_device(payloads[0], device)
        return getattr(metric, method)(*args, **kwargs)
    if not has_number:
        args, kwargs = _joined(payloads, sizes, device, metric)
        return getattr(metric, method)(*args, **kwargs)
    # A metric's `forward` calls its `update`, as do wrappers and collections. There, each inner metric is updated with
    # the arguments of all replicas.
    with ExitStack() as stack:
        for leaf in _leaves(metric):
            stack.enter_context(_updated_by(leaf, payloads, sizes, step, number))
        args, kwargs = move_data_to_device(payloads[0], device)
        return getattr(metric, method)(*args, **kwargs)


@contextmanager
def _updated_by(
    metric: Metric, payloads: Sequence[Arguments], sizes: Sequence[int], step: ReplicaStep, number: int
) -> Generator[None, None, None]:
    update = metric.update

    def update_for_all(*args: Any, **kwargs: Any) -> None:
        given = [(args, {name: named[name] for name in kwargs}) for args, named in payloads]
        for args, kwargs in _update_arguments(metric, given, sizes, step, number):
            update(*args, **kwargs)

    metric.update = update_for_all  # type: ignore[method-assign]
    try:
        yield
    finally:
        metric.update = update  # type: ignore[method-assign]


def _update_arguments(
    metric: Metric, payloads: Sequence[Arguments], sizes: Sequence[int], step: ReplicaStep, number: int
) -> Sequence[Arguments]:
    """Returns the arguments for the metric, one entry per update."""
    if isinstance(metric, MeanMetric):
        return _calls_of_mean(metric, payloads, sizes, step, number)
    device, num_replicas = step.root_device, step.number_scopes.num_replicas
    columns = _columns(payloads)
    numbers = {key: column for key, column in columns.items() if _has_number(column, sizes)}
    has_rows = any(contains(column, is_array) for key, column in columns.items() if key not in numbers)
    if has_rows and all(_is_constant(column) for column in numbers.values()):
        return [_joined(payloads, sizes, device, metric)]
    each = [move_data_to_device(payload, device) for payload in payloads]
    if len(payloads) == 1:
        return each
    if isinstance(metric, SumMetric):
        values = columns[0 if 0 in columns else "value"]
        step.warn_if_added_repeatedly((id(metric), number), type(metric).__name__, values, sizes)
    if isinstance(metric, _ADDING_UP):
        return each
    if metric.full_state_update or not _is_merged_by(metric, _ROWS_MERGED_BY if has_rows else _NUMBERS_MERGED_BY):
        raise _refusal(metric, "its state for the batch cannot be computed from its states for the parts")
    if len(set(sizes)) > 1 or len(sizes) < num_replicas:
        rank_zero_warn(
            f"{type(metric).__name__} is given numbers by replicas whose parts of the batch differ in size"
            f" ({', '.join(map(str, sizes))} samples, for {num_replicas} replicas), and is updated once for each"
            " part. That is correct for sums and counts. If they are means, give it a tensor with a row per sample."
        )
    return each


def _calls_of_mean(
    metric: Metric, payloads: Sequence[Arguments], sizes: Sequence[int], step: ReplicaStep, number: int
) -> Sequence[Arguments]:
    columns, device = _columns(payloads), step.root_device
    values = columns[0 if 0 in columns else "value"]
    weights = columns.get(1, columns.get("weight"))
    has_rows = not all(map(_is_number, values))
    counts = [float(weight) for weight in weights] if weights and all(map(_is_number, weights)) else []
    if has_rows and (not counts or (len(set(counts)) == 1 and not counts[0].is_integer())):
        return [_joined(payloads, sizes, device, metric)]
    each = [move_data_to_device(payload, device) for payload in payloads]
    if not counts:
        if weights or len(each) == 1:
            return each
        if not all(map(is_fraction, values)):
            raise _refusal(metric, "an integer is not a mean over the part's samples")
        return [((value_of_batch(values, list(map(denominator_of, values)), sizes, device),), {})]
    if step.are_batch_weights((id(metric), number), type(metric).__name__, counts, sizes):
        weight = counts[0] * step.number_scopes.num_replicas
    elif has_rows:
        weight = sum(counts)  # each row gets the total weight of all parts
    else:
        return each
    mean_or_rows = gather(values, sizes, device, "values") if has_rows else weighted_mean(values, sizes, device)
    return [((mean_or_rows, weight), {})]


def _leaves(metric: Any) -> Iterator[Metric]:
    """Yields the base metrics of a collection or wrapper, or the metric itself.

    Raises:
        ValueError: If a metric of another kind contains metrics.
    """
    if isinstance(metric, MetricCollection):
        for part in metric.values(copy_state=False):
            yield from _leaves(part)
    elif isinstance(metric, _WRAPPERS):
        for base_metric in metric.children():
            yield from _leaves(base_metric)
    elif any(isinstance(part, (Metric, MetricCollection)) for part in metric.modules() if part is not metric):
        raise _refusal(metric, "the values that it passes to the metrics inside it are not known")
    else:
        yield metric


def _columns(payloads: Sequence[Arguments]) -> dict[int | str, list[Any]]:
    """Returns the values of the replicas, by position or name of the argument."""
    args, kwargs = payloads[0]
    if any(len(others) != len(args) or named.keys() != kwargs.keys() for others, named in payloads):
        raise ValueError(
            "Replicas have updated a metric with different arguments. Pass the same arguments for all samples."
            f" {IF_OF_A_LIBRARY}"
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


def _is_constant(values: Sequence[Any]) -> bool:
    """Returns whether an argument is a setting, that is, equal in all replicas: values computed from parts differ.

    Equal integers are not taken for settings, because they may be counts.
    """
    if not all(is_same(value, values[0]) or _is_same_tensor(value, values[0]) for value in values):
        return False
    return isinstance(values[0], bool) or is_fraction(values[0])


def _is_same_tensor(one: Any, other: Any) -> bool:
    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one.cpu(), other.cpu())


def _joined(payloads: Sequence[Arguments], sizes: Sequence[int], device: torch.device, metric: Any) -> Arguments:
    name = f"what {type(metric).__name__} is given"

    def join(values: list[Any]) -> Any:
        if all(map(_is_number, values)):
            return values[0]
        if all(isinstance(value, list) for value in values) and not contains(values, is_array):
            return list(chain.from_iterable(values))
        return gather(values, sizes, device, name)

    args, kwargs = payloads[0]
    joined = {key: join(column) for key, column in _columns(payloads).items()}
    return tuple(joined[i] for i in range(len(args))), {key: joined[key] for key in kwargs}


def _is_merged_by(metric: Metric, functions: Sequence[Callable[..., Any]]) -> bool:
    """Returns whether the reduction of each state of the metric over processes is one of these functions."""
    return all(function in functions for function in user_modules.metric_reductions(metric).values())


def _refusal(metric: Any, why: str) -> ValueError:
    return ValueError(
        f"{type(metric).__name__} is given a number by each replica, for its part of the batch, and {why}: its value"
        " would differ from that of one device. Give it a tensor with a row per sample, or return the number from the"
        " step and update the metric in `on_train_batch_end` or a similar hook, which receives the whole batch."
        f" {IF_OF_A_LIBRARY}"
    )
